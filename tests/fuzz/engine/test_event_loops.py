"""Coroutines that are cancelled, raced or called from elsewhere, and readers of all kinds beside each other: none waits
for ever, none loses or doubles a token, and nothing is left behind."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import strategies as st

from paged import (
    AsyncEngine,
    AsyncModelExecutor,
    EngineStoppedError,
    InvalidInputError,
    PagedError,
    RequestOutput,
    SamplingParams,
)
from tests.deadline import HANG_S
from tests.executors.engine_cases import check_empty
from tests.fuzz.engine.neighbours import (
    NEIGHBOURS,
    alone,
    run_to_end,
    small_engine,
    small_executor,
    stream_beside,
    tokens_of,
)
from tests.fuzz.fuzzing import fuzz

LONG = SamplingParams(temperature=0, max_tokens=60)
CALLS = ["abort", "pause", "resume", "status", "list_loras", "generate", "nothing"]
SCRIPTS = st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 6)), min_size=1, max_size=10)


@fuzz(SCRIPTS, examples=8, thorough=30)
def test_cancelled_calls(case: list[tuple[str, int]]) -> None:
    """Every call, cancelled after some turns of the loop: readers end, by their tokens, an abort or an error."""
    engine = small_engine()

    async def read(server: AsyncEngine, name: str) -> str | None:
        outputs = [one async for one in server.generate([7, 7], LONG, request_id=name)]
        assert outputs[-1].finished
        return outputs[-1].outputs[0].finish_reason

    async def scenario() -> None:
        server = AsyncEngine(engine)
        readers = [asyncio.create_task(read(server, str(index))) for index in range(3)]
        for kind, turns in case:
            calls: dict[str, Any] = {
                "abort": lambda turns=turns: server.abort(str(turns % 3)),
                "pause": server.pause,
                "resume": server.resume,
                "status": server.status,
                "list_loras": server.list_loras,
                "generate": lambda: read(server, "another"),
            }
            if kind in calls:
                call = asyncio.create_task(calls[kind]())
                for _ in range(turns):
                    await asyncio.sleep(0)
                call.cancel()
                with suppress(asyncio.CancelledError, PagedError):
                    await call
            else:
                await asyncio.sleep(0.001)
        await server.resume()
        async with server:
            reasons = await asyncio.wait_for(asyncio.gather(*readers), HANG_S)
            assert set(reasons) <= {"length", "abort"}
            assert await asyncio.wait_for(tokens_of(server, 0), HANG_S) == alone(0)

    asyncio.run(scenario())
    check_empty(engine)


@pytest.mark.parametrize("error", [StopIteration, asyncio.CancelledError, KeyboardInterrupt, SystemExit, RuntimeError])
def test_every_error_arrives(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that no future can hold, and one that would end the loop."""
    executor = small_executor()

    def fail(*_: Any) -> None:
        raise error("a fault")

    for name in ("prefill", "load_lora", "unload_lora", "list_loras"):
        monkeypatch.setattr(executor, name, fail, raising=False)

    async def scenario() -> None:
        own = AsyncModelExecutor(executor)
        async with AsyncEngine(small_engine()) as server:
            server.engine.executor = executor
            for call in (own.prefill(None), server.load_lora("a", "b")):  # type: ignore[arg-type]
                with pytest.raises((PagedError, RuntimeError), match="a fault"):
                    await asyncio.wait_for(call, HANG_S)

    asyncio.run(scenario())


