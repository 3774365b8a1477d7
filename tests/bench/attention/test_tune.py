"""The parts of the tuner that need no GPU: its candidates, and that a plan takes the tile it is given."""

from dataclasses import replace

import pytest
import torch

from paged.bench.attention.cases import CASES
from paged.bench.attention.tune import NAMES, candidates, cases, with_tile
from paged.bench.benchmark import Setting
from paged.kernels.attention.call import AttentionShape, MlaShape
from paged.kernels.attention.keys import NO_LIMIT
from paged.kernels.attention.plan import AttentionPlan, AttentionTile


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_candidates_are_distinct_and_box_what_a_block_holds(kind: str) -> None:
    assert set(NAMES) <= {case.name for case in CASES}
    tiles = list(candidates(kind, 64))
    assert len(set(tiles)) == len(tiles) > 40
    assert {tile.block_n for tile in tiles if tile.by_tma} == {32, 64}
    assert not any(tile.by_tma for tile in candidates(kind, 16))


def test_batches_take_turns() -> None:
    found = cases(Setting(torch.device("cuda"), 2))
    assert len({case.name for case in found}) == len(found)
    assert {case.case.name for case in found[: 16 * len(NAMES)]} == set(NAMES)
    stages = {case.num_stages for case in found if case.kind == "prefill" and "chosen with" in case.name}
    assert stages == {tile.num_stages for tile in candidates("prefill", 16)}


def test_plans_take_the_tile(device: torch.device) -> None:
    sizes = {"num_tokens": 1, "num_kv_heads": 1, "group": 1, "head_dim": 64, "v_head_dim": 64}
    shape = AttentionShape(**sizes, element_size=2, window=(NO_LIMIT, 0))

    def tile_of_a_plan() -> AttentionTile:
        offsets, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1], [9]))
        return AttentionPlan(offsets, lengths, max_seqlen_q=1, max_seqlen_k=9).schedules(shape)[0].tile

    chosen, other = tile_of_a_plan(), AttentionTile(32, 32, 2, 2)
    with with_tile("decode", other):
        assert tile_of_a_plan() == other
    with with_tile("decode", None):
        assert tile_of_a_plan() == chosen != other
    with with_tile("decode", None, 7):
        assert tile_of_a_plan() == replace(chosen, num_stages=7)
    assert tile_of_a_plan() == chosen


def test_latents_take_the_tile_and_try_fetching_two_ahead() -> None:
    sizes = {"num_tokens": 1, "num_kv_heads": 1, "group": 128, "head_dim": 576, "v_head_dim": 512}
    shape = MlaShape(**sizes, element_size=2, window=(NO_LIMIT, 0))
    narrow = AttentionTile(64, 32, 8, 5)
    assert narrow in set(candidates("latents", 64))
    assert not any(tile.by_tma for tile in candidates("latents", 64))
    assert shape.tiles("sm_90", 128)["decode"] != narrow
    with with_tile("latents", narrow):
        assert shape.tiles("sm_90", 128)["decode"] == narrow
