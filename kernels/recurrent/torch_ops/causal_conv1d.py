"""The causal convolution in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..metadata import RecurrentBatch


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv: torch.Tensor,
    batch: RecurrentBatch,
    activation: str | None,
) -> torch.Tensor:
    """PyTorch implementation of `kernels.recurrent.causal_conv1d`, one sum of W products a sequence."""
    out, before, taps = torch.zeros_like(x), weight.shape[1] - 1, weight.float().unbind(1)
    for row in batch.rows():
        tokens, at = slice(row.first, row.first + row.length), row.cursor
        history = x.new_zeros(before, x.shape[1])
        if row.read_slot >= 0:
            history = conv[row.read_slot, at : at + before]
        raw = torch.cat([history, x[tokens]])
        total = sum(raw[tap : tap + row.length].float() * taps[tap] for tap in range(before + 1))
        assert isinstance(total, torch.Tensor)
        if bias is not None:
            total = total + bias.float()
        if activation is not None:
            total = functional.silu(total)
        out[tokens] = total.to(x.dtype)
        if row.length > batch.max_append:
            conv[row.write_slot, :before] = raw[row.length :]
            if row.snapshot_slot >= 0:
                taken = row.snapshot_len - row.start
                conv[row.snapshot_slot, :before] = raw[taken : taken + before]
        elif row.write_slot == row.read_slot:
            conv[row.write_slot, before + at : before + at + row.length] = raw[before:]
        else:
            conv[row.write_slot, : before + row.length] = raw
    return out
