"""Recovery: what fails ends alone, and any executor will do."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig, SamplingParams, UnifiedBatch
from paged.executors.engine.step import DecodeGroup
from paged.step.batch import PrefillInput
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
from tests.executors.minimal_executor import MinimalExecutor, OtherExecutor
from tests.executors.oracle import make_executor
from tests.executors.parrot import Parrot, UnsupportedParrot, other_executor
from tests.failure import FailedAllocation


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
def test_tokens_that_cannot_be_set_are_set_again(
    overlap: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory for a step's tokens is short now and then, also before a fork has ever had a chunk."""
    fill, calls = DecodeGroup.fill, []

    def short_of_memory(group: DecodeGroup, *arguments: Any) -> None:
        calls.append(group._row_ids)  # made before, so that the tokens are the first allocation
        with FailedAllocation(0 if len(calls) % 3 == 1 else None):
            fill(group, *arguments)

    monkeypatch.setattr(DecodeGroup, "fill", short_of_memory)
    engine = Engine(make_executor(device, num_blocks=64), EngineConfig(overlap=overlap))
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, replace(TEN, n=2), progress=False), strict=True):
        assert [answer.token_ids for answer in output.outputs] == [expected_tokens(prompt, 10)] * 2
    assert engine.metrics.failed_forwards == (len(calls) + 2) // 3 > 1
    check_empty(engine)


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
def test_results_that_do_not_fit(change: Any, device: torch.device) -> None:
    """Of another's executor, which may have moved its caches on."""
    executor = OtherExecutor(make_executor(device), change)
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


@pytest.mark.parametrize("way", [{}, {"preemption": "swap", "admission_tokens": 0}, {"overlap": True}], ids=str)
def test_another_executor_with_a_cache(way: dict[str, Any], device: torch.device) -> None:
    """It reserves and commits by itself; prefixes, forks and swap are its manager's."""
    num_blocks = 12 if "preemption" in way else 64
    executor = OtherExecutor(make_executor(device, num_blocks=num_blocks, num_swap_blocks=32))
    prompts = [[i] * 16 for i in range(1, 6)]
    engine = Engine(executor, EngineConfig(**way))
    assert run(engine, prompts, TEN) == [expected_tokens(p, 10) for p in prompts]
    assert bool(engine.metrics.preempted["swap"]) == ("preemption" in way)
    forks = engine.generate([prompts[0]], replace(TEN, n=3), progress=False)[0]
    assert [one.token_ids for one in forks.outputs] == [expected_tokens(prompts[0], 10)] * 3
    assert bool(forks.num_cached_tokens) == ("preemption" not in way)
    check_empty(engine)


def test_another_executor_with_a_cache_and_no_mixed_batches(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompts run in the sequences that the engine has allocated, and leave none behind."""
    executor = OtherExecutor(make_executor(device))
    monkeypatch.setattr(executor, "supports_native_unified_decode", lambda: False)
    engine = Engine(executor, EngineConfig(token_budget=6))
    prompts = [[1, 2, 3], [7] * 20]
    assert run(engine, prompts, TEN) == [expected_tokens(prompt, 10) for prompt in prompts]
    assert engine.metrics.failed_forwards == 0
    check_empty(engine)

    # A prompt fails after another sequence of the step has decoded, whose token then runs again.
    prefill = executor.prefill

    def failing(inputs: PrefillInput) -> Any:
        if inputs.input_ids[0, 0] == 9:
            raise RuntimeError("9 breaks it")
        return prefill(inputs)

    monkeypatch.setattr(executor, "prefill", failing)
    first = engine.add_request(prompts[0], TEN)
    engine.step()
    second = engine.add_request([9, 9], TEN)
    engine.step()
    assert [handle.num_tokens for handle in executor.kv_manager.handles()] == [3 + 1]
    run_to_end(engine)
    assert first.outputs[0].token_ids == expected_tokens(prompts[0], 10)
    assert second.error == "RuntimeError: 9 breaks it"
    check_empty(engine)


def test_another_executor_that_chooses_tokens(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = OtherExecutor(make_executor(device, num_blocks=64), list)
    chooses = replace(executor.capabilities(), prefers_tokens=True)
    monkeypatch.setattr(executor, "capabilities", lambda: chooses)
    assert run(Engine(executor), PROMPTS, TEN) == [expected_tokens(p, 10) for p in PROMPTS]


def test_a_minimal_executor_that_fails() -> None:
    executor = MinimalExecutor()
    outputs = Engine(executor).generate([[1, 2], [60], [3]], replace(GREEDY, max_tokens=3), progress=False)
    assert [output.error for output in outputs] == [None, "RuntimeError: 60 breaks it", None]
    assert executor.caches == {}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_function_in_place_of_unified_decode_gets_every_batch(
    overlap: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever counts, traces or breaks calls of an executor that an engine already uses sees all of them."""
    executor = make_executor(device)
    engine = Engine(executor, EngineConfig(overlap=overlap))
    decode = executor.unified_decode
    batches: list[UnifiedBatch] = []

    def noting(batch: UnifiedBatch) -> Any:
        batches.append(batch)
        if len(batches) == 3:
            raise RuntimeError("once")
        return decode(batch)

    monkeypatch.setattr(executor, "unified_decode", noting)
    prompts = [[1, 2, 3], [7] * 20]
    assert run(engine, prompts, TEN) == [expected_tokens(prompt, 10) for prompt in prompts]
    assert engine.metrics.failed_forwards == 1
    num_tokens = sum(len(item.q_tokens) for batch in batches[:2] + batches[3:] for item in batch.items)
    assert num_tokens >= 3 + 20 + 2 * 9
    check_empty(engine)


def test_a_function_in_place_of_unified_decode_keeps_rows_invariant(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch has no word for invariant rows, so each sequence of such an engine runs alone."""
    executor = make_executor(device)
    capabilities = replace(executor.capabilities(), has_invariant_rows=True)
    monkeypatch.setattr(executor, "capabilities", lambda: capabilities)
    engine = Engine(executor, EngineConfig(batch_invariant=True))
    steps: list[tuple[bool, int]] = []
    forward = executor._run

    def noting(step: Any) -> Any:
        steps.append((step.is_invariant, len(step.counts)))
        return forward(step)

    monkeypatch.setattr(executor, "_run", noting)
    prompts = [[1, 2, 3], [7] * 5]
    expected = [expected_tokens(prompt, 10) for prompt in prompts]
    assert run(engine, prompts, TEN) == expected
    assert set(steps) == {(True, 2)}
    steps.clear()
    decode = executor.unified_decode
    monkeypatch.setattr(executor, "unified_decode", lambda batch: decode(batch))
    assert run(engine, prompts, TEN) == expected
    assert set(steps) == {(False, 1)}
    check_empty(engine)
