"""Admission: which configurations and requests are refused, how requests are named, and which tokens end them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig, InvalidInputError, LlmExecutor, SequenceTooLongError, UnsupportedError
from paged.serving.command_line.cli import RECALL
from tests.executors.engine_cases import EOS, FIVE, GREEDY, TEN, encode, recall_prompts, run_to_end
from tests.executors.oracle import make_executor

WRONG: dict[str, list[Any]] = {
    "request_id": [True],
    "priority": [1.5, 10**30],
    "timeout_s": [-1, float("nan")],
    "cache_salt": [""],
    "metadata": ["french", {"lora_adapter": []}],
    "params": [{"n": 2}],
    "prompt_token_ids": ["a text", [1.0]],
}


LONG = {"prompt_token_ids": [1] * 100, "params": replace(TEN, max_tokens=158)}
LONGER = {"prompt_token_ids": [1] * 500, "params": replace(TEN, max_tokens=14)}


@pytest.mark.parametrize(
    ("match", "options", "error"),
    [
        *((f"{name}|lora_adapter", {name: value}, InvalidInputError) for name in WRONG for value in WRONG[name]),
        ("lora_adapter", {"metadata": {"lora_adapter": "french"}}, UnsupportedError),
        ("empty prompt", {"prompt_token_ids": []}, InvalidInputError),
        ("token id 256", {"prompt_token_ids": [1, 256]}, InvalidInputError),
        ("token id -1", {"prompt_token_ids": [1, -1]}, InvalidInputError),
        ("token id 300", {"params": replace(TEN, stop_token_ids=[300])}, InvalidInputError),
        ("token id 300", {"params": replace(TEN, logit_bias={300: 1.0})}, InvalidInputError),
        ("tokenizer", {"params": replace(TEN, stop="x")}, InvalidInputError),
        ("257 tokens .* the cache holds 256", LONG, InvalidInputError),
        ("513 tokens .* the longest sequence is 512", LONGER, SequenceTooLongError),
    ],
)
def test_requests_that_can_never_run(
    match: str, options: dict[str, Any], error: type[Exception], device: torch.device
) -> None:
    engine = Engine(make_executor(device))
    with pytest.raises(error, match=match):
        engine.add_request(**({"prompt_token_ids": [1, 2], "params": FIVE} | options))
    assert (engine.num_unfinished, engine.metrics.requests) == (0, 0)


def test_requests_that_just_fit(device: torch.device) -> None:
    engine = Engine(make_executor(device))
    engine.add_request([1] * 100, replace(TEN, max_tokens=157), request_id="a")
    with pytest.raises(InvalidInputError, match="'a': its id is in use"):
        engine.add_request([1], TEN, request_id="a")
    engine.abort("a")
    engine.add_request([1], replace(TEN, max_tokens=None), request_id="a")
    assert engine.abort("a")
    assert not engine.abort("a")
    engine.add_request(
        [1, 2], FIVE, request_id="a", priority=-3, timeout_s=60, cache_salt="b", metadata={"lora_adapter": None}
    )
    run_to_end(engine)
    small = Engine(make_executor(device, num_blocks=4))
    [output] = small.generate([[1] * 30], replace(TEN, max_tokens=None), progress=False)
    assert len(output.outputs[0].token_ids) == 3, "two take the slots up to 32, and the last needs none"


def test_an_adapter_that_is_not_loaded_is_refused() -> None:
    engine = Engine(LlmExecutor.from_pretrained(RECALL, num_blocks=16))
    with pytest.raises(InvalidInputError, match=r"'french' is not loaded"):
        engine.add_request([1, 2], FIVE, metadata={"lora_adapter": "french"})
    assert engine.num_unfinished == 0


def test_end_tokens_are_the_checkpoints() -> None:
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=64)
    assert executor.info().eos_token_ids == EOS
    as_told, by_itself, never = (
        [one.outputs[0] for one in Engine(executor, **options).generate(prompts, GREEDY, progress=False)]
        for prompts in [encode(recall_prompts(3))]
        for options in ({"eos_token_ids": EOS}, {}, {"eos_token_ids": ()})
    )
    assert [one.token_ids for one in by_itself] == [one.token_ids for one in as_told]
    assert {one.finish_reason for one in by_itself} == {"stop"}
    assert {one.finish_reason for one in never} == {"length"}


@pytest.mark.parametrize("wrong", [[300], [-1], [1.0], "eos", [True]])
def test_end_tokens_are_token_ids(wrong: Any, device: torch.device) -> None:
    with pytest.raises(InvalidInputError, match="eos_token_ids"):
        Engine(make_executor(device), eos_token_ids=wrong)
    Engine(make_executor(device), eos_token_ids={3})


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("token_budget", 0, 1),
        ("admission_tokens", -1, 0),
        ("preemption", "drop", "swap"),
        ("decode_stretch", 1.0, 1.1),
    ],
)
def test_configuration_is_checked(name: str, wrong: Any, right: Any) -> None:
    with pytest.raises(InvalidInputError, match=name):
        EngineConfig(**{name: wrong})
    EngineConfig(**{name: right})
