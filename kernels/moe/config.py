"""Tile sizes of the two grouped GEMMs of the fused MoE: from a tuned table if there is one, else from a pure function.

A table is a JSON file in `configs/` for one set of weights on one device, written by `bench.moe.tune`.
"""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..common.device import LARGE_SHARED_MEMORY, SMALL_SHARED_MEMORY, Device

FOLDER = Path(__file__).parent / "configs"
# Entries at most a quarter of the experts: few experts then have two, which share their weights in the L2 cache, so
# that sorting entries by expert has nothing to save. The same bound as vLLM's.
GEMV_EXPERTS_PER_ENTRY = 4


@dataclass(frozen=True)
class MoeTile:
    """Tile of a grouped GEMM: a program computes block_m entries of one expert by block_n output columns.

    group_m blocks of entries run next to each other before the next block_n columns, so that they find their expert's
    weights in the L2 cache. swap_ab: weights times entries, for matrix units that take the left operand's rows in 64s.
    tma: Hopper's copy engine fetches the weights, if their strides allow.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    swap_ab: bool = False
    tma: bool = False


@dataclass(frozen=True)
class MoeTiles:
    """Tiles of both GEMMs; they share block_m, because both walk one sorted order."""

    gate_up: MoeTile
    down: MoeTile


@dataclass(frozen=True)
class MoeShape:
    """Everything that tile choices depend on.

    num_experts: experts that entries are routed over; a rank may hold a part of them. packed: "int4", "mxfp4" or
    "nvfp4" if weights are words of eight such codes.
    """

    num_entries: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    element_size: int
    packed: str = ""

    @property
    def entries_per_expert(self) -> float:
        return self.num_entries / self.num_experts


def takes_gemv(shape: MoeShape, *, is_quantized: bool = False) -> bool:
    """Return whether entries are few enough for matrix-vector products, without alignment; not if quantised."""
    return not is_quantized and shape.num_entries * GEMV_EXPERTS_PER_ENTRY <= shape.num_experts


def moe_tiles(shape: MoeShape, dtype: torch.dtype, device: Device) -> MoeTiles:
    """Return the tiles tuned for the nearest number of tokens, or `fallback_tiles` without a table.

    Logs once which file is missing.
    """
    return _tiles(shape, table_dtype(shape.packed, dtype), device, FOLDER)


def table_dtype(packed: str, dtype: torch.dtype) -> str:
    """Return the weights' dtype as tables and vLLM name it; MXFP4 beside 16-bit activations is "mxfp4_w4a16"."""
    if packed:
        return f"{packed}_w4a{8 * dtype.itemsize}"
    return str(dtype).removeprefix("torch.")


def table_name(num_experts: int, intermediate_size: int, device_name: str, dtype: str) -> str:
    """Return the file name of a table, as in vLLM and SGLang."""
    return f"E={num_experts},N={intermediate_size},device_name={device_name.replace(' ', '_')},dtype={dtype}.json"


@functools.lru_cache(maxsize=4096)
def _tiles(shape: MoeShape, dtype: str, device: Device, folder: Path) -> MoeTiles:
    if device.name:
        table = load_table(folder / table_name(shape.num_experts, shape.intermediate_size, device.name, dtype))
        if table:
            return table[min(table, key=lambda num_entries: abs(num_entries - shape.num_entries))]
    return fallback_tiles(shape, device)


@functools.cache
def load_table(path: Path) -> dict[int, MoeTiles]:
    """Return tiles by number of entries (tokens times experts a token); empty, with a message, without such a file."""
    if not path.exists():
        logging.getLogger(__name__).warning(
            "no tuned MoE tiles in %s: tiles come from the shape; `python -m paged.bench.moe.tune` writes it",
            path,
        )
        return {}
    table = json.loads(path.read_text())
    top_k = int(table["top_k"])
    tiles = {}
    for num_tokens, row in table["tiles"].items():
        tiles[int(num_tokens) * top_k] = MoeTiles(MoeTile(**row["gate_up"]), MoeTile(**row["down"]))
    return tiles


