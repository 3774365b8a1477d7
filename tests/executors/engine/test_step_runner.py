"""StepRunner: what fails ends alone, and what does not fit the results ends at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig, SamplingParams, UnifiedBatch
from tests.executors.engine_cases import GREEDY, PROMPTS, TEN, check_empty, expected_tokens, spy, tokens_of
from tests.executors.oracle import make_executor
from tests.executors.parrot import UnifiedParrot, other_executor


def test_a_reservation_that_fails_runs_nothing(device: torch.device) -> None:
    """With swap nothing is computed twice, so the executor's counts are exact whatever was refused in between."""
    prompts = [[i] * 16 for i in range(1, 6)]
    executor = make_executor(device, num_blocks=12, num_swap_blocks=32)
    engine = Engine(executor, EngineConfig(preemption="swap", admission_tokens=0))
    assert tokens_of(engine.generate(prompts, TEN, progress=False)) == [expected_tokens(p, 10) for p in prompts]
    assert engine.metrics.preempted["swap"] > 0
    assert not engine.metrics.preempted["recompute"]
    assert (executor.prefill_count, executor.decode_count) == (5, 45)
    assert executor.status().prefill_tokens == engine.metrics.prefill_tokens == 80
    assert executor.kv_manager.stats().allocation_failures > 0
    check_empty(engine)


def test_one_that_cannot_run_fails_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its third token breaks the forward it is in, whatever else is in that forward."""
    executor = make_executor(device)
    engine = Engine(executor)
    outputs = [engine.add_request(prompt, TEN, metadata={"index": at}) for at, prompt in enumerate(PROMPTS)]
    poisoned = outputs[2]

    def breaks(batch: UnifiedBatch) -> None:
        for item in batch.items:
            if item.metadata["index"] == 2 and len(poisoned.outputs[0].token_ids) == 3:
                raise RuntimeError("a bad token")

    spy(monkeypatch, executor, breaks)
    while engine.num_unfinished:
        engine.step()
    assert (poisoned.outputs[0].finish_reason, poisoned.error) == ("error", "RuntimeError: a bad token")
    assert poisoned.outputs[0].token_ids == expected_tokens(PROMPTS[2], 3)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        if output is not poisoned:
            assert output.error is None
            assert output.outputs[0].token_ids == expected_tokens(prompt, 10)
    assert engine.metrics.finished == {"length": 4, "error": 1}
    assert engine.metrics.failed_forwards == 3, "of five, of two, of one"
    check_empty(engine)


@pytest.mark.parametrize("n", [1, 3])
def test_an_error_that_does_not_come_again_ends_none(
    n: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(device, num_blocks=64)
    engine = Engine(executor)
    calls = [0]

    def flaky(batch: UnifiedBatch) -> None:
        calls[0] += 1
        if calls[0] in (1, 4, 9):
            raise RuntimeError("a moment of weakness")

    spy(monkeypatch, executor, flaky)
    outputs = engine.generate(PROMPTS, replace(TEN, n=n), progress=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert [one.token_ids for one in output.outputs] == [expected_tokens(prompt, 10)] * n
    assert engine.metrics.failed_forwards == 3
    check_empty(engine)


def test_a_prompt_that_fails_takes_its_forks_along(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(device)
    engine = Engine(executor)

    def breaks(batch: UnifiedBatch) -> None:
        if any(5 in item.q_tokens for item in batch.items):
            raise RuntimeError("five")

    spy(monkeypatch, executor, breaks)
    bad, good = engine.generate([[1, 5], [1, 2]], SamplingParams(n=3, temperature=0, max_tokens=1), progress=False)
    assert [one.finish_reason for one in bad.outputs] == ["error"] * 3
    assert [one.finish_reason for one in good.outputs] == ["length"] * 3
    assert bad.error == "RuntimeError: five"
    check_empty(engine)


@pytest.mark.parametrize("change", [lambda rows: rows[:-1], lambda rows: [None, *rows[1:]], lambda rows: []])
def test_results_that_do_not_fit(
    change: Callable[[list[Any]], list[Any]], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an executor, which may have moved its caches on, or of a model, whose executor takes back what it did."""
    executor = make_executor(device)
    forward = executor.unified_decode
    monkeypatch.setattr(executor, "unified_decode", lambda batch: change(forward(batch)))
    engine = Engine(executor)
    for output in engine.generate(PROMPTS, TEN, progress=False):
        assert output.outputs[0].finish_reason == "error"
        assert output.error is not None
        assert "results for 5 items" in output.error
    assert engine.metrics.failed_forwards == 1
    check_empty(engine)

    model = UnifiedParrot()
    monkeypatch.setattr(model, "answer", change)
    for output in Engine(other_executor(model)).generate([[1], [2]], GREEDY, progress=False):
        assert output.error is not None
    assert model.caches == {}


def test_logits_that_say_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(device)
    forward = executor.unified_decode

    def unified_decode(batch: UnifiedBatch) -> Any:
        rows = forward(batch)
        return [row * math.nan if item.q_tokens[0] == 5 else row for row, item in zip(rows, batch.items, strict=True)]

    monkeypatch.setattr(executor, "unified_decode", unified_decode)
    engine = Engine(executor)
    bad, good = engine.generate([[5, 1], [1, 2]], replace(TEN, max_tokens=1), progress=False)
    assert (bad.outputs[0].token_ids, bad.error) == ([], "the logits left no token to choose")
    assert good.outputs[0].token_ids == expected_tokens([1, 2], 1)
    check_empty(engine)
