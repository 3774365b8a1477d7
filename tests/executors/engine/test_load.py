"""Many requests on one machine: none lost, none ended twice, memory flat, and a step's time its own."""

from __future__ import annotations

import asyncio
import gc
import itertools
import resource
import time
from collections import Counter
from statistics import median

import pytest
import torch

from paged import AsyncEngine, Engine, EngineConfig, SamplingParams
from tests.executors.engine_cases import check_empty
from tests.executors.oracle import make_executor

ONE = SamplingParams(temperature=0, max_tokens=1)
pytestmark = pytest.mark.long


def small_engine(**config: int) -> Engine:
    executor = make_executor(torch.device("cpu"), num_blocks=256, num_layers=1, num_heads=1, num_kv_heads=1)
    return Engine(executor, EngineConfig(**({"max_num_seqs": 64} | config)))


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


@pytest.fixture(autouse=True)
def _torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")


def test_a_step_does_not_see_the_queue() -> None:
    """Processor time of steps with 16 decodes, and of aborts, alone and before 10,000 others that wait."""
    engine = small_engine(max_num_seqs=16)

    def step_s() -> float:
        params = SamplingParams(temperature=0, max_tokens=60)
        begun = [engine.add_request([1, 2], params, priority=50) for _ in range(16)]
        times = []
        for _ in range(50):
            start = time.process_time()
            engine.step()
            times.append(time.process_time() - start)
        for output in begun:
            engine.abort(output.request_id)
        return median(times)

    def abort_s() -> float:
        names = [engine.add_request([1], ONE).request_id for _ in range(200)]
        start = time.process_time()
        assert all(map(engine.abort, names[::2]))
        return (time.process_time() - start) / 100

    alone, abort_alone = step_s(), abort_s()
    waiting = [engine.add_request([3], ONE) for _ in range(10_000)]
    assert step_s() < 2 * alone + 0.001
    assert abort_s() < 10 * abort_alone + 0.0001
    for output in waiting:
        engine.abort(output.request_id)
    while engine.num_unfinished:
        engine.step()
    check_empty(engine)


def test_six_thousand_in_a_row() -> None:
    engine = small_engine()
    ended: Counter[object] = Counter()
    kept = []
    for wave in range(60):
        names = {engine.add_request([wave % 200, one, 3], ONE, timeout_s=3600).request_id for one in range(100)}
        while engine.num_unfinished:
            finished = [output.request_id for output in engine.step() if output.finished]
            assert names.issuperset(finished)
            ended.update(finished)
        if wave % 20 == 19:
            gc.collect()
            kept.append((resident_mb(), len(gc.get_objects())))
    assert len(ended) == 6_000
    assert set(ended.values()) == {1}
    assert engine.metrics.finished == {"length": 6_000}
    # From the second third on, when allocators and the prefix index are full: for 2,000 requests.
    assert kept[-1][0] - kept[1][0] < 2
    assert kept[-1][1] - kept[1][1] < 500
    check_empty(engine)


def test_five_hundred_streams() -> None:
    """A third of them cancelled, some never read, some left: the others get all of their tokens."""
    engine = small_engine()
    params = SamplingParams(temperature=0, max_tokens=8)

    async def scenario() -> Counter[str]:
        seen: Counter[str] = Counter()
        async with AsyncEngine(engine) as server:

            async def read(number: int) -> None:
                outputs = [output async for output in server.generate([number % 250, 1, 2], params)]
                assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
                assert len(outputs[-1].outputs[0].token_ids) == 8
                seen["whole"] += 1

            async def begin(number: int) -> None:
                stream = server.generate([number % 250, 3], params)
                await anext(stream)
                seen["begun"] += 1
                await asyncio.sleep(3600)  # and is never read again

            whole = [asyncio.create_task(read(number)) for number in range(300)]
            cancelled = [asyncio.create_task(read(number)) for number in range(170)]
            unread = [asyncio.create_task(begin(number)) for number in range(30)]
            for number, task in enumerate(cancelled):
                if number % 10 == 0:
                    await asyncio.sleep(0.001)
                task.cancel()
            await asyncio.gather(*whole)
            for task in itertools.chain(cancelled, unread):
                task.cancel()
            await asyncio.gather(*cancelled, *unread, return_exceptions=True)
        return seen

    seen = asyncio.run(scenario())
    assert seen["whole"] >= 300
    assert engine.metrics.requests == sum(engine.metrics.finished.values()) <= 500
    check_empty(engine)
