"""Token masks and logits processors: what they forbid never comes, and all else is as without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig, InvalidInputError, SamplingParams, SpeculativeDecoder
from tests.executors.engine.answers import ANSWERS
from tests.executors.engine_cases import PROMPTS, TEN, check_empty, run_to_end
from tests.executors.oracle import make_executor

VOCAB, LENGTH = 256, 7


class Rising:
    """A grammar of rising tokens, each at most 40 above the one before; a text of `LENGTH` of them is complete."""

    def __init__(self, trouble: str = "") -> None:
        self.tokens: list[int] = []
        self.trouble = trouble

    def allowed(self) -> range:
        first = self.tokens[-1] + 1 if self.tokens else 0
        return range(first, min(first + 40, VOCAB))

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int = 0) -> bool:
        assert not self.is_terminated()
        if self.trouble == "raises" and len(self.tokens) == 3:
            raise RuntimeError("no grammar")
        words = [0] * (VOCAB // 32)
        for token in () if self.trouble == "leaves none" and len(self.tokens) == 3 else self.allowed():
            words[token // 32] |= 1 << token % 32
        bitmask[index] = torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32)
        return True

    def accept_token(self, token_id: int) -> bool:
        if token_id not in self.allowed():
            return False
        self.tokens.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[-num_tokens:]

    def is_terminated(self) -> bool:
        return len(self.tokens) == LENGTH

    def fork(self) -> Rising:
        copy = Rising(self.trouble)
        copy.tokens = self.tokens.copy()
        return copy


class Only:
    """A processor that leaves one token, which depends on those before."""

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(logits, -torch.inf)
        only[(3 * len(token_ids) + sum(token_ids)) % VOCAB] = 1.0
        return only

    def fork(self) -> Only:
        return self


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "overlap": ({"overlap": True}, {}),
    "overlap, preempted": ({"overlap": True, "admission_tokens": 0}, {"num_blocks": 15}),
    "preempted": ({"admission_tokens": 0, "token_budget": 16}, {"num_blocks": 15}),
}


def outputs_of(way: str, device: torch.device, *, drafts: bool = False, **fields: Any) -> list[Any]:
    """Requests with a mask between others."""
    config, options = WAYS[way]
    executor = make_executor(device, **({"num_blocks": 128} | options))
    make = SpeculativeDecoder if drafts else Engine
    engine = make(executor, config=EngineConfig(**config), eos_token_ids=())
    params = SamplingParams(max_tokens=12, seed=4, n=2, **fields)
    masked = [engine.add_request(prompt, params, token_mask=Rising()) for prompt in PROMPTS]
    others = [engine.add_request(prompt, TEN) for prompt in PROMPTS]
    run_to_end(engine)
    check_empty(engine)
    assert bool(engine.metrics.preempted) == ("num_blocks" in options)
    assert [one.outputs[0].token_ids for one in others] == ANSWERS
    found = [completion for output in masked for completion in output.outputs]
    for one in found:
        steps = [after - before for before, after in zip([-1, *one.token_ids], one.token_ids, strict=False)]
        assert all(0 < step <= 40 for step in steps)
        assert (one.finish_reason, len(one.token_ids), one.stop_reason) == ("stop", LENGTH, None)
    return [(one.token_ids, one.logprobs) for one in found]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"logprobs": 1, "repetition_penalty": 1.2}], ids=str)
def test_masks(fields: dict[str, Any], device: torch.device) -> None:
    """In every way to run: the same tokens; drafts, verified position by position, do not change greedy ones."""
    results = {way: outputs_of(way, device, **fields) for way in WAYS}
    assert all(found == results["plain"] for found in results.values())
    drafted = outputs_of("plain", device, drafts=True, **fields)
    assert fields.get("temperature") != 0 or drafted == results["plain"]


@pytest.mark.parametrize("trouble", ["raises", "leaves none"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_mask_in_trouble_ends_its_own_completion(trouble: str, overlap: bool, device: torch.device) -> None:
    engine = Engine(make_executor(device, num_blocks=64), EngineConfig(overlap=overlap))
    bad = engine.add_request([1, 2], replace(TEN, n=2), token_mask=Rising(trouble))
    good = engine.add_request([1, 2], TEN, token_mask=Rising())
    others = [engine.add_request(prompt, TEN) for prompt in PROMPTS]
    run_to_end(engine)
    assert [(one.finish_reason, len(one.token_ids)) for one in bad.outputs] == [("error", 3)] * 2
    assert ("no grammar" if trouble == "raises" else "no token") in str(bad.error)
    assert good.outputs[0].finish_reason == "stop"
    assert [one.outputs[0].token_ids for one in others] == ANSWERS
    check_empty(engine)


class Late(Rising):
    """A mask that is computed elsewhere, and is not there before it is let go."""

    def __init__(self, gate: dict[str, bool], trouble: str = "") -> None:
        super().__init__(trouble)
        self.gate = gate
        self.is_closed = False

    def fork(self) -> Late:
        return Late(self.gate, self.trouble)

    def is_ready(self, timeout: float) -> bool:
        return self.gate["is open"] or not self.tokens

    @property
    def is_quick(self) -> bool:
        return self.gate["is open"]

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_mask_that_is_not_there_holds_up_its_completion_alone(way: str, drafts: bool, device: torch.device) -> None:
    """Others end meanwhile; then it goes on to the tokens that it has anyway."""
    config, options = WAYS[way]

    def run(masks: Sequence[Any]) -> tuple[int, list[Any]]:
        make = SpeculativeDecoder if drafts else Engine
        engine = make(make_executor(device, **({"num_blocks": 128} | options)), config=EngineConfig(**config))
        masked = [engine.add_request(PROMPTS[0], replace(TEN, seed=4, max_tokens=12), token_mask=one) for one in masks]
        others = [engine.add_request(prompt, TEN) for prompt in PROMPTS]
        steps = 0
        while not all(one.finished for one in others):
            engine.step()
            steps += 1
        if masks and isinstance(masks[0], Late):
            for _ in range(3):
                engine.step()
            assert [(one.finished, len(one.outputs[0].token_ids)) for one in masked] == [(False, 1)] * len(masked)
            masks[0].gate["is open"] = True
        run_to_end(engine)
        assert [one.outputs[0].token_ids for one in others] == ANSWERS
        assert all(one.is_closed for one in masks if isinstance(one, Late))
        check_empty(engine)
        return steps, [one.outputs[0].token_ids for one in masked]

    gate = {"is open": False}
    steps, token_ids = run([Late(gate), Late(gate)])
    assert steps <= 2 * run([Rising(), Rising()])[0]  # it keeps its blocks
    assert token_ids == run([Rising(), Rising()])[1]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_processors(overlap: bool, drafts: bool, device: torch.device) -> None:
    """They see the tokens before, drafts too, and decide; one that gives no logits ends its own completion."""
    executor = make_executor(device, num_blocks=64)
    make = SpeculativeDecoder if drafts else Engine
    engine = make(executor, config=EngineConfig(overlap=overlap), eos_token_ids=())
    mine = engine.add_request([1, 2], replace(TEN, temperature=1.0, n=2), logits_processor=Only())
    bad = engine.add_request([1, 2], TEN, logits_processor=type("Bad", (Only,), {"__call__": lambda *_: None})())
    others = [engine.add_request(prompt, TEN) for prompt in PROMPTS]
    run_to_end(engine)
    expected: list[int] = []
    for _ in range(10):
        expected.append((3 * len(expected) + sum(expected)) % VOCAB)
    assert [one.token_ids for one in mine.outputs] == [expected] * 2
    assert bad.outputs[0].finish_reason == "error"
    assert [one.outputs[0].token_ids for one in others] == ANSWERS


class Characters:
    """A tokenizer of one character a token."""

    def decode(self, token_ids: list[int], /) -> str:
        return "".join(map(chr, token_ids))


class Behind:
    """Ends a text with its `count`-th character."""

    def __init__(self, count: int) -> None:
        self.count, self.text = count, ""

    def read(self, text: str) -> bool:
        if self.count < 0:
            raise RuntimeError("no text")
        self.text += text
        return len(self.text) >= self.count

    def fork(self) -> Behind:
        return Behind(self.count)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_text_ends(overlap: bool, drafts: bool, device: torch.device) -> None:
    """The text ends with the token that completes it, not before min_tokens; an error ends its own completion."""
    make = SpeculativeDecoder if drafts else Engine
    executor, config = make_executor(device, num_blocks=64), EngineConfig(overlap=overlap)
    engine = make(executor, config=config, tokenizer=Characters(), eos_token_ids=())
    ended = engine.add_request(PROMPTS[0], replace(TEN, n=2), text_end=Behind(4))
    later = engine.add_request(PROMPTS[0], replace(TEN, min_tokens=6), text_end=Behind(4))
    full = engine.add_request(PROMPTS[0], TEN, text_end=Behind(11))
    bad = engine.add_request(PROMPTS[0], TEN, text_end=Behind(-1))
    others = [engine.add_request(prompt, TEN) for prompt in PROMPTS]
    run_to_end(engine)
    answer = others[0].outputs[0].token_ids
    for output, count in ((ended.outputs[0], 4), (ended.outputs[1], 4), (later.outputs[0], 6)):
        assert (output.token_ids, output.finish_reason, output.stop_reason) == (answer[:count], "stop", None)
        assert output.text == Characters().decode(answer[:count])
    assert (full.outputs[0].token_ids, full.outputs[0].finish_reason) == (answer, "length")
    assert bad.outputs[0].finish_reason == "error"
    assert [one.outputs[0].token_ids for one in others] == ANSWERS
    check_empty(engine)
    with pytest.raises(InvalidInputError, match="text_end: the engine has no tokenizer"):
        Engine(executor).add_request([1], TEN, text_end=Behind(1))


def test_what_is_neither_is_refused(device: torch.device) -> None:
    engine = Engine(make_executor(device, num_blocks=64))
    for name in ("token_mask", "logits_processor", "text_end"):
        with pytest.raises(InvalidInputError, match=f"{name}: .*, expected the methods of"):
            engine.add_request([1], TEN, **{name: object()})
    assert not engine.num_unfinished
