"""Rows of logits as one matrix, without a copy where they lie in one already."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def row_matrix(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows [V] or [n, V] one below the other, [num_rows, V].

    The rows of one forward are views of one matrix, in order: 256 of 150,000 logits would take 150 MB to copy.
    """
    base, width = rows[0]._base, rows[0].shape[-1]
    if base is not None and base.dim() == 2 and base.is_contiguous() and base.shape[1] == width:
        size = base.element_size()
        start = place = rows[0].data_ptr()
        for row in rows:
            if row.data_ptr() != place:
                break
            place += row.numel() * size
        else:
            first = (start - base.data_ptr()) // (width * size)
            return base[first : first + (place - start) // (width * size)]
    return torch.cat([row.reshape(-1, width) for row in rows])