def fallback_tiles(shape: MoeShape, device: Device) -> MoeTiles:
    """Return tiles for shapes without a table, from the compiler's reports and from counting bytes.

    The rows of a tile change where vLLM 0.33's tuned table for 128 experts on an H200 changes: at 12, 24 and 48 entries
    an expert, halfway between its rows. With 12 entries on average, one expert in ten has more than 16.
    """
    if shape.packed:
        gate_up, down = _packed(shape, device)
    elif shape.element_size == 4 or shape.hidden_size % 16 or shape.intermediate_size % 16:
        # float32 has no tensor core to feed, and rows off the 16-byte grid are loaded element by element: both take so
        # many registers that larger tiles spill.
        num_warps = 8 if device.arch in SMALL_SHARED_MEMORY else 4  # on sm_89 4 warps spill 3 registers of the first
        gate_up, down = MoeTile(32, 32, 32, 1, num_warps, 2), MoeTile(32, 64, 32, 1, 4, 2)
    elif shape.entries_per_expert <= 24:
        gate_up, down = _few_rows(shape, device)
    else:
        gate_up, down = _many_rows(shape, device)
    return MoeTiles(_fitting(gate_up, device.arch), _fitting(down, device.arch))


def quantized_tile(tile: MoeTile, group_k: int, arch: str, *, gated: bool, is_native: bool) -> MoeTile:
    """Return the tile for weights with a scale for group_k columns; is_native: 8-bit numbers are multiplied as such.

    A step stays within a group and takes 128 bytes of a row. Its product takes registers besides the sum, so 128
    columns are the most they hold. With 128 rows that takes all 255 on sm_90, and spills up to 187 on sm_80 and sm_100.
    """
    block_k = tile.block_k
    if block_k >= 64:
        block_k = 128 if is_native else 64
    block_k = min(block_k, group_k & -group_k)
    max_columns = 128
    if tile.block_m == 128 and arch.startswith("sm_") and arch != "sm_90":
        max_columns = 64
    if gated:  # gate and up have as many columns each
        max_columns //= 2
    # 16 rows on the left go to mma.sync, for which Hopper first makes 16-bit numbers of them: 100 conversions a step.
    swap_ab = tile.swap_ab or (is_native and tile.block_m == 16 and arch in LARGE_SHARED_MEMORY)
    block_n = min(tile.block_n, max_columns)
    return replace(tile, block_n=block_n, block_k=block_k, num_stages=3, swap_ab=swap_ab)


