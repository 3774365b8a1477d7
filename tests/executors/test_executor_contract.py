"""What holds for any unified executor: all or nothing, named errors, and figures that were measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from paged.batch import GreedyArgmax, PrefillInput, UnifiedBatchItem
from paged.cache.kv_cache import KvCacheHandle
from paged.errors import (
    InvalidInputError,
    OutOfBlocksError,
    PagedError,
    SequenceTooLongError,
    StaleHandleError,
    UnsupportedError,
)
from paged.executors.command_line.closed_form import expected_logits
from paged.executors.model_executor import ExecutorShutDownError
from paged.executors.paged_attention_executor import PagedAttentionExecutor
from paged.executors.types import ExecutorState, MemoryRequirements
from tests.executors.oracle import batch, make_executor, prompt, step
from tests.tolerance import assert_close


@pytest.mark.parametrize("chunk", [4, 64, 100])
@pytest.mark.parametrize("length", [1, 4, 5, 70])
def test_a_request_is_one_prefill_and_its_decodes(chunk: int, length: int, device: torch.device) -> None:
    executor = make_executor(device)
    tokens = [(7 * i + 3) % 11 for i in range(length)]
    for start in range(0, length, chunk):
        part = tokens[start : start + chunk]
        is_last = start + chunk >= length
        item = UnifiedBatchItem("request", part, pos_offset=start, is_final_chunk=is_last, logits_policy=GreedyArgmax())
        [token] = executor.unified_decode(batch(item))
        assert (token is not None) == is_last
    for _ in range(5):  # six new tokens, the first of them from the prompt
        assert token is not None
        assert int(token) == int(expected_logits(executor.config, tokens).argmax())
        tokens.append(int(token))
        item = UnifiedBatchItem("request", tokens[-1:], pos_offset=len(tokens) - 1, logits_policy=GreedyArgmax())
        [token] = executor.unified_decode(batch(item))
    status = executor.status()
    assert (executor.prefill_count, executor.decode_count) == (status.prefill_count, status.decode_count) == (1, 5)
    assert status.prefill_tokens == length


Wrong = Callable[[PagedAttentionExecutor, KvCacheHandle], object]
LONG = UnifiedBatchItem("long", [1] * 61)
FINE = UnifiedBatchItem("fine", [1, 2])

WRONG_CALLS: dict[str, tuple[type[PagedError], str, Wrong]] = {
    "token beyond": (InvalidInputError, "256", lambda e, h: e.prefill(prompt([1, 2], [3, 256]))),
    "token below": (InvalidInputError, "-1", lambda e, h: e.decode(step(h, -1))),
    "empty prompt": (
        InvalidInputError,
        "empty",
        lambda e, h: e.prefill(PrefillInput(torch.empty(1, 0, dtype=torch.int64))),
    ),
    "no rows": (
        InvalidInputError,
        "0 rows",
        lambda e, h: e.prefill(PrefillInput(torch.empty(0, 3, dtype=torch.int64))),
    ),
    "only padding": (
        InvalidInputError,
        "empty",
        lambda e, h: e.prefill(prompt([1, 2], [3, 4], attention_mask=torch.tensor([[1, 1], [0, 0]]))),
    ),
    "empty item": (InvalidInputError, "empty", lambda e, h: e.unified_decode(batch(FINE, UnifiedBatchItem("a", [])))),
    "one dimension": (InvalidInputError, "input_ids", lambda e, h: e.prefill(PrefillInput(torch.tensor([1, 2])))),
    "two tokens a decode": (
        InvalidInputError,
        "input_ids",
        lambda e, h: e.decode(replace(step(h, 1), input_ids=torch.ones(1, 2))),
    ),
    "not integers": (InvalidInputError, "dtype", lambda e, h: e.prefill(PrefillInput(torch.ones(1, 2)))),
    "mask of another shape": (
        InvalidInputError,
        "attention_mask",
        lambda e, h: e.prefill(prompt([1, 2], attention_mask=torch.ones(1, 3))),
    ),
    "too few caches": (InvalidInputError, "caches", lambda e, h: e.prefill(prompt([1], [2], kv_caches=[h]))),
    "position before": (
        InvalidInputError,
        "pos_offset",
        lambda e, h: e.unified_decode(batch(FINE, UnifiedBatchItem("live", [1], pos_offset=4))),
    ),
    "position after": (
        InvalidInputError,
        "pos_offset",
        lambda e, h: e.unified_decode(batch(FINE, UnifiedBatchItem("live", [1], kv_cache=h, pos_offset=6))),
    ),
    "position of a new one": (
        InvalidInputError,
        "pos_offset",
        lambda e, h: e.unified_decode(batch(UnifiedBatchItem("new", [1], pos_offset=1))),
    ),
    "decode position": (
        InvalidInputError,
        "pos_offset",
        lambda e, h: e.decode(step(h, 1, position_ids=torch.tensor([[4]]))),
    ),
    "twice": (InvalidInputError, "twice", lambda e, h: e.unified_decode(batch(FINE, FINE))),
    "one cache twice": (InvalidInputError, "twice", lambda e, h: e.batch_decode([step(h, 1), step(h, 2)])),
    "one cache by two names": (
        InvalidInputError,
        "sequences",
        lambda e, h: e.unified_decode(
            batch(UnifiedBatchItem("x", [1], kv_cache=h, pos_offset=5), UnifiedBatchItem("live", [1], pos_offset=5))
        ),
    ),
    "verify two sequences": (
        InvalidInputError,
        r"inputs\[1\]",
        lambda e, h: e.forward_verify([step(h, 1), step(e.kv_manager.get_handle("other"), 1)]),  # type: ignore[arg-type]
    ),
    "verify with a gap": (
        InvalidInputError,
        r"inputs\[1\]",
        lambda e, h: e.forward_verify([step(h, 1), step(h, 1, position_ids=torch.tensor([[7]]))]),
    ),
    "too long": (SequenceTooLongError, "60", lambda e, h: e.unified_decode(batch(FINE, LONG))),
    "decode too long": (
        SequenceTooLongError,
        "60",
        lambda e, h: e.unified_decode(batch(replace(LONG, kv_cache=h, pos_offset=5))),
    ),
    "pool exhausted": (
        OutOfBlocksError,
        "blocks",
        lambda e, h: e.unified_decode(
            batch(FINE, UnifiedBatchItem("live", [1], pos_offset=5), *(UnifiedBatchItem(i, [1] * 30) for i in range(4)))
        ),
    ),
    "adapter": (
        UnsupportedError,
        "adapter",
        lambda e, h: e.unified_decode(batch(replace(FINE, metadata={"lora_adapter": "french"}))),
    ),
    "mask of another vocabulary": (
        InvalidInputError,
        "token_mask",
        lambda e, h: e.unified_decode(
            batch(
                FINE, UnifiedBatchItem("m", [1], logits_policy=GreedyArgmax(token_mask=torch.ones(3, dtype=torch.bool)))
            )
        ),
    ),
    "truncate beyond": (InvalidInputError, "6", lambda e, h: e.truncate_kv(h, 6)),
    "truncate below": (InvalidInputError, "-1", lambda e, h: e.truncate_kv(h, -1)),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_failed_call_changes_nothing(name: str, device: torch.device) -> None:
    error, message, call = WRONG_CALLS[name]
    executor = make_executor(device, num_blocks=12, max_sequence_length=60)
    executor.unified_decode(batch(UnifiedBatchItem("live", [1, 2, 3, 4, 5]), UnifiedBatchItem("other", [6] * 8)))
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
    results = executor.unified_decode(
        batch(
            UnifiedBatchItem("live", [6], pos_offset=5),
            UnifiedBatchItem("other", [1], pos_offset=8),
            UnifiedBatchItem("z", [9]),
        )
    )
    for logits, tokens in zip(results, ([1, 2, 3, 4, 5, 6], [6] * 8 + [1], [9]), strict=True):
        assert logits is not None
        assert_close(logits, expected_logits(executor.config, tokens))


def test_the_longest_sequence_is_served(device: torch.device) -> None:
    executor = make_executor(device, num_blocks=12, max_sequence_length=60)
    [logits] = executor.unified_decode(batch(replace(LONG, q_tokens=[1] * 60)))
    assert logits is not None
    assert_close(logits, expected_logits(executor.config, [1] * 60))


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
    assert_close(executor.decode(step(handle, 1)).logits[0], expected_logits(executor.config, [1, 2, 3, 1]))
    assert executor.status().state is ExecutorState.READY


@pytest.mark.parametrize("kept", [0, 1])
def test_missing_results_free_what_was_reserved(
    kept: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(device)
    handle = executor.prefill(prompt([1, 2, 3])).kv_cache
    stats = executor.kv_manager.stats()
    run = executor._run
    with monkeypatch.context() as patch:
        patch.setattr(executor, "_run", lambda items: run(items)[:kept] if kept else [None for _ in run(items)])
        items = batch(UnifiedBatchItem("a", [1] * 9, kv_cache=handle, pos_offset=3), UnifiedBatchItem("new", [1] * 9))
        with pytest.raises(PagedError, match="results for 2 items"):
            executor.unified_decode(items)
    # The forward itself ran: what it computed may still be found.
    assert replace(executor.kv_manager.stats(), cached_blocks=0, published_blocks=0) == stats
    executor.kv_manager.check_integrity()
    assert [logits is not None for logits in executor.unified_decode(items)] == [True, True]


def test_handles_of_others_and_of_the_dead(device: torch.device) -> None:
    executor, stranger = make_executor(device), make_executor(device)
    handle = executor.prefill(prompt([1, 2])).kv_cache
    foreign = stranger.prefill(prompt([1, 2])).kv_cache
    for wrong in (lambda: executor.decode(step(foreign, 1)), lambda: executor.truncate_kv(foreign, 1)):
        with pytest.raises(InvalidInputError, match="another"):
            wrong()
    with pytest.raises(InvalidInputError, match="None"):
        executor.decode(step([None], 1))  # type: ignore[list-item]
    executor.release_cache(handle.cache_id)
    executor.release_cache(handle.cache_id)
    executor.release_cache("never seen")
    for call in (lambda: executor.decode(step(handle, 1)), lambda: executor.truncate_kv(handle, 1)):
        with pytest.raises(StaleHandleError):
            call()
    assert executor.kv_manager.stats().used_blocks == 0
    assert stranger.decode(step(foreign, 1)).logits.shape == (1, 256)


def test_release_and_begin_again(device: torch.device) -> None:
    executor = make_executor(device)
    for tokens in ([1, 2, 3], [4, 5]):
        [logits] = executor.unified_decode(batch(UnifiedBatchItem("same", tokens)))
        assert logits is not None
        assert_close(logits, expected_logits(executor.config, tokens))
        executor.release_cache("same")
    assert executor.kv_manager.handles() == ()


def test_status_moves_with_work_alone(device: torch.device) -> None:
    executor = make_executor(device)
    start = executor.status()
    assert (start.state, start.prefill_count, start.memory_bytes, start.average_prefill_seconds) == (
        ExecutorState.READY,
        0,
        0,
        0,
    )
    executor.info(), executor.capabilities(), executor.kv_capacity(), executor.cache_metrics_snapshot()
    executor.unified_decode(batch())
    executor.batch_decode([])
    executor.warmup()
    assert executor.status() == start

    handle = executor.prefill(prompt([1] * 9)).kv_cache
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


def test_busy_while_it_runs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(device)
    run, seen = executor._run, []
    monkeypatch.setattr(executor, "_run", lambda items: (seen.append(executor.status().state), run(items))[1])
    executor.prefill(prompt([1]))
    assert seen == [ExecutorState.BUSY]


def test_shutdown_refuses_work(device: torch.device) -> None:
    executor = make_executor(device)
    handle = executor.prefill(prompt([1])).kv_cache
    executor.shutdown()
    executor.shutdown()
    for call in (
        lambda: executor.prefill(prompt([1])),
        lambda: executor.decode(step(handle, 1)),
        lambda: executor.batch_prefill([]),
        lambda: executor.batch_decode([]),
        lambda: executor.unified_decode(batch()),
        lambda: executor.forward_verify([]),
        lambda: executor.truncate_kv(handle, 0),
        lambda: executor.release_cache("a"),
    ):
        with pytest.raises(ExecutorShutDownError):
            call()
    assert executor.status().state is ExecutorState.SHUTDOWN
    assert executor.status().failed_calls == 0


def test_it_tells_its_limits(device: torch.device) -> None:
    executor = make_executor(device, num_blocks=6, num_heads=8)
    info, capabilities = executor.info(), executor.capabilities()
    assert (info.hidden_size, info.num_heads, info.vocab_size, info.device.type) == (32, 8, 256, device.type)
    assert executor.kv_capacity() == capabilities.max_sequence_length == 48
    assert capabilities.max_batch_size == 6
    assert capabilities.supports_native_unified_decode == executor.supports_native_unified_decode() == True  # noqa: E712
    assert not capabilities.supports_lora
    assert (
        capabilities.memory_requirements.kv_bytes_per_token_per_layer * 2 * 8
        == executor.kv_manager.stats().bytes_per_block
    )
    with pytest.raises(OutOfBlocksError):
        executor.prefill(prompt([1] * 49))
    executor.prefill(prompt([1] * 48))
    with pytest.raises(UnsupportedError):
        executor.forward({})
    with pytest.raises(FrozenInstanceError):
        info.vocab_size = 1  # type: ignore[misc]


def test_memory_total_by_hand() -> None:
    needs = MemoryRequirements(weight_bytes=1000, kv_bytes_per_token_per_layer=64, activation_bytes_per_token=10)
    assert needs.total(batch_size=2, seq_len=3, num_layers=4) == 1000 + 2 * 3 * (4 * 64 + 10)
    assert needs.total(0, 3, 4) == 1000
