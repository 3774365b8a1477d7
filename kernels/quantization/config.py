"""Tile sizes of the product with quantised weights: one pure function of shape and device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..common.device import LARGE_SHARED_MEMORY, Device

# Blocks of rows that run side by side before the next columns of weights, which they find in the L2 cache.
GROUP_M = 8
# Rows up to which reading the weights is all the work.
_FEW_ROWS = 32
# Pieces of the input: eight of 16 rows by 4,096 columns are 2 MB in float32, beside 8 MB of int4 weights, and two of
# 128 rows 4 MB. More would cost the launch that adds them up more than the product gains.
_MAX_SPLITS_FEW, _MAX_SPLITS_MANY = 8, 2


@dataclass(frozen=True)
class LinearShape:
    """Everything that tile choices depend on.

    element_size: bytes of a number that is multiplied, 1 if the chip multiplies 8-bit ones. is_packed: whether a word
    holds eight 4-bit codes. group_k: columns that share a scale, 0 for all. is_aligned: whether rows of both operands
    begin at multiples of 16 bytes.
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

    swap_ab: weights times rows, for matrix units that take the left operand's rows in 64s, from registers if need be.
    """

    block_m: int
    block_n: int
    block_k: int
    num_splits: int
    num_warps: int
    num_stages: int
    swap_ab: bool


def linear_tile(shape: LinearShape, device: Device) -> LinearTile:
    """The tile for `shape`, from what the compiler reports and from counting bytes.

    Few rows: 128 columns by 128 of the input are 8 KB of 4-bit codes or 16 KB of 8-bit ones, three of which are on
    their way. Two programs an SM make that 48 KB, of 33 KB that 4.3 TB/s at a microsecond of latency ask of each of
    132 SMs. 64 columns would read the activations twice as often, as many bytes as int4 weights have at 16 rows,
    and take 248 instructions a KB on sm_90 in place of 199. Weights are the left operand, of which wgmma takes 64
    rows, and takes them from the registers where they were unpacked; mma.sync takes either order alike (210 and
    214).

    Many rows: 8 warps, as 64 x 128 of int4 spills 83 values with 4. A step of 128 x 128 x 128 takes 300 instructions a
    warp on sm_90, 600 cycles of its schedulers for 512 of its matrix unit. Where weights are not unpacked, rows of
    activations are the left operand, and a step takes 82 (int8) or 228 (e4m3, blocks). Blackwell's matrix unit takes
    unpacked weights from its tensor memory, all 512 columns of which 64 rows fill; 128 do not compile to anything.
    """
    is_few = shape.num_rows <= _FEW_ROWS
    # No tensor core to feed, or rows that are loaded element by element: larger tiles spill.
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
        # Where a program has 99 KB (consumer chips) or 64 KB (CDNA3).
        tile = replace(tile, num_stages=min(tile.num_stages, 2))
    # Pieces of the input, until there are two programs an SM, as far as each is two steps long.
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
