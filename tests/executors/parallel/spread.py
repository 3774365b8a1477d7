"""A model in one process and in several, whose results tests compare."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.executors.llm_executor import LlmExecutor
from paged.step.batch import UnifiedBatch, UnifiedBatchItem
from tests.executors.parallel.followers import OPTIONS, Followers
from tests.models.families import save_family, tokens

PROMPT = tokens(40)


def cases_of(fast: str, thorough: str) -> list[Any]:
    """The family, how many processes, and whether they hold whole experts."""
    marked = ((fast, []), (thorough, [pytest.mark.thorough]))
    return [pytest.param(case, marks=marks) for cases, marks in marked for case in cases.split(", ")]


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
            if mine is not None:
                assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
                assert float((mine - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())
        return [row for row in found if row is not None]

    def managers(self) -> list[Any]:
        return [self.alone.kv_manager, self.spread.kv_manager]


@contextmanager
def load_case(case: str, folder: Path, followers: Followers) -> Iterator[Case]:
    """Save a family, load it here, and in as many processes as the case says."""
    name, size, *experts = case.split()
    save_family(name, folder)
    with followers.load(folder, int(size), expert_parallel=bool(experts), **OPTIONS) as spread:
        yield Case(LlmExecutor.from_pretrained(folder, **OPTIONS), spread)
