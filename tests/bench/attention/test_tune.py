"""The parts of the tuner that need no GPU: its candidates, and that a plan takes the tile it is given."""

from __future__ import annotations

import pytest
import torch

from paged.bench.attention.cases import CASES
from paged.bench.attention.tune import NAMES, candidates, main, with_tile
from paged.kernels.attention.call import NO_LIMIT
from paged.kernels.attention.config import AttentionTile
from paged.kernels.attention.plan import AttentionPlan, AttentionShape


def test_cases_exist() -> None:
    assert set(NAMES) <= {case.name for case in CASES}


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_candidates_are_distinct_and_box_what_a_block_holds(kind: str) -> None:
    tiles = list(candidates(kind, 64))
    assert len(set(tiles)) == len(tiles) > 40
    assert {tile.block_n for tile in tiles if tile.by_tma} == {32, 64}
    assert not any(tile.by_tma for tile in candidates(kind, 16))


def test_plans_take_the_tile(device: torch.device) -> None:
    shape = AttentionShape(
        num_tokens=1, num_kv_heads=1, group=1, head_dim=64, v_head_dim=64, element_size=2, window=(NO_LIMIT, 0)
    )  # fmt: skip

    def tile_of_a_plan() -> AttentionTile:
        offsets, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1], [9]))
        return AttentionPlan(offsets, lengths, max_seqlen_q=1, max_seqlen_k=9).schedules(shape)[0].tile

    chosen, other = tile_of_a_plan(), AttentionTile(32, 32, 2, 2)
    with with_tile("decode", other):
        assert tile_of_a_plan() == other
    with with_tile("decode", None):
        assert tile_of_a_plan() == chosen != other
    assert tile_of_a_plan() == chosen


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be tuned")
def test_says_that_it_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "no GPU" in capsys.readouterr().err
