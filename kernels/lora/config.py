"""Tile sizes of the two grouped products of low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.device import Device

# More splits would cost the second product more than the first one gains: it adds them up for every tile of columns.
_MAX_SPLITS = 8


@dataclass(frozen=True)
class ShrinkTile:
    """A x: a program computes a block of rows by block_r ranks of one part, over one of num_splits column ranges."""

    block_r: int
    block_k: int
    num_splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ExpandTile:
    """B (A x): a program computes a block of rows by block_n columns, block_r ranks at a time."""

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
    """Tile of the first product for `num_blocks` blocks of `block_m` rows, `element_size` bytes an element.

    A decode step of 8 adapters of rank 16 has 8 to 24 programs, each of which would read 128 KB of a row of 4096 by
    itself: x is cut until there are two programs an SM, as far as each split is two steps long.
    """
    # 16 ranks a program where few rows are all there is, so that the common ranks of 8 and 16 read nothing twice; with
    # 32, many rows are read half as often. Rows of 256 bytes keep a step's loads long; with 64 rows they spill in
    # float32, and where rows are not aligned to 16 bytes, so that every element is loaded by itself.
    block_r = 16 if block_m <= 16 else 32
    block_k = 256 // element_size
    if block_m > 16 and (element_size == 4 or in_features % 16):
        block_k = 32
    # Splits of 64 rows have large results: two of them.
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
    """Tile of the second product, which is short (the rank) and wide: reading and writing `out` is its work.

    Two stages hide the loads of few rows; of many they would fill 80 KB of shared memory.
    """
    num_stages = 2 if block_m <= 16 else 1
    return ExpandTile(256 // element_size, 16, 4, num_stages)
