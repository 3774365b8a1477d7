"""Rows of logits as one matrix, without a copy where they lie in one already."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch


def row_matrix(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows [V] or [n, V] one below the other, [num_rows, V].

    The rows of one forward are views of one matrix, in order: 256 of 150,000 logits would take 150 MB to copy.
    """
    base, width = rows[0]._base, rows[0].shape[-1]
    if base is not None and base.dim() == 2 and base.is_contiguous() and _is_row_of(rows[0], base):
        size = width * base.element_size()
        starts = list(map(torch.Tensor.data_ptr, rows))
        first = (starts[0] - base.data_ptr()) // size
        if rows[-1].dim() == 1 and starts == list(range(starts[0], starts[0] + len(rows) * size, size)):
            return base[first : first + len(rows)]
        ends = list(accumulate((row.numel() * base.element_size() for row in rows), initial=starts[0]))
        if starts == ends[:-1]:
            return base[first : first + (ends[-1] - starts[0]) // size]
    return torch.cat([row.reshape(-1, width) for row in rows])


def _is_row_of(row: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether it lies along the rows of `base`: a column of a square matrix begins at the same address."""
    return row.shape[-1] == base.shape[1] and row.dtype == base.dtype and row.stride(-1) == 1
