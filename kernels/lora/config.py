"""Tile sizes of the two grouped products of low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.device import Device

# Most splits of the columns of x. The second product adds up the splits for every tile of its columns, so with more
# splits it loses what the first product gains.
_MAX_SPLITS = 8


@dataclass(frozen=True)
class ShrinkTile:
    """Tile of A x: a program computes a block of rows by block_r ranks of one part, over one of num_splits splits."""

    block_r: int
    block_k: int
    num_splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ExpandTile:
    """Tile of B (A x): a program computes a block of rows by block_n columns, block_r ranks at a time."""

    block_n: int
    block_r: int
    num_warps: int
    num_stages: int


def shrink_tile(
    num_blocks: int,
    block_m: int,
    num_parts: int,
    max_rank: int,
    in_features: int,
    element_size: int,
    device: Device,
) -> ShrinkTile:
    """Return the tile of the first product for `num_blocks` blocks of `block_m` rows, `element_size` bytes an element.

    A decode step has few programs, see limits.md. The columns of x are split until there are two programs an SM, as
    long as each split has at least two steps.
    """
    # Few rows take 16 ranks a program, because most adapters have 8 or 16. Many rows take 32, to read x half as often.
    # A step reads 256 bytes of a row. With 64 rows this spills in float32, and if rows are not aligned to 16 bytes.
    block_r = 16 if block_m <= 16 else 32
    block_k = 256 // element_size
    if block_m > 16 and (element_size == 4 or in_features % 16):
        block_k = 32
    # Results of 64 rows are large, so they take at most two splits.
    max_splits = _MAX_SPLITS if block_m <= 16 else 2
    programs = num_blocks * num_parts * -(-max_rank // block_r)
    num_splits = 1
    while (
        num_splits < max_splits
        and programs * num_splits < 2 * device.num_sms
        and in_features >= 4 * num_splits * block_k
    ):
        num_splits *= 2
    num_stages = 3 if element_size == 2 else 2
    return ShrinkTile(block_r, block_k, num_splits, 4, num_stages)


def expand_tile(block_m: int, element_size: int) -> ExpandTile:
    """Return the tile of the second product, which mostly reads and writes `out`.

    For few rows, two stages hide the loads. For many rows, they would fill 80 KB of shared memory.
    """
    num_stages = 2 if block_m <= 16 else 1
    return ExpandTile(256 // element_size, 16, 4, num_stages)
