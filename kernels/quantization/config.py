"""Tile sizes of the product with quantised weights: a pure function of shape and device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.device import LARGE_SHARED_MEMORY, Device

# Blocks of rows that programs take before the next block of columns, so that they find the weights in the L2 cache.
GROUP_M = 8
# Up to this many rows, reading the weights takes longer than multiplying them.
_FEW_ROWS = 32
# The most splits of the input, for few and many rows. With more, adding up the partial sums costs more than the product
# gains, see limits.md.
_MAX_SPLITS_FEW, _MAX_SPLITS_MANY = 8, 2


@dataclass(frozen=True)
class LinearShape:
    """Everything that tile choices depend on.

    element_size: bytes of a number that is multiplied, 1 if the chip multiplies 8-bit numbers.
    is_packed: whether a word holds eight 4-bit codes.
    group_k: columns that share a scale, 0 for all.
    is_aligned: whether rows of both operands begin at multiples of 16 bytes.
    """

    num_rows: int
    out_features: int
    in_features: int
    element_size: int
    is_packed: bool
    group_k: int
    is_aligned: bool = True


@dataclass(frozen=True)
class LinearTile:
    """A program computes block_m rows by block_n columns over one of num_splits parts of the input, block_k at a time.

    swap_ab: multiply weights times rows, for matrix units that take the left operand's rows in 64s, also from
    registers.
    """

    block_m: int
    block_n: int
    block_k: int
    num_splits: int
    num_warps: int
    num_stages: int
    swap_ab: bool


def linear_tile(shape: LinearShape, device: Device) -> LinearTile:
    """Return the tile for `shape`, from what the compiler reports and from counting bytes.

    Few rows: a program takes 128 columns, with three steps in flight. Tiles of 64 columns would read the activations
    twice as often and take more instructions. Weights are the left operand: wgmma takes 64 of its rows, and reads them
    from the registers in which they were unpacked. For mma.sync the order does not matter.

    Many rows: 8 warps, because 4 spill. If weights are not unpacked, activations are the left operand. Blackwell reads
    unpacked weights from its tensor memory, which 64 rows fill; 128 rows do not compile.

    limits.md has the instruction counts.
    """
    is_few = shape.num_rows <= _FEW_ROWS
    # float32 has no tensor core, and unaligned rows are loaded element by element. In both cases, larger tiles spill
    # registers.
    is_slow = shape.element_size == 4 or not shape.is_aligned
    block_k = 64
    if shape.is_packed:
        block_k = 128
    elif is_slow:
        block_k = 32
    elif shape.element_size == 1 or is_few:
        block_k = 128
    if not shape.is_packed and shape.group_k:
        block_k = min(block_k, shape.group_k & -shape.group_k)
    block_m = 16 if shape.num_rows <= 16 else 32
    if is_slow:
        tile = LinearTile(block_m, 32, block_k, 1, 4, 2, False)
    elif is_few:
        tile = LinearTile(block_m, 128, block_k, 1, 4, 4, True)
    else:
        fills_memory = shape.is_packed and device.arch in ("sm_100", "sm_103")
        block_m = 64 if shape.num_rows <= 64 or fills_memory else 128
        tile = LinearTile(block_m, 128, block_k, 1, 8, 3, shape.element_size > 1)
    if device.arch not in LARGE_SHARED_MEMORY and device.arch != "sm_80":
        # Consumer chips and CDNA3, whose programs have at most 99 KB of shared memory.
        tile = replace(tile, num_stages=min(tile.num_stages, 2))
    # Split the input until there are two programs an SM, as long as each split has at least two steps.
    max_splits = _MAX_SPLITS_FEW if is_few else _MAX_SPLITS_MANY
    programs = -(-shape.num_rows // tile.block_m) * -(-shape.out_features // tile.block_n)
    num_splits = 1
    while (
        num_splits < max_splits
        and programs * num_splits < 2 * device.num_sms
        and shape.in_features >= 4 * num_splits * tile.block_k
    ):
        num_splits *= 2
    return replace(tile, num_splits=num_splits)
