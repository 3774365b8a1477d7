"""greedy_argmax against its definition: ties, masks, penalties and rows with nothing left."""

from __future__ import annotations

import pytest
import torch

from paged import InvalidInputError, greedy_argmax
from paged.kernels.sampling import reference
from tests.tolerance import dtypes

NAN, INF = float("nan"), float("inf")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(3, 1), (5, 100), (1, 4097), (0, 50)])
def test_matches_reference(
    num_rows: int, vocab_size: int, dtype: torch.dtype, per_row: bool, device: torch.device
) -> None:
    shape = (num_rows, vocab_size) if per_row else (vocab_size,)
    # Rounded to halves, so that most rows have ties at the top.
    logits = ((torch.randn(num_rows, vocab_size, device=device) * 4).round() / 2).to(dtype)
    token_mask = torch.rand(shape, device=device) < 0.8
    penalty = torch.where(torch.rand(shape, device=device) < 0.5, 1.0, 1.3)
    for arguments in (
        {},
        {"token_mask": token_mask},
        {"repetition_penalty": penalty},
        {"token_mask": token_mask, "repetition_penalty": penalty},
    ):
        chosen = greedy_argmax(logits, **arguments)
        assert chosen.dtype == torch.int64
        assert chosen.tolist() == reference.greedy_argmax(logits, **arguments).tolist()


@pytest.mark.usefixtures("backend")
def test_ties_across_chunks_go_to_the_smaller_token(device: torch.device) -> None:
    logits = torch.randn(4, 151936, device=device).clamp(max=5.0)
    ties = [(151935, 151934), (70000, 4096), (4096, 4095), (151935, 0)]
    for row, tied in enumerate(ties):
        logits[row, list(tied)] = 9.0
    assert greedy_argmax(logits).tolist() == [min(tied) for tied in ties]


@pytest.mark.usefixtures("backend")
def test_nan_and_infinities(device: torch.device) -> None:
    logits = torch.tensor(
        [
            [NAN, 1.0, 2.0, NAN],
            [NAN, -INF, NAN, -INF],
            [-INF, -INF, -3.0, -INF],
            [0.0, INF, 5.0, INF],
            [-1.0, -2.0, -INF, NAN],
        ],
        device=device,
    )
    assert greedy_argmax(logits).tolist() == [2, -1, 2, 1, 0]
    assert greedy_argmax(logits, token_mask=torch.zeros(4, dtype=torch.bool, device=device)).tolist() == [-1] * 5
    penalty = torch.tensor([2.0, 1.0, 4.0, 1.0], device=device)
    assert greedy_argmax(logits, repetition_penalty=penalty).tolist() == [1, -1, 2, 1, 0]


@pytest.mark.usefixtures("backend")
def test_strided_arguments(device: torch.device) -> None:
    logits = torch.randn(6, 300, device=device)[::2, 17:217]
    token_mask = torch.rand(200, 3, device=device).T < 0.5
    penalty = (1 + torch.rand(400, device=device))[::2]
    arguments = {"token_mask": token_mask, "repetition_penalty": penalty}
    expected = reference.greedy_argmax(logits, **arguments).tolist()
    assert greedy_argmax(logits, **arguments).tolist() == expected
    assert greedy_argmax(logits.T.contiguous().T, **arguments).tolist() == expected


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    logits = torch.randn(2, 8, device=device)
    greedy_argmax(logits, token_mask=torch.ones(8, dtype=torch.bool, device=device))
    with pytest.raises(InvalidInputError, match=r"token_mask: shape \[7\], expected \[8\]"):
        greedy_argmax(logits, token_mask=torch.ones(7, dtype=torch.bool, device=device))
    with pytest.raises(InvalidInputError, match=r"repetition_penalty: shape \[1, 8\], expected \[2, 8\]"):
        greedy_argmax(logits, repetition_penalty=torch.ones(1, 8, device=device))
    with pytest.raises(InvalidInputError, match="token_mask: dtype"):
        greedy_argmax(logits, token_mask=torch.ones(8, device=device))
    with pytest.raises(InvalidInputError, match="logits: shape"):
        greedy_argmax(logits[0])
