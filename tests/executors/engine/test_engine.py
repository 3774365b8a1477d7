"""The engine under load: everything ends and nothing leaks, whatever comes in between; what it counts."""

import gc
import itertools
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from paged import Engine, EngineConfig, InvalidInputError, QueueFullError, RequestOutput, SamplingParams
from paged.executors.requests.request import Completion, Request
from tests.executors.engine.answers import ANSWERS
from tests.executors.engine_cases import FIVE, PROMPTS, TEN, check_empty, expected_tokens, run_to_end
from tests.executors.oracle import make_executor


@pytest.mark.parametrize("length", [1, 2, 30])
@pytest.mark.parametrize("chunk_size", [4, 64, None])
def test_n_tokens_are_one_prefill_and_the_decodes(length: int, chunk_size: int | None, device: torch.device) -> None:
    executor = make_executor(device)
    prompt = [(3 * i + 1) % 11 for i in range(length)]
    engine = Engine(executor, EngineConfig(chunk_size=chunk_size))
    [output] = engine.generate([prompt], TEN, progress=False)
    assert output.outputs[0].token_ids == expected_tokens(prompt, 10)
    assert (executor.prefill_count, executor.decode_count) == (1, 9)
    metrics = engine.metrics
    assert (metrics.prefill_tokens, metrics.decode_tokens, metrics.generated_tokens) == (length, 9, 10)
    assert metrics.steps == math.ceil(length / (chunk_size or length)) + 9
    check_empty(engine)


def test_seeds_give_the_same_tokens_in_any_company(device: torch.device) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=42, max_tokens=12, n=2)
    alone = Engine(make_executor(device), seed=0).generate([PROMPTS[3]], params, progress=False)[0]
    first, second = (one.token_ids for one in alone.outputs)
    assert first != second
    executor = make_executor(device, num_blocks=12, num_swap_blocks=4)
    config = EngineConfig(chunk_size=3, admission_tokens=0, preemption="swap", token_budget=9)
    engine = Engine(executor, config, seed=99)
    others = [engine.add_request(prompt, replace(params, seed=None, max_tokens=20)) for prompt in PROMPTS]
    same = engine.add_request(PROMPTS[3], params)
    run_to_end(engine)
    assert [one.token_ids for one in same.outputs] == [first, second]
    assert engine.metrics.preempted
    assert others[3].outputs[0].token_ids[:12] != first
    again = Engine(make_executor(device), seed=99).generate(PROMPTS, replace(params, seed=None), progress=False)
    assert [o.outputs[1].token_ids for o in again] == [o.outputs[1].token_ids[:12] for o in others], "the engine's seed"


def test_streams_in_turns_and_left_early(device: torch.device) -> None:
    engine = Engine(make_executor(device))
    streams = [engine.stream(prompt, TEN) for prompt in PROMPTS[:3]]
    last: list[Any] = [None] * 3
    for _ in range(12):
        last = [next(stream, before) for stream, before in zip(streams, last, strict=True)]
    assert all(output.finished for output in last)
    assert [output.outputs[0].token_ids for output in last] == ANSWERS[:3]
    early = engine.stream(PROMPTS[0], TEN)
    next(early)
    assert engine.num_unfinished == 1
    early.close()
    check_empty(engine)
    with pytest.raises(InvalidInputError, match="expected one for each of 2 prompts"):
        engine.generate(PROMPTS[:2], [TEN])
    with pytest.raises(InvalidInputError, match="empty prompt"):
        engine.generate([[1], []], TEN)
    with pytest.raises(InvalidInputError, match="prompts"):
        engine.generate("a text", progress=False)  # type: ignore[arg-type]
    check_empty(engine)


def test_a_queue_has_an_end(device: torch.device) -> None:
    engine = Engine(make_executor(device), EngineConfig(max_waiting=2, max_num_seqs=1))
    for _ in range(2):
        engine.add_request([1], FIVE)
    with pytest.raises(QueueFullError, match="2 completions wait, max_waiting is 2"):
        engine.add_request([1], FIVE, request_id="a")
    engine.step()
    engine.add_request([1], FIVE, request_id="a")
    run_to_end(engine)


