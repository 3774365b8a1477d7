"""An exception at any line of the engine and of the cache below it: requests end or go on, and nothing is held."""

import asyncio
import os
import random
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import paged
from paged import AsyncEngine, Engine, EngineStoppedError, InvalidInputError, PagedError, PromptLookup, SamplingParams
from tests.deadline import HANG_S
from tests.executors.engine_cases import check_empty
from tests.failure import CACHE_GUARD, Failure
from tests.fuzz.engine.neighbours import (
    add_neighbours,
    alone,
    check_neighbours,
    run_to_end,
    small_engine,
    tokens_of,
)

ROOT = Path(paged.__file__).parent
OURS = {
    *((ROOT / "executors" / name).resolve() for name in ("engine", "requests", "sampling", "speculation", ".")),
    ROOT / "cache",
    ROOT / "cache" / "kinds",
    ROOT,
}
# Lines from one exception to the next in `make test-all`; each case begins at another, and all are met in `make fuzz`.
APART, MANY = (1, 10_000) if "FUZZ_S" in os.environ else (29, 2_000)
LONG = SamplingParams(n=2, temperature=0, max_tokens=4, logprobs=1, presence_penalty=0.5, stop=["never"])
PROMPT = [4, 4, 8, 2, 9, 4, 4, 8]


def _add(engine: Engine) -> Callable[[], object]:
    return lambda: engine.add_request(PROMPT, LONG, timeout_s=1000)


def _prefill(engine: Engine) -> Callable[[], object]:
    engine.add_request(PROMPT, LONG, timeout_s=1000)
    return engine.step


def _decode(engine: Engine) -> Callable[[], object]:
    engine.add_request(PROMPT, LONG)
    engine.step()
    engine.step()
    return engine.step


def _finish(engine: Engine) -> Callable[[], object]:
    engine.add_request(PROMPT, LONG, timeout_s=1000)
    for _ in range(LONG.max_tokens - 1):  # type: ignore[operator]
        engine.step()
    return engine.step


def _abort(engine: Engine) -> Callable[[], object]:
    engine.add_request(PROMPT, LONG, request_id="a")
    engine.step()
    return lambda: engine.abort("a")


def _stream(engine: Engine) -> Callable[[], object]:
    return lambda: list(engine.stream(PROMPT, LONG))


CASES: dict[str, Callable[[Engine], Callable[[], object]]] = {
    one.__name__[1:]: one for one in (_add, _prefill, _decode, _finish, _abort, _stream)
}
ROWS = [
    (case, way, (KeyboardInterrupt, MemoryError)[at % 2])
    for at, (case, way) in enumerate(product(CASES, ("plain", "drafts", "overlap")))
]


@pytest.mark.parametrize("stride", [83, pytest.param(APART, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("case", "way", "error"), ROWS)
def test_an_exception_at_any_line_leaves_nothing(case: str, way: str, error: type[BaseException], stride: int) -> None:
    stride *= 5 if case == "stream" else 1  # its lines are those of the others, and five times as many
    count, is_hit = random.Random(f"{case} {way} {error}").randrange(stride), True
    while is_hit:
        engine = small_engine(overlap=way == "overlap", proposer=PromptLookup(2) if way == "drafts" else None)
        call = CASES[case](engine)
        failure = Failure(count, OURS, error(), skip=CACHE_GUARD)
        try:
            is_hit = failure.hits(call)  # or it is of one request, which ends
        except PagedError:
            is_hit = failure.is_raised
        if is_hit and case in ("add", "stream"):
            assert engine.num_unfinished == 0, failure.path
        run_to_end(engine)
        check_empty(engine)
        assert not engine._requests._timed, failure.path
        count += stride
    check_neighbours(engine, add_neighbours(engine), drafts=way == "drafts")


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Without a word to its tasks, as where a program forgets them."""
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()


@pytest.mark.parametrize("pauses", [False, True])
def test_a_closed_loop_is_a_client_that_has_gone(pauses: bool) -> None:
    """Its streams neither end nor hang those of the next loop, and they end themselves where one reads on."""
    engine = small_engine()
    server = AsyncEngine(engine)
    forever = SamplingParams(temperature=0, max_tokens=370)
    stale: list[Any] = []

    async def first() -> None:
        for index in range(4):
            stale.append(server.generate([7, index], forever, request_id=str(index)))
            await anext(stale[-1])
        if pauses:
            await server.pause()

    async def second() -> None:
        if pauses:
            await server.resume()
        assert await asyncio.wait_for(tokens_of(server, 0), HANG_S) == alone(0)
        with pytest.raises(EngineStoppedError, match="event loop"):
            await asyncio.wait_for(anext(stale[0]), HANG_S)
        assert (await server.status()).decoding == engine.num_unfinished == 0
        await server.shutdown()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(first())
    _close(loop)
    asyncio.run(second())
    check_empty(engine)


def test_calls_from_another_loop_are_refused_or_hold() -> None:
    engine = small_engine()
    server = AsyncEngine(engine)

    async def scenario() -> None:
        own = asyncio.create_task(tokens_of(server, 0))
        await asyncio.sleep(0)
        others = (lambda: server.abort("a"), lambda: tokens_of(server, 1))
        for call in (server.pause, server.resume, server.shutdown, server.status, *others):
            with pytest.raises(InvalidInputError, match="another event loop"):
                await asyncio.to_thread(lambda call=call: asyncio.run(call()))
        assert await asyncio.wait_for(own, HANG_S) == alone(0)
        await server.shutdown()

    asyncio.run(scenario())
    asyncio.run(server.shutdown())
    check_empty(engine)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("num_requests", [150, pytest.param(MANY, marks=pytest.mark.thorough)])
def test_many_requests_under_all_of_it_leave_nothing(num_requests: int) -> None:
    """Random aborts, streams that are left, loops that are closed, and listeners that raise all they can."""
    chance = random.Random(0)
    engine = small_engine(preemption="swap", max_num_seqs=8)
    manager, server = engine.executor.kv_manager, AsyncEngine(engine)
    assert manager is not None

    def listen(event: object) -> None:
        if chance.random() < 0.05:
            raise chance.choice([KeyboardInterrupt, GeneratorExit, MemoryError, asyncio.CancelledError])

    manager.subscribe(listen)
    manager.on_pressure(listen)
    done = 0

    async def read(index: int) -> None:
        prompt = [chance.randrange(1, 40) for _ in range(chance.randrange(1, 30))]
        params = SamplingParams(n=chance.randrange(1, 3), max_tokens=chance.randrange(1, 12), seed=index)
        with suppress(EngineStoppedError):
            async for _ in server.generate(prompt, params, request_id=index):
                match chance.randrange(12):
                    case 0:
                        return
                    case 1:
                        await server.abort(index)
                    case 2:
                        raise asyncio.CancelledError

    async def one_loop() -> None:
        nonlocal done
        tasks = [asyncio.create_task(read(done + index)) for index in range(50)]
        done += len(tasks)
        await asyncio.wait(tasks, timeout=chance.choice([0.01, 0.05, HANG_S]))

    while done < num_requests:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(one_loop())
        _close(loop)
    asyncio.run(server.shutdown())
    assert engine.metrics.requests == sum(engine.metrics.finished.values())
    manager._guard.listeners.on_pressure.clear()
    manager._guard.listeners.on_event.clear()
    check_empty(engine)
    check_neighbours(engine, add_neighbours(engine))
