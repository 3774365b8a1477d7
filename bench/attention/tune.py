"""Times every candidate tile on a few batches, instead of the one that the chooser returns.

    python -m bench.attention.tune [--json FILE] [--budget SECONDS] [--only NAME] [--repeats N]

A candidate that does not compile, spills too much to launch, or gives another result than the chooser's tile is refused
with the reason. The chooser's own tile is timed first and again last, so that drift shows. What wins here goes into
`kernels/attention/config.py` by hand, with its measurement in the comment. Needs a GPU.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import torch

from paged.bench.attention.cases import CASES, MAX_LAYERS, AttentionCase, ours
from paged.bench.benchmark import option_parser
from paged.bench.check import compare
from paged.bench.environment import benchmark_dtype, environment, save
from paged.bench.limits import Ceilings, speed
from paged.bench.timing import ceilings, num_sets, take
from paged.kernels.attention import plan as attention_plan
from paged.kernels.attention.config import AttentionTile

REPEATS = 30
# Two prompts, decodes and verify rows, each gathered and in boxes: what the tiles differ for.
NAMES = [f"prefill.4x4k.h32_8.b{block_size}" for block_size in (16, 64, 128)]
NAMES += ["decode.64x8k.h32_8.b16", "decode.64x8k.h32_8.b64", "mixed.verify_64x5x8k.h32_8.b16"]


def candidates(kind: str, block_size: int) -> Iterator[AttentionTile]:
    """Tiles of one kind over caches of one block size; boxes wherever a block holds BLOCK_N keys.

    programs_per_sm is what the planner aims at: where more fit, a lower number only makes longer work items.
    """
    if kind == "prefill":
        shapes = itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4), (1, 2))
    else:
        shapes = itertools.product((16, 32), (32, 64, 128), (2, 4, 8), (2, 3, 5), (2, 3, 4))
    for block_m, block_n, num_warps, num_stages, programs in shapes:
        if block_m // 16 >= num_warps // 2:  # more warps than 16-row slices twice over have nothing to do
            tile = AttentionTile(block_m, block_n, num_warps, num_stages, programs)
            yield tile
            if block_size >= block_n:
                yield replace(tile, by_tma=True)


def with_tile(kind: str, tile: AttentionTile | None) -> mock._patch:  # type: ignore[type-arg]
    """A context in which plans have `tile` for their sequences of one kind, or for None the chooser's."""
    name = "prefill_tile" if kind == "prefill" else "decode_tile"
    choose = getattr(attention_plan, name)
    return mock.patch.object(attention_plan, name, choose if tile is None else lambda *_, **__: tile)


def tune(
    case: AttentionCase, device: torch.device, repeats: int, limits: Ceilings, is_over: Callable[[], bool]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Rows of tiles and their speed, fastest first, and why other tiles have none."""
    torch.manual_seed(0)
    dtype = benchmark_dtype(device)
    step, layers = case.tensors(device, dtype, num_sets(case.cost(dtype).num_bytes, device, MAX_LAYERS)[0])
    kind = "prefill" if case.kind == "prefill" else "decode"
    want = ours(step, layers)[0]()
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}

    def add(name: dict[str, Any] | str, tile: AttentionTile | None = None) -> None:
        with with_tile(kind, tile):
            calls = ours(step, layers)
            compare(calls[0](), want)
            found = speed(take(calls, device, repeats), case.cost(dtype), limits)
        rows.append({"name": case.name, "tile": name, **found})

    add("the chooser's")
    tiles = list(candidates(kind, case.block_size))
    random.Random(0).shuffle(tiles)  # where time runs out, what was tried is spread over all of them
    for tile in tiles:
        if is_over():
            break
        try:
            add(asdict(tile), tile)
        except Exception as error:  # too much shared memory, or what the compiler refuses: the others go on
            refused[f"{case.name} {tile}"] = f"{type(error).__name__}: {str(error)[:200]}"
    add("the chooser's, again")
    chosen_us = statistics.mean(row["median_us"] for row in rows if isinstance(row["tile"], str))
    rows = [row | {"over_chosen": chosen_us / row["median_us"]} for row in rows]
    return sorted(rows, key=lambda row: float(row["median_us"])), refused


def main(argv: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Print the fastest tiles of every case; the JSON holds all."""
    parser = option_parser(__doc__, "json", "only", "repeats", "budget", budget=500.0, repeats=REPEATS)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no GPU: tiles can only be compared where they run")
    device = torch.device("cuda")
    chosen = [case for case in CASES if case.name in NAMES and args.only in case.name]
    limits = ceilings(device, benchmark_dtype(device), REPEATS)
    not_run = [case.name for case in chosen]
    report: dict[str, Any] = environment("tune_attention", device, limits)
    report |= {"rows": [], "refused": {}, "not_run": not_run}
    end = time.monotonic() + args.budget
    for index, case in enumerate(chosen):
        case_end = time.monotonic() + (end - time.monotonic()) / (len(chosen) - index)
        rows, refused = tune(case, device, args.repeats, limits, lambda end=case_end: time.monotonic() > end)  # type: ignore[misc]
        report["rows"] += rows
        report["refused"] |= refused
        not_run.remove(case.name)
        write(f"{case.name}: {len(rows)} timed, {len(refused)} refused")
        for row in rows[:8]:
            write(f"  {row['median_us']:10.2f} us  {row['tile']}")
        if args.json:
            save(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
