"""A request from the door to its end: names, limits, timeouts, salts, end tokens, and its own times."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import (
    Engine,
    EngineConfig,
    InvalidInputError,
    LlmExecutor,
    PagedError,
    QueueFullError,
    SamplingParams,
    UnsupportedError,
)
from paged.executors.command_line.cli import RECALL
from tests.executors.engine_cases import EOS, GREEDY, check_empty, encode, recall_prompts
from tests.executors.oracle import make_executor

FIVE = SamplingParams(temperature=0, max_tokens=5)


def run(engine: Engine) -> None:
    while engine.num_unfinished:
        engine.step()
    check_empty(engine)


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
def test_what_is_refused_at_the_door(error: type[PagedError], options: dict[str, Any], device: torch.device) -> None:
    engine = Engine(make_executor(device))
    with pytest.raises(error, match=next(iter(options)) if "metadata" not in options else "metadata|lora_adapter"):
        engine.add_request(**({"prompt_token_ids": [1, 2], "params": FIVE} | options))
    assert (engine.num_unfinished, engine.metrics.requests) == (0, 0)
    engine.add_request([1, 2], FIVE, request_id="a", priority=-3, timeout_s=60, cache_salt="b", metadata={"c": []})
    run(engine)


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


def test_an_id_may_be_used_again_while_its_stream_is_open(device: torch.device) -> None:
    engine = Engine(make_executor(device))
    stream = engine.stream([1], FIVE, request_id="a")
    while not next(stream).finished:
        pass
    second = engine.add_request([2], FIVE, request_id="a")
    stream.close()
    run(engine)
    assert second.outputs[0].finish_reason == "length"


def test_a_queue_has_an_end(device: torch.device) -> None:
    engine = Engine(make_executor(device), EngineConfig(max_waiting=2, max_num_seqs=1))
    for _ in range(2):
        engine.add_request([1], FIVE)
    with pytest.raises(QueueFullError, match="2 completions wait, max_waiting is 2"):
        engine.add_request([1], FIVE, request_id="a")
    engine.step()
    engine.add_request([1], FIVE, request_id="a")
    run(engine)


def test_a_request_may_time_out(device: torch.device) -> None:
    """One that waits, and one that runs: others go on."""
    engine = Engine(make_executor(device), EngineConfig(max_num_seqs=2))
    long = SamplingParams(temperature=0, max_tokens=100)
    stays = engine.add_request([1], long)
    runs = engine.add_request([2], long, timeout_s=0.2)
    waits = engine.add_request([3], long, timeout_s=0.0)
    engine.step()
    assert (waits.outputs[0].finish_reason, waits.outputs[0].token_ids) == ("timeout", [])
    time.sleep(0.25)
    [changed] = [output for output in engine.step() if output is not stays]
    assert changed is runs
    assert (runs.outputs[0].finish_reason, len(runs.outputs[0].token_ids)) == ("timeout", 1)
    assert "not done after 0." in str(runs.error)
    run(engine)
    assert len(stays.outputs[0].token_ids) == 100
    assert engine.metrics.finished == {"timeout": 2, "length": 1}


def test_deadlines_of_the_past_take_no_memory(device: torch.device) -> None:
    engine = Engine(make_executor(device))
    for _ in range(5):
        for _ in range(100):
            engine.abort(engine.add_request([1], FIVE, timeout_s=3600).request_id)
    assert len(engine._lifecycle._deadlines._heap) <= 128


def test_salts_part_prefixes(device: torch.device) -> None:
    engine = Engine(make_executor(device))
    cached = []
    for salt in (None, "a", "b", "a", None):
        output = engine.add_request([3] * 20, FIVE, cache_salt=salt)
        run(engine)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 0, 16, 16]


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


def test_a_request_knows_its_times(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean is over the tokens of all completions: not the request's time by the tokens of one."""
    now = [100.0]
    for module in ("core", "lifecycle", "admission"):
        monkeypatch.setattr(f"paged.executors.engine.{module}.perf_counter", lambda: now[0])
    engine = Engine(make_executor(device), EngineConfig(max_num_seqs=2))
    first = engine.add_request([1], SamplingParams(temperature=0, n=2, max_tokens=5))
    second = engine.add_request([2], SamplingParams(temperature=0, max_tokens=3))
    assert first.metrics.queued_s is first.metrics.first_token_s is first.metrics.mean_token_s is None
    while engine.num_unfinished:
        now[0] += 1.0
        engine.step()
    assert (first.metrics.queued_s, first.metrics.first_token_s, first.metrics.mean_token_s) == (1.0, 1.0, 1.0)
    assert (second.metrics.queued_s, second.metrics.first_token_s, second.metrics.mean_token_s) == (6.0, 6.0, 1.0)
    assert engine.metrics.time_per_output_token.total == 2.0
    assert engine.metrics.time_per_output_token.count == 2


def test_a_copy_keeps_a_moment(device: torch.device) -> None:
    engine = Engine(make_executor(device))
    output = engine.add_request([1], SamplingParams(temperature=0, max_tokens=5, logprobs=1))
    moments = []
    while not output.finished:
        engine.step()
        moments.append(output.copy())
    assert [len(one.outputs[0].token_ids) for one in moments] == [1, 2, 3, 4, 5]
    assert [len(one.outputs[0].logprobs or ()) for one in moments] == [1, 2, 3, 4, 5]
    news = moments[3].since([moments[1].outputs[0].mark])
    assert news.outputs[0].token_ids == output.outputs[0].token_ids[2:4]
    assert moments[0].copy().outputs[0].token_ids == moments[0].outputs[0].token_ids


def test_rows_without_a_valid_token_end_alone(device: torch.device) -> None:
    """The only token that is allowed is an end token that may not come yet."""
    engine = Engine(make_executor(device))
    odd = SamplingParams(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=2, top_p=0.9, max_tokens=5)
    for params in (odd, SamplingParams(temperature=1e-37, top_p=0.5, seed=1, max_tokens=5)):
        beside = engine.add_request([1], FIVE)
        output = engine.add_request([3, 4], params)
        run(engine)
        assert beside.outputs[0].token_ids == [1] * 5
        assert output.outputs[0].finish_reason == ("error" if params is odd else "length")


def test_generate_takes_no_text(device: torch.device, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="prompts"):
        Engine(make_executor(device)).generate("a text", progress=False)  # type: ignore[arg-type]
