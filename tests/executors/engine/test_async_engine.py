"""The engine behind coroutines: streams side by side, aborts, errors, and the page for Prometheus."""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from paged import AsyncEngine, Engine, InvalidInputError, RequestOutput, SamplingParams
from paged.executors.engine.async_engine import EngineStoppedError
from tests.deadline import HANG_S
from tests.executors.engine.answers import ANSWERS
from tests.executors.engine_cases import PROMPTS, TEN, StepGate, check_empty, spy
from tests.executors.oracle import make_executor


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine as a test."""
    return functools.wraps(test)(lambda **fixtures: asyncio.run(test(**fixtures)))


async def collect(
    engine: AsyncEngine, prompt: list[int], params: SamplingParams = TEN, **options: Any
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **options)]


@in_a_loop
async def test_streams_side_by_side(device: torch.device) -> None:
    engine = AsyncEngine(Engine(make_executor(device)))
    streams = await asyncio.gather(*(collect(engine, prompt) for prompt in PROMPTS))
    for answer, outputs in zip(ANSWERS, streams, strict=True):
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == sorted(set(lengths))
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].token_ids == answer
    assert engine.engine.metrics.steps < 25, "they share forwards"
    assert (await collect(engine, PROMPTS[0]))[-1].outputs[0].token_ids == ANSWERS[0]
    assert (await engine.status()).waiting == 0
    assert not await engine.abort("no such request")
    page = await engine.prometheus_text()
    assert "paged_generated_tokens_total 60.0" in page
    assert 'paged_preempted_total{kind="recompute"} 0.0' in page, "before the first, so that a rate sees it"
    await engine.shutdown()
    check_empty(engine.engine)


@in_a_loop
async def test_the_loop_runs_while_a_step_does(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits for the loop ends; if it held the loop up, its wait would fail."""
    executor = make_executor(device)
    begun, goes_on, waits = threading.Event(), threading.Event(), []

    def wait(step: Any) -> None:
        begun.set()
        waits.append(goes_on.wait(HANG_S))

    spy(monkeypatch, executor, wait)
    engine = AsyncEngine(Engine(executor))
    request = asyncio.create_task(collect(engine, [1, 2], SamplingParams(max_tokens=2)))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    goes_on.set()
    await request
    assert waits == [True, True]
    await engine.shutdown()


@pytest.mark.parametrize("shut_down", ["executor", "engine"])
@in_a_loop
async def test_errors_arrive_where_they_belong(
    shut_down: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(device)
    gate = StepGate(monkeypatch, executor)
    engine = AsyncEngine(Engine(executor))
    with pytest.raises(InvalidInputError, match="empty prompt"):
        await collect(engine, [])
    running = asyncio.create_task(collect(engine, [1], SamplingParams(max_tokens=200), request_id="a"))
    await asyncio.sleep(0)
    with pytest.raises(InvalidInputError, match="in use"):
        await gate.during(collect(engine, [1], TEN, request_id="a"))
    assert not running.done()
    if shut_down == "executor":
        executor.shutdown()
    else:
        await gate.during(engine.shutdown())
    gate.open()
    with pytest.raises(EngineStoppedError, match=f"the {shut_down} was shut down"):
        await running
    await engine.shutdown()
    await engine.shutdown()
    with pytest.raises(EngineStoppedError):
        await collect(engine, [1])
    if shut_down == "engine":
        check_empty(engine.engine)


@pytest.mark.parametrize("end", ["pause", "shutdown"])
@in_a_loop
async def test_the_last_step_holds_no_tokens_back(end: str, device: torch.device) -> None:
    """A reader that lags sees, after the last step, all tokens there are."""
    engine = AsyncEngine(Engine(make_executor(device)))
    stream = engine.generate([1], SamplingParams(max_tokens=250))
    await anext(stream)
    while engine.engine.metrics.generated_tokens < 20:
        await asyncio.sleep(0.001)
    await getattr(engine, end)()
    newest = await anext(stream)
    assert len(newest.outputs[0].token_ids) == engine.engine.metrics.generated_tokens >= 20
    await stream.aclose()
    await engine.shutdown()
