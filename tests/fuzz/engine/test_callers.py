"""Callers that change what they gave or got, give objects with ideas of their own, or call from within a step."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import strategies as st

from paged import Engine, EngineConfig, PagedError, PromptLookup, RequestOutput, SamplingParams, UnsupportedError
from tests.executors.engine_cases import check_empty
from tests.fuzz.engine.neighbours import (
    Letters,
    add_neighbours,
    alone,
    check_neighbours,
    run_to_end,
    small_engine,
    small_executor,
)
from tests.fuzz.engine.test_requests import check_ended
from tests.fuzz.fuzzing import fuzz

PROMPT = [4, 4, 8, 2, 9]


class OddText(str):
    """A text whose methods tell the truth `patience` times."""

    patience = 0

    def _lie(self, truth: Any, lie: Callable[[], Any]) -> Any:
        self.patience -= 1
        return truth if self.patience >= 0 else lie()

    def __hash__(self) -> int:
        return self._lie(str.__hash__(self), lambda: [][0])  # type: ignore[no-any-return]

    def __eq__(self, other: object) -> bool:
        return self._lie(str.__eq__(self, other), lambda: True)  # type: ignore[no-any-return]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __iter__(self) -> Iterator[str]:
        return self._lie(str.__iter__(self), lambda: itertools.repeat("a"))  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return self._lie(str.__len__(self), lambda: 1 / 0)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return self._lie(str.__repr__(self), lambda: 1 / 0)  # type: ignore[no-any-return]

    __str__ = __repr__


class OddParams(SamplingParams):
    """Parameters of which one is read anew each time."""

    reads: Any = None

    def __getattribute__(self, name: str) -> Any:
        reads = object.__getattribute__(self, "reads")
        return reads(name) if reads is not None and name != "__class__" else object.__getattribute__(self, name)


def odd_text(patience: int) -> OddText:
    text = OddText("odd")
    text.patience = patience
    return text


def odd_texts(token_ids: list[int]) -> str:
    return OddText("o" * len(token_ids))


TEXTS = st.fixed_dictionaries(
    {
        "field": st.sampled_from(["request_id", "cache_salt", "stop", "stops", "key", "adapter", "params"]),
        "patience": st.integers(0, 60),
    }
)


@fuzz(TEXTS, examples=60)
def test_odd_objects(case: dict[str, Any]) -> None:
    """Texts and parameters that change their minds, at the door or in the middle of a step."""
    engine = small_engine()
    outputs = add_neighbours(engine)
    text, field = odd_text(case["patience"]), case["field"]
    options: dict[str, Any] = {}
    params = SamplingParams(temperature=0, max_tokens=5)
    try:
        if field in ("request_id", "cache_salt"):
            options[field] = text
        elif field in ("stop", "stops"):
            params = SamplingParams(temperature=0, max_tokens=5, stop=text if field == "stop" else [text, "b"])
        elif field == "params":
            params, left = OddParams(temperature=0, max_tokens=5), itertools.count(case["patience"], -1)
            whole = object.__getattribute__
            OddParams.reads = staticmethod(lambda name: whole(params, name) if next(left) > 0 else 1 / 0)
        else:
            options["metadata"] = {text: 1} if field == "key" else {"lora_adapter": text}
        odd = engine.add_request(PROMPT, params, **options)
    except (PagedError, ZeroDivisionError, IndexError):  # the latter of the text itself, as a key of the caller's
        assert engine.num_unfinished == len(outputs)
    else:
        run_to_end(engine)
        check_ended(odd)
    finally:
        OddParams.reads = None
    run_to_end(engine)
    check_neighbours(outputs)
    check_empty(engine)


CHANGES = {
    "prompt cleared": lambda own: own["prompt"].clear(),
    "prompt changed": lambda own: own["prompt"].__setitem__(0, 10**9),
    "bias added": lambda own: own["params"].logit_bias.update({10**6: 1.0}),
    "bias of another type": lambda own: own["params"].logit_bias.update({"a": None}),
    "another temperature": lambda own: object.__setattr__(own["params"], "temperature", "hot"),
    "more completions": lambda own: object.__setattr__(own["params"], "n", 10**9),
    "other stops": lambda own: object.__setattr__(own["params"], "stop", None),
    "metadata cleared": lambda own: own["metadata"].clear(),
    "outputs cleared": lambda own: own["output"].outputs.clear(),
    "tokens cleared": lambda own: own["output"].outputs[0].token_ids.clear(),
    "tokens added": lambda own: own["output"].outputs[0].token_ids.extend([10**9, "a"]),
    "logprobs cleared": lambda own: own["output"].outputs[0].logprobs.clear(),
    "no metrics": lambda own: setattr(own["output"], "metrics", None),
    "another count": lambda own: setattr(own["output"], "num_cached_tokens", "many"),
    "another name": lambda own: setattr(own["output"], "request_id", ["a"]),
    "no prompt": lambda own: setattr(own["output"], "prompt_token_ids", None),
    "no finish": lambda own: setattr(own["output"], "finished", "no"),
    "another index": lambda own: setattr(own["output"].outputs[0], "index", "first"),
}
CHANGED = st.fixed_dictionaries(
    {
        "changes": st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=3, unique=True),
        "steps": st.integers(0, 4),
        "drafts": st.booleans(),
        "held": st.sampled_from([0, 30]),
    }
)


@fuzz(CHANGED, examples=50)
def test_changed_objects(case: dict[str, Any]) -> None:
    """What was given to a request, or came from it, is changed while it waits or runs, also where the cache is full."""
    engine = small_engine(proposer=PromptLookup(2) if case["drafts"] else None, preemption="swap")
    manager = engine.executor.kv_manager
    assert manager is not None
    others = manager.allocate("others", case["held"] * 8)
    params = SamplingParams(n=2, seed=4, max_tokens=9, logit_bias={3: 1.0}, logprobs=1, stop=["never"], min_tokens=2)
    own: dict[str, Any] = {"prompt": PROMPT.copy(), "params": params, "metadata": {"a": [1]}}
    own["output"] = engine.add_request(own["prompt"], params, metadata=own["metadata"])
    outputs = add_neighbours(engine)
    for _ in range(case["steps"]):
        engine.step()
    for name in case["changes"]:
        with suppress(IndexError):  # the outputs were cleared
            CHANGES[name](own)
    run_to_end(engine)
    if not case["drafts"]:
        check_neighbours(outputs)
    assert [output.error for output in outputs] == [None] * 3
    assert outputs[0].outputs[0].token_ids == alone(0)[0]
    manager.free(others)
    check_empty(engine)


def test_parameters_are_checked_as_they_are() -> None:
    """What was changed before the request is added is refused, or holds."""
    engine = small_engine()
    for name, value in (("n", 10**9), ("temperature", "hot"), ("stop", [1]), ("logit_bias", {"a": 1})):
        params = SamplingParams(max_tokens=3)
        object.__setattr__(params, name, value)
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


ACTS = ["abort own", "abort other", "abort both", "discard", "add", "step", "generate", "collect", "raise"]
CALLS = st.fixed_dictionaries({"act": st.sampled_from(ACTS), "turn": st.integers(0, 30), "drafts": st.booleans()})


@fuzz(CALLS, examples=40)
def test_calls_within_a_step(case: dict[str, Any]) -> None:
    """A tokenizer that adds, aborts and steps, and streams that are collected meanwhile: the neighbours go on."""
    added: list[RequestOutput] = []
    greedy = SamplingParams(temperature=0, max_tokens=8)

    def act() -> None:
        if case["act"] in ("abort own", "abort both"):
            assert engine.abort("a")
        if case["act"] in ("abort other", "abort both"):
            engine.abort("b")
        elif case["act"] == "discard":
            engine.discard(odd[1])
        elif case["act"] == "add":
            added.append(engine.add_request(PROMPT, greedy))
        elif case["act"] == "step":
            engine.step()
        elif case["act"] == "generate":
            engine.generate([PROMPT], greedy, progress=False)
        elif case["act"] == "collect":
            streams.clear()
            gc.collect()
        elif case["act"] == "raise":
            raise GeneratorExit

    proposer = PromptLookup(2) if case["drafts"] else None
    engine = Engine(small_executor(), EngineConfig(token_budget=64), tokenizer=Letters(), proposer=proposer, seed=0)
    outputs = add_neighbours(engine)
    engine._admission._tokenizer = Caller(act, case["turn"])
    odd = [engine.add_request(PROMPT, greedy, request_id=name) for name in ("a", "b")]
    streams = [engine.stream([8, 8], greedy)]
    next(streams[0])
    while engine.num_unfinished:
        engine.step()
    if not case["drafts"]:
        check_neighbours(outputs)
    assert [output.error for output in outputs] == [None] * 3
    assert outputs[0].outputs[0].token_ids == alone(0)[0]
    for output in odd + added:
        assert output.finished
        [one] = output.outputs
        assert one.finish_reason in ("abort", "length", "error")
        assert one.finish_reason != "length" or len(one.token_ids) == 8
    check_empty(engine)


def test_a_step_within_a_step_is_refused() -> None:
    errors = []

    def act() -> None:
        try:
            engine.step()
        except UnsupportedError as error:
            errors.append(error)

    engine = Engine(small_executor(), tokenizer=Caller(act, 0))
    output = engine.add_request(PROMPT, SamplingParams(temperature=0, max_tokens=3))
    run_to_end(engine)
    assert (len(errors), len(output.outputs[0].token_ids), output.error) == (1, 3, None)


@pytest.mark.parametrize("decode", [lambda ids: b"ab", lambda ids: None, lambda ids: ids, odd_texts])
@pytest.mark.parametrize("max_tokens", [1, 4])
def test_tokenizers_that_give_no_text(decode: Callable[[list[int]], Any], max_tokens: int) -> None:
    class Odd:
        def decode(self, token_ids: list[int]) -> Any:
            return decode(token_ids)

    engine = small_engine()
    outputs = add_neighbours(engine)
    engine._admission._tokenizer = Odd()
    odd = engine.add_request(PROMPT, SamplingParams(temperature=0, max_tokens=max_tokens, stop=["x"]))
    run_to_end(engine)
    check_neighbours(outputs)
    assert odd.outputs[0].text == ("o" * max_tokens if decode is odd_texts else "")
    assert decode is odd_texts or "decode gave" in str(odd.error)
    check_empty(engine)
