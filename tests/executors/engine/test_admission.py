"""Admission: which requests are refused, how they are named, and which tokens end them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import (
    Engine,
    InvalidInputError,
    LlmExecutor,
    PagedAttentionExecutor,
    PagedError,
    SequenceTooLongError,
    UnsupportedError,
)
from paged.executors.command_line.cli import RECALL
from tests.executors.engine_cases import EOS, FIVE, GREEDY, TEN, check_empty, encode, recall_prompts, run_to_end
from tests.executors.oracle import make_executor


@pytest.mark.parametrize(
    ("error", "match", "prompt", "fields"),
    [
        (InvalidInputError, "empty prompt", [], {}),
        (InvalidInputError, "token id 256", [1, 256], {}),
        (InvalidInputError, "token id -1", [1, -1], {}),
        (InvalidInputError, "token id 300", [1], {"stop_token_ids": [300]}),
        (InvalidInputError, "token id 300", [1], {"logit_bias": {300: 1.0}}),
        (InvalidInputError, "tokenizer", [1], {"stop": "x"}),
        (InvalidInputError, "257 tokens .* the cache holds 256", [1] * 100, {"max_tokens": 158}),
        (SequenceTooLongError, "513 tokens .* the longest sequence is 512", [1] * 500, {"max_tokens": 14}),
    ],
)
def test_what_can_never_run_is_refused(
    error: type[Exception], match: str, prompt: list[int], fields: dict[str, Any], device: torch.device
) -> None:
    engine = Engine(make_executor(device))
    with pytest.raises(error, match=match):
        engine.add_request(prompt, replace(TEN, **fields))
    assert (engine.num_unfinished, engine.metrics.requests) == (0, 0)
    engine.add_request([1] * 100, replace(TEN, max_tokens=157), request_id="a")
    with pytest.raises(InvalidInputError, match="'a': its id is in use"):
        engine.add_request([1], TEN, request_id="a")
    engine.abort("a")
    engine.add_request([1], replace(TEN, max_tokens=None), request_id="a")
    assert engine.abort("a")
    assert not engine.abort("a")


def test_as_many_as_fit(device: torch.device) -> None:
    executor: PagedAttentionExecutor = make_executor(device, num_blocks=4)
    [output] = Engine(executor).generate([[1] * 30], replace(TEN, max_tokens=None), progress=False)
    assert len(output.outputs[0].token_ids) == 3, "two take the slots up to 32, and the last needs none"


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (InvalidInputError, {"request_id": True}),
        (InvalidInputError, {"request_id": 1.0}),
        (InvalidInputError, {"request_id": ["a"]}),
        (InvalidInputError, {"priority": 1.5}),
        (InvalidInputError, {"priority": 10**30}),
        (InvalidInputError, {"timeout_s": -1}),
        (InvalidInputError, {"timeout_s": float("nan")}),
        (InvalidInputError, {"cache_salt": ""}),
        (InvalidInputError, {"cache_salt": 5}),
        (InvalidInputError, {"metadata": "french"}),
        (InvalidInputError, {"metadata": {1: 2}}),
        (InvalidInputError, {"metadata": {"lora_adapter": []}}),
        (InvalidInputError, {"metadata": {"lora_adapter": ""}}),
        (UnsupportedError, {"metadata": {"lora_adapter": "french"}}),
        (InvalidInputError, {"params": {"n": 2}}),
        (InvalidInputError, {"prompt_token_ids": "a text"}),
        (InvalidInputError, {"prompt_token_ids": [1.0]}),
    ],
)
def test_invalid_requests_are_refused(error: type[PagedError], options: dict[str, Any], device: torch.device) -> None:
    engine = Engine(make_executor(device))
    with pytest.raises(error, match=next(iter(options)) if "metadata" not in options else "metadata|lora_adapter"):
        engine.add_request(**({"prompt_token_ids": [1, 2], "params": FIVE} | options))
    assert (engine.num_unfinished, engine.metrics.requests) == (0, 0)
    engine.add_request([1, 2], FIVE, request_id="a", priority=-3, timeout_s=60, cache_salt="b", metadata={"c": []})
    run_to_end(engine)


def test_an_adapter_that_is_not_loaded_is_refused() -> None:
    engine = Engine(LlmExecutor.from_pretrained(RECALL, num_blocks=16))
    with pytest.raises(InvalidInputError, match=r"'french', which is not loaded"):
        engine.add_request([1, 2], FIVE, metadata={"lora_adapter": "french"})
    assert engine.num_unfinished == 0


def test_names_are_apart(device: torch.device) -> None:
    """1 and "1", given ids and automatic ones, and a sequence of the caller's with an engine's own name."""
    executor = make_executor(device)
    engine = Engine(executor)
    automatic = engine.add_request([1], FIVE)
    own = executor.kv_manager.allocate(f"{automatic.request_id}/0", 4)
    for given in (1, "1", "request-1", "request-0", 0):
        engine.add_request([1], FIVE, request_id=given)
    outputs = {output.request_id: output for _ in range(8) for output in engine.step()}
    assert len(outputs) == 6
    assert {tuple(output.outputs[0].token_ids) for output in outputs.values()} == {(1,) * 5}
    executor.kv_manager.free(own)
    check_empty(engine)


def test_end_tokens_are_the_checkpoints() -> None:
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=64)
    assert executor.info().eos_token_ids == EOS
    prompts = encode(recall_prompts(3))
    as_told = Engine(executor, eos_token_ids=EOS).generate(prompts, GREEDY, progress=False)
    by_itself = Engine(executor).generate(prompts, GREEDY, progress=False)
    never = Engine(executor, eos_token_ids=()).generate(prompts, GREEDY, progress=False)
    assert [one.outputs[0].token_ids for one in by_itself] == [one.outputs[0].token_ids for one in as_told]
    assert {one.outputs[0].finish_reason for one in by_itself} == {"stop"}
    assert {one.outputs[0].finish_reason for one in never} == {"length"}


@pytest.mark.parametrize("wrong", [[300], [-1], [1.0], "eos", [True]])
def test_end_tokens_are_token_ids(wrong: Any, device: torch.device) -> None:
    with pytest.raises(InvalidInputError, match="eos_token_ids"):
        Engine(make_executor(device), eos_token_ids=wrong)
    Engine(make_executor(device), eos_token_ids={3})
