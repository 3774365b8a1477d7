"""Any value in any field of a request, with neighbours: it is refused at the door, or runs, or ends alone. Also callers
that change what they gave or got, or call from within a step."""

import gc
import itertools
from collections import UserDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import strategies as st

from paged import AsyncEngine, Engine, InvalidInputError, PagedError, PromptLookup, SamplingParams, UnsupportedError
from paged.executors.sampling.counts import TokenCounts
from tests.executors.engine_cases import check_empty
from tests.fuzz.engine.neighbours import (
    Letters,
    add_neighbours,
    alone,
    check_ended,
    check_neighbours,
    run_to_end,
    small_engine,
    stream_beside,
)
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.values import VALUES, expressions, value

PROMPT = [4, 4, 8, 2, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=5)
ARGUMENTS = "prompt_token_ids params request_id priority metadata lora_adapter timeout_s cache_salt".split()
FIELDS = [one.name for one in fields(SamplingParams)]
REQUESTS = st.tuples(
    st.dictionaries(st.sampled_from(ARGUMENTS), VALUES, max_size=2),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
)


def arguments(case: tuple[dict[str, str], dict[str, str]]) -> dict[str, Any]:
    """What the case's expressions stand for, made anew."""
    given, params = ({name: value(text) for name, text in one.items()} for one in case)
    if "lora_adapter" in given:
        given["metadata"] = {"lora_adapter": given.pop("lora_adapter")}
    if "params" not in given:
        given["params"] = SamplingParams(**params)
    return {"prompt_token_ids": [4, 4, 8]} | given


@fuzz(REQUESTS, examples=25, thorough=80)
def test_request_fields(case: Any) -> None:
    engine = small_engine()
    outputs = add_neighbours(engine)
    engine.step()
    try:
        odd = engine.add_request(**arguments(case))
    except PagedError:
        assert engine.num_unfinished == len(outputs)
    else:
        run_to_end(engine)
        check_ended(odd)
    check_neighbours(engine, outputs)


@fuzz(REQUESTS, examples=12, thorough=40)
def test_streamed_request_fields(case: Any) -> None:
    async def scenario(server: AsyncEngine) -> None:
        with suppress(PagedError):
            outputs = [one async for one in server.generate(**arguments(case), deltas=True)]
            check_ended(outputs[-1])

    stream_beside(small_engine(), scenario)


IDS = st.lists(st.sampled_from(["1", "'1'", "'request-0'", "'request-1'", "None", "'a'", "'a/0'", "0"]), max_size=8)


@fuzz(IDS, examples=20)
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
    run_to_end(engine)
    run_to_end(other)
    assert len({tuple(one.outputs[0].token_ids) for _, one in outputs}) <= 1
    assert all(one.error is None for _, one in outputs)
    manager.free(own)
    check_empty(engine)
    check_empty(other)


CHANGES = expressions("""
    prompt.clear(); prompt.insert(0, 10**9); metadata.clear(); params.logit_bias.update({10**6: 1.0});
    params.logit_bias.update({'a': None}); change(params, 'temperature', 'hot'); change(params, 'n', 10**9);
    change(params, 'stop', None); change(output, 'metrics', None); change(output, 'num_cached_tokens', 'many');
    change(output, 'request_id', ['a']); change(output, 'prompt', None); change(output, 'finished', 'no');
    output.outputs.clear(); change(output.outputs[0], 'index', 'first'); output.outputs[0].token_ids.clear();
    output.outputs[0].token_ids.extend([10**9, 'a']); output.outputs[0].logprobs.clear()
""")
CHANGED = st.fixed_dictionaries({
    "changes": st.lists(CHANGES, min_size=1, max_size=3, unique=True),
    "steps": st.integers(0, 4), "drafts": st.booleans(), "held": st.sampled_from([0, 30]),
})  # fmt: skip


