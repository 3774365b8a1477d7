"""How requests end, what their texts are then, and their times."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig, SamplingParams
from tests.executors.engine_cases import EOS, FIVE, GREEDY, TOKENIZER, encode, recall_engine, recall_prompts, run_to_end
from tests.executors.oracle import make_executor


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the time is for an engine, in seconds."""
    now = [100.0]
    for module in ("core", "engine", "unfinished_requests"):
        monkeypatch.setattr(f"paged.executors.engine.{module}.perf_counter", lambda: now[0])
    return now


def test_pictures_name_requests(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within a step, between the cache's reservation and its commit."""
    executor = make_executor(device)
    engine, pictures = Engine(executor), []
    attend = executor._attend
    monkeypatch.setattr(executor, "_attend", lambda step: pictures.append(engine.picture()) or attend(step))
    engine.add_request([1] * 20, replace(FIVE, n=2), request_id="alice")
    engine.add_request([2] * 9, FIVE, request_id=7)
    run_to_end(engine)
    assert [one.request_id for one in pictures[0].sequences] == ["alice/0", "7/0"]
    assert {one.request_id for one in pictures[1].sequences} == {"alice/0", "alice/1", "7/0"}
    assert engine.picture().sequences == ()


def test_ends_of_a_text() -> None:
    """The answer is two words and a terminator, which is the end token."""
    prompt = next(one for one in recall_prompts(20) if one.answer.count(" ") == 1)
    ids, (first, second) = encode([prompt])[0], prompt.answer.split()
    engine = recall_engine()

    def ask(**fields: Any) -> Any:
        output = engine.add_request(ids, replace(GREEDY, **fields))
        run_to_end(engine)
        return output.outputs[0]

    whole = ask()
    assert (whole.text.strip(), whole.finish_reason, whole.stop_reason) == (prompt.answer, "stop", EOS[0])
    assert len(whole.token_ids) == 3
    cut = ask(stop=[second[1:3], "never"])
    assert (cut.text.strip(), cut.stop_reason) == (f"{first} {second[0]}", second[1:3])
    assert cut.token_ids == whole.token_ids[:2]
    assert ask(stop=f"{first[-1]} {second[0]}").text.strip() == first[:-1]
    by_id = ask(stop_token_ids=[whole.token_ids[1]])
    assert (by_id.token_ids, by_id.text.strip(), by_id.stop_reason) == (whole.token_ids[:2], first, whole.token_ids[1])
    short = ask(max_tokens=1, stop=second)
    assert (short.text.strip(), short.finish_reason) == (first, "length")
    on = ask(ignore_eos=True, max_tokens=6)
    assert (len(on.token_ids), on.finish_reason, on.token_ids[:3]) == (6, "length", whole.token_ids)
    assert on.text == TOKENIZER.decode(on.token_ids)
    later = ask(min_tokens=5, max_tokens=6)
    assert EOS[0] not in later.token_ids[:4]
    assert len(later.token_ids) >= 5
    assert EOS[0] not in ask(logit_bias={EOS[0]: -1e9}, max_tokens=5).token_ids

    stream = engine.stream(ids, replace(GREEDY, stop=f" {second}"))
    texts = [output.outputs[0].text for output in stream]
    assert texts[-1].strip() == first
    assert all(texts[-1].startswith(text) for text in texts), "what may be a stop is held back"
    plain = [output.copy() for output in engine.stream(ids, GREEDY)]
    assert [len(output.outputs[0].token_ids) for output in plain] == [1, 2, 3]
    assert [output.finished for output in plain] == [False, False, True]


def test_a_request_may_time_out(device: torch.device, clock: list[float]) -> None:
    """One that waits, and one that runs: others go on."""
    engine = Engine(make_executor(device), EngineConfig(max_num_seqs=2))
    long = SamplingParams(temperature=0, max_tokens=100)
    stays = engine.add_request([1], long)
    runs = engine.add_request([2], long, timeout_s=0.2)
    waits = engine.add_request([3], long, timeout_s=0.0)
    engine.step()
    assert (waits.outputs[0].finish_reason, waits.outputs[0].token_ids) == ("timeout", [])
    clock[0] += 0.25
    assert [output for output in engine.step() if output is not stays] == [runs]
    assert (runs.outputs[0].finish_reason, len(runs.outputs[0].token_ids)) == ("timeout", 1)
    assert "not done after 0." in str(runs.error)
    run_to_end(engine)
    assert len(stays.outputs[0].token_ids) == 100
    assert engine.metrics.finished == {"timeout": 2, "length": 1}


def test_a_request_knows_its_times(device: torch.device, clock: list[float]) -> None:
    """The mean is over the tokens of all completions: not the request's time by the tokens of one."""
    engine = Engine(make_executor(device), EngineConfig(max_num_seqs=2))
    first = engine.add_request([1], SamplingParams(temperature=0, n=2, max_tokens=5))
    second = engine.add_request([2], SamplingParams(temperature=0, max_tokens=3))
    assert first.metrics.queued_s is first.metrics.first_token_s is first.metrics.mean_token_s is None
    while engine.num_unfinished:
        clock[0] += 1.0
        engine.step()
    assert (first.metrics.queued_s, first.metrics.first_token_s, first.metrics.mean_token_s) == (1.0, 1.0, 1.0)
    assert (second.metrics.queued_s, second.metrics.first_token_s, second.metrics.mean_token_s) == (6.0, 6.0, 1.0)
    per_token = engine.metrics.time_per_output_token
    assert (per_token.total, per_token.count) == (2.0, 2)


def test_rows_without_a_valid_token_end_alone(device: torch.device) -> None:
    """The only token that is allowed is an end token that may not come yet."""
    engine = Engine(make_executor(device))
    odd = SamplingParams(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=2, top_p=0.9, max_tokens=5)
    for params in (odd, SamplingParams(temperature=1e-37, top_p=0.5, seed=1, max_tokens=5)):
        beside = engine.add_request([1], FIVE)
        output = engine.add_request([3, 4], params)
        run_to_end(engine)
        assert beside.outputs[0].token_ids == [1] * 5
        assert output.outputs[0].finish_reason == ("error" if params is odd else "length")
        assert output.error == ("the logits left no token to choose" if params is odd else None)
