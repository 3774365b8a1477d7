"""Threads of rank 0 that run steps, move blocks, load adapters and warm up, all at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic

import pytest
import torch

from paged import InvalidInputError, LlmExecutor
from paged.batch import UnifiedBatch, UnifiedBatchItem
from paged.cache.kv_cache import KvCacheHandle
from tests.executors.parallel.followers import Followers
from tests.models.families import FAMILIES, save_checkpoint, tokens
from tests.models.lora.folders import Adapter

OPTIONS = {"block_size": 4, "num_blocks": 96, "num_swap_blocks": 32, "max_loras": 1, "max_lora_rank": 4}
STORM_S, LIMIT_S = 2.0, 60.0


@pytest.fixture
def mortals() -> Iterator[Followers]:
    started = Followers(1)
    yield started
    started.close()


def _run(executor: LlmExecutor, seq_id: str, ids: list[int], start: int = 0, **metadata: str) -> torch.Tensor:
    (row,) = executor.unified_decode(UnifiedBatch([UnifiedBatchItem(seq_id, ids, pos_offset=start, metadata=metadata)]))
    assert row is not None
    return row


def test_none_waits_for_another_and_all_tell_the_same_order(mortals: Followers, tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_checkpoint(FAMILIES["llama"], base)
    for seed in (1, 2):
        Adapter(["q_proj", "o_proj"], seed=seed).save(tmp_path / f"adapter{seed}", base)
    alone = LlmExecutor.from_pretrained(base, **OPTIONS)
    spread = mortals.order(base, 2, {"tensor_parallel_size": 2, "timeout_s": 60.0}, OPTIONS)
    for executor in (alone, spread):
        _run(executor, "moved", tokens(22))
    manager = spread.kv_manager
    assert manager is not None

    def handle(name: str) -> KvCacheHandle:
        found = manager.get_handle(name)
        assert found is not None
        return found

    def move() -> None:
        manager.swap_out(handle("moved"))
        filler = manager.allocate("filler", 22)  # over what it left
        manager.extend(filler, 22)
        manager.swap_in(handle("moved"))
        manager.extend(manager.fork(handle("moved"), "fork"), 1)  # copies the last block
        manager.free(handle("fork"))
        manager.free(filler)

    def step() -> None:
        _run(spread, "stepped", tokens(9))
        spread.release_cache("stepped")

    def adapt(name: str) -> Callable[[], None]:
        def once() -> None:
            with suppress(InvalidInputError):  # the other one has the only slot
                spread.load_lora(name, tmp_path / name)
                spread.unload_lora(name)

        return once

    ends, counts, failures = monotonic() + STORM_S, Counter[int](), list[BaseException]()

    def again(index: int, act: Callable[[], None]) -> None:
        try:
            while monotonic() < ends and not failures:
                act()
                counts[index] += 1
        except BaseException as error:
            failures.append(error)

    acts = [move, step, adapt("adapter1"), adapt("adapter2"), spread.warmup]
    threads = [Thread(target=again, args=each, daemon=True) for each in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends + LIMIT_S - monotonic()))
    assert not failures
    assert not any(thread.is_alive() for thread in threads), "they wait for one another"
    assert min(counts[index] for index in range(len(acts))) > 0
    for executor in (alone, spread):
        executor.load_lora("adapter2", tmp_path / "adapter2")
    for request in (("moved", [5], 22), ("fresh", tokens(9))):
        torch.testing.assert_close(_run(spread, *request), _run(alone, *request), rtol=1e-5, atol=1e-5)
    found, expected = (_run(one, "adapted", tokens(9), lora_adapter="adapter2") for one in (spread, alone))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    spread.shutdown()
    assert mortals.answers(2) == ["served"]
