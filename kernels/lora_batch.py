"""Which rows of a batch an adapter changes, grouped by adapter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.kernels.checks import check_tensor

# Up to this many rows an adapter reading its weights is all the work, and 16 rows are the least a tensor core takes.
# More rows share one read of the weights in tiles of 64.
FEW_ROWS, MANY_ROWS = 16, 64


@dataclass(frozen=True, eq=False)
class LoraBatch:
    """Rows in blocks of one adapter each; rows without an adapter stand in none.

    rows: int32 [num_blocks, rows_per_block], contiguous; -1 is a place without a row, and no row stands twice.
    slots: int32 [num_blocks], where the weights of a block's adapter lie; a block of -1 is padding, and skipped.
    """

    rows: torch.Tensor
    slots: torch.Tensor

    @staticmethod
    def group(slots: torch.Tensor) -> LoraBatch:
        """The blocks of a batch whose row i takes the adapter in slots[i]; on the CPU, with no block where all are -1.

        Args:
            slots: int32 [num_rows] on the CPU, -1 for rows without an adapter.

        Raises:
            InvalidInputError: the shape, dtype or device is another.
        """
        check_tensor("slots", slots, ("num_rows",), (torch.int32,), torch.device("cpu"))
        (adapted,) = torch.nonzero(slots >= 0, as_tuple=True)
        ordered, order = slots[adapted].sort(stable=True)
        present, counts = ordered.unique_consecutive(return_counts=True)
        size = FEW_ROWS if len(adapted) <= FEW_ROWS * len(present) else MANY_ROWS
        blocks = (counts + size - 1) // size
        # The rows of one adapter follow each other; the places of the next one begin with a block of its own.
        skipped = (blocks.cumsum(0) - blocks) * size - (counts.cumsum(0) - counts)
        rows = torch.full((int(blocks.sum()), size), -1, dtype=torch.int32)
        rows.view(-1)[torch.arange(len(adapted)) + skipped.repeat_interleave(counts)] = adapted[order].int()
        return LoraBatch(rows, present.repeat_interleave(blocks))
