"""gated_rms_norm against float64, gate before and after the norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged import InvalidInputError, gated_rms_norm
from tests.backends import BACKENDS
from tests.kernels.recurrent import loops
from tests.pairwise import pairwise
from tests.tolerance import DTYPES, assert_close


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pairwise(
    dtype=DTYPES,
    shape=[(5, 4, 128), (3, 3, 24), (1, 8, 16), (0, 4, 64)],
    group=[None, 1, 2, 4],
    norm_first=[True, False],
    activation=["silu", "sigmoid"],
    is_shared=[True, False],
)
def test_matches_reference(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    group: int | None,
    norm_first: bool,
    activation: str,
    is_shared: bool,
    device: torch.device,
) -> None:
    """Groups of a head, of a part of one, and of all heads; x and z as parts of wider rows."""
    tokens, heads, size = shape
    wide = torch.randn(tokens, 3 * heads * size, device=device).to(dtype) * 3
    x, z = (wide[:, start : start + heads * size].view(shape) for start in (0, heads * size))
    weight = torch.randn(size if is_shared else heads * size, device=device)
    group_size = None if group is None else heads * size // group
    options: dict[str, Any] = {"norm_first": norm_first, "group_size": group_size, "activation": activation}
    assert_close(gated_rms_norm(x, z, weight, 1e-5, **options), loops.gated_rms_norm(x, z, weight, 1e-5, **options))


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    x, weight = torch.randn(2, 3, 8, device=device), torch.ones(8, device=device)
    gated_rms_norm(x, x, weight, norm_first=True, group_size=12)
    for arguments, options, message in (
        ((x, x[1:], weight), {}, r"z: shape \[1, 3, 8\], expected \[2, 3, 8\]"),
        ((x, x.half(), weight), {}, "z: dtype"),
        ((x, x, weight[1:]), {}, r"weight: shape \[7\], expected \[8\] or \[24\]"),
        ((x, x, weight), {"group_size": 7}, "group_size: 7, expected a divisor of 24"),
        ((x, x, weight), {"activation": "gelu"}, "activation: 'gelu', expected 'silu' or 'sigmoid'"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            gated_rms_norm(*arguments, **{"norm_first": True, **options})
