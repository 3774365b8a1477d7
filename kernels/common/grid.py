"""How much of a row, and how many warps, a program of a simple kernel takes."""

from __future__ import annotations

from paged.kernels.common.compat import triton


def num_warps(block_size: int) -> int:
    """Warps for a row of `block_size` elements: one for each 512 (16 a thread, two 16-byte loads of a 16-bit type)."""
    return min(max(block_size // 512, 1), 16)


def tile(num_rows: int, row_size: int) -> tuple[int, int]:
    """Rows and columns, powers of two, of a program that reads two tensors: 1,024 elements of each at most.

    In 4 warps every thread then takes 16 bytes of a 16-bit type from each tensor.
    """
    columns = min(triton.next_power_of_2(row_size), 1024)
    return min(1024 // columns, triton.next_power_of_2(num_rows)), columns
