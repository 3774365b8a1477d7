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


@pytest.mark.parametrize(
    ("states", "config"),
    [
        ({"num_slots": 6}, {}),
        pytest.param({"num_slots": 4, "snapshot_interval": 8}, {"chunk_size": 7}, marks=pytest.mark.thorough),
        pytest.param({"num_slots": 6, "num_swap_slots": 8}, {"preemption": "swap"}, marks=pytest.mark.thorough),
    ],
    ids=["few slots", "snapshots at every block", "swap"],
)
def test_same_tokens_with_a_tier(states: dict[str, Any], config: dict[str, Any]) -> None:
    """Blocks and states that the device gave to others come back; a prompt begins only where it has both."""
    engine = Engine(_executor(states, num_blocks=42, host_cache_bytes=1 << 24), EngineConfig(**config))
    manager = engine.executor.kv_manager
    for _ in range(3):
        found = []
        for prompt_ids in PROMPTS:
            found += tokens_of(engine.generate([prompt_ids], PARAMS, progress=False))
            manager.check_integrity()
        assert found == alone()
        assert _answers(engine) == alone()
        manager.evict(42)
    stats = manager.stats()
    assert min(stats.host_loaded_blocks, stats.host_loaded_states, stats.host_hit_tokens) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("num_tokens", [3, 7])
def test_same_tokens_with_drafts(num_tokens: int) -> None:
    """Also where the states and blocks that were kept beside refused drafts come back from host memory."""
    engine = Engine(_executor({}, host_cache_bytes=1 << 24), proposer=PromptLookup(num_tokens))
    assert _answers(engine) == alone()
    engine.executor.kv_manager.evict(96)
    assert _answers(engine) == alone()
    assert engine.executor.kv_manager.stats().host_loaded_states > 0
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
    states = manager._kinds[-1]
    slot, wrong = (states.get(one._state).slot for one in (handle, other))
    tensors = [tensor for tensor in vars(layer).values() if tensor is not None]
    kept = [tensor[slot].clone() for tensor in tensors]
    check_logits(executor, executor.decode(step(handle, 3)).logits[0], [*ids, 3])
    slot = states.get(handle._state).slot
    for tensor, old in zip(tensors, kept, strict=True):
        if fault:
            tensor[slot] = {"zeroed": torch.zeros_like(old), "stale": old, "another's": tensor[wrong].clone()}[fault]
    logits = executor.decode(step(handle, 4)).logits[0]
    with pytest.raises(AssertionError) if fault else nullcontext():
        check_logits(executor, logits, [*ids, 3, 4])
    manager.check_integrity()
