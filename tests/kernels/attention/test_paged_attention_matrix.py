"""The matrix of lengths, heads and head sizes in vLLM's and FlashInfer's tests of paged attention: a slice of it in the
interpreter, all of it on a GPU."""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch

from paged.bench.attention.problem import Problem
from tests.kernels.attention.problem import check
from tests.tolerance import GPU_DTYPES

LENGTHS = (((1, 1328), (5, 18), (129, 463)), ((1, 523), (1, 37), (1, 2011)))
HEADS = ((4, 4), (8, 2), (5, 1))
HEAD_DIMS = (64, 80, 96, 128, 256, 512)
WINDOWS = (-1, 63, 127, 255)  # a window of 64 is the own position and 63 before it
SOFTCAPS = (0.0, 50.0)
BLOCK_SIZES = (16, 64, 128)

Values = tuple[tuple[tuple[int, int], ...], tuple[int, int], int, int, float, int, torch.dtype]

# Every value of every axis once.
SLICE: tuple[Values, ...] = (
    (LENGTHS[0], (4, 4), 64, 63, 0.0, 16, torch.float32),
    (LENGTHS[0], (8, 2), 128, 127, 50.0, 64, torch.float16),
    (LENGTHS[0], (5, 1), 80, -1, 50.0, 128, torch.float16),
    (LENGTHS[1], (8, 2), 96, 255, 50.0, 16, torch.float32),
    (LENGTHS[1], (5, 1), 256, -1, 0.0, 64, torch.float16),
)


def _full() -> list[Values]:
    """Everything but products of what no code connects: block sizes take turns, windows and softcaps have one shape."""
    shapes = list(product(LENGTHS, HEADS, HEAD_DIMS, (-1,), (0.0,), GPU_DTYPES))
    shapes += product(LENGTHS, HEADS[1:2], (128,), WINDOWS, SOFTCAPS, GPU_DTYPES)
    return [(*shape[:-1], block_size, shape[-1]) for shape, block_size in zip(shapes, cycle(BLOCK_SIZES), strict=False)]


@pytest.mark.parametrize("values", _full() if torch.cuda.is_available() else SLICE, ids=str)
def test_matches_reference(values: Values, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    lengths, heads, head_dim, window, softcap, block_size, dtype = values
    problem = Problem(
        "",
        lengths,
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        window_size=(window, -1),
        softcap=softcap,
        dtype=dtype,
    )
    check(problem, device)
