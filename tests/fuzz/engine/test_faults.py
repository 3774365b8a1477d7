"""Whatever raises on behalf of one completion, it alone ends: the others' tokens are those of runs of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from paged import AsyncEngine, EngineStoppedError, PromptLookup, RequestOutput, SamplingParams
from paged.executors.engine.cache_space import BlockSpace
from paged.executors.engine.lifecycle import RequestLifecycle
from paged.executors.requests.request import Completion
from paged.executors.sampling.sampler import Drafts, Sampler
from tests.executors.engine_cases import check_empty
from tests.fuzz.engine.neighbours import add_neighbours, alone, check_neighbours, run_to_end, small_engine
from tests.fuzz.engine.test_requests import tokens_of
from tests.fuzz.fuzzing import fuzz

Patch = pytest.MonkeyPatch


class SilentError(Exception):
    """Raises even when it is asked what it says."""

    def __str__(self) -> str:
        raise RuntimeError("no message")


class PanicException(BaseException):
    """No `Exception`, as what tokenizers and other extensions in Rust raise when they panic."""


ERRORS: dict[str, type[BaseException]] = {
    one.__name__: one
    for one in (
        RuntimeError,
        MemoryError,
        KeyError,
        StopIteration,
        RecursionError,
        AssertionError,
        SilentError,
        PanicException,
        asyncio.CancelledError,
        GeneratorExit,
    )
}
# Where a signal cannot have raised them, they too are of whoever was called.
EXITS: dict[str, type[BaseException]] = {"KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit}
VICTIM = [4, 4, 8]


def fault_tokenizer(patch: Patch, is_victim: Callable[[Completion], bool], fail: Callable[[], None]) -> None:
    whole = Completion._read_text

    def read(self: Completion, *args: Any, **options: Any) -> bool:
        if is_victim(self):
            fail()
        return whole(self, *args, **options)

    patch.setattr(Completion, "_read_text", read)


def fault_stop_check(patch: Patch, is_victim: Callable[[Completion], bool], fail: Callable[[], None]) -> None:
    whole = Completion.finish_reason

    def finish_reason(self: Completion) -> str | None:
        reason = whole(self)
        if is_victim(self):
            fail()
        return reason

    patch.setattr(Completion, "finish_reason", finish_reason)


def fault_sampling(patch: Patch, is_victim: Callable[[Completion], bool], fail: Callable[[], None]) -> None:
    for name in ("sample", "verify"):
        whole = getattr(Sampler, name)

        def sample(self: Sampler, logits: Any, completions: list[Completion], *rest: Any, whole: Any = whole) -> Any:
            sampled = whole(self, logits, completions, *rest)
            if any(map(is_victim, completions)):
                fail()
            return sampled

        patch.setattr(Sampler, name, sample)


def fault_admission(patch: Patch, is_victim: Callable[[Completion], bool], fail: Callable[[], None]) -> None:
    for name in ("_take_blocks", "_growth_of"):
        whole = getattr(BlockSpace, name)

        def admit(self: BlockSpace, completion: Completion, whole: Any = whole) -> Any:
            if is_victim(completion):
                fail()
            return whole(self, completion)

        patch.setattr(BlockSpace, name, admit)


def fault_fork(patch: Patch, is_victim: Callable[[Completion], bool], fail: Callable[[], None]) -> None:
    whole = BlockSpace.fork

    def fork(self: BlockSpace, source: Completion, target: Completion) -> None:
        if is_victim(target):
            fail()
        whole(self, source, target)

    patch.setattr(BlockSpace, "fork", fork)


def fault_forward(patch: Patch, is_victim: Callable[[Completion], bool], fail: Callable[[], None]) -> None:
    from paged.executors.engine.batch_runner import UnifiedRunner

    whole = UnifiedRunner.run

    def run(self: UnifiedRunner, group: list[Completion]) -> list[torch.Tensor | None]:
        rows = whole(self, group)
        for index, completion in enumerate(group):
            if is_victim(completion) and rows[index] is not None:
                rows[index] = torch.zeros(3)  # no logits of this model
        return rows

    patch.setattr(UnifiedRunner, "run", run)


def fault_logits(patch: Patch, is_victim: Callable[[Completion], bool], fail: Callable[[], None]) -> None:
    from paged.executors.engine.batch_runner import UnifiedRunner

    whole = UnifiedRunner.run

    def run(self: UnifiedRunner, group: list[Completion]) -> list[torch.Tensor | None]:
        rows = whole(self, group)
        for completion, row in zip(group, rows, strict=True):
            if is_victim(completion) and row is not None:
                row.fill_(torch.nan)
        return rows

    patch.setattr(UnifiedRunner, "run", run)


def fault_metrics(patch: Patch, is_victim: Callable[[Completion], bool], fail: Callable[[], None]) -> None:
    whole = RequestLifecycle.finish

    def finish(self: RequestLifecycle, completion: Completion, reason: str) -> None:
        if is_victim(completion):
            patch.setattr(self.metrics, "time_per_output_token", None)
        whole(self, completion, reason)

    patch.setattr(RequestLifecycle, "finish", finish)


FAULTS = {name.removeprefix("fault_"): fault for name, fault in dict(globals()).items() if name.startswith("fault_")}
CASES = st.fixed_dictionaries(
    {
        "fault": st.sampled_from(sorted(FAULTS)),
        "error": st.sampled_from(sorted(ERRORS)),
        "tokens": st.integers(0, 5),
        "index": st.integers(0, 2),
        "drafts": st.booleans(),
        "n": st.integers(1, 3),
    }
)


def install(case: dict[str, Any], patch: Patch) -> None:
    """Have the case's fault raise for one completion of the victim from so many tokens on."""

    def is_victim(completion: Completion) -> bool:
        return (
            completion.request.prompt == VICTIM
            and completion.index == case["index"] % case["n"]
            and len(completion.token_ids) >= case["tokens"]
        )

    def fail() -> None:
        raise (ERRORS | EXITS)[case["error"]]("a fault")

    FAULTS[case["fault"]](patch, is_victim, fail)


