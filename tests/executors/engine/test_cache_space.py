"""BlockSpace: preemption where blocks run out, and prefixes that are shared by those alone that may."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig
from tests.executors.engine_cases import (
    FIVE,
    PROMPTS,
    TEN,
    check_empty,
    expected_tokens,
    run,
    run_to_end,
    spy,
    tokens_of,
)
from tests.executors.oracle import make_executor


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_five_requests_in_six_blocks(preemption: Any, device: torch.device) -> None:
    """Each needs up to 4 blocks of 8."""
    executor = make_executor(device, num_blocks=6)
    engine = Engine(executor, EngineConfig(preemption=preemption, admission_tokens=0))
    assert tokens_of(engine.generate(PROMPTS, TEN, progress=False)) == [expected_tokens(p, 10) for p in PROMPTS]
    assert engine.metrics.preempted["recompute"] > 0
    check_empty(engine)


def test_room_for_all_that_may_come_makes_preemption_needless(device: torch.device) -> None:
    engine = Engine(make_executor(device, num_blocks=6), EngineConfig(admission_tokens=None))
    assert tokens_of(engine.generate(PROMPTS, TEN, progress=False)) == [expected_tokens(p, 10) for p in PROMPTS]
    assert not engine.metrics.preempted
    assert engine.metrics.decode_tokens == 9 * len(PROMPTS)


def test_blocks_held_by_others(device: torch.device) -> None:
    """A request that would fit an empty cache says why it does not run, or waits if it can."""
    executor = make_executor(device, num_blocks=4)
    other = executor.kv_manager.allocate("other", 20)
    engine = Engine(executor)
    blocked, small = engine.generate([[1] * 20, [2] * 5], replace(TEN, max_tokens=2), progress=False)
    assert blocked.error == "the cache has no room for it, and no request here holds any"
    assert small.error is None
    executor.kv_manager.free(other)
    assert run(engine, [[1] * 20], TEN) == [expected_tokens([1] * 20, 10)]
    alone = engine.add_request([1] * 8, TEN)
    engine.step()
    executor.kv_manager.allocate("other", executor.kv_manager.stats().free_blocks * 8)
    while engine.num_unfinished:
        engine.step()
    assert alone.error is not None
    assert alone.error.startswith("OutOfBlocksError")


def test_prefixes_are_reused(device: torch.device) -> None:
    executor = make_executor(device, num_blocks=128)
    engine = Engine(executor)
    context = [(i * i) % 13 for i in range(50)]
    first = run(engine, [[*context, 1]], TEN)
    assert engine.metrics.prefill_tokens == 51
    [output] = engine.generate([[*context, 1]], TEN, progress=False)
    assert tokens_of([output]) == first
    assert (engine.metrics.prefill_tokens, engine.metrics.cached_tokens, output.num_cached_tokens) == (54, 48, 48)
    other = engine.add_request([*context, 1], TEN, metadata={"tenant": "a"})
    engine.step()
    assert other.num_cached_tokens == 48


def test_adapters_part_prefixes_and_reach_the_items(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(device)
    monkeypatch.setattr(executor, "_choose_adapters", lambda items: None)
    takes = replace(executor.capabilities(), supports_lora=True)
    monkeypatch.setattr(executor, "capabilities", lambda: takes)
    seen: list[Any] = []
    spy(monkeypatch, executor, lambda batch: seen.extend(item.metadata.get("lora_adapter") for item in batch.items))
    engine = Engine(executor)
    cached = []
    for adapter in ("french", None, "french"):
        metadata = None if adapter is None else {"lora_adapter": adapter}
        output = engine.add_request([4] * 20, replace(TEN, max_tokens=1), metadata=metadata)
        engine.step()
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 16]
    assert seen == ["french", None, "french"]


def test_salts_part_prefixes(device: torch.device) -> None:
    engine = Engine(make_executor(device))
    cached = []
    for salt in (None, "a", "b", "a", None):
        output = engine.add_request([3] * 20, FIVE, cache_salt=salt)
        run_to_end(engine)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 0, 16, 16]
