"""StepRunner: what fails ends alone, and any executor will do."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig, SamplingParams
from tests.executors.engine.answers import parrot_tokens
from tests.executors.engine_cases import (
    GREEDY,
    PROMPTS,
    TEN,
    check_empty,
    encode,
    expected_tokens,
    recall_engine,
    recall_prompts,
    run,
    run_to_end,
    tokens_of,
)
from tests.executors.minimal_executor import MinimalExecutor
from tests.executors.oracle import make_executor
from tests.executors.parrot import Parrot, UnsupportedParrot, other_executor


def test_a_reservation_that_fails_runs_nothing(device: torch.device) -> None:
    """With swap nothing is computed twice, so the executor's counts are exact whatever was refused in between."""
    prompts = [[i] * 16 for i in range(1, 6)]
    executor = make_executor(device, num_blocks=12, num_swap_blocks=32)
    engine = Engine(executor, EngineConfig(preemption="swap", admission_tokens=0))
    assert run(engine, prompts, TEN) == [expected_tokens(p, 10) for p in prompts]
    assert engine.metrics.preempted["swap"] > 0
    assert not engine.metrics.preempted["recompute"]
    assert (executor.prefill_count, executor.decode_count) == (5, 45)
    assert executor.status().prefill_tokens == engine.metrics.prefill_tokens == 80
    assert executor.kv_manager.stats().allocation_failures > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sequence_that_a_caller_frees_ends_alone(overlap: bool) -> None:
    """Its step cannot be reserved. The others had the same rows for some steps, and go on from their newest tokens."""
    prompts, params = encode(recall_prompts()), replace(TEN, ignore_eos=True)
    expected = run(recall_engine(num_blocks=256), prompts, params)
    engine = recall_engine(num_blocks=256, overlap=overlap)
    outputs = [engine.add_request(prompt, params, request_id=index) for index, prompt in enumerate(prompts)]
    for _ in range(4):
        engine.step()
    (seq_id,) = [seq_id for seq_id, name in engine.sequence_names().items() if name == "1/0"]
    engine.executor.release_cache(seq_id)
    run_to_end(engine)
    assert str(outputs[1].error).startswith("StaleHandleError")
    del outputs[1], expected[1]
    assert tokens_of(outputs) == expected


@pytest.mark.parametrize("change", [lambda rows: rows[:-1], lambda rows: [None, *rows[1:]], lambda rows: []])
def test_results_that_do_not_fit(change: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an executor, which may have moved its caches on."""
    executor = make_executor(device)
    forward = executor.unified_decode
    monkeypatch.setattr(executor, "unified_decode", lambda batch: change(forward(batch)))
    engine = Engine(executor)
    for output in engine.generate(PROMPTS, TEN, progress=False):
        assert output.outputs[0].finish_reason == "error"
        assert "results for 5 items" in str(output.error)
    assert engine.metrics.failed_forwards == 1
    check_empty(engine)


@pytest.mark.parametrize("other", [MinimalExecutor, Parrot, UnsupportedParrot])
def test_any_executor_will_do(other: Any) -> None:
    """One with the five required calls, and another's model behind LlmExecutor: no forks, no prefixes, same answers."""
    prompts, cached = [[1, 2, 3], [4], [5, 6]], other()
    executor = cached if other is MinimalExecutor else other_executor(cached)
    engine = Engine(executor, EngineConfig(chunk_size=2))
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=4, n=2), progress=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.error is None
        assert [one.token_ids for one in output.outputs] == [parrot_tokens(prompt, 4)] * 2
    assert engine.num_unfinished == 0
    assert cached.caches == {}


def test_a_minimal_executor_that_fails() -> None:
    executor = MinimalExecutor()
    outputs = Engine(executor).generate([[1, 2], [60], [3]], replace(GREEDY, max_tokens=3), progress=False)
    assert [output.error for output in outputs] == [None, "RuntimeError: 60 breaks it", None]
    assert executor.caches == {}
