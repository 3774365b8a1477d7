"""row_matrix: no copy where rows lie in one matrix."""

from __future__ import annotations

import torch

from paged.executors.sampling.row_matrix import row_matrix
from tests.executors.sampling.completions import VOCAB


def test_rows_of_one_matrix_are_not_copied() -> None:
    logits = torch.randn(6, VOCAB)
    for rows in (list(logits), list(logits[1:4]), list(logits.split([1, 3, 2])), [logits[0], logits[1:3], logits[3]]):
        matrix = row_matrix(rows)
        assert matrix.data_ptr() == rows[0].data_ptr()
        assert torch.equal(matrix, torch.cat([row.reshape(-1, VOCAB) for row in rows]))
    pieces = list(logits)
    for rows in (pieces[::-1], [pieces[0], pieces[2]], [pieces[0], pieces[0]], [torch.ones(VOCAB), pieces[1]]):
        assert torch.equal(row_matrix(rows), torch.stack(rows))


def test_columns_are_no_rows() -> None:
    """Views that begin where a row of their matrix does."""
    matrix = torch.arange(9.0).view(3, 3)
    assert torch.equal(row_matrix([matrix[:, 0]]), torch.tensor([[0.0, 3.0, 6.0]]))
    assert torch.equal(row_matrix([matrix[0]]), torch.tensor([[0.0, 1.0, 2.0]]))
