"""Tile sizes of paged attention: shape and device in, configuration out."""

from __future__ import annotations

from dataclasses import dataclass

from paged.kernels.compat import triton
from paged.kernels.device import LARGE_SHARED_MEMORY

# A decode or verify sequence packs its rows (query tokens times the GQA group) into 16-row tiles up to this many rows;
# beyond it re-reading K and V for every 16 rows costs more than a large tile's idle rows.
DECODE_MAX_ROWS = 64


@dataclass(frozen=True)
class AttentionTile:
    """One program's shape: BLOCK_M query rows (tokens times GQA group) against BLOCK_N keys at a time.

    programs_per_sm: how many an SM holds at once, at least; registers and shared memory decide (`bench.compile`).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1


def padded_head_dim(head_dim: int) -> int:
    """The tile's width: the next power of two, and 16 at least, the smallest operand of a matrix instruction."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def decode_tile(head_dim: int, element_size: int, arch: str) -> AttentionTile:
    """Tile of sequences of at most DECODE_MAX_ROWS rows: the smallest that tensor cores take, as the time is K and V's.

    BLOCK_N rows of K are 16 KB, as many of V again. At 3 stages the compiler takes 39 to 43 KB of shared memory and 164
    registers at head_dim 128, so that three programs share an SM.
    """
    width = padded_head_dim(head_dim) * element_size
    if element_size == 4:  # full float32 runs outside the tensor cores; 4 warps spill 286 registers at head_dim 128
        return AttentionTile(16, 32 if width <= 512 else 16, 8, *((1, 1) if arch.startswith("gfx") else (2, 3)))
    block_n = min(128, 16384 // width)
    if arch.startswith("gfx"):  # 64 KB of LDS a compute unit: one stage, and registers prefetch the next
        return AttentionTile(16, min(block_n, 64), 4, 1, 2)
    return AttentionTile(16, block_n, 4, 3, 3 if width <= 256 else 2)


def prefill_tile(head_dim: int, element_size: int, arch: str) -> AttentionTile:
    """Tile of longer queries: 128 rows, so that each of two warp groups issues 64-row wgmma, where registers allow."""
    width = padded_head_dim(head_dim) * element_size
    if arch.startswith("gfx"):
        if element_size == 4:
            return AttentionTile(32, 16, 8, 1)
        return AttentionTile(128 if width <= 256 else 64, 64 if width <= 256 else 32, 4, 1)
    if element_size == 4:  # BLOCK_N 32 spills 251 registers at head_dim 128
        return AttentionTile(32, 16, 4 if width <= 256 else 8, 2)
    if arch in LARGE_SHARED_MEMORY:
        # head_dim 128: 213 registers, no spills, 96 KB; head_dim 256: 255 registers, 192 KB with two stages
        return AttentionTile(128, 64, 8, 3 if width <= 256 else 2)
    # Without wgmma the operands pass through registers: 128 x 64 spills 24 of them at head_dim 128, 64 x 64 spills 28
    # at 256. These stay under the 99 KB of the consumer chips, too.
    if width <= 128:
        return AttentionTile(128, 64, 8, 3)
    return AttentionTile(128, 32, 8, 3) if width <= 256 else AttentionTile(64, 32, 8, 2)
