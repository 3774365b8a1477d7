"""Entries and choices that layers share, in DeepSeek-V4.1: candidates, open rows and rotation by planted faults."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.models.layers import shared_entries
from paged.models.layers.compressed_attention import EntryIndexer
from paged.models.layers.open_rows import rows_of_step
from paged.models.layers.shared_entries import LatentPool
from paged.models.registry import load_model
from tests.models.deepseek_v41 import SETTINGS, DeepseekV41
from tests.models.families import assert_same_logits, logits_of, tokens

BLOCK = 8
choose, write = EntryIndexer.choose, LatentPool.write


def _without_candidates(indexer: EntryIndexer, q: torch.Tensor, weights: torch.Tensor, **step: Any) -> torch.Tensor:
    return choose(indexer, q, weights, **{**step, "candidates": None, "candidate_size": 1})


def _rotated_late(pool: LatentPool, *arguments: Any) -> None:
    *others, positions, dtype = arguments
    write(pool, *others, positions + pool.pool_size * (positions // pool.pool_size % 2), dtype)


def _another_pool(rows: torch.Tensor, places: Any, *caches: Any) -> torch.Tensor:
    return rows_of_step(rows, places._replace(earlier_rows=places.earlier_rows - 1), *caches)


# fault -> (owner, name, what stands there instead)
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a choice among all entries": (EntryIndexer, "choose", _without_candidates),
    "entries are rotated at the next pool's position": (LatentPool, "write", _rotated_late),
    "the open row of another position": (shared_entries, "rows_of_step", _another_pool),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_logits_see_the_fault(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = DeepseekV41(SETTINGS)
    theirs.save_pretrained(tmp_path)
    model, ids = load_model(tmp_path, block_size=BLOCK, num_blocks=64), tokens(45)
    if fault:
        monkeypatch.setattr(*FAULTS[fault])
    rows = torch.cat([model.forward_verify("a", part) for part in (ids[:21], ids[21:])])
    if not fault:
        assert_same_logits(rows, logits_of(theirs, ids))
        return
    with pytest.raises(AssertionError):
        assert_same_logits(rows, logits_of(theirs, ids))
