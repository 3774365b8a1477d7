"""What int8 caches must hold of rows."""

from __future__ import annotations

import torch


def assert_holds_rows(cache: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, slack: float = 1e-6) -> None:
    """Each of `rows` (float64, [..., head_dim]) rounded to the nearest of 255 steps, the largest of which it fills.

    slack: what the values may be off by before they are rounded, relative to the row's largest.
    """
    cache, scale = cache.cpu().double(), scale.cpu().double()
    largest = rows.abs().amax(-1)
    is_finite = rows.isfinite().all(-1)
    assert torch.equal(scale.isnan(), ~is_finite)
    torch.testing.assert_close(scale[is_finite], largest[is_finite] / 127, rtol=slack, atol=0)
    off = (cache * scale.unsqueeze(-1) - rows).abs()
    assert (off[is_finite] <= ((0.5 + 127 * slack) * scale).unsqueeze(-1)[is_finite]).all()
    assert (cache.abs().amax(-1)[is_finite] == 127 * (largest[is_finite] > 0)).all()
