"""A semaphore under random ends, refusals and cancellations, several of them in one turn of the loop."""

import asyncio
import random
from contextlib import suppress

import pytest

from paged.serving.grammar.fair_semaphore import FairSemaphore, QueueFullError


@pytest.mark.parametrize("seed", range(20))
def test_no_turn_is_lost_and_nobody_waits_for_ever(seed: int) -> None:
    rng = random.Random(seed)

    async def hold(semaphore: FairSemaphore, client: int, end: asyncio.Event) -> None:
        async with semaphore.hold(client):
            await end.wait()

    async def run() -> None:
        semaphore, end = FairSemaphore(2, 6), asyncio.Event()
        tasks: list[asyncio.Task[None]] = []
        for _ in range(60):
            tasks.append(asyncio.create_task(hold(semaphore, rng.randrange(3), end)))
            if rng.random() < 0.5:
                await asyncio.sleep(0)
            if rng.random() < 0.4:
                end.set()  # who holds it ends in the same turn in which others are cancelled
                for task in rng.sample(tasks, min(len(tasks), 4)):
                    task.cancel()
                await asyncio.sleep(0)
                end.clear()
        end.set()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        errors = [result for result in results if result is not None]
        assert all(isinstance(error, (QueueFullError, asyncio.CancelledError)) for error in errors), errors
        with suppress(TimeoutError):
            async with asyncio.timeout(1), semaphore.hold("a"), semaphore.hold("b"):
                return
        raise AssertionError("a turn is lost")

    asyncio.run(run())
