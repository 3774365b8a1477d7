"""The simulated schedules: the planner's work lists fill the chip, and the simulator tells those that do not."""

import pytest

from paged.bench.attention.schedule import CASES, LATENT, SWEEP, Launch, makespan, outcome, plan, simulate
from paged.kernels.common.attention.tile import AttentionTile
from paged.kernels.common.compat import interpreting

pytestmark = pytest.mark.skipif(not interpreting(), reason="the planner is told another chip only in the interpreter")


def _launch(blocks: list[int], *, resident: int = 1, kind: str = "decode", heads: int = 1) -> Launch:
    """Tiles of so many blocks, none split."""
    tile = AttentionTile(16, 64, 4, 3, resident)
    return Launch(kind, tile, heads, [(count, False) for count in blocks], num_tiles=len(blocks))


@pytest.mark.parametrize("name", CASES)
def test_mixed_batches_are_balanced(name: str) -> None:
    result = outcome(CASES[name], (32, 8), 132)
    assert 1.0 <= result["ratio"] < 1.10
    assert result["ideal"] >= result["roofline"]
    assert result["total"] > result["makespan"]


@pytest.mark.parametrize(("heads", "num_sms"), [((16, 16), 132), ((64, 8), 108), ((32, 8), 148)])
def test_chunk_beside_decodes_is_balanced(heads: tuple[int, int], num_sms: int) -> None:
    assert outcome(CASES["chunk of 2k at 8k + 63 decodes at 8k"], heads, num_sms)["ratio"] < 1.10


@pytest.mark.parametrize("name", [f"{batch} decodes at 8k" for batch in (8, 64, 256)])
def test_equal_decodes_are_balanced(name: str) -> None:
    assert outcome(SWEEP[name], (32, 8), 132)["ratio"] < 1.11


@pytest.mark.parametrize("heads", [16, 128])
def test_decodes_over_latents_are_balanced(heads: int) -> None:
    result = outcome(SWEEP["64 decodes at 8k"], (heads, 1), 132, LATENT)
    assert 1.0 <= result["ratio"] < 1.15
    assert result["ideal"] > 0.99 * result["roofline"]  # which also reads queries and block ids


def test_unsplit_schedule_is_seen_as_unbalanced() -> None:
    """The positive control: the same tiles, each in one work item."""
    (launch,) = plan(CASES["1 x 128k + 31 x 4k decodes"], (32, 8), 132)
    unsplit = _launch([2048] + [64] * 31, heads=8)._replace(tile=launch.tile)
    assert sum(blocks for blocks, _ in launch.items) == sum(blocks for blocks, _ in unsplit.items)
    assert simulate([launch], 132)["ideal"] == pytest.approx(simulate([unsplit], 132)["ideal"])
    assert simulate([unsplit], 132)["ratio"] > 10


def test_makespan_by_hand() -> None:
    """Two SMs take 5, 1, 1 and 2 blocks in order: one runs 5, the other 1, 1 and 2."""
    launch = _launch([5, 1, 1, 2])
    cost = {count: _launch([count]).programs()[0] for count in (1, 2, 5)}
    assert makespan(launch, 2) == pytest.approx(2 * cost[1] + cost[2])
    assert makespan(launch, 1) == pytest.approx(sum(cost[count] for count in (5, 1, 1, 2)))
    assert makespan(launch, 4) == pytest.approx(cost[5])


def test_programs_that_share_an_sm_start_together() -> None:
    """Three at once on an SM are slower by as much."""
    alone, shared = _launch([10] * 6), _launch([10] * 6, resident=3)
    assert makespan(shared, 2) == pytest.approx(shared.programs()[0])
    assert makespan(shared, 1) == pytest.approx(2 * shared.programs()[0])
    assert makespan(shared, 2) < makespan(alone, 2) == pytest.approx(3 * alone.programs()[0])
