"""greedy_argmax against its definition: ties, masks, penalties and rows with nothing left."""

import pytest
import torch

from paged import InvalidInputError, greedy_argmax
from tests.kernels.sampling import loops
from tests.pairwise import pairwise
from tests.tolerance import DTYPES

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.usefixtures("backend")


@pairwise(shape=[(3, 1), (5, 100), (1, 4097), (0, 50)], dtype=DTYPES, per_row=[False, True])
def test_matches_reference(shape: tuple[int, int], dtype: torch.dtype, per_row: bool, device: torch.device) -> None:
    # Rounded to halves, so that most rows have ties at the top.
    logits = ((torch.randn(shape, device=device) * 4).round() / 2).to(dtype)
    given = shape if per_row else shape[1:]
    mask = {"token_mask": torch.rand(given, device=device) < 0.8}
    penalty = {"repetition_penalty": torch.where(torch.rand(given, device=device) < 0.5, 1.0, 1.3)}
    for arguments in ({}, mask, penalty, mask | penalty):
        chosen = greedy_argmax(logits, **arguments)
        assert chosen.dtype == torch.int64
        assert chosen.tolist() == loops.greedy_argmax(logits, **arguments).tolist()


def test_ties_across_chunks_go_to_the_smaller_token(device: torch.device) -> None:
    logits = torch.randn(4, 151936, device=device).clamp(max=5.0)
    ties = [(151935, 151934), (70000, 4096), (4096, 4095), (151935, 0)]
    for row, tied in enumerate(ties):
        logits[row, list(tied)] = 9.0
    assert greedy_argmax(logits).tolist() == [min(tied) for tied in ties]


def test_nan_and_infinities(device: torch.device) -> None:
    rows = [[NAN, 1.0, 2.0, NAN], [NAN, -INF, NAN, -INF], [-INF, -INF, -3.0, -INF], [0.0, INF, 5.0, INF]]
    logits = torch.tensor([*rows, [-1.0, -2.0, -INF, NAN]], device=device)
    assert greedy_argmax(logits).tolist() == [2, -1, 2, 1, 0]
    assert greedy_argmax(logits, token_mask=torch.zeros(4, dtype=torch.bool, device=device)).tolist() == [-1] * 5
    penalty = torch.tensor([2.0, 1.0, 4.0, 1.0], device=device)
    assert greedy_argmax(logits, repetition_penalty=penalty).tolist() == [1, -1, 2, 1, 0]


def test_strided_arguments(device: torch.device) -> None:
    logits = torch.randn(6, 300, device=device)[::2, 17:217]
    token_mask = torch.rand(200, 3, device=device).T < 0.5
    penalty = (1 + torch.rand(400, device=device))[::2]
    arguments = {"token_mask": token_mask, "repetition_penalty": penalty}
    expected = loops.greedy_argmax(logits, **arguments).tolist()
    assert greedy_argmax(logits, **arguments).tolist() == expected
    assert greedy_argmax(logits.T.contiguous().T, **arguments).tolist() == expected


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    logits = torch.randn(2, 8, device=device)
    ones, mask = torch.ones(1, 8, device=device), torch.ones(8, dtype=torch.bool, device=device)
    greedy_argmax(logits, token_mask=mask)
    for bad, options, message in (
        (logits, {"token_mask": mask[1:]}, r"token_mask: shape \[7\], expected \[8\]"),
        (logits, {"repetition_penalty": ones}, r"repetition_penalty: shape \[1, 8\], expected \[2, 8\]"),
        (logits, {"token_mask": ones[0]}, "token_mask: dtype"),
        (logits[0], {}, "logits: shape"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            greedy_argmax(bad, **options)
