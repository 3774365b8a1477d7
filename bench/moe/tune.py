"""Find the tiles of the fused MoE for one model on this GPU, and write the table that `fused_moe` looks up.

    python -m bench.moe.tune --model gpt-oss-20b [--packed mxfp4] [--tokens 64 4096 ...] [--budget SECONDS] [--out DIR]

The two GEMMs are timed separately, in bfloat16 with evenly drawn experts, for every number of rows that they could
share; the rows with the smallest sum win. Candidates closest to the tiles that `fused_moe` would choose come first,
128 at a time: compiled on all cores, then timed. Every number of tokens gets an equal part of the time left. The table
is written after each. Numbers already in it are skipped, so a stopped run can continue.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from paged.bench.benchmark import INTERPRETING, option_parser, save
from paged.bench.compilation.ahead import compile_ahead, variants_of
from paged.bench.compilation.compile import SHARED_LIMIT
from paged.bench.moe.cases import GPT_OSS, MODELS, MoeBatch, MoeCase, MoeLayer, MoeModel
from paged.bench.moe.formats import MXFP4, NVFP4, Format
from paged.bench.timing import take
from paged.kernels.common.compat import interpreting
from paged.kernels.common.device import LARGE_SHARED_MEMORY, device_of
from paged.kernels.common.packed.packing import num_words
from paged.kernels.moe.config import (
    FOLDER,
    MoeShape,
    MoeTile,
    MoeTiles,
    fallback_tiles,
    table_dtype,
    table_name,
    takes_gemv,
)
from paged.kernels.moe.gemm import expert_gemm
from paged.kernels.moe.moe_align_block_size import moe_align_block_size

TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
REPEATS = 7
# Candidates that are compiled before they are timed: 16 cores take half a minute.
_AT_ONCE = 128
# Candidates that are timed however late it is: the guess's own tiles of both GEMMs are among them.
_FEWEST = 8
PACKED = {"mxfp4": MXFP4, "nvfp4": NVFP4, "int4": Format("int4", 1, 128, in_words=True)}


@dataclass(frozen=True)
class Candidate:
    """A tile for one of the two GEMMs."""

    gated: bool
    tile: MoeTile


def search_space(shape: MoeShape, arch: str) -> list[Candidate]:
    """Tiles whose rows lie within a factor of four of the entries an expert, and that could fit the chip."""
    fewest, largest = shape.entries_per_expert / 4, max(16.0, 4 * shape.entries_per_expert)
    rows = [m for m in (16, 32, 64, 128) if fewest <= m <= largest] or [128]
    candidates = []
    for gated, block_m, width, block_k, num_stages, swap_ab, tma in itertools.product(
        (True, False), rows, (64, 128, 256), (64, 128, 256), (2, 3, 4, 5), (False, True), (False, True)
    ):
        is_large = block_m >= 64
        if (width == 256) != (block_m == 128) and width != 128:
            continue
        if block_k == 256 and is_large:
            continue
        if shape.packed and (block_k < 128 or not swap_ab or tma):
            continue
        is_for_hopper = tma or (swap_ab and not shape.packed)
        if is_for_hopper and (arch not in LARGE_SHARED_MEMORY or (swap_ab and block_m == 128)):
            continue
        w_bytes = width * block_k * shape.element_size
        if shape.packed:
            w_bytes //= 4
        stage_bytes = block_m * block_k * shape.element_size + w_bytes
        if stage_bytes * (num_stages - 1) > SHARED_LIMIT.get(arch, 99 << 10):
            continue
        num_warps = 4
        if block_m * width >= 128 * 128 or (shape.packed and is_large):
            num_warps = 8
        block_n = width
        if gated:
            block_n = width // 2
        tile = MoeTile(block_m, block_n, block_k, 1, num_warps, num_stages, swap_ab, tma)
        candidates.append(Candidate(gated, tile))
        if is_large:
            candidates.append(Candidate(gated, replace(tile, group_m=8)))
    return candidates


def by_promise(candidates: Iterable[Candidate], guess: MoeTiles) -> list[Candidate]:
    """Sort candidates: those that differ least from the guess come first."""

    def distance(candidate: Candidate) -> int:
        guessed = guess.down
        if candidate.gated:
            guessed = guess.gate_up
        return sum(size != other for size, other in zip(astuple(candidate.tile), astuple(guessed), strict=True))

    return sorted(candidates, key=distance)


def compiled(candidates: Sequence[Candidate], seconds: Callable[[Candidate], float], end: float) -> Iterator[Candidate]:
    """Yield candidates until `end`, and always the first few; many are compiled at once, in half of the time left."""
    for index, candidate in enumerate(candidates):
        remaining = end - time.monotonic()
        if index >= _FEWEST and remaining < 0:
            break
        if index % _AT_ONCE == 0:
            group = candidates[index : index + _AT_ONCE]
            compile_ahead(variants_of(lambda: list(map(seconds, group))), remaining / 2)  # noqa: B023
        yield candidate


def tune(
    candidates: Iterable[Candidate], seconds: Callable[[Candidate], float]
) -> tuple[dict[str, MoeTile], dict[str, float]]:
    """The tiles of both GEMMs that share their rows with the least sum of times, and those times in microseconds."""
    best: dict[tuple[int, bool], tuple[float, MoeTile]] = {}
    for candidate in candidates:
        key = candidate.tile.block_m, candidate.gated
        took = seconds(candidate)
        if took < best.get(key, (math.inf, None))[0]:
            best[key] = took, candidate.tile
    sums = {}
    for block_m, gated in best:
        if gated and (block_m, False) in best:
            sums[block_m] = best[block_m, True][0] + best[block_m, False][0]
    block_m = min(sums, key=lambda rows: sums[rows])
    gate_up_seconds, gate_up = best[block_m, True]
    down_seconds, down = best[block_m, False]
    return {"gate_up": gate_up, "down": down}, {"gate_up": gate_up_seconds * 1e6, "down": down_seconds * 1e6}


def timer(layer: MoeLayer, batch: MoeBatch, device: torch.device) -> Callable[[Candidate], float]:
    """Median seconds of one GEMM with a tile; infinite where it does not run."""
    num_entries, top_k = batch.topk_ids.numel(), batch.topk_ids.shape[1]
    gate_up, down = layer.gate_up, layer.down
    (num_experts, hidden_size, _), intermediate_size = down.w.shape, gate_up.w.shape[1] // 2
    activated = torch.randn(num_entries, intermediate_size, device=device, dtype=batch.hidden_states.dtype)
    parts = torch.empty(num_entries, hidden_size, device=device, dtype=activated.dtype)
    out = torch.empty_like(activated)

    def seconds(candidate: Candidate) -> float:
        tile = candidate.tile
        aligned = moe_align_block_size(batch.topk_ids, tile.block_m, num_experts, expert_map=layer.expert_map)

        def call() -> None:
            if candidate.gated:
                expert_gemm(batch.hidden_states, gate_up, out, aligned, tile, activation="silu", entries_per_row=top_k)
            else:
                expert_gemm(activated, down, parts, aligned, tile, entry_weights=batch.topk_weights)

        try:
            return statistics.median(take([call], device, REPEATS))
        except Exception:  # a launch that the device refuses
            return math.inf

    return seconds


def shape_of(model: MoeModel, num_tokens: int, packed: str = "") -> MoeShape:
    """Return the shape as `fused_moe` computes it: columns of packed weights fill words."""
    intermediate_size = model.intermediate_size
    if packed:
        intermediate_size = 8 * num_words(intermediate_size)
    return MoeShape(num_tokens * model.top_k, model.num_experts, model.hidden_size, intermediate_size, 2, packed)


def new_table(model: MoeModel, arch: str, packed: str = "") -> dict[str, Any]:
    return {
        "model": model.name,
        "num_experts": model.num_experts,
        "top_k": model.top_k,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "packed": packed,
        "arch": arch,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "tiles": {},
    }


def main(argv: list[str] | None = None) -> int:
    parser = option_parser(__doc__, "budget")
    parser.add_argument("--model", required=True, choices=[model.name for model in (*MODELS, GPT_OSS)])
    parser.add_argument("--packed", choices=list(PACKED), default="", help="format of packed weights")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the tables; default: %(default)s")
    args = parser.parse_args(argv)
    if interpreting():
        parser.error(INTERPRETING)
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU: tiles are timed on the GPU that they are for, so run this there")
    end = time.monotonic() + args.budget
    device = torch.device("cuda")
    chip = device_of(device)
    (model,) = (model for model in (*MODELS, GPT_OSS) if model.name == args.model)
    any_shape = shape_of(model, 1, args.packed)
    kind = table_dtype(args.packed, torch.bfloat16)
    path = args.out / table_name(model.num_experts, any_shape.intermediate_size, chip.name, kind)
    table = new_table(model, chip.arch, args.packed)
    if path.exists():
        table = json.loads(path.read_text())
    shapes = {}
    for tokens in args.tokens:
        shape = shape_of(model, tokens, args.packed)
        if str(tokens) not in table["tiles"] and not takes_gemv(shape, is_quantized=bool(args.packed)):
            shapes[tokens] = shape
    layer = MoeCase(model, 1, "balanced", PACKED.get(args.packed)).layer(device, torch.bfloat16)
    for index, (tokens, shape) in enumerate(shapes.items()):
        now = time.monotonic()
        if now > end:
            break
        batch = MoeCase(model, tokens, "balanced").batch(device, torch.bfloat16)
        candidates = by_promise(search_space(shape, chip.arch), fallback_tiles(shape, chip))
        seconds = timer(layer, batch, device)
        tiles, times = tune(compiled(candidates, seconds, now + (end - now) / (len(shapes) - index)), seconds)
        row = {name: asdict(tile) for name, tile in tiles.items()}
        table["tiles"][str(tokens)] = {**row, "microseconds": times}
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path, table)
    print(f"{path}: {len(table['tiles'])} numbers of tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
