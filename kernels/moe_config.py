"""Tile sizes of the two grouped GEMMs of the fused MoE."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paged.kernels.device import LARGE_SHARED_MEMORY


@dataclass(frozen=True)
class MoeTile:
    """How a grouped GEMM is cut: a program computes block_m entries of one expert by block_n output columns.

    group_m blocks of entries run next to each other before the next block_n columns, so that they find their expert's
    weights in the L2 cache.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


def gate_up_tile(num_entries: int, num_experts: int, element_size: int, arch: str) -> MoeTile:
    """Tile of the first GEMM for `num_entries` entries routed over `num_experts`, `element_size` bytes an element.

    A program computes block_n gate columns and the same block_n up columns, so its width counts twice.
    """
    tiles = {
        # Three buffers of 20 KB in flight in each program: 4.3 TB/s at a microsecond of latency ask 33 KB of each of
        # 132 SMs. 32 columns give one token of Qwen3-30B-A3B 192 programs, 64 would give 96.
        16: MoeTile(16, 32, 128, 1, 4, 4),
        32: MoeTile(32, 32, 32, 1, 4, 2),
        64: MoeTile(64, 64, 64, 4, 4, 4),
        # 128 by 128 by 64 in 4 stages is the tile of the best figure known in Triton: 523 TFLOP/s on H100 at the sizes
        # of Qwen3-30B-A3B. Twice as wide would halve the reads of x, but takes 254 of 255 registers.
        128: MoeTile(128, 64, 64, 8, 8, 4),
    }
    return _fitting(tiles[_block_m(num_entries, num_experts, element_size)], arch)


def down_tile(num_entries: int, num_experts: int, element_size: int, arch: str) -> MoeTile:
    """Tile of the second GEMM; block_m is that of the first, since both walk one sorted order."""
    tiles = {
        16: MoeTile(16, 64, 128, 1, 4, 4),
        32: MoeTile(32, 64, 32, 1, 4, 2),
        64: MoeTile(64, 128, 64, 4, 4, 4),
        # 96 KB of shared memory: two programs share an SM and one computes while the other drains, which counts where a
        # row is short (768 for Qwen3-30B-A3B: 12 steps).
        128: MoeTile(128, 128, 64, 8, 8, 3),
    }
    return _fitting(tiles[_block_m(num_entries, num_experts, element_size)], arch)


def _fitting(tile: MoeTile, arch: str) -> MoeTile:
    """The tile as `arch` can hold it: 128 KB for 4 stages fit the 163 KB of sm_80, but not the 99 KB of consumer chips
    nor the 64 KB of LDS on CDNA3, where two stages take 64 KB and 32 KB.
    """
    if arch in LARGE_SHARED_MEMORY or arch == "sm_80":
        return tile
    return replace(tile, num_stages=min(tile.num_stages, 2))


def _block_m(num_entries: int, num_experts: int, element_size: int) -> int:
    """Rows of a tile. Up to 16 entries an expert reading the weights is all the work, and 16 rows are the least a
    tensor core takes. From 64 rows on Hopper's wgmma multiplies (m64); up to about 184 entries an expert
    (790 TFLOP/s over 4.3 TB/s) reading the weights still bounds the time, so that rows which pad 64 cost nothing. 128
    rows halve the reads of weights once experts fill them. float32 has no tensor core to feed: 32 rows fit registers.
    """
    if element_size == 4:
        return 32
    entries_per_expert = num_entries / num_experts
    if entries_per_expert <= 16:
        return 16
    return 64 if entries_per_expert <= 128 else 128
