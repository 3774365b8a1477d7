"""Readers of all kinds beside each other: none loses or doubles what another gets, and nothing is left behind."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import strategies as st

from paged import AsyncEngine, EngineStoppedError, InvalidInputError, RequestOutput, SamplingParams
from tests.executors.engine_cases import check_empty
from tests.fuzz.engine.neighbours import NEIGHBOURS, alone, small_engine
from tests.fuzz.engine.test_requests import tokens_of
from tests.fuzz.fuzzing import fuzz

LONG = SamplingParams(temperature=0, max_tokens=30)
READERS = ["whole", "deltas", "slow", "never", "left", "cancelled", "cancelled at once", "aborted", "reused id"]
SCRIPTS = st.fixed_dictionaries(
    {
        "readers": st.lists(st.tuples(st.sampled_from(READERS), st.integers(0, 3)), min_size=1, max_size=8),
        "pauses": st.booleans(),
        "ending": st.sampled_from(["drain", "shutdown", "both", "two"]),
        "max_num_seqs": st.integers(1, 4),
    }
)


async def read(server: AsyncEngine, kind: str, turns: int, index: int) -> None:
    """One reader; what it sees must be right as far as it goes."""
    prompt, params = NEIGHBOURS[index % 3]
    if kind == "deltas":
        with suppress(EngineStoppedError):
            assert await tokens_of(server, index % 3) == alone(index % 3)
        return
    name = "shared" if kind == "reused id" else None
    stream = server.generate(prompt, LONG if kind in ("never", "aborted") else params, request_id=name)
    seen: list[RequestOutput] = []
    try:
        async for output in stream:
            assert not seen or all(
                len(new.token_ids) >= len(old.token_ids)
                for new, old in zip(output.outputs, seen[-1].outputs, strict=True)
            )
            seen.append(output)
            if kind == "slow":
                await asyncio.sleep(0.002 * turns)
            elif kind == "never":
                await asyncio.sleep(3600)
            elif kind == "left" and len(seen) > turns:
                await stream.aclose()
                return
            elif kind == "aborted" and len(seen) == turns:
                await server.abort(output.request_id)
    except EngineStoppedError:
        return
    except InvalidInputError:  # the id is in use
        if kind == "reused id":
            return
        raise
    if kind != "left":
        assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
        if kind in ("whole", "slow", "reused id"):
            assert [one.token_ids for one in seen[-1].outputs] == alone(index % 3)


@fuzz(SCRIPTS, examples=40)
def test_scripts_of_readers(case: dict[str, Any]) -> None:
    engine = small_engine(max_num_seqs=case["max_num_seqs"])

    async def scenario() -> None:
        server = AsyncEngine(engine)
        readers = []
        for index, (kind, turns) in enumerate(case["readers"]):
            reader = asyncio.create_task(read(server, kind, turns, index))
            readers.append(reader)
            if kind == "cancelled at once":
                await asyncio.sleep(0)
                reader.cancel()
            elif kind == "cancelled":
                await asyncio.sleep(0.003 * turns)
                reader.cancel()
        if case["pauses"]:
            await server.pause()
            steps = engine.metrics.steps
            await asyncio.sleep(0.01)
            assert engine.metrics.steps == steps
            await server.resume()
        await asyncio.sleep(0.005)
        for kind, reader in zip([kind for kind, _ in case["readers"]], readers, strict=True):
            if kind == "never":
                await asyncio.sleep(0.01)
                reader.cancel()
        if case["ending"] == "two":
            await asyncio.gather(server.shutdown(drain=True), server.shutdown())
        else:
            await server.shutdown(drain=case["ending"] != "shutdown")
        if case["ending"] == "both":
            await server.shutdown()
        for reader in readers:
            with suppress(asyncio.CancelledError):
                await asyncio.wait_for(reader, 60)
        for call in (server.status(), server.abort("x"), server.pause(), server.resume(), server.prometheus_text()):
            with pytest.raises(EngineStoppedError):
                await call

    asyncio.run(scenario())
    assert engine.metrics.requests == sum(engine.metrics.finished.values())
    check_empty(engine)
