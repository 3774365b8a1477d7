"""Steps that are prepared ahead: when that is done, what becomes of them, and that no token depends on it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from paged import Engine, EngineConfig
from paged.cache.kv_cache import KvCacheHandle
from paged.forward_step import PreparedStep
from tests.executors.engine.answers import ANSWERS
from tests.executors.engine_cases import PROMPTS, TEN, check_empty, run, run_to_end
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
        run_to_end(engine)
    assert waits.events == ["forward", "prepare", "fetch"] * 3 + ["forward", "fetch"], "the last token has no next step"
    assert (engine.metrics.prepared_steps, engine.metrics.dropped_steps) == (3, 0)


def test_off_by_default_on_a_cpu_and_without_the_capability(device: torch.device) -> None:
    engine, plain = Engine(make_executor(device, num_blocks=64)), Engine(MinimalExecutor(), AHEAD)
    run(engine, PROMPTS, TEN)
    assert bool(engine.metrics.prepared_steps) == (device.type == "cuda")
    plain.generate([[1], [2]], replace(TEN, max_tokens=3), progress=False)
    assert (plain.metrics.prepared_steps, plain.metrics.dropped_steps) == (0, 0)


def test_one_that_ends_early(device: torch.device) -> None:
    """By a stop id: the step that counted on it goes, its room comes back at once, and the others go on."""
    engine = Engine(make_executor(device, num_blocks=64), AHEAD)
    stop = ANSWERS[1][3]
    params = [TEN, replace(TEN, stop_token_ids=(stop,)), TEN]
    outputs = [engine.add_request(one, fields) for one, fields in zip(PROMPTS[:3], params, strict=True)]
    manager = engine.executor.kv_manager
    while not outputs[1].finished:
        assert engine.metrics.dropped_steps == 0
        engine.step()
    assert engine.metrics.dropped_steps == 1
    assert manager.stats().used_blocks == sum(-(-handle.num_tokens // 8) for handle in manager.handles())
    run_to_end(engine)
    assert outputs[1].outputs[0].finish_reason == "stop"
    until_stop = ANSWERS[1][: ANSWERS[1].index(stop) + 1]
    assert [one.outputs[0].token_ids for one in outputs] == [ANSWERS[0], until_stop, ANSWERS[2]]
    assert engine.metrics.dropped_steps == 1


def test_an_arrival_is_not_kept_waiting(device: torch.device) -> None:
    engine = Engine(make_executor(device, num_blocks=64), AHEAD)
    engine.add_request(PROMPTS[3], TEN)
    engine.step()
    late = engine.add_request(PROMPTS[2], TEN)
    engine.step()
    assert len(late.outputs[0].token_ids) == 1
    assert (engine.metrics.prepared_steps, engine.metrics.dropped_steps) == (0, 1)
    run_to_end(engine)
    assert late.outputs[0].token_ids == ANSWERS[2]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_nothing_is_preempted_for_it(preemption: Any, device: torch.device) -> None:
    """In a pool that is almost full, the same are preempted as without it."""
    counts = []
    for ahead in (False, True):
        executor = make_executor(device, num_blocks=9, num_swap_blocks=9)
        engine = Engine(executor, EngineConfig(preemption=preemption, admission_tokens=0, prepare_ahead=ahead))
        assert run(engine, PROMPTS, TEN) == ANSWERS
        counts.append((engine.metrics.preempted, engine.metrics.steps))
        assert bool(engine.metrics.prepared_steps) == ahead
    assert counts[0] == counts[1]
    assert counts[0][0]


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
    assert run(engine, PROMPTS, TEN) == ANSWERS
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
    assert output.outputs[0].token_ids == ANSWERS[2]
    assert (engine.metrics.prepared_steps, engine.metrics.dropped_steps) == (0, 9)
    check_empty(engine)


def test_aborting_all_leaves_nothing(device: torch.device) -> None:
    executor = make_executor(device, num_blocks=64)
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
