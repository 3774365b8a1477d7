"""Answers of an engine under grammars: they parse and validate, in every way to run."""

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig, SamplingParams, SpeculativeDecoder
from paged.serving.grammar.structured import GrammarCompiler
from tests.executors.engine_cases import check_empty, run_to_end
from tests.executors.oracle import make_executor
from tests.processes import branches_of, wait_until
from tests.serving.grammar.test_structured import END, PROCESS, VOCABULARY, ambiguous, byte_tokenizer

pytest.importorskip("xgrammar", reason="needs the extra serve")
jsonschema = pytest.importorskip("jsonschema", reason="needs the extra test")

WAYS: dict[str, tuple[bool, dict[str, Any], dict[str, Any]]] = {
    "plain": (False, {}, {}),
    "overlap": (False, {"overlap": True}, {}),
    "drafts": (True, {}, {}),
    "overlap, preempted": (False, {"overlap": True, "admission_tokens": 0}, {"num_blocks": 70}),
}


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose texts are short."""
    leaves: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "null"},
        {"enum": [rng.randrange(99), "a b", 'quo"te', None][: rng.randint(1, 4)]},
        {"type": "string", "maxLength": rng.randint(0, 6)},
        {"type": "integer", "minimum": -5, "maximum": rng.randint(0, 300)},
    ]
    kind = rng.random() if depth else 0.0
    if kind < 0.4:
        return rng.choice(leaves)
    if kind < 0.6:
        return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": rng.randint(0, 3)}
    names = rng.sample(["a", "name", "x y"], rng.randint(1, 3))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: random_schema(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@pytest.mark.parametrize("num_schemas", [12, pytest.param(80, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("way", WAYS)
def test_json_validates(way: str, num_schemas: int, device: torch.device) -> None:
    """Sampled at random from an untrained model, 24 at once; in ASCII, as random bytes are seldom UTF-8."""
    drafts, config, options = WAYS[way]
    tokenizer, rng = byte_tokenizer(), random.Random(num_schemas)
    compiler = GrammarCompiler(tokenizer, VOCABULARY, [END], max_cached=8)
    schemas = [random_schema(rng) for _ in range(num_schemas)]
    executor = make_executor(device, vocab_size=VOCABULARY, **({"num_blocks": 1024} | options))
    engine = (SpeculativeDecoder if drafts else Engine)(
        executor, config=EngineConfig(max_num_seqs=24, **config), tokenizer=tokenizer, eos_token_ids=(END,), seed=3
    )
    ascii_ids = tuple(token for token in range(END) if tokenizer.decode([token]).isascii())
    outputs = []
    for index, schema in enumerate(schemas):
        matcher = asyncio.run(compiler.compile("json", schema))
        params = SamplingParams(seed=index, max_tokens=400, allowed_token_ids=(*ascii_ids, END))
        outputs.append(engine.add_request([index % 7, 34, 58], params, token_mask=matcher))
    run_to_end(engine)
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.outputs[0].finish_reason == "stop", (schema, output.error, output.outputs[0].text)
        jsonschema.validate(json.loads(output.outputs[0].text), schema)
    assert bool(engine.metrics.preempted) == (way.endswith("preempted") and num_schemas > 24)
    assert bool(engine.metrics.accepted_tokens) == drafts
    check_empty(engine)


@pytest.mark.parametrize("way", WAYS)
def test_a_whole_text_ends_whatever_else_is_asked(way: str, device: torch.device) -> None:
    """Neither a minimum, nor allowed tokens without the end, nor a bias against it prolongs an answer."""
    drafts, config, options = WAYS[way]
    tokenizer = byte_tokenizer()
    compiler = GrammarCompiler(tokenizer, VOCABULARY, [END])
    executor = make_executor(device, vocab_size=VOCABULARY, **({"num_blocks": 1024} | options))
    make = SpeculativeDecoder if drafts else Engine
    engine = make(executor, config=EngineConfig(**config), tokenizer=tokenizer, eos_token_ids=(END,), seed=3)
    rules: list[dict[str, Any]] = [
        {"min_tokens": 9},
        {"allowed_token_ids": tuple(tokenizer.encode("ab").ids)},
        {"logit_bias": {END: -100.0}},
        {"min_tokens": 9, "logit_bias": {END: -100.0}, "temperature": 0.0},
    ]
    outputs = []
    for given in rules:
        matcher = asyncio.run(compiler.compile("regex", "a?[ab]b"))
        outputs.append(engine.add_request([5, 6], SamplingParams(seed=1, max_tokens=20, **given), token_mask=matcher))
    run_to_end(engine)
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop", output.error
        assert output.outputs[0].text in ("ab", "bb", "aab", "abb")
    check_empty(engine)


@pytest.mark.parametrize("way", WAYS)
def test_a_grammar_that_takes_too_long_ends_its_own_completion(way: str, device: torch.device) -> None:
    """Beside one that is as honest as it is, and one without a grammar, whose answers it does not change."""
    drafts, config, options = WAYS[way]
    tokenizer = byte_tokenizer()
    compiler = GrammarCompiler(tokenizer, VOCABULARY, [END], token_seconds=0.01)
    hostile, before = [ambiguous(random.Random(seed)) for seed in range(2)], branches_of(PROCESS)

    def answers(grammars: list[str]) -> list[str]:
        executor = make_executor(device, vocab_size=VOCABULARY, **({"num_blocks": 1024} | options))
        make = SpeculativeDecoder if drafts else Engine
        engine = make(executor, config=EngineConfig(**config), tokenizer=tokenizer, eos_token_ids=(END,), seed=3)
        params = SamplingParams(seed=1, max_tokens=60)
        compiled = [asyncio.run(compiler.compile("grammar", grammar, seconds=60)) for grammar in grammars]
        endless = replace(params, allowed_token_ids=tuple(tokenizer.encode("ab").ids))
        bad = [engine.add_request([5, 6], endless, token_mask=matcher) for matcher in compiled]
        honest = asyncio.run(compiler.compile("regex", "([ab]c?){1,40}"))
        good = [engine.add_request([5, 6], params, token_mask=mask) for mask in (honest, None)]
        run_to_end(engine)
        assert all("GrammarLimitError" in str(output.error) for output in bad)
        assert [output.outputs[0].finish_reason for output in bad] == ["error"] * len(bad)
        assert not any(output.error for output in good)
        check_empty(engine)
        return [output.outputs[0].text for output in good]

    assert answers(hostile) == answers([])
    wait_until(lambda: len(branches_of(PROCESS) - before) <= 5)  # the root, the vocabulary, three grammars
