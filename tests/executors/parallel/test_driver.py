"""What rank 0 tells the other processes of a model: all the same, from any thread, and when one of them is lost."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from paged import (
    Engine,
    EngineConfig,
    InvalidInputError,
    LlmExecutor,
    ModelAsleepError,
    ParallelConfig,
    RankFailedError,
    SamplingParams,
)
from paged.errors import PagedError, UnsupportedError
from paged.executors.parallel.messages import Channel, Kind
from paged.models.parallel.ranks import Ranks
from paged.models.parallel.share import step_bytes
from paged.step.batch import FullLogits, GreedyArgmax, UnifiedBatch, UnifiedBatchItem
from tests.backends import needs_numba
from tests.deadline import HANG_S
from tests.executors.parallel.followers import Followers
from tests.models.families import FAMILIES, assert_same_logits, save_checkpoint, tokens
from tests.models.lora.folders import Adapter

OPTIONS: dict[str, Any] = {"block_size": 8, "num_blocks": 64}


def _run(executor: LlmExecutor, seq_id: str, ids: list[int], start: int = 0, **fields: Any) -> torch.Tensor:
    (row,) = executor.unified_decode(UnifiedBatch([UnifiedBatchItem(seq_id, ids, pos_offset=start, **fields)]))
    return row


def _assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    if expected.is_floating_point():
        assert_same_logits(found, expected)
    else:
        assert int(found) == int(expected)  # a token id


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and beside it two adapters of it."""
    folder = tmp_path_factory.mktemp("llama") / "base"
    save_checkpoint(FAMILIES["llama"], folder)
    for seed in (1, 2):
        Adapter(["q_proj", "o_proj"], seed=seed).save(folder.parent / f"adapter{seed}", folder)
    return folder


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three ranks the last has fewer rows of the vocabulary, and all have the same KV head."""
    folder, config = tmp_path_factory.mktemp("odd"), FAMILIES["llama"]
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads = 96, 3, 1
    save_checkpoint(config, folder)
    return folder


class _Loop(Ranks):
    """Keeps what is broadcast, and gives it back."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[torch.Tensor] = []
        self.is_sender = True

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_sender:
            self.sent.append(x.clone())
            return x
        return x.copy_(self.sent.pop(0))


@pytest.mark.parametrize("rows", [0, 1, 300, 20_000])
def test_messages_arrive_as_they_were_sent(rows: int) -> None:
    """Short ones in one broadcast, long ones in two."""
    loop = _Loop()
    arrays = [np.arange(rows), np.arange(rows, dtype=np.int32), np.arange(rows % 7, dtype=np.uint8), np.array(5)]
    arrays.append(np.arange(6, dtype=np.int32).reshape(2, 1, 3)[:, :, ::2])
    sender, receiver = Channel(loop), Channel(loop)
    sender.send(Kind.STEP, arrays)
    assert len(loop.sent) == (2 if rows > 2000 else 1)
    loop.is_sender = False
    kind, found = receiver.receive()
    assert kind is Kind.STEP
    for mine, theirs in zip(found, arrays, strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert sender.state.tolist() == receiver.state.tolist()


@pytest.mark.parametrize(
    "name", ["gemma4_moe", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("llama", "cohere2", "olmo2"))]
)
def test_bytes_of_a_step(name: str, followers: Followers, tmp_path: Path) -> None:
    """As many as the arithmetic says."""
    save_checkpoint(FAMILIES[name], tmp_path)
    with followers.load(tmp_path, 2, dtype="bfloat16", **OPTIONS) as spread:
        network, config = spread.model.network, spread.model.network.config
        for items in (
            [UnifiedBatchItem("a", tokens(11)), UnifiedBatchItem("b", tokens(6), is_final_chunk=False)],
            [UnifiedBatchItem("a", [1], pos_offset=11), UnifiedBatchItem("b", [2, 3], pos_offset=6)],
        ):
            batch, before = UnifiedBatch(items), spread.model.ranks.num_bytes.copy()
            spread.unified_decode(batch)
            sent = spread.model.ranks.num_bytes - before
            assert sent.pop("broadcast") == 1 << 14
            sums = network.num_sums(config), network.layer_class.num_sums(config, config.num_layers - 1)
            sizes = {"size": 2, "itemsize": 2, "num_tokens": batch.total_q_tokens, "num_rows": batch.num_sampled_items}
            assert sent == step_bytes(config, num_sums=sums[0], last_sums=sums[1], **sizes)