def test_figures_of_a_run(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are of a clock that advances a second whenever it is read."""
    clock = itertools.count()
    for module in ("core", "engine"):
        monkeypatch.setattr(f"paged.executors.engine.{module}.perf_counter", lambda: float(next(clock)))
    executor = make_executor(device, num_blocks=64)
    engine = Engine(executor, EngineConfig(max_num_seqs=2, overlap=False))
    metrics, empty = engine.metrics, asdict(engine.metrics)
    engine.step()
    assert asdict(metrics) == empty, "nothing was done"
    for prompt in PROMPTS:
        engine.add_request(prompt, TEN)
    engine.step()
    status = engine.status()
    assert (status.waiting, status.prefilling, status.decoding, status.num_blocks) == (3, 0, 2, 64)
    assert status.used_blocks == 2
    run_to_end(engine)
    assert (metrics.requests, metrics.finished, metrics.generated_tokens) == (5, {"length": 5}, 50)
    assert metrics.prefill_tokens == sum(map(len, PROMPTS)) == executor.status().prefill_tokens
    assert metrics.decode_tokens == 45 == executor.decode_count
    assert metrics.time_to_first_token.count == metrics.time_per_output_token.count == 5
    assert metrics.step_time.count == metrics.steps
    assert 0 < metrics.time_per_output_token.total < metrics.time_to_first_token.total + metrics.step_time.total
    assert metrics.mixed_steps < metrics.steps
    done = asdict(metrics)
    engine.step()
    assert asdict(metrics) == done
    assert engine.status().used_blocks == 0


ONE = SamplingParams(temperature=0, max_tokens=1)


def small_engine(monkeypatch: pytest.MonkeyPatch, max_num_seqs: int = 64) -> Engine:
    """On the CPU, by PyTorch."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    executor = make_executor(torch.device("cpu"), num_blocks=256, num_layers=1, num_heads=1, num_kv_heads=1)
    return Engine(executor, EngineConfig(max_num_seqs=max_num_seqs))


class Reads:
    """Counts how often requests and completions are read, compared or hashed: what a loop over a queue does to each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for kind in (Request, Completion, RequestOutput):
            for name in ("__getattribute__", "__eq__", "__hash__"):
                monkeypatch.setattr(kind, name, self._counting(getattr(kind, name)))

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.count += 1
            return method(*args)

        return counted

    def of(self, call: Callable[[], object]) -> int:
        """How many there are in a call."""
        before = self.count
        call()
        return self.count - before


@pytest.mark.parametrize("overlap", [False, True])
def test_the_profiler_sees_the_parts_of_a_step(overlap: bool) -> None:
    config = EngineConfig(profiler_ranges=True, overlap=overlap, admission_tokens=0)
    engine = Engine(make_executor(torch.device("cpu"), num_blocks=12), config)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        outputs = engine.generate(PROMPTS, TEN, progress=False)
    assert [output.outputs[0].token_ids for output in outputs] == [expected_tokens(prompt, 10) for prompt in PROMPTS]
    assert engine.metrics.preempted, "a step that does not fit is planned again"
    names = {event.name for event in profiler.events() or ()}
    assert {f"paged.{part}" for part in ("schedule", "forward", "sample", "update")} <= names


def test_a_dropped_engine_is_freed_at_once(device: torch.device) -> None:
    """Not when garbage is next collected, because the executor's memory may be needed for another one."""
    executor = make_executor(device)
    engine = Engine(executor)
    engine.generate(PROMPTS[:2], TEN, progress=False)
    gc.collect()
    gc.disable()
    try:
        freed = weakref.ref(engine), weakref.ref(executor)
        del engine, executor
        assert [reference() for reference in freed] == [None, None]
    finally:
        gc.enable()


def test_a_step_does_not_see_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with 16 decodes, and aborts, read as much before 5,000 others that wait as alone; a loop over these would
    read 5,000 times more in each."""
    engine, reads = small_engine(monkeypatch, max_num_seqs=16), Reads(monkeypatch)

    def reads_of_a_step() -> int:
        outputs = [engine.add_request([1, 2], replace(ONE, max_tokens=60), priority=50) for _ in range(16)]
        counts = [reads.of(engine.step) for _ in range(30)]
        for output in outputs:
            engine.abort(output.request_id)
        return sum(counts) // len(counts)

    def reads_of_an_abort() -> int:
        names = [engine.add_request([1], ONE).request_id for _ in range(200)]
        return reads.of(lambda: [engine.abort(name) for name in names[::2]]) // 100

    step_alone, abort_alone = reads_of_a_step(), reads_of_an_abort()
    waiting = [engine.add_request([3], ONE) for _ in range(5_000)]
    assert 0 < reads_of_a_step() < 2 * step_alone
    assert 0 < reads_of_an_abort() < 3 * abort_alone  # a search by halves: 13 places of the queue for 8
    for output in waiting:
        engine.abort(output.request_id)
    run_to_end(engine)


@pytest.mark.parametrize("waves", [6, pytest.param(60, marks=pytest.mark.thorough)])
def test_thousands_in_a_row(waves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine(monkeypatch)
    kept: list[int] = []
    for wave in range(waves):
        names = {engine.add_request([wave % 200, one, 3], ONE, timeout_s=3600).request_id for one in range(100)}
        ended: list[object] = []
        while engine.num_unfinished:
            ended += [output.request_id for output in engine.step() if output.finished]
        assert len(ended) == len(names)
        assert names == set(ended)
        if wave % 20 == 19:
            gc.collect()
            kept.append(sys.getallocatedblocks())
    assert engine.metrics.finished == {"length": waves * 100}
    if (
        kept
    ):  # from the second third on, when the prefix index is full: 2,000 requests, of which each would leave a block
        assert kept[-1] - kept[1] < 2_000 / 4
    check_empty(engine)
