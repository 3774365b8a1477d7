"""Steps that are launched before the tokens of the last one are read: their order, and that no token depends on it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from paged import Engine, EngineConfig, SamplingParams
from paged.errors import OutOfBlocksError
from paged.executors.sampling.sampler import Sampler
from paged.step.batch import DrawToken, UnifiedBatch, UnifiedBatchItem
from paged.step.staging import HostCopy
from paged.step.step import Step
from tests.executors.engine.answers import ANSWERS
from tests.executors.engine_cases import PROMPTS, TEN, check_empty, run, run_to_end, tokens_of
from tests.executors.minimal_executor import MinimalExecutor
from tests.executors.oracle import make_executor, prompt

OVERLAP = EngineConfig(overlap=True)


class Events(TorchFunctionMode):
    """Notes forwards, and when the host reads values: of a `HostCopy`, or of any tensor outside of a forward."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        self._is_noted = False
        monkeypatch.setattr(engine.executor, "run", self._noting("forward", engine.executor.run))
        monkeypatch.setattr(HostCopy, "numpy", self._noting("read", HostCopy.numpy))
        monkeypatch.setattr(HostCopy, "__init__", self._noting("copy", HostCopy.__init__))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.item) and not self._is_noted:
            self.names.append("wait")
        return func(*args, **(kwargs or {}))

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, noted. On a CPU a forward waits for all that it computes, which does not count."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            self._is_noted = True
            try:
                return call(*args, **kwargs)
            finally:
                self._is_noted = False

        return noted


RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_p": 0.9},
    {"logprobs": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 3, "stop_token_ids": (1,)},
]


