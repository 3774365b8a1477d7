"""The engine behind coroutines: streams side by side, aborts, errors, and the page for Prometheus."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

from paged import AsyncEngine, Engine, InvalidInputError, RequestOutput, SamplingParams
from paged.executors.engine.async_engine import EngineStoppedError
from tests.executors.engine_cases import PROMPTS, TEN, check_empty, expected_tokens, spy
from tests.executors.oracle import make_executor


async def collect(
    engine: AsyncEngine, prompt: list[int], params: SamplingParams = TEN, **options: Any
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **options)]


def test_streams_side_by_side(device: torch.device) -> None:
    async def scenario() -> None:
        engine = AsyncEngine(Engine(make_executor(device)))
        streams = await asyncio.gather(*(collect(engine, prompt) for prompt in PROMPTS))
        for prompt, outputs in zip(PROMPTS, streams, strict=True):
            lengths = [len(output.outputs[0].token_ids) for output in outputs]
            assert lengths == sorted(set(lengths))
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert outputs[-1].outputs[0].token_ids == expected_tokens(prompt, 10)
        assert engine.engine.metrics.steps < 25, "they share forwards"
        again = await collect(engine, PROMPTS[0])
        assert again[-1].outputs[0].token_ids == expected_tokens(PROMPTS[0], 10)
        assert (await engine.status()).waiting == 0
        assert "paged_generated_tokens_total 60.0" in await engine.prometheus_text()
        await engine.shutdown()
        check_empty(engine.engine)

    asyncio.run(scenario())


def test_the_loop_runs_while_a_step_does(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(device)
    spy(monkeypatch, executor, lambda batch: time.sleep(1.0))

    async def scenario() -> None:
        engine = AsyncEngine(Engine(executor))
        request = asyncio.create_task(collect(engine, [1, 2], SamplingParams(max_tokens=2)))
        longest, last = 0.0, time.perf_counter()
        while not request.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        assert longest < 0.9
        await engine.shutdown()

    asyncio.run(scenario())


def test_aborts_and_streams_that_are_left(device: torch.device) -> None:
    long = SamplingParams(temperature=0, max_tokens=200)

    async def scenario() -> None:
        engine = AsyncEngine(Engine(make_executor(device, num_blocks=128)))
        aborted = asyncio.create_task(collect(engine, [1, 2], long, request_id="a"))
        cancelled = asyncio.create_task(collect(engine, [3], long))
        stream = engine.generate([4], long)
        await anext(stream)
        await stream.aclose()
        assert await engine.abort("a")
        assert not await engine.abort("a")
        assert (await aborted)[-1].outputs[0].finish_reason == "abort"
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await collect(engine, PROMPTS[1]))[-1].outputs[0].token_ids == expected_tokens(PROMPTS[1], 10)
        await engine.shutdown()
        assert engine.engine.metrics.finished == {"abort": 3, "length": 1}
        check_empty(engine.engine)

    asyncio.run(scenario())


def test_errors_arrive_where_they_belong(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(device)
    spy(monkeypatch, executor, lambda batch: time.sleep(0.05))  # 100 tokens outlast the stalls of a busy machine

    async def scenario() -> None:
        engine = AsyncEngine(Engine(executor))
        with pytest.raises(InvalidInputError, match="empty prompt"):
            await collect(engine, [])
        running = asyncio.create_task(collect(engine, [1], SamplingParams(max_tokens=100), request_id="a"))
        await asyncio.sleep(0.01)
        with pytest.raises(InvalidInputError, match="in use"):
            await collect(engine, [1], TEN, request_id="a")
        assert not running.done()
        executor.shutdown()
        with pytest.raises(EngineStoppedError, match="the executor was shut down"):
            await running
        await engine.shutdown()
        await engine.shutdown()
        with pytest.raises(EngineStoppedError):
            await collect(engine, [1])

    asyncio.run(scenario())


def test_shutdown_ends_what_runs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(device)
    spy(monkeypatch, executor, lambda batch: time.sleep(0.05))

    async def scenario() -> None:
        engine = AsyncEngine(Engine(executor))
        running = asyncio.create_task(collect(engine, [1], SamplingParams(max_tokens=200)))
        await asyncio.sleep(0.01)
        await engine.shutdown()
        with pytest.raises(EngineStoppedError, match="the engine was shut down"):
            await running
        check_empty(engine.engine)

    asyncio.run(scenario())
