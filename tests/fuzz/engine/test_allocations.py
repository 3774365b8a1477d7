"""An allocation that fails anywhere in a step: every request gets what it gets undisturbed, and nothing is held."""

import os
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from paged import Engine, EngineConfig, RequestOutput, SamplingParams
from paged.executors.speculation.draft_model import DraftModel
from paged.executors.speculation.prompt_lookup import PromptLookup
from tests.executors.engine.test_token_rules import Only, Rising
from tests.executors.engine_cases import check_empty
from tests.executors.oracle import make_executor
from tests.failure import FailedAllocation
from tests.fuzz.engine.neighbours import run_to_end

# Allocations from one that fails to the next in `make test-all`; all fail in `make fuzz`.
APART = 1 if "FUZZ_S" in os.environ else 97
SIZES = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "embedding": "sinusoidal"}
REPEATED = [3, 1, 4, 1, 5, 9, 3, 1, 4, 1]  # prompt lookup finds drafts in it
SWAPS = {"admission_tokens": 0, "preemption": "swap"}
FEW_BLOCKS = {"num_blocks": 9, "num_swap_blocks": 40}
STATES = {"states": {"num_slots": 16, "num_swap_slots": 4}}


class Way(NamedTuple):
    """How an engine runs: its configuration, its cache and its source of drafts."""

    config: Mapping[str, Any] = MappingProxyType({})
    cache: Mapping[str, Any] = MappingProxyType({})
    drafts: str | None = None


WAYS = {
    "plain": Way(),
    "swap": Way(SWAPS, FEW_BLOCKS),
    "overlap, swap": Way(SWAPS | {"overlap": True}, FEW_BLOCKS),
    "lookup": Way(drafts="lookup"),
    "draft model": Way({}, {"num_blocks": 64}, drafts="draft model"),
    "recurrent, overlap": Way({"overlap": True}, STATES),
    "apart": Way({"batch_invariant": True}),
}
FAST = ("overlap, swap",)


def new_engine(way: Way) -> Engine:
    options = {"num_blocks": 40, "block_size": 4} | dict(way.cache)
    executor = make_executor(torch.device("cpu"), **options, **SIZES)
    proposer = {"lookup": PromptLookup(3), "draft model": DraftModel(executor, 3), None: None}[way.drafts]
    config = EngineConfig(token_budget=32, **{"overlap": False} | dict(way.config))
    return Engine(executor, config, proposer=proposer, eos_token_ids=(), seed=0)


def run(way: Way, failure: FailedAllocation) -> list[RequestOutput]:
    """Run a request for each thing that a step may have to do, the last ones beside others that decode."""
    engine = new_engine(way)
    step = engine.step

    def failing_step() -> list[RequestOutput]:
        with failure:
            return step()

    engine.step = failing_step  # type: ignore[method-assign]
    drawn: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
    if way.drafts is not None:  # drawn tokens depend on the drafts
        drawn = {"temperature": 0}
    scored = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1)
    forked = SamplingParams(n=2, seed=3, max_tokens=4, presence_penalty=0.5, **drawn)
    chosen = SamplingParams(
        seed=5,
        max_tokens=4,
        min_tokens=2,
        allowed_token_ids=[1, 2, 3, 70],
        logit_bias={2: 1.5},
        stop_token_ids=[70],
        **drawn,
    )
    greedy = SamplingParams(temperature=0, max_tokens=5)
    outputs = [engine.add_request(REPEATED, scored), engine.add_request([7] * 5, forked)]
    engine.step()
    outputs += [
        engine.add_request([5, 5, 9], greedy, token_mask=Rising()),
        engine.add_request([2, 8], greedy, logits_processor=Only()),
        engine.add_request([6, 6, 1], chosen),
    ]
    run_to_end(engine)
    check_empty(engine)
    return outputs


def answers(outputs: list[RequestOutput]) -> list[Any]:
    """What each request got: tokens, and which log probabilities."""
    got: list[Any] = []
    for output in outputs:
        assert output.error is None
        prompt_ids = [table and list(table) for table in output.prompt_logprobs or ()]
        for completion in output.outputs:
            num_logprobs = [len(table) for table in completion.logprobs or ()]
            got.append((completion.token_ids, completion.finish_reason, num_logprobs, prompt_ids))
    return got


@cache
def undisturbed(name: str) -> tuple[list[Any], list[int]]:
    """What each request gets, and the first allocation of each line of ours that makes some."""
    run(WAYS[name], FailedAllocation())  # what is made once
    failure = FailedAllocation()
    expected = answers(run(WAYS[name], failure))
    firsts: dict[tuple[str, int], int] = {}
    for index, line in enumerate(failure.lines):
        firsts.setdefault(line, index)
    return expected, list(firsts.values())


def check(name: str, count: int) -> bool:
    """Let an allocation fail; return whether there are so many."""
    expected, _ = undisturbed(name)
    failure = FailedAllocation(count)
    assert answers(run(WAYS[name], failure)) == expected, (name, count)
    return failure.is_raised


@pytest.fixture(autouse=True)
def _torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.thorough) for name in WAYS]
)
def test_each_line_that_allocates_may_fail(name: str) -> None:
    """Each first allocation of a line of the engine, the executor or the cache, with the kernels that it calls."""
    for count in undisturbed(name)[1]:
        assert check(name, count)


@pytest.mark.thorough
@pytest.mark.parametrize("name", WAYS)
def test_each_allocation_may_fail(name: str) -> None:
    count = 0
    while check(name, count):
        count += APART