def victim_params(case: dict[str, Any]) -> SamplingParams:
    return SamplingParams(n=case["n"], seed=2, max_tokens=7, stop=["never"], presence_penalty=0.25)


def check_victim(output: RequestOutput) -> None:
    """It ended; those of its completions that ended well have all their tokens."""
    assert output.finished
    for one in output.outputs:
        assert (one.finish_reason, len(one.token_ids)) == ("length", 7) or one.finish_reason == "error"
    assert (output.error is not None) == any(one.finish_reason == "error" for one in output.outputs)


@fuzz(CASES, examples=80)
def test_faults_of_one_completion(case: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        install(case, patch)
        engine = small_engine(proposer=PromptLookup(2) if case["drafts"] else None)
        outputs = add_neighbours(engine)
        engine.step()
        victim = engine.add_request(VICTIM, victim_params(case))
        run_to_end(engine)
        if not case["drafts"]:  # drafts are accepted by other chances, so sampled tokens differ from plain ones
            check_neighbours(outputs)
        assert [output.error for output in outputs] == [None] * 3
        assert outputs[0].outputs[0].token_ids == alone(0)[0]
        check_victim(victim)
        check_empty(engine)


STREAM_CASES = st.tuples(CASES, st.sampled_from([*ERRORS, *EXITS])).map(
    lambda case: case[0] | {"drafts": False, "error": case[1]}
)


@fuzz(STREAM_CASES, examples=50)
def test_faults_of_one_stream(case: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        install(case, patch)
        engine = small_engine()

        async def scenario() -> None:
            async with AsyncEngine(engine) as server:
                neighbours = [asyncio.create_task(tokens_of(server, index)) for index in range(3)]
                outputs = [output async for output in server.generate(VICTIM, victim_params(case))]
                check_victim(outputs[-1])
                assert [await task for task in neighbours] == [alone(index) for index in range(3)]

        asyncio.run(scenario())
        check_empty(engine)


def test_a_copy_that_fails_ends_its_stream(monkeypatch: Patch) -> None:
    engine, whole = small_engine(), RequestOutput.copy

    def copy(self: RequestOutput) -> RequestOutput:
        if list(self.prompt_token_ids) == VICTIM:
            raise SilentError
        return whole(self)

    monkeypatch.setattr(RequestOutput, "copy", copy)

    async def scenario() -> None:
        async with AsyncEngine(engine) as server:
            neighbours = [asyncio.create_task(tokens_of(server, index)) for index in range(3)]
            with pytest.raises(EngineStoppedError, match="SilentError"):
                await anext(server.generate(VICTIM))
            assert [await task for task in neighbours] == [alone(index) for index in range(3)]

    asyncio.run(scenario())
    check_empty(engine)


class OddProposer:
    """Drafts that raise, or that are none: too many, of another vocabulary, of another type, for others."""

    vocab_size = None
    num_tokens = 3

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def propose(self, completions: list[Completion], limits: list[int]) -> Drafts:
        if self._kind == "raises":
            raise SilentError
        odd: Any = {"many": [1] * 9, "beyond": [10**6], "negative": [-1], "text": ["a"], "none": None}.get(self._kind)
        return Drafts([odd for _ in completions if self._kind != "fewer"])

    def forget(self, completion: Completion) -> None:
        raise KeyError(completion)

    def make_room(self, manager: Any) -> bool:
        raise MemoryError


@pytest.mark.parametrize("kind", ["raises", "many", "beyond", "negative", "text", "none", "fewer"])
@pytest.mark.parametrize("num_blocks", [48, 12])
def test_odd_proposers(kind: str, num_blocks: int) -> None:
    engine = small_engine(proposer=OddProposer(kind))
    manager = engine.executor.kv_manager
    assert manager is not None
    others = manager.allocate("others", (48 - num_blocks) * 8)
    outputs = [engine.add_request([index + 1] * 9, SamplingParams(temperature=0, max_tokens=12)) for index in range(4)]
    run_to_end(engine)
    assert [output.error for output in outputs] == [None] * 4
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12] * 4
    manager.free(others)
    check_empty(engine)


def test_what_gives_back_may_raise(monkeypatch: Patch) -> None:
    """An executor that cannot release a sequence: its requests end, and later ones run."""
    engine = small_engine()
    release = type(engine.executor).release_cache

    def refuse(seq_id: Any) -> None:
        release(engine.executor, seq_id)  # type: ignore[arg-type]
        raise SilentError

    monkeypatch.setattr(engine.executor, "release_cache", refuse)
    for _ in range(2):
        outputs = add_neighbours(engine)
        run_to_end(engine)
        check_neighbours(outputs)
    check_empty(engine)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_exit_leaves_a_sound_engine(error: type[BaseException]) -> None:
    """Ctrl-C comes through, wherever it comes: what was under way has ended, and the engine can be used."""
    engine = small_engine()
    outputs = add_neighbours(engine)
    engine.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Completion, "_read_text", lambda *_, **__: (_ for _ in ()).throw(error("stop")))
        with pytest.raises(error):
            engine.step()
    assert all(output.finished and error.__name__ in str(output.error) for output in outputs)
    check_empty(engine)
    outputs = add_neighbours(engine)
    run_to_end(engine)
    check_neighbours(outputs)


def test_a_step_raises_once_for_one_cause() -> None:
    """Something that is of no request, as a scheduler with a fault: all requests end, and it is told once."""
    engine = small_engine()
    outputs = add_neighbours(engine)
    engine.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._scheduler, "plan", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert all(output.finished and "ZeroDivisionError" in str(output.error) for output in outputs)
    assert engine.step() == []
    check_empty(engine)
    outputs = add_neighbours(engine)
    run_to_end(engine)
    check_neighbours(outputs)