class Syllables:
    """A tokenizer whose tokens are texts of none to three letters of a small alphabet."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join("ab"[one % 2] * (one % 4) + "é"[: one % 5 == 0] for one in token_ids)


STREAMS = st.fixed_dictionaries({
    "params": st.fixed_dictionaries({
        "stop": st.lists(st.text("ab", min_size=1, max_size=7), max_size=3), "n": st.integers(1, 3),
        "logprobs": st.sampled_from([None, 0, 3]), "seed": st.integers(0, 50), "min_tokens": st.integers(0, 12),
        "stop_token_ids": st.lists(st.integers(0, 40), max_size=4),
    }),
    "waits": st.lists(st.integers(0, 3), min_size=1, max_size=6), "end": st.sampled_from([None, None, 3, 8]),
})  # fmt: skip


@fuzz(STREAMS, examples=8, thorough=40)
def test_deltas_add_up(case: dict[str, Any]) -> None:
    """However slowly they are read, all that came new is the final output, exactly; and that is the one without a
    stream, where no call aborts it.
    """
    params = SamplingParams(max_tokens=20, **case["params"])
    plain = small_engine(tokenizer=Syllables())
    whole = plain.add_request(NEIGHBOURS[2][0], params)
    run_to_end(plain)
    assert plain.metrics.generated_tokens == sum(len(one.token_ids) for one in whole.outputs)

    async def scenario(server: AsyncEngine) -> None:
        texts, tokens, logprobs = [""] * params.n, [[] for _ in whole.outputs], [[] for _ in whole.outputs]
        count = 0
        async for output in server.generate(NEIGHBOURS[2][0], params, deltas=True, request_id="a"):
            for one in output.outputs:
                texts[one.index] += one.text
                tokens[one.index] += one.token_ids
                logprobs[one.index] += one.logprobs or []
            count += 1
            if count == case["end"]:
                await server.abort("a")
            await asyncio.sleep(0.001 * case["waits"][count % len(case["waits"])])
        assert output.finished
        for index, (one, streamed) in enumerate(zip(whole.outputs, output.outputs, strict=True)):
            if streamed.finish_reason != "abort":
                assert (texts[index], tokens[index]) == (one.text, one.token_ids)
                assert streamed.finish_reason == one.finish_reason
            assert one.text.startswith(texts[index])
            if params.logprobs is not None:
                assert [next(iter(table)) for table in logprobs[index]] == tokens[index]

    stream_beside(small_engine(tokenizer=Syllables()), scenario)


READERS = ["whole", "deltas", "slow", "never", "left", "cancelled", "cancelled at once", "aborted", "reused id"]
READING = st.fixed_dictionaries({
    "readers": st.lists(st.tuples(st.sampled_from(READERS), st.integers(0, 3)), min_size=1, max_size=8),
    "ending": st.sampled_from(["drain", "shutdown", "both", "two"]),
    "pauses": st.booleans(), "max_num_seqs": st.integers(1, 4),
})  # fmt: skip


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
            if seen:
                pairs = zip(output.outputs, seen[-1].outputs, strict=True)
                assert all(len(new.token_ids) >= len(old.token_ids) for new, old in pairs)
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


@fuzz(READING, examples=12, thorough=40)
def test_scripts_of_readers(case: dict[str, Any]) -> None:
    engine = small_engine(max_num_seqs=case["max_num_seqs"])

    async def scenario() -> None:
        server = AsyncEngine(engine)
        readers = []
        for index, (kind, turns) in enumerate(case["readers"]):
            reader = asyncio.create_task(read(server, kind, turns, index))
            readers.append(reader)
            if kind.startswith("cancelled"):
                await asyncio.sleep(0.003 * turns if kind == "cancelled" else 0)
                reader.cancel()
        if case["pauses"]:
            for _ in range(2):
                await server.pause()
                await server.resume()  # the task that runs steps has no turn before the next pause
                await server.pause()
                steps = engine.metrics.steps
                await asyncio.sleep(0.005)
                assert engine.metrics.steps == steps
                await server.resume()
        await asyncio.sleep(0.005)
        for (kind, _), reader in zip(case["readers"], readers, strict=True):
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
                await asyncio.wait_for(reader, HANG_S)
        for call in (server.status(), server.abort("x"), server.pause(), server.resume(), server.prometheus_text()):
            with pytest.raises(EngineStoppedError):
                await call

    asyncio.run(scenario())
    assert engine.metrics.requests == sum(engine.metrics.finished.values())
    check_empty(engine)
