"""The oracle with a recurrent layer: one prompt has one answer, however its state has travelled."""

import random
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig, PromptLookup, SamplingParams
from paged.errors import UnsupportedError
from paged.executors.paged_attention_executor import PagedAttentionExecutor
from tests.executors.engine_cases import check_empty, tokens_of
from tests.executors.oracle import check_logits, make_executor, prompt, step

PARAMS = SamplingParams(temperature=0, max_tokens=24)
RANDOM = random.Random(3)
STEM = [RANDOM.randrange(5) for _ in range(150)]
PROMPTS = [STEM[: 40 * count] + [RANDOM.randrange(5) for _ in range(5 * count + 1)] for count in range(4)]
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "batched": ({}, {}),
    "chunks of 7": ({}, {"chunk_size": 7}),
    "chunks of 64": ({}, {"chunk_size": 64}),
    "three slots": ({"num_slots": 3}, {}),
    "snapshots at every block": ({"num_slots": 24, "snapshot_interval": 8}, {}),
    "swap": ({"num_swap_slots": 8}, {"admission_tokens": 0, "preemption": "swap"}),
    "recompute": ({}, {"admission_tokens": 0}),
}


def _executor(states: dict[str, Any], **sizes: Any) -> PagedAttentionExecutor:
    known = {"num_blocks": 96, "vocab_size": 16, "max_sequence_length": 256, "num_swap_blocks": 64}
    return make_executor(torch.device("cpu"), states={"num_slots": 32} | states, **known | sizes)


def _answers(engine: Engine) -> list[list[int]]:
    found = tokens_of(engine.generate(PROMPTS, PARAMS, progress=False))
    check_empty(engine)
    return found


@cache
def alone() -> list[list[int]]:
    """Each prompt's answer from an executor of its own, which runs it whole and token by token."""
    found = []
    for one in PROMPTS:
        engine = Engine(_executor({}))
        found.append(tokens_of(engine.generate([one], PARAMS, progress=False))[0])
    return found


@pytest.mark.parametrize("way", ["batched", *(pytest.param(way, marks=pytest.mark.thorough) for way in [*WAYS][1:])])
def test_same_tokens_in_every_way(way: str) -> None:
    states, config = WAYS[way]
    sizes = {"num_blocks": 42} if "preemption" in config or way == "recompute" else {}
    engine = Engine(_executor(states, **sizes), EngineConfig(**config))
    assert _answers(engine) == alone()
    assert _answers(engine) == alone()  # with snapshots of the first time
    stats = engine.executor.kv_manager.stats()
    assert stats.state_hits > 0
    assert (stats.state_evictions > 0) == ("num_slots" in states)
    assert not sizes or sum(engine.metrics.preempted.values())


@pytest.mark.thorough
@pytest.mark.parametrize("num_tokens", [3, 7])
def test_same_tokens_with_drafts(num_tokens: int) -> None:
    engine = Engine(_executor({}), proposer=PromptLookup(num_tokens))
    assert _answers(engine) == alone()
    assert 0 < engine.metrics.accepted_tokens < engine.metrics.draft_tokens
    with pytest.raises(UnsupportedError, match="8 drafts, expected at most 7 beside recurrent layers"):
        Engine(_executor({}), proposer=PromptLookup(8))


@pytest.mark.parametrize("fault", [None, "zeroed", "stale", "another's"])
@pytest.mark.parametrize("embedding", ["one_hot", "sinusoidal"])
def test_a_wrong_state_shows(embedding: str, fault: str | None) -> None:
    """In logits, which are those of the closed form if the state is right."""
    executor = _executor({}, embedding=embedding)
    manager, layer = executor.kv_manager, executor.kv_manager.state(executor.config.num_layers - 1)
    ids = STEM[:20]
    handle, other = (executor.prefill(prompt(one)).kv_cache for one in (ids, PROMPTS[2][::-1]))
    slot, wrong = (one._state.slot for one in (handle, other))
    tensors = [tensor for tensor in vars(layer).values() if tensor is not None]
    kept = [tensor[slot].clone() for tensor in tensors]
    check_logits(executor, executor.decode(step(handle, 3)).logits[0], [*ids, 3])
    slot = handle._state.slot
    for tensor, old in zip(tensors, kept, strict=True):
        if fault:
            tensor[slot] = {"zeroed": torch.zeros_like(old), "stale": old, "another's": tensor[wrong].clone()}[fault]
    logits = executor.decode(step(handle, 4)).logits[0]
    with pytest.raises(AssertionError) if fault else nullcontext():
        check_logits(executor, logits, [*ids, 3, 4])
    manager.check_integrity()
