"""AsyncModelExecutor: the same calls in the same order, and an event loop that keeps running."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time

import pytest
import torch

from paged.batch import DecodeInput, DecodeOutput, PrefillInput, PrefillOutput, UnifiedBatchItem
from paged.errors import InvalidInputError, UnsupportedError
from paged.executors.async_executor import AsyncModelExecutor
from paged.executors.command_line.closed_form import expected_logits
from paged.executors.model_executor import ExecutorShutDownError, ModelExecutor
from paged.executors.types import ExecutorCapabilities, ExecutorStatus, ModelInfo
from tests.executors.oracle import batch, make_executor, prompt, step
from tests.tolerance import assert_close

METHODS = {name for name, _ in inspect.getmembers(ModelExecutor, inspect.isfunction)}


class SlowExecutor(ModelExecutor):
    """Only the required calls; prefill waits for a gate. Its handles are the lists of tokens it was given."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.running = 0
        self.log: list[int] = []

    def prefill(self, inputs: PrefillInput) -> PrefillOutput:
        self.running += 1
        assert self.running == 1
        assert self.gate.wait(10)
        time.sleep(0.001)
        self.log.append(int(inputs.input_ids[0, 0]))
        self.running -= 1
        return PrefillOutput(torch.zeros(1, 1, 4), [[]])  # type: ignore[list-item]

    def decode(self, inputs: DecodeInput) -> DecodeOutput:
        seen = [*inputs.kv_cache, int(inputs.input_ids)]  # type: ignore[misc]
        return DecodeOutput(torch.full((1, 4), float(sum(seen))), seen)

    def info(self) -> ModelInfo:
        raise NotImplementedError

    def capabilities(self) -> ExecutorCapabilities:
        raise NotImplementedError

    def status(self) -> ExecutorStatus:
        raise NotImplementedError


def test_eighteen_calls() -> None:
    assert len(METHODS) == 18
    assert {"info", "prefill", "decode", "capabilities", "status"} == ModelExecutor.__abstractmethods__
    for name in METHODS:
        sync, coroutine = getattr(ModelExecutor, name), getattr(AsyncModelExecutor, name)
        assert not inspect.iscoroutinefunction(sync)
        assert inspect.iscoroutinefunction(coroutine)
        assert list(inspect.signature(sync).parameters) == list(inspect.signature(coroutine).parameters)


def test_the_loop_ticks_while_calls_queue() -> None:
    async def scenario() -> None:
        slow = SlowExecutor()
        executor = AsyncModelExecutor(slow)
        calls = [asyncio.create_task(executor.prefill(prompt([i]))) for i in range(5)]
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert slow.running == 1
        assert slow.log == []
        slow.gate.set()
        await asyncio.gather(*calls)
        assert slow.log == [0, 1, 2, 3, 4]

    asyncio.run(scenario())


def test_a_cancelled_call_does_not_stop_the_others() -> None:
    async def scenario() -> None:
        slow = SlowExecutor()
        executor = AsyncModelExecutor(slow)
        calls = [asyncio.create_task(executor.prefill(prompt([i]))) for i in range(3)]
        await asyncio.sleep(0.001)
        calls[0].cancel()
        calls[1].cancel()
        await asyncio.sleep(0)
        slow.gate.set()
        await calls[2]
        assert slow.log == [0, 2]  # the first was running already

    asyncio.run(scenario())


def test_results_and_errors_pass_through(device: torch.device) -> None:
    sync = make_executor(device)
    executor = AsyncModelExecutor(sync)

    async def scenario() -> None:
        out = await executor.prefill(prompt([1, 2, 1]))
        assert_close(out.last_token_logits()[0], expected_logits(sync.config, [1, 2, 1]))
        assert not out.logits.requires_grad
        [verified] = await executor.forward_verify([step(out.kv_cache, 2)])
        assert_close(verified.logits[0], expected_logits(sync.config, [1, 2, 1, 2]))
        await executor.truncate_kv(out.kv_cache, 1)
        assert out.kv_cache.num_tokens == 1
        assert await executor.unified_decode(batch(UnifiedBatchItem("a", [1], is_final_chunk=False))) == [None]
        await executor.release_cache("a")
        assert sync.kv_manager.get_handle("a") is None
        with pytest.raises(InvalidInputError):
            await executor.prefill(prompt([999]))
        with pytest.raises(UnsupportedError):
            await executor.forward({})
        assert (await executor.status()).prefill_count == sync.prefill_count == 1
        assert await executor.info() == sync.info()
        assert await executor.kv_capacity() == sync.kv_capacity()
        assert await executor.supports_native_unified_decode()
        await executor.warmup()
        await executor.shutdown()
        with pytest.raises(ExecutorShutDownError):
            await executor.prefill(prompt([1]))

    asyncio.run(scenario())


def test_defaults_of_the_base_class() -> None:
    executor = SlowExecutor()
    executor.gate.set()
    assert executor.batch_prefill([]) == executor.batch_decode([]) == executor.forward_verify([]) == []
    assert len(executor.batch_prefill([prompt([8]), prompt([9])])) == 2
    assert executor.log == [8, 9]
    start: list[int] = []
    verified = executor.forward_verify([step(start, token) for token in (1, 2, 3)])  # type: ignore[arg-type]
    assert [float(one.logits[0, 0]) for one in verified] == [1, 3, 6]
    assert [float(one.logits[0, 0]) for one in executor.batch_decode([step([], 4), step([5], 5)])] == [4, 10]  # type: ignore[list-item]
    assert not executor.supports_native_unified_decode()
    assert executor.kv_capacity() is executor.cache_metrics_snapshot() is executor.lora_metrics_snapshot() is None
    assert (
        executor.warmup()
        is executor.shutdown()
        is executor.truncate_kv(start, 0)
        is executor.release_cache("x")
        is None
    )  # type: ignore[func-returns-value]
    for call in (lambda: executor.unified_decode(batch()), lambda: executor.forward(None)):
        with pytest.raises(UnsupportedError):
            call()
