"""Rounded activations, beside codes found by their distance."""

from __future__ import annotations

import pytest
import torch

from paged.kernels.quantization import definition
from tests.float64 import to_float8


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
def test_numbers_of_e4m3_are_the_nearest(compute: torch.dtype) -> None:
    """Every middle of two neighbours, and the numbers next to it."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(compute)
    middles = (values[1:] + values[:-1]) / 2
    below, above = (torch.nextafter(middles, middles + side) for side in (-1, 1))
    x = torch.cat([values, middles, below, above])
    x = torch.cat([x, -x]).unsqueeze(0)
    codes, scale = definition.round_rows(x, "e4m3", torch.ones(()), compute=compute)
    assert torch.equal(codes.double(), to_float8(x, torch.float8_e4m3fn).double())
    assert scale.item() == 1


@pytest.mark.parametrize(("form", "largest"), [("int8", 127), ("e4m3", 448)])
def test_groups_have_their_own_scale(form: str, largest: int) -> None:
    """The last group is short, one is zero, and one has a NaN."""
    x = torch.randn(2, 300) * 100
    x[0, :128] = 0
    x[1, 130] = torch.nan
    rounded = definition.rounded_groups(x, form, 128)
    assert (rounded[0, :128] == 0).all()
    assert rounded[1, 128:256].isnan().all()
    for row, columns in ((0, slice(128, 256)), (0, slice(256, 300)), (1, slice(0, 128)), (1, slice(256, 300))):
        group = x[row, columns].double()
        scale = group.abs().max() / largest
        expected = (group / scale).round()
        if form == "e4m3":
            expected = to_float8(group / scale, torch.float8_e4m3fn).double()
        assert torch.equal(rounded[row, columns], expected * scale)