@fuzz(CHANGED, examples=12, thorough=50)
def test_changed_objects(case: dict[str, Any]) -> None:
    """What was given to a request, or came from it, is changed while it waits or runs, also where the cache is full."""
    engine = small_engine(proposer=PromptLookup(2) if case["drafts"] else None, preemption="swap")
    manager = engine.executor.kv_manager
    assert manager is not None
    others = manager.allocate("others", case["held"] * 8)
    params = SamplingParams(n=2, seed=4, max_tokens=9, logit_bias={3: 1.0}, logprobs=1, stop=["never"], min_tokens=2)
    own: dict[str, Any] = {"prompt": PROMPT.copy(), "params": params, "metadata": {"lora_adapter": None}}
    own["output"] = engine.add_request(own["prompt"], params, metadata=own["metadata"])
    outputs = add_neighbours(engine)
    for _ in range(case["steps"]):
        engine.step()
    for change in case["changes"]:
        with suppress(IndexError):  # the outputs were cleared
            value(change, change=object.__setattr__, **own)
    run_to_end(engine)
    manager.free(others)
    check_neighbours(engine, outputs, drafts=case["drafts"])


def test_parameters_are_checked_as_they_are() -> None:
    """What was changed before the request is added is refused, or holds."""
    engine = small_engine()
    for name, odd in (("n", 10**9), ("temperature", "hot"), ("stop", [1]), ("logit_bias", {"a": 1})):
        params = SamplingParams(max_tokens=3)
        object.__setattr__(params, name, odd)
        with pytest.raises(PagedError, match=name):
            engine.add_request(PROMPT, params)
    params = SamplingParams(max_tokens=3)
    object.__setattr__(params, "max_tokens", 5)
    output = engine.add_request(PROMPT, params)
    run_to_end(engine)
    assert len(output.outputs[0].token_ids) == 5


class Caller(Letters):
    """A tokenizer that calls its engine at its `turn`-th decode."""

    def __init__(self, act: Callable[[], Any], turn: int) -> None:
        self._act = act
        self._turns = itertools.count(-turn)

    def decode(self, token_ids: list[int]) -> str:
        if next(self._turns) == 0:
            self._act()
        return super().decode(token_ids)


ACTS = expressions("""
    engine.abort('a'); engine.abort('b'); [engine.abort('a'), engine.abort('b')]; engine.discard(odd[1]); engine.step();
    odd.append(engine.add_request([4, 4, 8], params)); engine.generate([[4, 4, 8]], params, progress=False);
    [streams.clear(), gc.collect()]; (_ for _ in ()).throw(GeneratorExit)
""")
CALLS = st.fixed_dictionaries({"act": ACTS, "turn": st.integers(0, 30), "drafts": st.booleans()})


@fuzz(CALLS, examples=12, thorough=40)
def test_calls_within_a_step(case: dict[str, Any]) -> None:
    """A tokenizer that adds, aborts and steps, and streams that are collected meanwhile: the neighbours go on."""

    def act() -> None:
        value(case["act"], engine=engine, odd=odd, params=GREEDY, streams=streams, gc=gc)

    engine = small_engine(proposer=PromptLookup(2) if case["drafts"] else None)
    outputs = add_neighbours(engine)
    engine._prompts.tokenizer = Caller(act, case["turn"])
    odd = [engine.add_request(PROMPT, GREEDY, request_id=name) for name in ("a", "b")]
    streams = [engine.stream([8, 8], GREEDY)]
    next(streams[0])
    check_neighbours(engine, outputs, drafts=case["drafts"])
    for output in odd:
        assert output.finished
        [one] = output.outputs
        assert one.finish_reason in ("abort", "length", "error")
        assert one.finish_reason != "length" or len(one.token_ids) == 5


def test_a_step_within_a_step_is_refused() -> None:
    errors = []

    def act() -> None:
        try:
            engine.step()
        except UnsupportedError as error:
            errors.append(error)

    engine = small_engine(tokenizer=Caller(act, 0))
    output = engine.add_request(PROMPT, GREEDY)
    run_to_end(engine)
    assert (len(errors), len(output.outputs[0].token_ids), output.error) == (1, 5, None)


