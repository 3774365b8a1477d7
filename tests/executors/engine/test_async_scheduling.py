"""Steps that are prepared ahead: when that is done, what becomes of them, and that no token depends on it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from paged import Engine, EngineConfig, PagedAttentionExecutor, RequestOutput, SamplingParams
from paged.cache.kv_cache import KvCacheHandle
from paged.forward_step import PreparedStep
from tests.executors.engine_cases import PROMPTS, TEN, check_empty, expected_tokens, run, spy, tokens_of
from tests.executors.minimal_executor import MinimalExecutor
from tests.executors.oracle import make_executor, prompt

AHEAD = EngineConfig(prepare_ahead=True)


class Waits(TorchFunctionMode):
    """Notes when the host waits for a value that the device computes, as if the device took until then."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self._is_called = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.item) and not self._is_called:
            self.events.append("fetch")
        return func(*args, **(kwargs or {}))

    def during(self, name: str, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The call, noted; on a CPU it waits at once for all that it computes, which does not count."""

        def noted(argument: Any) -> Any:
            self.events.append(name)
            self._is_called = True
            try:
                return call(argument)
            finally:
                self._is_called = False

        return noted


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"logprobs": 2}], ids=str)
def test_the_next_step_is_prepared_before_the_tokens_are_fetched(
    fields: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(device, num_blocks=64)
    engine, waits = Engine(executor, AHEAD), Waits()
    monkeypatch.setattr(executor, "unified_decode", waits.during("forward", executor.unified_decode))
    monkeypatch.setattr(executor, "prepare_step", waits.during("prepare", executor.prepare_step))
    engine.add_request([1, 2, 3], replace(TEN, max_tokens=4, **fields))
    with waits:
        while engine.num_unfinished:
            engine.step()
    assert waits.events == ["forward", "prepare", "fetch"] * 3 + ["forward", "fetch"], "the last token has no next step"
    assert (engine.metrics.prepared_steps, engine.metrics.dropped_steps) == (3, 0)


def test_every_decode_step_of_a_batch_is_prepared(device: torch.device) -> None:
    """Those that reach their last token are left out of the next one."""
    engine = Engine(make_executor(device, num_blocks=64), AHEAD)
    params = [replace(TEN, max_tokens=1 + 3 * index) for index in range(len(PROMPTS))]
    outputs = engine.generate(PROMPTS, params, progress=False)
    assert tokens_of(outputs) == [
        expected_tokens(one, fields.max_tokens or 0) for one, fields in zip(PROMPTS, params, strict=True)
    ]
    metrics = engine.metrics
    assert (metrics.steps, metrics.prepared_steps, metrics.dropped_steps) == (13, 12, 0)
    check_empty(engine)


def test_off_by_default_on_a_cpu_and_without_the_capability(device: torch.device) -> None:
    engine = Engine(make_executor(device, num_blocks=64))
    run(engine, PROMPTS, TEN)
    assert bool(engine.metrics.prepared_steps) == (device.type == "cuda")
    plain = Engine(MinimalExecutor(), AHEAD)
    plain.generate([[1], [2]], replace(TEN, max_tokens=3), progress=False)
    assert (plain.metrics.prepared_steps, plain.metrics.dropped_steps) == (0, 0)


def test_one_that_ends_early(device: torch.device) -> None:
    """By a stop id: the step that counted on it goes, its room comes back at once, and the others go on."""
    engine = Engine(make_executor(device, num_blocks=64), AHEAD)
    stop = expected_tokens(PROMPTS[1], 4)[3]
    params = [TEN, replace(TEN, stop_token_ids=(stop,)), TEN]
    outputs = [engine.add_request(one, fields) for one, fields in zip(PROMPTS[:3], params, strict=True)]
    manager = engine.executor.kv_manager
    assert manager is not None
    while not outputs[1].finished:
        assert engine.metrics.dropped_steps == 0
        engine.step()
    assert engine.metrics.dropped_steps == 1
    assert manager.stats().used_blocks == sum(-(-handle.num_tokens // 8) for handle in manager.handles())
    while engine.num_unfinished:
        engine.step()
    assert outputs[1].outputs[0].finish_reason == "stop"
    length = expected_tokens(PROMPTS[1], 4).index(stop) + 1
    assert [one.outputs[0].token_ids for one in outputs] == [
        expected_tokens(one, count) for one, count in zip(PROMPTS[:3], (10, length, 10), strict=True)
    ]
    assert engine.metrics.dropped_steps == 1
    check_empty(engine)


def test_an_arrival_is_not_kept_waiting(device: torch.device) -> None:
    engine = Engine(make_executor(device, num_blocks=64), AHEAD)
    engine.add_request(PROMPTS[3], TEN)
    engine.step()
    late = engine.add_request(PROMPTS[2], TEN)
    engine.step()
    assert len(late.outputs[0].token_ids) == 1
    assert (engine.metrics.prepared_steps, engine.metrics.dropped_steps) == (0, 1)
    while engine.num_unfinished:
        engine.step()
    assert late.outputs[0].token_ids == expected_tokens(PROMPTS[2], 10)
    check_empty(engine)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_nothing_is_preempted_for_it(preemption: Any, device: torch.device) -> None:
    """In a pool that is almost full, the same are preempted as without it."""
    counts = []
    for prepare_ahead in (False, True):
        executor = make_executor(device, num_blocks=9, num_swap_blocks=9)
        config = EngineConfig(preemption=preemption, admission_tokens=0, prepare_ahead=prepare_ahead)
        engine = Engine(executor, config)
        assert run(engine, PROMPTS, TEN) == [expected_tokens(one, 10) for one in PROMPTS]
        counts.append((engine.metrics.preempted, engine.metrics.steps))
        assert bool(engine.metrics.prepared_steps) == prepare_ahead
    assert counts[0] == counts[1]
    assert counts[0][0]


def test_forks_and_the_rest_of_a_batch(device: torch.device) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=42, max_tokens=12, n=4)
    outputs = []
    for prepare_ahead in (False, True):
        engine = Engine(make_executor(device, num_blocks=64), EngineConfig(prepare_ahead=prepare_ahead), seed=3)
        outputs.append(engine.generate(PROMPTS, params, progress=False))
        check_empty(engine)
    assert engine.metrics.prepared_steps == 11
    for plain, ahead in zip(*outputs, strict=True):
        assert [one.token_ids for one in ahead.outputs] == [one.token_ids for one in plain.outputs]


def test_a_forward_that_fails(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it takes the prepared step, or inside of it."""
    executor = make_executor(device, num_blocks=64)
    engine, calls = Engine(executor, AHEAD), [0]

    def flaky(*args: Any) -> None:
        calls[0] += 1
        if calls[0] in (7, 12):
            raise RuntimeError("a moment of weakness")

    spy(monkeypatch, executor, flaky)
    attend = executor._attend
    monkeypatch.setattr(executor, "_attend", lambda step: (flaky(), attend(step))[1])
    assert run(engine, PROMPTS, TEN) == [expected_tokens(one, 10) for one in PROMPTS]
    assert engine.metrics.failed_forwards == 2
    assert engine.metrics.prepared_steps > 5


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_preparation_that_fails(
    where: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before its room was taken or after: the step that was under way keeps its tokens, and the next one runs."""
    executor = make_executor(device, num_blocks=64)
    prepare, calls = executor._prepare_step, [0]

    def flaky(handles: Sequence[KvCacheHandle]) -> PreparedStep | None:
        calls[0] += 1
        prepared = prepare(handles) if where == "after" or calls[0] != 3 else None
        if calls[0] == 3:
            raise RuntimeError("out of memory")
        return prepared

    monkeypatch.setattr(executor, "_prepare_step", flaky)
    engine = Engine(executor, AHEAD)
    assert run(engine, PROMPTS, TEN) == [expected_tokens(one, 10) for one in PROMPTS]
    assert (engine.metrics.prepared_steps, engine.metrics.dropped_steps) == (8, 0)
    assert "the next step was not prepared: RuntimeError: out of memory" in caplog.text


def test_an_executor_that_is_used_by_others_too(device: torch.device) -> None:
    """Their forward comes between: what was prepared is dropped, and no token changes."""
    executor = make_executor(device, num_blocks=64)
    engine = Engine(executor, AHEAD)
    output = engine.add_request(PROMPTS[2], TEN)
    while engine.num_unfinished:
        engine.step()
        handle = executor.prefill(prompt([1, 2, 3])).kv_cache
        executor.release_cache(handle.cache_id)
        executor.kv_manager.check_integrity()
    assert output.outputs[0].token_ids == expected_tokens(PROMPTS[2], 10)
    assert (engine.metrics.prepared_steps, engine.metrics.dropped_steps) == (0, 9)
    check_empty(engine)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_arrivals_aborts_and_others_at_random(preemption: Any, device: torch.device) -> None:
    """Others take and free blocks between the steps; what ends by itself has the tokens of a plain engine."""
    rng = random.Random(8)
    executor = make_executor(device, num_blocks=30, num_swap_blocks=12)
    config = EngineConfig(
        token_budget=48, max_num_seqs=12, preemption=preemption, admission_tokens=4, prepare_ahead=True
    )
    engine, manager = Engine(executor, config, seed=1), executor.kv_manager
    requests: list[tuple[list[int], SamplingParams, RequestOutput]] = []
    foreign: list[KvCacheHandle] = []
    while len(requests) < 100 or engine.num_unfinished:
        if len(requests) < 100 and rng.random() < 0.4:
            params = SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                max_tokens=rng.randint(1, 25),
                n=rng.choice([1, 1, 4]),
                seed=len(requests),
                stop_token_ids=rng.choice([(), (rng.randrange(256),)]),
            )
            ids = [rng.randrange(11) for _ in range(rng.randint(1, 40))]
            requests.append((ids, params, engine.add_request(ids, params)))
        if rng.random() < 0.1 and (live := [one for *_, one in requests if not one.finished]):
            engine.abort(rng.choice(live).request_id)
        if rng.random() < 0.2 and manager.can_allocate(16):
            foreign.append(manager.allocate(f"foreign {rng.random()}", 16))
        elif foreign:
            manager.free(foreign.pop())
        manager.check_integrity()
        engine.step()
        manager.check_integrity()
    for handle in foreign:
        manager.free(handle)
    check_empty(engine)
    metrics = engine.metrics
    assert metrics.prepared_steps > 50
    assert metrics.dropped_steps > 10
    assert metrics.preempted
    plain = Engine(make_executor(device, num_blocks=512), EngineConfig(prepare_ahead=False), seed=1)
    assert all(output.finished and output.error is None for *_, output in requests)
    whole = [one for one in requests if all(each.finish_reason in ("length", "stop") for each in one[2].outputs)]
    assert len(whole) > 40
    prompts, params, outputs = zip(*whole, strict=True)
    expected = plain.generate(prompts, params, progress=False)
    for output, other in zip(outputs, expected, strict=True):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in other.outputs]


def test_aborting_all_leaves_nothing(device: torch.device) -> None:
    executor: PagedAttentionExecutor = make_executor(device, num_blocks=64)
    engine = Engine(executor, AHEAD)
    outputs = [engine.add_request([index] * 8, TEN) for index in range(3)]
    engine.step()
    assert executor.kv_manager.stats().used_blocks == 6, "each has a block for its next token"
    engine.abort(outputs[0].request_id)
    assert executor.kv_manager.stats().used_blocks == 2, "the step is not that one any more"
    assert engine.metrics.dropped_steps == 1
    for output in outputs[1:]:
        engine.abort(output.request_id)
    check_empty(engine)