def _few_rows(shape: MoeShape, device: Device) -> tuple[MoeTile, MoeTile]:
    """Return the tile for few rows, where reading the weights takes the time.

    The goals are 33 KB in flight on each SM (4.3 TB/s at a microsecond of latency, 132 SMs), and no SM without a
    program. A tile of 16 rows has two stages on their way, of 20 KB or 36 KB, and three programs share an SM. The wide
    one reads the entries half as often; it is taken if it still gives four programs an SM. A program computes block_n
    gate columns and as many up columns, so the first GEMM's width counts twice.

    For 16 rows mma.sync and wgmma on swapped operands both take 22 instructions per KB of weights. For 32, swapping
    takes 24 instead of 29 and multiplies no padding up to 64; its 82 KB let two programs share an SM.
    """
    if shape.entries_per_expert > 12:
        swap_ab = device.arch in LARGE_SHARED_MEMORY
        return MoeTile(32, 64, 64, 1, 4, 4, swap_ab), MoeTile(32, 128, 64, 1, 4, 4, swap_ab)
    num_blocks = min(shape.num_entries, shape.num_experts)

    def width(columns: int) -> int:
        return 128 if num_blocks * columns >= 4 * device.num_sms * 128 else 64

    return (
        MoeTile(16, width(2 * shape.intermediate_size) // 2, 128, 1, 4, 3),
        MoeTile(16, width(shape.hidden_size), 128, 1, 4, 3),
    )


def _many_rows(shape: MoeShape, device: Device) -> tuple[MoeTile, MoeTile]:
    """Return the tile for many rows: 64, one wgmma, or 128 from 48 entries an expert on, to halve reads of weights."""
    tma = device.arch in LARGE_SHARED_MEMORY
    if shape.entries_per_expert <= 48:
        return MoeTile(64, 64, 64, 4, 4, 4, tma=tma), MoeTile(64, 128, 64, 4, 4, 4, tma=tma)
    narrow = MoeTile(128, 64, 64, 8, 8, 3, tma=tma), MoeTile(128, 128, 64, 8, 8, 3, tma=tma)
    if not tma:
        return narrow
    # 128 x 256: a step of 64 moves 48 KB into shared memory and 80 KB out of it in the 1,024 cycles of its wgmma, all
    # of the 128 bytes a cycle; 128 x 128 needs 160 a cycle. The copy engine leaves it with 174 registers of 254 and a
    # third of the copies that threads issue. But the 100 registers and 96 KB of 128 x 128 let two programs share an SM,
    # and one computes while the other drains, which counts where a row is short (768 for the second GEMM of
    # Qwen3-30B-A3B: 12 steps).
    wide = MoeTile(128, 128, 64, 16, 8, 4, tma=True), MoeTile(128, 256, 64, 16, 8, 4, tma=True)
    gate_up, down = narrow
    if _is_long(shape.hidden_size):
        gate_up = wide[0]
    if _is_long(shape.intermediate_size):
        down = wide[1]
    return gate_up, down


def _is_long(depth: int) -> bool:
    return depth >= 2048 and depth % 64 == 0


def _packed(shape: MoeShape, device: Device) -> tuple[MoeTile, MoeTile]:
    """Return the tile for words of eight 4-bit codes; a step takes whole units of 128 columns, 8 KB for 128 rows.

    The tiles are those of `quantization.config.linear_tile`, which gives the reasons: weights on the left, from
    registers if the matrix unit takes them there, and 8 warps for many rows, because unpacked weights take registers.
    Per KB of MXFP4 and 16 rows, 128 columns take 321 instructions on sm_90 and 64 take 419; 64 are for SMs without a
    program.
    """
    entries = shape.entries_per_expert
    few_rows = 16 if entries <= 12 else 32
    if shape.element_size == 4 or shape.hidden_size % 16 or shape.intermediate_size % 16:
        return MoeTile(few_rows, 16, 128, 1, 4, 2), MoeTile(few_rows, 32, 128, 1, 4, 2)
    if entries <= 24:
        num_blocks = min(shape.num_entries, shape.num_experts)

        def width(columns: int) -> int:
            fills = num_blocks * columns >= device.num_sms * 128
            # For 64 columns ptxas puts 12 registers away on sm_89, outside of the loop.
            return 128 if fills or device.arch in SMALL_SHARED_MEMORY else 64

        return (
            MoeTile(few_rows, width(2 * shape.intermediate_size) // 2, 128, 1, 4, 4, swap_ab=True),
            MoeTile(few_rows, width(shape.hidden_size), 128, 1, 4, 4, swap_ab=True),
        )
    fills_memory = device.arch in ("sm_100", "sm_103")
    rows, group_m = 128, 8
    if entries <= 48 or fills_memory:
        rows, group_m = 64, 4
    return MoeTile(rows, 64, 128, group_m, 8, 3, swap_ab=True), MoeTile(rows, 128, 128, group_m, 8, 3, swap_ab=True)


def _fitting(tile: MoeTile, arch: str) -> MoeTile:
    """Return the tile in a form that fits `arch`.

    82 KB for 4 stages fit the 163 KB of sm_80, but not the 99 KB of consumer chips beside a second program, nor the 64
    KB of LDS on CDNA3, where two stages take 32 KB.
    """
    if arch in LARGE_SHARED_MEMORY or arch == "sm_80":
        return tile
    return replace(tile, num_stages=min(tile.num_stages, 2))
