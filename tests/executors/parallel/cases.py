"""A checkpoint in one process and in several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from paged.batch import UnifiedBatch, UnifiedBatchItem
from paged.cache.manager import PagedKvCacheManager
from paged.executors.llm_executor import LlmExecutor
from tests.executors.parallel.followers import Followers
from tests.models.families import FAMILIES, save_checkpoint

OPTIONS = {"block_size": 8, "num_blocks": 64, "num_swap_blocks": 16, "cuda_graphs": [4]}


@dataclass(frozen=True)
class Case:
    """The same checkpoint in one process and in several."""

    alone: LlmExecutor
    spread: LlmExecutor

    def same(self, *items: UnifiedBatchItem) -> list[torch.Tensor]:
        """Run in both, and compare; the logits that are there."""
        expected, found = (one.unified_decode(UnifiedBatch(items)) for one in (self.alone, self.spread))
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert mine.shape == theirs.shape
                assert mine.dtype == theirs.dtype
                assert float((mine - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())
        return [row for row in found if row is not None]

    def managers(self) -> list[PagedKvCacheManager]:
        return [one.kv_manager for one in (self.alone, self.spread) if one.kv_manager is not None]


def case_id(case: tuple[str, int, bool]) -> str:
    return "-".join(map(str, case))


@contextmanager
def loaded_case(case: tuple[str, int, bool], folder: Path, followers: Followers) -> Iterator[Case]:
    name, size, expert_parallel = case
    save_checkpoint(FAMILIES[name], folder)
    with followers.load(folder, size, expert_parallel=expert_parallel, **OPTIONS) as spread:
        yield Case(LlmExecutor.from_pretrained(folder, **OPTIONS), spread)
