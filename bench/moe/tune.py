"""Find the tiles of the fused MoE for one model on this GPU, and write the table that `fused_moe` looks up.

    python -m bench.moe.tune --model gpt-oss-20b [--packed mxfp4] [--tokens 64 4096 ...] [--budget SECONDS] [--out DIR]

Both GEMMs are timed separately, in bfloat16 with evenly drawn experts, for every number of rows that they could share;
the rows with the smallest sum win. Candidates closest to the tiles that `fused_moe` would choose come first. A group of
128 is compiled on all cores, then timed. A candidate whose result differs from these tiles' is left out. Every number
of tokens gets an equal part of the time left. The table is written after each number. Numbers already in it are
skipped, so a stopped run can continue; with --json and --resume also after a candidate that hangs.
"""

from __future__ import annotations

import argparse
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

from paged.bench.benchmark import RESUMABLE, Benchmark, Json, Setting, option_parser, released, save
from paged.bench.check import WrongResultError, agreement
from paged.bench.compilation.ahead import compile_ahead, variants_of
from paged.bench.compilation.compile import SHARED_LIMIT
from paged.bench.moe.cases import GPT_OSS, MODELS
from paged.bench.problems.experts import MoeBatch, MoeCase, MoeLayer, MoeModel
from paged.bench.problems.formats import MXFP4, NVFP4, Format
from paged.bench.timing import Call, take
from paged.bench.watchdog import WATCHDOG
from paged.kernels.core.device import LARGE_SHARED_MEMORY, device_of
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
from paged.kernels.quantization.packing import num_words

TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# Number of candidates that are compiled together before they are timed. 16 cores take half a minute for them.
_AT_ONCE = 128
# Number of candidates that are timed even if time is short. They include the chosen tiles of both GEMMs.
_FEWEST = 8
# Largest number of a result's rows that are compared.
_MAX_COMPARED = 4096
PACKED = {"mxfp4": MXFP4, "nvfp4": NVFP4, "int4": Format("int4", 1, 128, in_words=True)}


@dataclass(frozen=True)
class Candidate:
    """A tile for one of the two GEMMs."""

    gated: bool
    tile: MoeTile


def search_space(shape: MoeShape, arch: str) -> list[Candidate]:
    """Return tiles that could fit the chip, with rows within a factor of four of the entries per expert."""
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
    """Sort candidates: the ones that differ least from the guess come first."""

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
        WATCHDOG.progress()
        yield candidate


def tune(
    candidates: Iterable[Candidate], seconds: Callable[[Candidate], float]
) -> tuple[dict[str, MoeTile], dict[str, float]]:
    """Return the tiles of both GEMMs with equal rows and the least sum of times, and the times in microseconds."""
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


def timer(layer: MoeLayer, batch: MoeBatch, guess: MoeTiles, repeats: int) -> Callable[[Candidate], float]:
    """Return a function for the median seconds of one GEMM with a tile, infinite if it fails or its result differs."""
    num_entries, top_k = batch.topk_ids.numel(), batch.topk_ids.shape[1]
    gate_up, down = layer.gate_up, layer.down
    (num_experts, hidden_size, _), intermediate_size = down.w.shape, gate_up.w.shape[1] // 2
    x = batch.hidden_states
    activated = x.new_empty(num_entries, intermediate_size).normal_()
    outputs = {True: torch.empty_like(activated), False: x.new_empty(num_entries, hidden_size)}
    compared = slice(None, None, -(-num_entries // _MAX_COMPARED))
    expected: dict[bool, torch.Tensor] = {}

    def call_of(candidate: Candidate) -> Call:
        tile, out = candidate.tile, outputs[candidate.gated].fill_(math.nan)
        aligned = moe_align_block_size(batch.topk_ids, tile.block_m, num_experts, expert_map=layer.expert_map)

        def call() -> torch.Tensor:
            if candidate.gated:
                expert_gemm(x, gate_up, out, aligned, tile, activation="silu", entries_per_row=top_k)
            else:
                expert_gemm(activated, down, out, aligned, tile, entry_weights=batch.topk_weights)
            return out[compared]

        return call

    for candidate in (Candidate(True, guess.gate_up), Candidate(False, guess.down)):
        expected[candidate.gated] = call_of(candidate)().clone()

    def seconds(candidate: Candidate) -> float:
        try:
            call = call_of(candidate)
            agreement(call(), expected[candidate.gated]).check()
            return statistics.median(take([call], x.device, repeats))
        except WrongResultError:
            return math.inf
        except Exception:  # the device refuses a launch
            if not released(x.device):
                raise
            return math.inf

    return seconds


class Tuner:
    """The cases of `main`'s arguments, one for each number of tokens, and their table."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._end = time.monotonic() + args.budget
        self._num_left = 0
        self._layer: MoeLayer | None = None
        (self._model,) = (model for model in (*MODELS, GPT_OSS) if model.name == args.model)
        self.path, self.table = Path(), Json()

    def cases(self, setting: Setting) -> list[MoeCase]:
        """Open the table, and return the cases that it lacks."""
        model, packed, chip = self._model, self._args.packed, device_of(setting.device)
        kind = table_dtype(packed, setting.dtype)
        width = shape_of(model, 1, packed).intermediate_size
        self.path = self._args.out / table_name(model.num_experts, width, chip.name, kind)
        self.table = new_table(model, chip.arch, packed)
        if self.path.exists():
            self.table = json.loads(self.path.read_text())
        cases = []
        for tokens in self._args.tokens:
            is_gemv = takes_gemv(shape_of(model, tokens, packed), is_quantized=bool(packed))
            if str(tokens) not in self.table["tiles"] and not is_gemv:
                cases.append(MoeCase(model, tokens, "balanced", PACKED.get(packed)))
        self._num_left = len(cases)
        return cases

    def measure(self, case: MoeCase, setting: Setting) -> Json:
        """Tune for one number of tokens, and write the table."""
        now = time.monotonic()
        end = now + (self._end - now) / self._num_left
        self._num_left -= 1
        chip, shape = device_of(setting.device), shape_of(case.model, case.num_tokens, self._args.packed)
        guess = fallback_tiles(shape, chip)
        if self._layer is None:
            self._layer = case.layer(setting.device, setting.dtype)
        candidates = by_promise(search_space(shape, chip.arch), guess)
        seconds = timer(self._layer, case.batch(setting.device, setting.dtype), guess, setting.repeats)
        tiles, times = tune(compiled(candidates, seconds, end), seconds)
        entry = {name: asdict(tile) for name, tile in tiles.items()}
        self.table["tiles"][str(case.num_tokens)] = {**entry, "microseconds": times}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save(self.path, self.table)
        return {"name": case.name, "value": sum(times.values()), "unit": "us", "detail": times}


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
    """Tune, and print how many numbers of tokens the table has."""
    parser = option_parser(__doc__, *RESUMABLE)
    parser.add_argument("--model", required=True, choices=[model.name for model in (*MODELS, GPT_OSS)])
    parser.add_argument("--packed", choices=list(PACKED), default="", help="format of packed weights")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the tables; default: %(default)s")
    args = parser.parse_args(argv)
    tuner = Tuner(args)
    repeats = {"cuda": 7}
    benchmark = Benchmark("tune_moe", __doc__, tuner.cases, tuner.measure, repeats, device="cuda", has_limits=False)
    code = benchmark.run(parser, args)
    print(f"{tuner.path}: {len(tuner.table['tiles'])} numbers of tokens")
    return code


if __name__ == "__main__":
    sys.exit(main())
