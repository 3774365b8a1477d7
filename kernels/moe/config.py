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

from ..core.device import LARGE_SHARED_MEMORY, SMALL_SHARED_MEMORY, Device

FOLDER = Path(__file__).parent / "configs"
# Matrix-vector products need at least this many experts an entry. Few experts then have two entries, which share the
# weights in the L2 cache, so sorting saves nothing. vLLM has the same bound.
GEMV_EXPERTS_PER_ENTRY = 4


@dataclass(frozen=True)
class MoeTile:
    """Tile of a grouped GEMM: a program computes block_m entries of one expert by block_n output columns.

    group_m: blocks of entries that run next to each other before the next block_n columns, so that their expert's
    weights are in the L2 cache.
    swap_ab: multiply weights times entries, for matrix units that take the left operand's rows in 64s.
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
    """Tiles of both GEMMs. They share block_m, because both follow one sorted order."""

    gate_up: MoeTile
    down: MoeTile


@dataclass(frozen=True)
class MoeShape:
    """Everything that tile choices depend on.

    num_experts: experts that entries are routed over; a rank may hold a part of them.
    packed: "int4", "mxfp4" or "nvfp4" if weights are words of eight such codes.
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
    """Return whether entries are few enough for matrix-vector products without sorting. Quantised weights never are."""
    return not is_quantized and shape.num_entries * GEMV_EXPERTS_PER_ENTRY <= shape.num_experts


def moe_tiles(shape: MoeShape, dtype: torch.dtype, device: Device) -> MoeTiles:
    """Return the tiles tuned for the nearest number of tokens, or `fallback_tiles` without a table.

    A missing file is logged once.
    """
    return _tiles(shape, table_dtype(shape.packed, dtype), device, FOLDER)


def table_dtype(packed: str, dtype: torch.dtype) -> str:
    """Return the weights' dtype as tables and vLLM name it; MXFP4 with 16-bit activations is "mxfp4_w4a16"."""
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
    """Return tiles by number of entries (tokens times experts a token); empty, with a message, if there is no file."""
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

    The rows of a tile change at 12, 24 and 48 entries an expert, where vLLM's tuned table changes, see limits.md.
    """
    if shape.packed:
        gate_up, down = _packed(shape, device)
    elif shape.element_size == 4 or shape.hidden_size % 16 or shape.intermediate_size % 16:
        # float32 has no tensor core. Rows that are not aligned to 16 bytes are loaded element by element. Both take so
        # many registers that larger tiles spill.
        num_warps = 8 if device.arch in SMALL_SHARED_MEMORY else 4  # with 4 warps the first GEMM spills on sm_89
        gate_up, down = MoeTile(32, 32, 32, 1, num_warps, 2), MoeTile(32, 64, 32, 1, 4, 2)
    elif shape.entries_per_expert <= 24:
        gate_up, down = _few_rows(shape, device)
    else:
        gate_up, down = _many_rows(shape, device)
    return MoeTiles(_fitting(gate_up, device.arch), _fitting(down, device.arch))


def quantized_tile(tile: MoeTile, group_k: int, arch: str, *, gated: bool, is_native: bool) -> MoeTile:
    """Return the tile for weights with a scale for group_k columns. is_native: the chip multiplies 8-bit numbers.

    A step stays within a group and takes 128 bytes of a row. Its product takes registers besides the sum, so a tile has
    at most 128 columns, see limits.md.
    """
    block_k = tile.block_k
    if block_k >= 64:
        block_k = 128 if is_native else 64
    block_k = min(block_k, group_k & -group_k)
    max_columns = 128
    if tile.block_m == 128 and arch.startswith("sm_") and arch != "sm_90":
        max_columns = 64
    if gated:  # gate and up have this many columns each
        max_columns //= 2
    # On Hopper, 16 rows on the left go to mma.sync, which converts operands to 16 bits first: 100 conversions a step.
    # So weights go on the left.
    swap_ab = tile.swap_ab or (is_native and tile.block_m == 16 and arch in LARGE_SHARED_MEMORY)
    block_n = min(tile.block_n, max_columns)
    return replace(tile, block_n=block_n, block_k=block_k, num_stages=3, swap_ab=swap_ab)


def _few_rows(shape: MoeShape, device: Device) -> tuple[MoeTile, MoeTile]:
    """Return the tiles for few rows, where reading the weights takes the time.

    The goals are enough bytes in flight on each SM, and no SM without a program. limits.md has the numbers. The wide
    tile reads the entries half as often; it is taken if it still gives four programs an SM. A program computes block_n
    gate columns and as many up columns, so the first GEMM's width counts twice.
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
    """Return the tiles for many rows: 64, one wgmma; or 128 from 48 entries an expert on, to halve reads of weights."""
    tma = device.arch in LARGE_SHARED_MEMORY
    if shape.entries_per_expert <= 48:
        return MoeTile(64, 64, 64, 4, 4, 4, tma=tma), MoeTile(64, 128, 64, 4, 4, 4, tma=tma)
    narrow = MoeTile(128, 64, 64, 8, 8, 3, tma=tma), MoeTile(128, 128, 64, 8, 8, 3, tma=tma)
    if not tma:
        return narrow
    # The wide tile needs less bandwidth of shared memory. The narrow one leaves room for a second program on an SM,
    # which helps if rows are short. limits.md has the numbers.
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
    """Return the tiles for words of eight 4-bit codes. A step takes whole units of 128 columns.

    `quantization.config.linear_tile` gives the reasons for these tiles: weights are on the left, from registers if the
    matrix unit takes them there. Many rows take 8 warps, because unpacked weights take registers. Tiles of 64 columns
    are for SMs without a program; they take more instructions, see limits.md.
    """
    entries = shape.entries_per_expert
    few_rows = 16 if entries <= 12 else 32
    if shape.element_size == 4 or shape.hidden_size % 16 or shape.intermediate_size % 16:
        return MoeTile(few_rows, 16, 128, 1, 4, 2), MoeTile(few_rows, 32, 128, 1, 4, 2)
    if entries <= 24:
        num_blocks = min(shape.num_entries, shape.num_experts)

        def width(columns: int) -> int:
            fills = num_blocks * columns >= device.num_sms * 128
            # On sm_89, ptxas spills 12 registers of a tile with 64 columns, outside of the loop.
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
    """Return the tile with at most two stages on chips with little shared memory.

    Four stages take 82 KB. They fit sm_80, but neither consumer chips beside a second program, nor CDNA3. See
    limits.md.
    """
    if arch in LARGE_SHARED_MEMORY or arch == "sm_80":
        return tile
    return replace(tile, num_stages=min(tile.num_stages, 2))
