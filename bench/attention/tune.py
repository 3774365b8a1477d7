"""Time every candidate tile of paged attention on a few batches.

    python -m bench.attention.tune [--json FILE] [--budget SECONDS] [--only NAME] [--repeats N]

A candidate is refused, with the reason, if it does not compile, spills too much to launch, or differs from the
chooser's tile. The report sorts the other candidates by `over_chosen`, the chooser's time over the candidate's, both
measured in turns. `--only "chosen with"` compares numbers of stages alone. Copy the best tiles into the tables of
`kernels/attention/tiles.py` by hand, with the measurement in the comment. Needs a GPU.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import torch

from paged.bench.attention.cases import CASES, MAX_LAYERS, AttentionCase, ours
from paged.bench.benchmark import RESUMABLE, Benchmark, Json, Setting
from paged.bench.check import agreement
from paged.bench.contest import OURS, Contest
from paged.bench.timing import num_sets, sampler
from paged.kernels.attention import tiles
from paged.kernels.attention.plan import AttentionTile

# One case for each batch with tiles of its own: prompts, decodes and verify rows, each gathered and in boxes, and
# latents of few and many heads.
NAMES = [f"prefill.4x4k.h32_8.b{block_size}" for block_size in (16, 64, 128)]
NAMES += ["decode.64x8k.h32_8.b16", "decode.64x8k.h32_8.b64", "mixed.verify_64x5x8k.h32_8.b16"]
NAMES += [f"decode.latents_64x8k.h{heads}_1.b64.d576_512" for heads in (16, 128)]
# Number of tiles of a batch that are timed before the next batch's turn, so that every batch gets its turn early.
_AT_ONCE = 16


@dataclass(frozen=True)
class TileCase:
    """A batch with one tile, or with the chooser's. num_stages: stages that replace the chooser's number."""

    case: AttentionCase
    tile: AttentionTile | None = None
    num_stages: int | None = None

    @property
    def name(self) -> str:
        return f"{self.case.name} {self.tile or self.chosen}"

    @property
    def chosen(self) -> str:
        """The part of a case's name that means the chooser's tile."""
        if self.num_stages is None:
            return "chosen"
        return f"chosen with {self.num_stages} stages"

    @property
    def kind(self) -> str:
        """The kind of tile: "mixed" cases are verify rows, which take decode tiles."""
        if self.case.latent:
            return "latents"
        if self.case.kind == "prefill":
            return "prefill"
        return "decode"


def candidates(kind: str, block_size: int) -> Iterator[AttentionTile]:
    """Yield tiles of one kind over caches of one block size. A block of BLOCK_N keys or more is a box, except latents.

    The planner aims at programs_per_sm. If more programs fit, a lower number only makes work items longer.
    """
    can_box = kind != "latents"
    if kind == "prefill":
        shapes = itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 5), (1, 2))
    elif kind == "decode":
        shapes = itertools.product((16, 32), (32, 64, 128), (2, 4, 8), (2, 3, 5), (2, 3, 4))
    else:
        shapes = itertools.product((16, 32, 64), (16, 32, 64), (4, 8), (2, 3, 5), (1, 2))
    for block_m, block_n, num_warps, num_stages, programs in shapes:
        if block_m // 16 >= num_warps // 2:  # more than two warps per 16 rows have no work
            tile = AttentionTile(block_m, block_n, num_warps, num_stages, programs)
            yield tile
            if can_box and block_size >= block_n:
                yield replace(tile, by_tma=True)


def with_tile(kind: str, tile: AttentionTile | None, num_stages: int | None = None) -> mock._patch:  # type: ignore[type-arg]
    """Return a context in which plans use `tile` for their sequences of one kind; None for the chooser's tile.

    num_stages: stages of the tile; None for its own.
    """
    name = f"{kind}_tile"
    if kind == "latents":
        name = "mla_tile"
    choose = getattr(tiles, name)

    def changed(*args: Any, **options: Any) -> AttentionTile:
        chosen: AttentionTile = tile or choose(*args, **options)
        if num_stages is not None:
            return replace(chosen, num_stages=num_stages)
        return chosen

    return mock.patch.object(tiles, name, changed)


def cases(_: Setting) -> list[TileCase]:
    """Return the cases in an order that spreads them over all batches and tiles, in case time runs out.

    The chooser's tiles come first, with every number of stages that a candidate has.
    """
    of_stages: list[TileCase] = []
    rounds: dict[int, list[TileCase]] = {}
    for case in CASES:
        if case.name not in NAMES:
            continue
        tiles = list(candidates(TileCase(case).kind, case.block_size))
        for num_stages in sorted({tile.num_stages for tile in tiles}, reverse=True):
            of_stages.append(TileCase(case, num_stages=num_stages))
        random.Random(0).shuffle(tiles)
        for rank, tile in enumerate([None, *tiles]):
            rounds.setdefault(rank // _AT_ONCE, []).append(TileCase(case, tile))
    return of_stages + list(itertools.chain(*(rounds[number] for number in sorted(rounds))))


@functools.lru_cache(maxsize=1)
def _batch(case: AttentionCase, setting: Setting) -> tuple[Any, ...]:
    """Return tensors, the chooser's result, and a function that times a call."""
    torch.manual_seed(0)
    num_bytes = case.cost(setting.dtype).num_bytes
    tensors = case.tensors(setting.device, setting.dtype, num_sets(num_bytes, setting.device, MAX_LAYERS)[0])
    calls = ours(*tensors)
    return tensors, calls[0](), sampler(calls, setting.device)[1]


def measure(case: TileCase, setting: Setting) -> Json:
    """Measure the row of a tile, in turns with the chooser's."""
    tensors, expected, time_chosen = _batch(case.case, setting)
    tile: Any = case.chosen
    if case.tile is not None:
        tile = asdict(case.tile)
    entries = Contest({"name": case.case.name, "tile": tile}, setting, case.case.cost(setting.dtype))
    with with_tile(case.kind, case.tile, case.num_stages):
        entries.add(OURS, ours(*tensors), lambda out: agreement(out, expected).check())
        entries.samples["chosen"] = time_chosen
        row = entries.row()
    return row | {"over_chosen": row["peers"].pop("chosen")["ratio"]}


BENCHMARK = Benchmark(
    "tune_attention",
    __doc__,
    cases,
    measure,
    {"cuda": 30},
    options=RESUMABLE,
    device="cuda",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
