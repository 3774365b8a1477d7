"""AsyncModelExecutor: the same calls in the same order, and an event loop that keeps running."""

import asyncio
import inspect
import threading

import pytest
import torch

from paged.errors import UnsupportedError
from paged.executors.async_executor import AsyncModelExecutor
from paged.executors.model_executor import ModelExecutor
from paged.step.batch import PrefillInput, PrefillOutput
from tests.deadline import HANG_S
from tests.executors.minimal_executor import MinimalExecutor
from tests.executors.oracle import batch, prompt, step
from tests.executors.parrot import parrot_logits

METHODS = {name for name, _ in inspect.getmembers(ModelExecutor, inspect.isfunction)}


class SlowExecutor(MinimalExecutor):
    """Only the required calls; prefill waits for a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.running = 0
        self.log: list[int] = []

    def prefill(self, inputs: PrefillInput) -> PrefillOutput:
        self.running += 1
        assert self.running == 1
        assert self.gate.wait(HANG_S)
        self.log.append(int(inputs.input_ids[0, 0]))
        self.running -= 1
        return super().prefill(inputs)


def test_eighteen_calls() -> None:
    assert len(METHODS) == 18
    assert {"info", "prefill", "decode", "capabilities", "status"} == ModelExecutor.__abstractmethods__
    for name in METHODS:
        sync, coroutine = getattr(ModelExecutor, name), getattr(AsyncModelExecutor, name)
        assert (inspect.iscoroutinefunction(sync), inspect.iscoroutinefunction(coroutine)) == (False, True)
        assert coroutine.__wrapped__ is sync


def test_the_loop_ticks_while_calls_queue() -> None:
    """Of calls that are cancelled, the one that runs already is finished and the others never begin."""

    async def scenario() -> None:
        slow = SlowExecutor()
        executor = AsyncModelExecutor(slow)
        calls = [asyncio.create_task(executor.prefill(prompt([i]))) for i in range(5)]
        while slow.running == 0:
            await asyncio.sleep(0.001)
        calls[0].cancel()
        calls[2].cancel()
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert (slow.running, slow.log) == (1, [])
        slow.gate.set()
        await asyncio.gather(calls[1], *calls[3:])
        assert slow.log == [0, 1, 3, 4]

    asyncio.run(scenario())


def test_defaults_of_the_base_class() -> None:
    executor = MinimalExecutor()
    assert executor.batch_prefill([]) == executor.batch_decode([]) == executor.forward_verify([]) == []
    one, two = executor.batch_prefill([prompt([8]), prompt([9])])
    assert torch.equal(two.logits[0, 0], parrot_logits([9]))
    verified = executor.forward_verify([step(one.kv_cache, token) for token in (1, 2, 3)])
    assert [int(row.logits.argmax()) for row in verified] == [8 + 1, 8 + 3, 8 + 6]
    decoded = executor.batch_decode([step(one.kv_cache, 4), step(two.kv_cache, 5)])
    assert [int(row.logits.argmax()) for row in decoded] == [8 + 10, 9 + 5]
    assert not executor.supports_native_unified_decode()
    assert executor.kv_capacity() is executor.cache_metrics_snapshot() is executor.lora_metrics_snapshot() is None
    assert executor.warmup() is executor.shutdown() is executor.truncate_kv(one.kv_cache, 0) is None
    assert ModelExecutor.release_cache(executor, "x") is None
    for call in (lambda: executor.unified_decode(batch()), lambda: executor.forward(None)):
        with pytest.raises(UnsupportedError):
            call()
