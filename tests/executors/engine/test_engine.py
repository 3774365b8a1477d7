"""The engine under load and in trouble: everything ends, nothing leaks, and a failure takes no other with it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig, InvalidInputError, QueueFullError, RequestOutput, SamplingParams
from paged.executors.model_executor import ExecutorShutDownError
from tests.executors.engine_cases import FIVE, PROMPTS, TEN, check_empty, expected_tokens, run_to_end
from tests.executors.oracle import make_executor


@pytest.mark.parametrize("length", [1, 2, 30])
@pytest.mark.parametrize("chunk_size", [4, 64, None])
def test_n_tokens_are_one_prefill_and_the_decodes(length: int, chunk_size: int | None, device: torch.device) -> None:
    executor = make_executor(device)
    prompt = [(3 * i + 1) % 11 for i in range(length)]
    engine = Engine(executor, EngineConfig(chunk_size=chunk_size))
    [output] = engine.generate([prompt], TEN, progress=False)
    assert output.outputs[0].token_ids == expected_tokens(prompt, 10)
    assert (executor.prefill_count, executor.decode_count) == (1, 9)
    metrics = engine.metrics
    assert (metrics.prefill_tokens, metrics.decode_tokens, metrics.generated_tokens) == (length, 9, 10)
    assert metrics.steps == math.ceil(length / (chunk_size or length)) + 9
    check_empty(engine)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_poisson_arrivals_with_aborts(preemption: Any, device: torch.device) -> None:
    rng = random.Random(5)
    executor = make_executor(device, num_blocks=40, num_swap_blocks=20)
    config = EngineConfig(token_budget=48, max_num_seqs=24, preemption=preemption, admission_tokens=4)
    engine = Engine(executor, config, seed=1)
    outputs: list[RequestOutput] = []
    live: list[RequestOutput] = []
    aborted: set[Any] = set()
    reported: dict[Any, int] = {}
    next_arrival, step = 0.0, 0
    while len(outputs) < 200 or engine.num_unfinished:
        while len(outputs) < 200 and next_arrival <= step:
            params = SamplingParams(
                temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randint(1, 30), n=rng.choice([1, 1, 3]), seed=3
            )
            prompt = [rng.randrange(11) for _ in range(rng.randint(1, 60))]
            outputs.append(engine.add_request(prompt, params, priority=rng.choice([0, 0, 1])))
            live.append(outputs[-1])
            next_arrival += rng.expovariate(1.2)
        if live and rng.random() < 0.2:
            victim = rng.choice(live)
            assert engine.abort(victim.request_id)
            assert victim.finished
            assert not engine.abort(victim.request_id)
            live.remove(victim)
            aborted.add(victim.request_id)
        for output in engine.step():
            if output.finished:
                assert output.request_id not in reported
                reported[output.request_id] = step
        live = [output for output in live if not output.finished]
        step += 1
        if step % 10 == 0:
            executor.kv_manager.check_integrity()
    assert len({output.request_id for output in outputs}) == 200
    assert all(output.finished and output.error is None for output in outputs)
    for output in outputs:
        reasons = {one.finish_reason for one in output.outputs}
        assert reasons <= ({"length", "abort"} if output.request_id in aborted else {"length"})
        assert (output.request_id in reported) != (output.request_id in aborted)
    assert sum(engine.metrics.finished.values()) == 200
    assert engine.metrics.finished["abort"] > 10
    assert engine.metrics.preempted
    assert not engine.metrics.failed_forwards
    check_empty(engine)


def test_a_long_prompt_does_not_stop_decodes(device: torch.device) -> None:
    executor = make_executor(device, num_blocks=128, max_sequence_length=600)
    engine = Engine(executor, EngineConfig(token_budget=32))
    short = [engine.add_request([i, 1, i], SamplingParams(temperature=0, max_tokens=40)) for i in range(8)]
    engine.step()
    long = engine.add_request([3] * 500, replace(TEN, max_tokens=2))
    for step in range(20):
        before = [len(output.outputs[0].token_ids) for output in short]
        rows = engine.metrics.prefill_tokens + engine.metrics.decode_tokens
        engine.step()
        assert [len(output.outputs[0].token_ids) for output in short] == [count + 1 for count in before]
        assert engine.metrics.prefill_tokens + engine.metrics.decode_tokens - rows == 32
        assert not long.outputs[0].token_ids, f"step {step}"
    while engine.num_unfinished:
        engine.step()
    check_empty(engine)


def test_seeds_give_the_same_tokens_in_any_company(device: torch.device) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=42, max_tokens=12, n=2)
    alone = Engine(make_executor(device), seed=0).generate([PROMPTS[3]], params, progress=False)[0]
    first, second = (one.token_ids for one in alone.outputs)
    assert first != second
    executor = make_executor(device, num_blocks=12, num_swap_blocks=4)
    config = EngineConfig(chunk_size=3, admission_tokens=0, preemption="swap", token_budget=9)
    engine = Engine(executor, config, seed=99)
    others = [engine.add_request(prompt, replace(params, seed=None, max_tokens=20)) for prompt in PROMPTS]
    same = engine.add_request(PROMPTS[3], params)
    while engine.num_unfinished:
        engine.step()
    assert [one.token_ids for one in same.outputs] == [first, second]
    assert engine.metrics.preempted
    assert others[3].outputs[0].token_ids[:12] != first
    again = Engine(make_executor(device), seed=99).generate(PROMPTS, replace(params, seed=None), progress=False)
    assert [o.outputs[1].token_ids for o in again] == [o.outputs[1].token_ids[:12] for o in others], "the engine's seed"


def test_streams_in_turns_and_left_early(device: torch.device) -> None:
    engine = Engine(make_executor(device))
    streams = [engine.stream(prompt, TEN) for prompt in PROMPTS[:3]]
    last = [None] * 3
    for _ in range(12):
        for index, stream in enumerate(streams):
            last[index] = next(stream, last[index])  # type: ignore[assignment]
    for prompt, output in zip(PROMPTS, last, strict=False):
        assert output is not None
        assert output.finished
        assert output.outputs[0].token_ids == expected_tokens(prompt, 10)
    early = engine.stream(PROMPTS[0], TEN)
    next(early)
    assert engine.num_unfinished == 1
    early.close()
    check_empty(engine)
    with pytest.raises(InvalidInputError, match="expected one for each of 2 prompts"):
        engine.generate(PROMPTS[:2], [TEN])
    with pytest.raises(InvalidInputError, match="empty prompt"):
        engine.generate([[1], []], TEN)
    check_empty(engine)


def test_after_the_executor_is_shut_down(device: torch.device) -> None:
    executor = make_executor(device)
    engine = Engine(executor)
    engine.add_request([1], TEN)
    executor.shutdown()
    with pytest.raises(ExecutorShutDownError):
        engine.step()


def test_bar_shows_what_is_done(capsys: pytest.CaptureFixture[str], device: torch.device) -> None:
    Engine(make_executor(device)).generate(PROMPTS, TEN)
    assert "5/5" in capsys.readouterr().err


def test_an_id_may_be_used_again_while_its_stream_is_open(device: torch.device) -> None:
    engine = Engine(make_executor(device))
    stream = engine.stream([1], FIVE, request_id="a")
    while not next(stream).finished:
        pass
    second = engine.add_request([2], FIVE, request_id="a")
    stream.close()
    run_to_end(engine)
    assert second.outputs[0].finish_reason == "length"


def test_a_queue_has_an_end(device: torch.device) -> None:
    engine = Engine(make_executor(device), EngineConfig(max_waiting=2, max_num_seqs=1))
    for _ in range(2):
        engine.add_request([1], FIVE)
    with pytest.raises(QueueFullError, match="2 completions wait, max_waiting is 2"):
        engine.add_request([1], FIVE, request_id="a")
    engine.step()
    engine.add_request([1], FIVE, request_id="a")
    run_to_end(engine)


def test_generate_takes_no_text(device: torch.device, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="prompts"):
        Engine(make_executor(device)).generate("a text", progress=False)  # type: ignore[arg-type]
