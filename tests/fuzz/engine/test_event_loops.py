"""Coroutines that are cancelled, raced or called from elsewhere: no reader waits for ever, and none loses a token."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import strategies as st

from paged import AsyncEngine, AsyncModelExecutor, EngineStoppedError, InvalidInputError, PagedError, SamplingParams
from tests.executors.engine_cases import check_empty
from tests.fuzz.engine.neighbours import NEIGHBOURS, alone, small_engine, small_executor
from tests.fuzz.engine.test_requests import tokens_of
from tests.fuzz.fuzzing import fuzz

LONG = SamplingParams(temperature=0, max_tokens=60)
# Far more than anything here takes: a reader that waits longer waits for ever.
WAIT_S = 30


CALLS = ["abort", "pause", "resume", "status", "steps", "list_loras", "generate", "nothing"]
SCRIPTS = st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 6)), min_size=1, max_size=10)


@fuzz(SCRIPTS, examples=30)
def test_cancelled_calls(case: list[tuple[str, int]]) -> None:
    """Every call, cancelled after some turns of the loop: readers end, by their tokens, an abort or an error."""
    engine = small_engine()

    async def read(server: AsyncEngine, name: str) -> str | None:
        with suppress(EngineStoppedError):
            async for output in server.generate([7, 7], LONG, request_id=name):
                last = output
            assert last.finished
            return last.outputs[0].finish_reason
        return "stopped"

    async def scenario() -> None:
        server = AsyncEngine(engine)
        readers = [asyncio.create_task(read(server, str(index))) for index in range(3)]
        stopped = {"stopped"} if any(kind == "steps" for kind, _ in case) else set()
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
            elif kind == "steps" and server._steps is not None:  # as a server does that cancels all of its tasks
                server._steps.cancel()
            else:
                await asyncio.sleep(0.001)
        await server.resume()
        async with server:
            reasons = await asyncio.wait_for(asyncio.gather(*readers), WAIT_S)
            assert set(reasons) <= {"length", "abort"} | stopped
            assert await asyncio.wait_for(tokens_of(server, 0), WAIT_S) == alone(0)

    asyncio.run(scenario())
    check_empty(engine)


def test_no_step_runs_while_paused() -> None:
    """Also where it was resumed just before, and the task that runs steps had no turn in between."""
    engine = small_engine()

    async def scenario() -> None:
        async with AsyncEngine(engine) as server:
            await server.pause()
            reader = asyncio.create_task(tokens_of(server, 0))
            for _ in range(5):
                await asyncio.sleep(0.005)
                await server.resume()
                await server.pause()
                steps = engine.metrics.steps
                await asyncio.sleep(0.01)
                assert engine.metrics.steps == steps
            await server.resume()
            assert await asyncio.wait_for(reader, WAIT_S) == alone(0)

    asyncio.run(scenario())


def test_one_loop_after_another() -> None:
    """A loop that has ended leaves nothing that the next one waits for; two at once are refused."""
    engine = small_engine()
    server = AsyncEngine(engine)
    errors: list[BaseException] = []

    async def first() -> None:
        await server.pause()
        asyncio.create_task(tokens_of(server, 1))  # noqa: RUF006
        await asyncio.sleep(0.01)

        def other() -> None:
            try:
                asyncio.run(asyncio.wait_for(tokens_of(server, 0), WAIT_S))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        await asyncio.to_thread(thread.join)

    async def second() -> None:
        async with server:
            await server.resume()
            assert await asyncio.wait_for(tokens_of(server, 0), WAIT_S) == alone(0)

    asyncio.run(first())
    [error] = errors
    assert isinstance(error, InvalidInputError)
    asyncio.run(second())
    check_empty(engine)


@pytest.mark.parametrize("error", [StopIteration, asyncio.CancelledError, KeyboardInterrupt, SystemExit, RuntimeError])
def test_every_error_arrives(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that no future can hold, and one that would end the loop."""
    executor = small_executor()

    def fail(*_: Any) -> None:
        raise error("a fault")

    monkeypatch.setattr(executor, "prefill", fail)
    monkeypatch.setattr(executor, "load_lora", fail, raising=False)
    monkeypatch.setattr(executor, "unload_lora", fail, raising=False)
    monkeypatch.setattr(executor, "list_loras", fail, raising=False)

    async def scenario() -> None:
        own = AsyncModelExecutor(executor)
        async with AsyncEngine(small_engine()) as server:
            server.engine.executor = executor
            for call in (own.prefill(None), server.load_lora("a", "b")):  # type: ignore[arg-type]
                with pytest.raises((PagedError, RuntimeError), match="a fault"):
                    await asyncio.wait_for(call, WAIT_S)

    asyncio.run(scenario())


class Syllables:
    """A tokenizer whose tokens are texts of none to three letters of a small alphabet."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join("ab"[one % 2] * (one % 4) + "é"[: one % 5 == 0] for one in token_ids)


STREAMS = st.fixed_dictionaries(
    {
        "stop": st.lists(st.text("ab", min_size=1, max_size=7), max_size=3),
        "n": st.integers(1, 3),
        "logprobs": st.sampled_from([None, 0, 3]),
        "seed": st.integers(0, 50),
        "min_tokens": st.integers(0, 12),
        "waits": st.lists(st.integers(0, 3), min_size=1, max_size=6),
        "end": st.sampled_from([None, None, 3, 8]),
        "stop_token_ids": st.lists(st.integers(0, 40), max_size=4),
    }
)


@fuzz(STREAMS, examples=40)
def test_deltas_add_up(case: dict[str, Any]) -> None:
    """However slowly they are read, all that came new is the final output, exactly; and that is the one without a
    stream, where no call aborts it.
    """
    params = SamplingParams(
        n=case["n"],
        seed=case["seed"],
        stop=case["stop"],
        stop_token_ids=case["stop_token_ids"],
        logprobs=case["logprobs"],
        min_tokens=case["min_tokens"],
        max_tokens=20,
    )
    engine = small_engine()
    engine._admission._tokenizer = Syllables()

    async def scenario() -> None:
        async with AsyncEngine(engine) as server:
            neighbour = asyncio.create_task(tokens_of(server, 1))
            texts, tokens = [""] * case["n"], [[] for _ in range(case["n"])]  # type: ignore[var-annotated]
            logprobs: list[list[Any]] = [[] for _ in range(case["n"])]
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
            assert await neighbour == alone(1)
            plain = small_engine()
            plain._admission._tokenizer = Syllables()
            whole = plain.add_request(NEIGHBOURS[2][0], params)
            while not whole.finished:
                plain.step()
            for index, one in enumerate(whole.outputs):
                if output.outputs[index].finish_reason != "abort":
                    assert (texts[index], tokens[index]) == (one.text, one.token_ids)
                    assert output.outputs[index].finish_reason == one.finish_reason
                assert one.text.startswith(texts[index])
                if case["logprobs"] is not None:
                    assert [next(iter(table)) for table in logprobs[index]] == tokens[index]

    asyncio.run(scenario())
    check_empty(engine)


def test_every_token_has_its_log_probabilities() -> None:
    """Also where the last one was none, as the logits allowed none."""
    engine = small_engine()
    params = SamplingParams(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=2, logprobs=1)
    output = engine.add_request([1, 2], params)
    while engine.num_unfinished:
        engine.step()
    assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == ([], [])
    assert engine.metrics.generated_tokens == 0
