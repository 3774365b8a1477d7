"""Rows of a batch, grouped by adapter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.checks import check_contiguous, check_is_tensor, check_tensor
from ..core.errors import InvalidInputError

# Up to FEW_ROWS rows an adapter, reading the weights takes the time, so tiles have the fewest rows that a tensor core
# multiplies. More rows share one read of the weights in tiles of MANY_ROWS.
FEW_ROWS, MANY_ROWS = 16, 64


@dataclass(frozen=True, eq=False)
class LoraBatch:
    """Rows of a batch in blocks with one adapter each. Rows without an adapter are in no block.

    Attributes:
        rows: int32 [num_blocks, rows_per_block], contiguous; -1 for no row. No row appears twice.
        slots: int32 [num_blocks], contiguous: slot in `LoraWeights` of each block's adapter; -1 for a block of padding,
            which is skipped.
        runs: calls that a `Bound` has bound to this batch.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit; on a CPU also if a row appears twice.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    runs: dict[Any, dict[Any, Any]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_is_tensor("rows", self.rows)
        check_tensor("rows", self.rows, ("num_blocks", "rows_per_block"), (torch.int32,), self.rows.device)
        check_tensor("slots", self.slots, (self.rows.shape[0],), (torch.int32,), self.rows.device)
        check_contiguous("rows", self.rows)
        check_contiguous("slots", self.slots)
        if self.rows.device.type == "cpu":
            ordered = self.rows[self.slots >= 0].flatten().sort().values  # slot -1 marks blocks of padding
            is_twice = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
            if is_twice.any():
                row = int(ordered[1:][is_twice][0])
                raise InvalidInputError(f"rows: row {row} appears twice, expected every row once at most")

    @staticmethod
    def group(slots: torch.Tensor, *, most_adapters: int | None = None) -> LoraBatch:
        """Group the rows of a batch by adapter, on the CPU. Without adapters there are no blocks.

        Args:
            slots: int32 [num_rows] on the CPU, the adapter of each row; -1 for none.
            most_adapters: if given, the shape is the same for all batches with as many rows and at most this many
                adapters: blocks of FEW_ROWS rows, padding included.

        Raises:
            InvalidInputError: the shape, dtype or device of slots does not fit.
        """
        check_tensor("slots", slots, ("num_rows",), (torch.int32,), torch.device("cpu"))
        (adapted,) = torch.nonzero(slots >= 0, as_tuple=True)
        ordered, order = slots[adapted].sort(stable=True)
        present, counts = ordered.unique_consecutive(return_counts=True)
        has_few = most_adapters is not None or len(adapted) <= FEW_ROWS * len(present)
        size = FEW_ROWS if has_few else MANY_ROWS
        blocks = (counts + size - 1) // size
        num_blocks = used = int(blocks.sum())
        if most_adapters is not None:  # each adapter may leave one block partly empty
            num_blocks = min(len(slots), most_adapters) + max(len(slots) - most_adapters, 0) // FEW_ROWS
        # Place the rows of one adapter one after another. Each adapter begins with a new block.
        skipped = (blocks.cumsum(0) - blocks) * size - (counts.cumsum(0) - counts)
        rows = torch.full((num_blocks, size), -1, dtype=torch.int32)
        rows.view(-1)[torch.arange(len(adapted)) + skipped.repeat_interleave(counts)] = adapted[order].int()
        padded = torch.full((num_blocks,), -1, dtype=torch.int32)
        padded[:used] = present.repeat_interleave(blocks)
        return LoraBatch(rows, padded)
