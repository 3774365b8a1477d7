"""Whatever raises on behalf of one completion, it alone ends: the others' tokens are those of runs of their own. Also
in another's model that keeps its K/V itself and has a way back or none: no sequence runs on wrongly."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st

from paged import (
    AsyncEngine,
    DecodeInput,
    Engine,
    PrefillInput,
    PromptLookup,
    RequestOutput,
    SamplingParams,
    StaleHandleError,
    UnsupportedError,
)
from paged.executors.engine.cache_space import BlockSpace
from paged.executors.engine.core import EngineCore
from paged.executors.engine.unfinished_requests import UnfinishedRequests
from paged.executors.requests.request import Completion
from paged.executors.sampling.sampler import Drafts, Sampler
from paged.seq_id import SeqId
from tests.executors.engine_cases import check_empty
from tests.executors.parrot import Parrot, UnifiedParrot, UnsupportedParrot, other_executor, parrot_logits
from tests.fuzz.engine.neighbours import add_neighbours, check_neighbours, run_to_end, small_engine, stream_beside
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
        *(RuntimeError, MemoryError, KeyError, StopIteration, RecursionError, AssertionError, SilentError),
        *(PanicException, asyncio.CancelledError, GeneratorExit),
    )
}
# Where a signal cannot have raised them, they too are of whoever was called.
EXITS: dict[str, type[BaseException]] = {"KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit}
VICTIM = [4, 4, 8]


class Fault(NamedTuple):
    """What goes wrong in calls of some methods that work for the victim.

    completions: those that a call works for, from its arguments. kind: the error comes "before" the work of the call or
    "after" it; or the victim's logits are "nan"; or its "metrics" are broken.
    """

    owner: type
    methods: tuple[str, ...]
    completions: Callable[..., list[Completion]]
    kind: str

    def install(self, patch: Patch, is_victim: Callable[[Completion], bool], error: type[BaseException]) -> None:
        for name in self.methods:
            whole = getattr(self.owner, name)

            def call(owner: Any, *args: Any, whole: Any = whole, **options: Any) -> Any:
                are_victims = [is_victim(one) for one in self.completions(owner, *args)]
                if any(are_victims) and self.kind == "before":
                    raise error("a fault")
                if any(are_victims) and self.kind == "metrics":
                    patch.setattr(owner._metrics, "time_per_output_token", None)
                result = whole(owner, *args, **options)
                if any(are_victims) and self.kind == "after":
                    raise error("a fault")
                if self.kind == "nan":
                    for is_hit, rows in zip(are_victims, args[0].answer_rows(), strict=True):
                        if is_hit:
                            rows.answers[rows.begin : rows.end] = torch.nan
                return result

            patch.setattr(self.owner, name, call)


FAULTS = {
    "tokenizer": Fault(Completion, ("_read_text",), lambda completion, *_: [completion], "before"),
    "stop check": Fault(Completion, ("finish_reason",), lambda completion: [completion], "after"),
    "sampling": Fault(Sampler, ("sample", "verify"), lambda _, logits, completions, *rest: completions, "after"),
    "admission": Fault(BlockSpace, ("_take_blocks", "_growth_of"), lambda _, completion: [completion], "before"),
    "fork": Fault(BlockSpace, ("fork",), lambda _, source, target: [target], "before"),
    "forward": Fault(EngineCore, ("_run",), lambda _, step: step.completions, "before"),
    "logits": Fault(EngineCore, ("_run",), lambda _, step: step.completions, "nan"),
    "metrics": Fault(UnfinishedRequests, ("finish",), lambda _, completion, reason: [completion], "metrics"),
}
CASES = st.fixed_dictionaries({
    "fault": st.sampled_from(sorted(FAULTS)), "error": st.sampled_from(sorted(ERRORS)), "tokens": st.integers(0, 5),
    "index": st.integers(0, 2), "drafts": st.booleans(), "n": st.integers(1, 3),
})  # fmt: skip
STREAM_CASES = st.tuples(CASES, st.sampled_from([*ERRORS, *EXITS])).map(lambda case: case[0] | {"error": case[1]})


def install(case: dict[str, Any], patch: Patch) -> SamplingParams:
    """Have the case's fault hit one completion of the victim from so many tokens on; the victim's parameters."""

    def is_victim(completion: Completion) -> bool:
        is_it = list(completion.request.prompt) == VICTIM and completion.index == case["index"] % case["n"]
        return is_it and len(completion.token_ids) >= case["tokens"]

    FAULTS[case["fault"]].install(patch, is_victim, (ERRORS | EXITS)[case["error"]])
    return SamplingParams(n=case["n"], seed=2, max_tokens=7, stop=["never"], presence_penalty=0.25)


def check_victim(output: RequestOutput) -> None:
    """It ended; those of its completions that ended well have all their tokens."""
    assert output.finished
    for one in output.outputs:
        assert (one.finish_reason, len(one.token_ids)) == ("length", 7) or one.finish_reason == "error"
    assert (output.error is not None) == any(one.finish_reason == "error" for one in output.outputs)


@fuzz(CASES, examples=25, thorough=80)
def test_faults_of_one_completion(case: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        params = install(case, patch)
        engine = small_engine(proposer=PromptLookup(2) if case["drafts"] else None)
        outputs = add_neighbours(engine)
        engine.step()
        victim = engine.add_request(VICTIM, params)
        check_neighbours(engine, outputs, drafts=case["drafts"])
        check_victim(victim)


@fuzz(STREAM_CASES, examples=12, thorough=50)
def test_faults_of_one_stream(case: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        params = install(case, patch)

        async def scenario(server: AsyncEngine) -> None:
            check_victim([output async for output in server.generate(VICTIM, params)][-1])

        stream_beside(small_engine(), scenario)


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
        check_neighbours(engine, add_neighbours(engine))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_a_step_raises_once_for_one_cause(error: type[BaseException]) -> None:
    """Ctrl-C, wherever it comes, and what is of no request, as a scheduler with a fault: told once, all requests end,
    and the engine can be used."""
    engine = small_engine()
    outputs = add_neighbours(engine)
    engine.step()
    owner, name = (engine._scheduler, "next_step") if error is ZeroDivisionError else (Completion, "_read_text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *_, **__: (_ for _ in ()).throw(error("stop")))
        with pytest.raises(error):
            engine.step()
    assert all(output.finished and error.__name__ in str(output.error) for output in outputs)
    assert engine.step() == []
    check_empty(engine)
    check_neighbours(engine, add_neighbours(engine))


POISON = 60


def with_faults(base: type[Parrot], way_back: str, fails_at: set[int]) -> Parrot:
    """A parrot whose `fails_at`-th runs of tokens raise once, half of the batch being done, and POISON always."""

    class Faulty(base):  # type: ignore[misc, valid-type]
        runs = 0

        def _run(self, cache_id: SeqId, tokens: Sequence[int]) -> torch.Tensor:
            self.runs += 1
            logits = super()._run(cache_id, tokens)
            if self.runs in fails_at:
                raise MemoryError("once")
            return logits

        def truncate_kv(self, cache_id: SeqId, new_len: int) -> None:
            if way_back == "none":
                raise UnsupportedError("no way back")
            if way_back == "broken":
                raise RuntimeError("a broken way back")
            super().truncate_kv(cache_id, new_len)

    return Faulty()


def own_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What the parrot says to a prompt, up to the token that breaks it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and tokens[-1] != POISON:
        tokens.append(int(parrot_logits(tokens).argmax()))
    return tokens[len(prompt) :]


MODELS: dict[str, type[Parrot]] = {one.__name__: one for one in (Parrot, UnsupportedParrot, UnifiedParrot)}
MODEL_CASES = st.fixed_dictionaries({
    "model": st.sampled_from(sorted(MODELS)), "way_back": st.sampled_from(["right", "none", "broken"]),
    "fails_at": st.lists(st.integers(1, 30), max_size=4),
    "prompts": st.lists(st.lists(st.integers(1, POISON), min_size=1, max_size=5), min_size=1, max_size=3),
})  # fmt: skip


@fuzz(MODEL_CASES, examples=40, thorough=100)
def test_models_that_fail(case: dict[str, Any]) -> None:
    model = with_faults(MODELS[case["model"]], case["way_back"], set(case["fails_at"]))
    engine = Engine(other_executor(model), eos_token_ids=())
    outputs = [engine.add_request(one, SamplingParams(temperature=0, max_tokens=6)) for one in case["prompts"]]
    for _ in range(200):
        engine.step()
    assert engine.num_unfinished == 0
    for prompt, output in zip(case["prompts"], outputs, strict=True):
        expected = own_tokens(prompt, 6)
        is_poisoned = POISON in prompt or len(expected) < 6
        [one] = output.outputs
        if one.finish_reason == "error":
            # One that is alone in its call when that fails for once is blamed itself.
            assert is_poisoned or case["fails_at"]
            assert one.token_ids == expected[: len(one.token_ids)]
        else:
            assert not is_poisoned
            assert one.token_ids == expected
    assert model.caches == {}


def test_siblings_of_a_failed_batch_are_given_up() -> None:
    """Directly on the executor: their handles are no longer valid, and the model holds nothing of them."""
    model = with_faults(Parrot, "none", set())
    executor = other_executor(model)

    handles = [executor.prefill(PrefillInput(torch.tensor([[1, 2]]))).kv_cache for _ in range(2)]
    inputs = [DecodeInput(torch.tensor([[token]]), handle) for token, handle in zip((3, POISON), handles, strict=True)]
    with pytest.raises(RuntimeError, match="breaks it"):
        executor.batch_decode(inputs)
    assert [handle.is_valid for handle in handles] == [False, False]
    assert model.caches == {}
    with pytest.raises(StaleHandleError):
        executor.decode(inputs[0])
    assert executor.prefill(PrefillInput(torch.tensor([[1, 2]]))).kv_cache.is_valid