@pytest.mark.parametrize("fields", RULES, ids=str)
def test_the_next_forward_is_launched_before_tokens_are_read(
    fields: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy to the host comes before the next forward, reading it after; nothing else waits."""
    engine = Engine(make_executor(device, num_blocks=64), OVERLAP)
    engine.add_request([1, 2, 3], replace(TEN, max_tokens=4, **fields))
    with Events(engine, monkeypatch) as events:
        run_to_end(engine)
    assert events.names == ["forward", "copy", *["forward", "copy", "read"] * 3, "read"]
    assert (engine.metrics.steps, engine.metrics.overlapped_steps, engine.metrics.dropped_tokens) == (4, 3, 0)


def test_off_by_default_on_a_cpu_and_without_the_capability(device: torch.device) -> None:
    engine, plain = Engine(make_executor(device, num_blocks=64)), Engine(MinimalExecutor(), OVERLAP)
    run(engine, PROMPTS, TEN)
    assert bool(engine.metrics.overlapped_steps) == (device.type == "cuda")
    plain.generate([[1], [2]], replace(TEN, max_tokens=3), progress=False)
    assert plain.metrics.overlapped_steps == 0


def random_params(seed: int, index: int) -> SamplingParams:
    """All that changes how a token is chosen, and how a completion ends."""
    draw = torch.Generator().manual_seed(100 * seed + index)
    chance = torch.rand(8, generator=draw).tolist()
    return SamplingParams(
        temperature=[0.0, 1.0][chance[0] < 0.7],
        top_p=[1.0, 0.9][chance[1] < 0.3],
        repetition_penalty=[1.0, 1.4][chance[2] < 0.4],
        presence_penalty=[0.0, 0.6][chance[3] < 0.3],
        logprobs=2 if chance[4] < 0.3 else None,
        n=3 if chance[5] < 0.3 else 1,
        min_tokens=[0, 4][chance[6] < 0.3],
        stop_token_ids=tuple(range(0, 256, 17)) if chance[7] < 0.5 else (),
        max_tokens=4 + index % 9,
        seed=index,
    )


@pytest.mark.parametrize("config", [{}, {"token_budget": 9, "chunk_size": 4}, {"num_blocks": 14}], ids=str)
def test_nothing_depends_on_it(config: dict[str, Any], device: torch.device) -> None:
    """Requests of every kind, that come while others run: tokens, log probabilities and ends are the same."""
    results = []
    for overlap in (False, True):
        options = dict(config)
        executor = make_executor(device, num_blocks=options.pop("num_blocks", 128))
        engine = Engine(executor, EngineConfig(overlap=overlap, admission_tokens=2, **options), seed=5)
        outputs = []
        for index in range(24):
            text = [index % 5, 3, 1, *range(index % 11)]
            outputs.append(engine.add_request(text, random_params(1, index)))
            if index % 3 == 2:
                engine.step()
        run_to_end(engine)
        results.append(
            [[(o.token_ids, o.logprobs, o.finish_reason, o.stop_reason) for o in one.outputs] for one in outputs]
        )
        check_empty(engine)
        assert bool(engine.metrics.overlapped_steps) == bool(engine.metrics.dropped_tokens) == overlap
        assert bool(engine.metrics.preempted) == ("num_blocks" in config)
    assert results[0] == results[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_executor_that_chooses_tokens(overlap: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so while no request asks for more, and a request's tokens are the same beside one that does."""
    plain, penalised = (SamplingParams(max_tokens=12, seed=3, **fields) for fields in ({}, {"repetition_penalty": 1.3}))
    results, chosen = [], []
    for prefers_tokens in (False, True):
        executor = make_executor(device, num_blocks=64)
        capabilities, run_step = replace(executor.capabilities(), prefers_tokens=prefers_tokens), executor.run

        def noted(step: Step, run_step: Any = run_step) -> Any:
            chosen.extend(isinstance(policy, DrawToken) for policy in step.policies or ())
            return run_step(step)

        monkeypatch.setattr(executor, "capabilities", lambda given=capabilities: given)
        monkeypatch.setattr(executor, "run", noted)
        engine = Engine(executor, EngineConfig(overlap=overlap))
        first = engine.add_request([1, 2, 3], plain)
        for _ in range(4):
            engine.step()
        second = engine.add_request([4, 5], replace(penalised, max_tokens=4))
        run_to_end(engine)
        results.append(tokens_of([first, second]))
        assert any(chosen) == prefers_tokens
    assert results[0] == results[1]


def test_one_that_ends_early(device: torch.device) -> None:
    """By a stop id: the token that was under way for it is dropped, its blocks come back at once, others go on."""
    engine = Engine(make_executor(device, num_blocks=64), OVERLAP)
    stop = ANSWERS[1][3]
    params = [TEN, replace(TEN, stop_token_ids=(stop,)), TEN]
    outputs = [engine.add_request(one, fields) for one, fields in zip(PROMPTS[:3], params, strict=True)]
    while not outputs[1].finished:
        engine.step()
    manager = engine.executor.kv_manager
    assert manager is not None
    assert len(manager.handles()) == 2
    run_to_end(engine)
    assert outputs[1].outputs[0].finish_reason == "stop"
    until_stop = ANSWERS[1][: ANSWERS[1].index(stop) + 1]
    assert tokens_of(outputs) == [ANSWERS[0], until_stop, ANSWERS[2]]
    assert engine.metrics.dropped_tokens == 1
    text = [*PROMPTS[1], *until_stop]
    found = manager.allocate("again", token_ids=[*text, 0])
    assert found.num_cached_tokens == (len(text) - 1) // 8 * 8, "blocks of known tokens are published, and no others"


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_of_the_engine_are_not_checked_again(
    overlap: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are valid and hold their capacity. A batch of a caller is checked."""
    executor = make_executor(device, num_blocks=64)
    checked = Mock(wraps=executor._check_items)
    monkeypatch.setattr(executor, "_check_items", checked)
    config = EngineConfig(overlap=overlap)
    assert run(Engine(executor, config), PROMPTS, TEN) == ANSWERS
    assert not checked.called
    executor.unified_decode(UnifiedBatch([UnifiedBatchItem("a", PROMPTS[0])]))
    assert checked.called
    executor.release_cache("a")
    executor.kv_manager.check_integrity()


def test_drain_reads_what_is_under_way(device: torch.device) -> None:
    """And launches nothing; then the engine goes on."""
    engine = Engine(make_executor(device, num_blocks=64), OVERLAP)
    outputs = [engine.add_request(one, TEN) for one in PROMPTS]
    engine.step()
    forwards, lengths = engine.executor.status().forwards, [len(one.outputs[0].token_ids) for one in outputs]
    assert engine.drain() == outputs
    assert [len(one.outputs[0].token_ids) for one in outputs] == [length + 1 for length in lengths]
    assert engine.drain() == []
    assert engine.executor.status().forwards == forwards
    run_to_end(engine)
    assert tokens_of(outputs) == ANSWERS


@pytest.mark.parametrize("error", [RuntimeError("flaky"), OutOfBlocksError(2, 1)], ids=["error", "blocks"])
def test_a_forward_that_fails_ahead_runs_again(
    error: Exception, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, with the tokens of the one before: no request notices."""
    executor = make_executor(device, num_blocks=64)
    run_step, steps = executor.run, []

    def flaky(step: Step) -> Any:
        steps.append(step.device_ids is not None)
        if len(steps) in (3, 6):
            raise error
        return run_step(step)

    monkeypatch.setattr(executor, "run", flaky)
    engine = Engine(executor, OVERLAP)
    assert run(engine, PROMPTS, TEN) == ANSWERS
    assert steps[2:5] == [True, False, True]
    check_empty(engine)


@pytest.mark.parametrize("fields", RULES[1:], ids=str)
def test_sampling_that_fails_ahead_is_done_again(
    fields: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tables of penalties that are built anew from tokens that were under way, which are read first."""
    params, answers = replace(TEN, seed=3, **fields), []
    choose, calls = Sampler._choose, [0]

    def flaky(self: Sampler, *args: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 4:
            raise RuntimeError("out of memory")
        return choose(self, *args)

    for method in (choose, flaky):
        monkeypatch.setattr(Sampler, "_choose", method)
        answers.append(run(Engine(make_executor(device, num_blocks=64), OVERLAP), PROMPTS, params))
    assert calls[0] >= 10
    assert answers[0] == answers[1]


def test_an_executor_that_is_used_by_others_too(device: torch.device) -> None:
    executor = make_executor(device, num_blocks=64)
    engine = Engine(executor, OVERLAP)
    output = engine.add_request(PROMPTS[2], TEN)
    while engine.num_unfinished:
        engine.step()
        handle = executor.prefill(prompt([1, 2, 3])).kv_cache
        executor.release_cache(handle.cache_id)
        executor.kv_manager.check_integrity()
    assert output.outputs[0].token_ids == ANSWERS[2]
    check_empty(engine)


@pytest.mark.parametrize("num_errors", [1, 2])
def test_a_read_that_fails_is_repeated_once(num_errors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the whole step: its tokens come in one copy. If it fails again, all completions of the step fail."""
    engine = Engine(make_executor(torch.device("cpu")), EngineConfig(overlap=False))
    expected = run(engine, [[1, 2], [3, 4]], TEN)
    numpy, calls = HostCopy.numpy, []

    def failing(copy: HostCopy) -> Any:
        calls.append(copy)
        if len(calls) <= num_errors:
            raise MemoryError("full")
        return numpy(copy)

    monkeypatch.setattr(HostCopy, "numpy", failing)
    outputs = engine.generate([[1, 2], [3, 4]], TEN, progress=False)
    if num_errors == 1:
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert len(calls) == 1 + TEN.max_tokens
    else:
        assert [output.error for output in outputs] == ["MemoryError: full"] * 2
        assert len(calls) == 2
    check_empty(engine)
