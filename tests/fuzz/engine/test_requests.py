"""Any value in any field of a request, with neighbours: it is refused at the door, or runs, or ends alone."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import strategies as st

from paged import AsyncEngine, Engine, InvalidInputError, PagedError, RequestOutput, SamplingParams
from tests.executors.engine_cases import check_empty
from tests.fuzz.engine.neighbours import add_neighbours, alone, check_neighbours, run_to_end, small_engine
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.values import VALUES, value

PARAMS = st.dictionaries(st.sampled_from([one.name for one in fields(SamplingParams)]), VALUES, max_size=3)
OPTIONS = st.dictionaries(
    st.sampled_from(["request_id", "priority", "metadata", "timeout_s", "cache_salt"]), VALUES, max_size=2
)
ADAPTERS = VALUES.map(lambda text: f"{{'lora_adapter': {text}}}")
PROMPTS = st.one_of(st.just("[4, 4, 8]"), st.just("[4, 4, 8]"), VALUES)
REQUESTS = st.fixed_dictionaries(
    {"prompt": PROMPTS, "params": PARAMS, "options": OPTIONS},
    optional={"metadata": ADAPTERS, "whole_params": VALUES},
)


def arguments(case: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """What the case's expressions stand for, made anew."""
    options = {name: value(text) for name, text in case["options"].items()}
    if "metadata" in case:
        options["metadata"] = value(case["metadata"])
    if "whole_params" in case:
        return value(case["prompt"]), value(case["whole_params"]), options
    params = SamplingParams(**{name: value(text) for name, text in case["params"].items()})
    return value(case["prompt"]), params, options


def check_ended(output: RequestOutput) -> None:
    """It ended once, with a reason, and what it has fits that."""
    assert output.finished
    for one in output.outputs:
        assert one.finish_reason in ("stop", "length", "error", "timeout")
        assert all(type(token) is int and token >= 0 for token in one.token_ids)
        assert isinstance(one.text, str)


@fuzz(REQUESTS, examples=80)
def test_request_fields(case: dict[str, Any]) -> None:
    engine = small_engine()
    outputs = add_neighbours(engine)
    engine.step()
    odd = None
    try:
        prompt, params, options = arguments(case)
        odd = engine.add_request(prompt, params, **options)
    except PagedError:
        assert engine.num_unfinished == len(outputs)
    run_to_end(engine)
    check_neighbours(outputs)
    if odd is not None:
        check_ended(odd)
    check_empty(engine)


@fuzz(REQUESTS, examples=40)
def test_streamed_request_fields(case: dict[str, Any]) -> None:
    engine = small_engine()

    async def scenario() -> None:
        async with AsyncEngine(engine) as server:
            neighbours = [asyncio.create_task(tokens_of(server, index)) for index in range(3)]
            try:
                prompt, params, options = arguments(case)
                outputs = [one async for one in server.generate(prompt, params, deltas=True, **options)]
                check_ended(outputs[-1])
            except PagedError:
                pass
            assert [await task for task in neighbours] == [alone(index) for index in range(3)]

    asyncio.run(scenario())
    check_empty(engine)


async def tokens_of(server: AsyncEngine, index: int) -> list[list[int]]:
    """A neighbour's tokens, put together from what came new each time."""
    from tests.fuzz.engine.neighbours import NEIGHBOURS

    prompt, params = NEIGHBOURS[index]
    tokens: list[list[int]] = [[] for _ in range(params.n)]
    async for output in server.generate(prompt, params, deltas=True):
        for one in output.outputs:
            tokens[one.index] += one.token_ids
    return tokens


NAMES = st.lists(st.sampled_from(["1", "'1'", "'request-0'", "'request-1'", "None", "'a'", "'a/0'", "0"]), max_size=8)


@fuzz(NAMES, examples=40)
def test_request_names(case: list[str]) -> None:
    """Requests of two engines over one executor, and a sequence of the caller's own: none is taken for another."""
    engine = small_engine()
    other = Engine(engine.executor, seed=1)
    manager = engine.executor.kv_manager
    assert manager is not None
    own = manager.allocate("a/0", 5)
    outputs = []
    for text in case:
        for each in (engine, other):
            given, params = value(text), SamplingParams(seed=1, max_tokens=3)
            if any(one.request_id == given for at, one in outputs if at is each):
                with pytest.raises(InvalidInputError, match="in use"):
                    each.add_request([4, 4, 8], params, request_id=given)
            else:
                outputs.append((each, each.add_request([4, 4, 8], params, request_id=given)))
    for each in (engine, other):
        run_to_end(each)
    assert len({tuple(one.outputs[0].token_ids) for _, one in outputs}) <= 1
    assert all(one.error is None for _, one in outputs)
    manager.free(own)
    check_empty(engine)
    check_empty(other)