def test_processes_of_a_mesh(followers: Followers, llama: Path) -> None:
    """Two models of two processes each."""
    executor = followers.order(llama, 4, {"tensor_parallel_size": 2, "mesh": (2, 2)}, OPTIONS)
    try:
        _assert_same(
            _run(executor, "a", tokens(9)), _run(LlmExecutor.from_pretrained(llama, **OPTIONS), "a", tokens(9))
        )
        executor.shutdown()
        assert dist.is_initialized()  # it is the caller's
    finally:
        dist.destroy_process_group()
    assert followers.answers(4) == ["served"] * 3


def test_every_so_many_steps_all_have_been_told_the_same(followers: Followers, llama: Path) -> None:
    executor = followers.order(llama, 2, {"check_steps": 3}, OPTIONS)
    for step in range(5):
        _run(executor, "a", [step], step)
    executor._driver._channel.state[1] += 1
    with pytest.raises(PagedError, match=r"ranks \[1\] have received other messages"):
        _run(executor, "a", [5], 5)
    executor.shutdown()
    assert "have received other messages" in followers.answers(2)[0]


@pytest.mark.parametrize(
    ("sign", "timeout_s"),
    # One that stalls is noticed by its silence: seconds, which a busy machine must not take for a step.
    [(signal.SIGKILL, 2 * HANG_S), pytest.param(signal.SIGSTOP, 8.0, marks=pytest.mark.thorough)],
)
def test_a_process_that_is_lost(mortals: Followers, odd: Path, sign: signal.Signals, timeout_s: float) -> None:
    """Three processes, of which the last is lost in the middle of the engine's work. One that has ended is noticed long
    before the timeout."""
    executor = mortals.order(odd, 3, {"timeout_s": timeout_s}, OPTIONS)
    engine = Engine(executor, eos_token_ids=())
    outputs = [engine.add_request(tokens(9, seed), SamplingParams(max_tokens=100)) for seed in range(4)]
    for _ in range(5):
        engine.step()
    victim = mortals.processes[1]
    os.kill(victim.pid, sign)
    lost = monotonic()
    with pytest.raises(RankFailedError, match="rank 0 of 3 cannot go on: another rank has ended, or did not answer"):
        list(iter(engine.step, []))
    assert mortals.answers(2)[0].startswith("RankFailedError: rank 1 of 3 cannot go on")
    assert sign is signal.SIGSTOP or monotonic() - lost < timeout_s / 2
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 4
    with pytest.raises(RankFailedError):
        executor.load_lora("any", odd)
    executor.shutdown()
    victim.kill()
    victim.join(HANG_S)


@pytest.mark.thorough  # as it waits longer than a timeout that no busy machine exceeds
def test_idle_processes_wait_longer_than_the_timeout(followers: Followers, odd: Path) -> None:
    executor = followers.order(odd, 3, {"timeout_s": 8.0}, OPTIONS)
    sleep(10)
    _run(executor, "a", tokens(5))
    executor.shutdown()
    executor.shutdown()
    assert followers.answers(3) == ["served"] * 2


def test_rank_0_that_gives_up_ends_the_others(followers: Followers, odd: Path) -> None:
    executor = followers.order(odd, 3, {}, OPTIONS)
    with pytest.raises(UnsupportedError, match="rank"):
        executor.serve()
    executor.model.ranks.fail("a test wants so")
    assert all(answer.startswith("RankFailedError: rank") for answer in followers.answers(3))
    with pytest.raises(RankFailedError, match="a test wants so"):
        executor.warmup()
    executor.shutdown()


def test_a_model_that_does_not_divide(followers: Followers, odd: Path) -> None:
    with pytest.raises(UnsupportedError, match="tensor_parallel_size 2: num_attention_heads 3"):
        followers.order(odd, 2, {}, OPTIONS)
    assert followers.answers(2)[0].startswith("UnsupportedError: tensor_parallel_size 2")