@pytest.mark.parametrize("decoded", [b"ab", None, [1]])
@pytest.mark.parametrize("max_tokens", [1, 4])
def test_tokenizers_that_give_no_text(decoded: Any, max_tokens: int) -> None:
    engine = small_engine()
    outputs = add_neighbours(engine)
    engine._prompts.tokenizer = SimpleNamespace(decode=lambda ids: decoded)
    odd = engine.add_request(PROMPT, SamplingParams(temperature=0, max_tokens=max_tokens, stop=["x"]))
    check_neighbours(engine, outputs)
    assert odd.outputs[0].text == ""
    assert "decode returned" in str(odd.error)


@pytest.mark.parametrize("where", ["prompt_token_ids", "metadata"])
def test_reading_an_argument_may_add_requests(where: str) -> None:
    """Also one of the same id: the one that came first runs, the other is refused."""
    engine, inner = small_engine(max_waiting=3), []

    def add() -> int:
        inner.append(engine.add_request(PROMPT, GREEDY, request_id="a"))
        return 5

    class Adding(UserDict[str, Any]):
        def keys(self) -> Any:
            add()
            return super().keys()

    given: dict[str, Any] = {"prompt_token_ids": PROMPT, "params": GREEDY, "request_id": "a"}
    given[where] = {"prompt_token_ids": (add() for _ in range(1)), "metadata": Adding(lora_adapter=None)}[where]
    with pytest.raises(InvalidInputError, match="in use"):
        engine.add_request(**given)
    run_to_end(engine)
    assert [len(one.outputs[0].token_ids) for one in inner] == [5]
    check_empty(engine)


def test_what_completions_share_cannot_be_changed() -> None:
    """Metadata, prompt and parameters are there once for all completions; what outputs give is the reader's own."""
    engine, seen = small_engine(), []
    forward = engine.executor.run

    def look(step: Any) -> Any:
        seen.extend(completion.request.metadata for completion in step.completions)
        return forward(step)

    engine.executor.run = look  # type: ignore[method-assign]
    output = engine.add_request(PROMPT, SamplingParams(n=8, max_tokens=3, logprobs=1), metadata={"lora_adapter": None})
    run_to_end(engine)
    assert len(seen) > 8
    assert len(set(map(id, seen))) == 1
    with pytest.raises(TypeError):
        seen[0]["a"] = 2
    copy = output.copy()
    copy.prompt_token_ids.clear()
    for one in copy.outputs[0].logprobs or ():
        one.clear()
    assert output.prompt_token_ids == copy.prompt_token_ids == PROMPT
    assert all(output.outputs[0].logprobs or ())
    assert copy.prompt is output.prompt


def test_an_output_that_is_changed_still_ends_in_time() -> None:
    engine = small_engine()
    output = engine.add_request(PROMPT, SamplingParams(max_tokens=300), timeout_s=0.0)
    output.finished = True
    engine.step()
    assert (output.outputs[0].finish_reason, engine.num_unfinished) == ("timeout", 0)
    check_empty(engine)


def test_no_memory_while_errors_are_dealt_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling finds none, and then neither does what makes it anew: that request ends, and others run."""
    engine = small_engine()
    outputs = add_neighbours(engine)
    engine.step()
    odd = engine.add_request([9], SamplingParams(presence_penalty=0.5, max_tokens=4))
    with monkeypatch.context() as patch:
        patch.setattr(TokenCounts, "rows", Mock(side_effect=MemoryError))
        patch.setattr(TokenCounts, "__init__", Mock(side_effect=MemoryError))
        for _ in range(2):
            engine.step()
    assert "MemoryError" in str(odd.error)
    run_to_end(engine)
    check_ended(odd)
    assert outputs[0].outputs[0].token_ids == alone(0)[0]
    check_empty(engine)
