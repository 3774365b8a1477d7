"""The shape of a program of attention."""

from __future__ import annotations

from dataclasses import dataclass

from paged.kernels.common.compat import triton

# A decode or verify sequence packs its rows (query tokens times the GQA group) into 16-row tiles up to this many rows;
# beyond it re-reading K and V for every 16 rows costs more than a large tile's idle rows.
DECODE_MAX_ROWS = 64
# The widest keys and values: 16 rows of an accumulator are 64 registers of a thread in 4 warps.
MAX_HEAD_DIM = 512


@dataclass(frozen=True)
class AttentionTile:
    """Shape of one program: BLOCK_M query rows (tokens times GQA group) against BLOCK_N keys at a time.

    Attributes:
        programs_per_sm: least number of programs that an SM holds at once, limited by registers and shared memory
            (`make compile`).
        by_tma: whether the copy engine fetches the keys as one box; they lie in one cache block.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    by_tma: bool = False

    @property
    def edge_stages(self) -> int:
        """Pipeline stages of loops over keys with masks, a block or two: a third would take registers for nothing."""
        return min(self.num_stages, 2)


def padded_head_dim(head_dim: int) -> int:
    """Return the tile's width: the next power of two, at least 16, the smallest operand of a matrix instruction."""
    return max(16, int(triton.next_power_of_2(head_dim)))