@pytest.mark.parametrize(
    "given", [{"tensor_parallel_size": 0}, {"expert_parallel": 1}, {"timeout_s": 0}, {"check_steps": 0}]
)
def test_configurations_out_of_range(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(given))):
        ParallelConfig(**given)


def test_three_ranks_of_an_odd_vocabulary(followers: Followers, odd: Path) -> None:
    alone = LlmExecutor.from_pretrained(odd, **OPTIONS)
    with followers.load(odd, 3, **OPTIONS) as spread:
        for policy in (FullLogits(), GreedyArgmax()):
            for seed in range(3):
                found, expected = (
                    _run(one, f"{policy} {seed}", tokens(9, seed), logits_policy=policy) for one in (spread, alone)
                )
                _assert_same(found, expected)


def test_threads_that_run_steps_move_blocks_load_adapters_and_warm_up(mortals: Followers, llama: Path) -> None:
    """None waits for another, and all processes do everything in one order."""
    options = {"block_size": 4, "num_blocks": 96, "num_swap_blocks": 32, "max_loras": 1, "max_lora_rank": 4}
    alone = LlmExecutor.from_pretrained(llama, **options)
    spread = mortals.order(llama, 2, {"timeout_s": HANG_S}, options)
    for executor in (alone, spread):
        _run(executor, "moved", tokens(22))
    manager = spread.kv_manager

    def move() -> None:
        manager.swap_out(manager.get_handle("moved"))
        filler = manager.allocate("filler", 22)  # over what it left
        manager.extend(filler, 22)
        manager.swap_in(manager.get_handle("moved"))
        manager.extend(manager.fork(manager.get_handle("moved"), "fork"), 1)  # copies the last block
        manager.free(manager.get_handle("fork"))
        manager.free(filler)

    def step() -> None:
        _run(spread, "stepped", tokens(9))
        spread.release_cache("stepped")

    def adapt(name: str) -> None:
        with suppress(InvalidInputError):  # the other one has the only slot
            spread.load_lora(name, llama.parent / name)
            spread.unload_lora(name)

    failures: list[BaseException] = []

    def again(act: Callable[[], None], times: int) -> None:
        try:
            for _ in range(times):
                act()
        except BaseException as error:
            failures.append(error)

    acts = {move: 100, step: 10, partial(adapt, "adapter1"): 5, partial(adapt, "adapter2"): 5, spread.warmup: 2}
    threads = [Thread(target=again, args=each, daemon=True) for each in acts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert not failures
    assert not any(thread.is_alive() for thread in threads), "they wait for one another"
    adapted = {"metadata": {"lora_adapter": "adapter2"}}
    for executor in (alone, spread):
        executor.load_lora("adapter2", llama.parent / "adapter2")
    for request, fields in ((("moved", [5], 22), {}), (("fresh", tokens(9)), {}), (("adapted", tokens(9)), adapted)):
        _assert_same(_run(spread, *request, **fields), _run(alone, *request, **fields))
    spread.shutdown()
    assert mortals.answers(2) == ["served"]


@needs_numba
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_the_same_bits_in_any_batch(
    name: str, followers: Followers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks, whose sums have one order; they sleep in between."""
    save_checkpoint(FAMILIES[name], tmp_path)
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    config = EngineConfig(batch_invariant=True, token_budget=32)
    prompts = [tokens(30)[: 4 * index] + tokens(1 + index, index) for index in range(6)]
    params = [SamplingParams(temperature=index % 2 * 0.8, seed=index, max_tokens=3, logprobs=2) for index in range(6)]

    def answers(prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
        outputs = Engine(spread, config, eos_token_ids=()).generate(prompts, params, progress=False)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    with followers.load(tmp_path, 2, **OPTIONS) as spread:
        spread.warmup()
        assert spread.capabilities().has_invariant_rows
        together = answers(prompts, params)
        spread.sleep()
        with pytest.raises(ModelAsleepError):
            spread.model.prefill("a", [1, 2])
        spread.wake()
        assert [answers([prompt], [row])[0] for prompt, row in zip(prompts, params, strict=True)] == together
