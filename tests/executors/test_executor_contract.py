"""What holds for any unified executor: all or nothing, named errors, and figures that were measured."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from paged import DecodeInput, GreedyArgmax, PrefillInput, UnifiedBatch, UnifiedBatchItem, UnsupportedError
from paged.cache.kv_cache import KvCacheHandle
from paged.errors import InvalidInputError, OutOfBlocksError, PagedError, SequenceTooLongError, StaleHandleError
from paged.executors.model_executor import ExecutorShutDownError
from paged.executors.paged_attention_executor import PagedAttentionExecutor
from paged.executors.types import ExecutorState, MemoryRequirements
from tests.executors.oracle import batch, check_logits, forward, item, make_executor, prompt, step

Wrong = Callable[[PagedAttentionExecutor, KvCacheHandle], object]
LONG, FINE, LIVE = item("long", [1] * 61), item("fine", [1, 2]), item("live", [1], 5)
GREEDY_OF_3 = GreedyArgmax(token_mask=torch.ones(3, dtype=torch.bool))
ONLY_PADDING = torch.tensor([[1, 1], [0, 0]])


def run(*items: UnifiedBatchItem) -> Wrong:
    return lambda e, h: forward(e, *items)


def prefill(ids: torch.Tensor, **fields: torch.Tensor) -> Wrong:
    return lambda e, h: e.prefill(PrefillInput(ids, **fields))


def verify(second: Callable[[PagedAttentionExecutor, KvCacheHandle], DecodeInput]) -> Wrong:
    return lambda e, h: e.forward_verify([step(h, 1), second(e, h)])


# They have a sequence "live" of 5 tokens, whose handle is h, and one of 8.
INVALID: dict[str, tuple[str, Wrong]] = {
    "token beyond": ("256", prefill(torch.tensor([[1, 2], [3, 256]]))),
    "token below": ("-1", lambda e, h: e.decode(step(h, -1))),
    "empty prompt": ("empty", prefill(torch.empty(1, 0, dtype=torch.int64))),
    "only padding": ("empty", prefill(torch.ones_like(ONLY_PADDING), attention_mask=ONLY_PADDING)),
    "empty item": ("empty", run(FINE, item("a", []))),
    "two tokens a decode": ("input_ids", lambda e, h: e.decode(replace(step(h, 1), input_ids=torch.ones(1, 2)))),
    "not integers": ("dtype", prefill(torch.ones(1, 2))),
    "mask's shape": ("attention_mask", prefill(torch.tensor([[1, 2]]), attention_mask=torch.ones(1, 3))),
    "too few caches": ("caches", lambda e, h: e.prefill(prompt([1], [2], kv_caches=[h]))),
    "position after": ("pos_offset", lambda e, h: forward(e, FINE, item("live", [1], 6, kv_cache=h))),
    "position of a new one": ("pos_offset", run(item("new", [1], 1))),
    "twice": ("twice", run(FINE, FINE)),
    "one cache by two names": ("given twice", lambda e, h: forward(e, item("x", [1], 5, kv_cache=h), LIVE)),
    "verify two sequences": (r"inputs\[1\]", verify(lambda e, h: step(e.kv_manager.get_handle("other"), 1))),
    "verify with a gap": (r"inputs\[1\]", verify(lambda e, h: step(h, 1, position_ids=torch.tensor([[7]])))),
    "mask of another vocabulary": ("token_mask", run(FINE, item("m", [1], logits_policy=GREEDY_OF_3))),
    "items without their batch": ("UnifiedBatch", lambda e, h: e.unified_decode([FINE])),
    "a batch of no items": ("UnifiedBatchItem", lambda e, h: e.unified_decode(UnifiedBatch([h]))),
    "ids without their input": ("PrefillInput", lambda e, h: e.prefill(torch.tensor([[1, 2]]))),
    "one of several inputs": ("PrefillInput", lambda e, h: e.batch_prefill(prompt([1]))),
    "the wrong input": ("DecodeInput", lambda e, h: e.forward_verify([prompt([1])])),
    "a key that nothing reads": ("'lora', expected one of", run(FINE, item("m", [1], metadata={"lora": "french"}))),
    "a prompt's such key": ("'lora', expected one of", prefill(torch.tensor([[1]]), metadata={"lora": "french"})),
    "truncate beyond": ("6", lambda e, h: e.truncate_kv(h, 6)),
}
WRONG_CALLS: dict[str, tuple[type[PagedError], str, Wrong]] = {
    **{name: (InvalidInputError, *case) for name, case in INVALID.items()},
    "too long": (SequenceTooLongError, "60", run(FINE, LONG)),
    "decode too long": (SequenceTooLongError, "60", run(replace(LONG, seq_id="live", pos_offset=5))),
    "pool exhausted": (OutOfBlocksError, "blocks", run(FINE, LIVE, *(item(i, [1] * 30) for i in range(4)))),
    "adapter": (UnsupportedError, "adapter", run(replace(FINE, metadata={"lora_adapter": "french"}))),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_failed_call_changes_nothing(name: str, device: torch.device) -> None:
    error, message, call = WRONG_CALLS[name]
    executor = make_executor(device, num_blocks=12, max_sequence_length=60)
    forward(executor, item("live", [1, 2, 3, 4, 5]), item("other", [6] * 8))
    manager = executor.kv_manager
    handle = manager.get_handle("live")
    assert handle is not None
    blocks, stats, status = handle.blocks, manager.stats(), executor.status()

    with pytest.raises(error, match=message):
        call(executor, handle)

    manager.check_integrity()
    assert replace(manager.stats(), allocation_failures=0) == stats
    assert (handle.blocks, handle.num_tokens) == (blocks, 5)
    assert executor.status() == replace(status, failed_calls=1)
    results = forward(executor, item("live", [6], 5), item("other", [1], 8), item("z", [9]))
    for logits, tokens in zip(results, ([1, 2, 3, 4, 5, 6], [6] * 8 + [1], [9]), strict=True):
        check_logits(executor, logits, tokens)


def test_a_forward_that_breaks_changes_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(device)
    handle = executor.prefill(prompt([1, 2, 3])).kv_cache
    stats = executor.kv_manager.stats()
    with monkeypatch.context() as patch:
        patch.setattr(executor, "_logits", lambda attention: 1 / 0)
        for call in (
            lambda: executor.forward_verify([step(handle, token) for token in range(9)]),
            lambda: executor.prefill(prompt([1] * 20)),
        ):
            with pytest.raises(ZeroDivisionError):
                call()
            assert executor.status().state is ExecutorState.FAILED
            assert executor.kv_manager.stats() == stats
    executor.kv_manager.check_integrity()
    check_logits(executor, executor.decode(step(handle, 1)).logits[0], [1, 2, 3, 1])
    assert executor.status().state is ExecutorState.READY


@pytest.mark.parametrize("results", [lambda rows: [], lambda rows: rows[:1], lambda rows: [*rows, *rows]])
def test_missing_results_free_what_was_reserved(
    results: Callable[[list[object]], list[object]], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(device)
    handle = executor.prefill(prompt([1, 2, 3])).kv_cache
    stats, run, items = executor.kv_manager.stats(), executor._run, (item("a", [1] * 9, 3, kv_cache=handle), LONG)
    with monkeypatch.context() as patch:
        patch.setattr(executor, "_run", lambda items: results(run(items)))
        with pytest.raises(PagedError, match="results for 2 items"):
            forward(executor, *items)
    assert executor.kv_manager.stats() == stats
    executor.kv_manager.check_integrity()
    assert [logits is not None for logits in forward(executor, *items)] == [True, True]


def test_handles_of_others_and_of_the_dead(device: torch.device) -> None:
    executor, stranger = make_executor(device), make_executor(device)
    handle, foreign = (one.prefill(prompt([1, 2])).kv_cache for one in (executor, stranger))
    for wrong, match in ((foreign, "another"), ([None], "None")):
        with pytest.raises(InvalidInputError, match=match):
            executor.decode(step(wrong, 1))
    with pytest.raises(InvalidInputError, match="another"):
        executor.truncate_kv(foreign, 1)
    for name in (handle.cache_id, handle.cache_id, "never seen"):
        executor.release_cache(name)
    for call in (lambda: executor.decode(step(handle, 1)), lambda: executor.truncate_kv(handle, 1)):
        with pytest.raises(StaleHandleError):
            call()
    assert executor.kv_manager.stats().used_blocks == 0
    assert stranger.decode(step(foreign, 1)).logits.shape == (1, 256)


def test_status_moves_with_work_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(device)
    start = executor.status()
    assert start.state is ExecutorState.READY
    assert (start.prefill_count, start.memory_bytes, start.average_prefill_seconds) == (0, 0, 0)
    executor.info(), executor.capabilities(), executor.kv_capacity(), executor.cache_metrics_snapshot()
    forward(executor)
    executor.batch_decode([])
    executor.warmup()
    assert executor.status() == start

    run, seen = executor._run, []
    with monkeypatch.context() as patch:
        patch.setattr(executor, "_run", lambda items: (seen.append(executor.status().state), run(items))[1])
        handle = executor.prefill(prompt([1] * 9)).kv_cache
    assert seen == [ExecutorState.BUSY]
    prefilled = executor.status()
    block_bytes = executor.kv_manager.stats().bytes_per_block
    assert prefilled.memory_bytes == prefilled.peak_memory_bytes == 2 * block_bytes
    assert prefilled.average_prefill_seconds > 0
    assert prefilled.average_decode_seconds == 0

    executor.forward_verify([step(handle, 1), step(handle, 1)])
    executor.decode(step(handle, 1))
    decoded = executor.status()
    assert (decoded.prefill_count, decoded.decode_count, decoded.prefill_tokens) == (1, 3, 9)
    assert decoded.average_decode_seconds > 0
    assert decoded.average_prefill_seconds == prefilled.average_prefill_seconds

    executor.release_cache(handle.cache_id)
    assert executor.status() == replace(decoded, memory_bytes=0)
    executor.prefill(prompt([1]))
    assert executor.status().memory_bytes == block_bytes
    assert executor.status().peak_memory_bytes == 2 * block_bytes


def test_shutdown_refuses_work(device: torch.device) -> None:
    executor = make_executor(device)
    handle = executor.prefill(prompt([1])).kv_cache
    executor.shutdown()
    executor.shutdown()
    for method, *arguments in (
        (executor.prefill, prompt([1])),
        (executor.decode, step(handle, 1)),
        (executor.batch_prefill, []),
        (executor.batch_decode, []),
        (executor.unified_decode, batch()),
        (executor.forward_verify, []),
        (executor.truncate_kv, handle, 0),
        (executor.release_cache, "a"),
    ):
        with pytest.raises(ExecutorShutDownError):
            method(*arguments)
    assert executor.status().state is ExecutorState.SHUTDOWN
    assert executor.status().failed_calls == 0


def test_memory_total_by_hand() -> None:
    needs = MemoryRequirements(weight_bytes=1000, kv_bytes_per_token_per_layer=64, activation_bytes_per_token=10)
    assert needs.total(batch_size=2, seq_len=3, num_layers=4) == 1000 + 2 * 3 * (4 * 64 + 10)
    assert needs.total(0, 3, 4) == 1000
