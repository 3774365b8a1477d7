"""Products of rows with experts' weights on a CPU: all experts at once by numba kernels, or one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from ...core.device import backend, takes_numba
from ..products import MANY_ROWS, this_cpu
from .packed_product import CpuProduct

# Computes rows [num_rows, in_features] times an expert's weights, plus its bias or None.
Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


class ExpertProducts:
    """x @ weight^T + bias of each expert, for entries sorted by expert.

    products: the experts' products. If numba kernels multiply all experts, their tensors become views of stacked ones.
    """

    def __init__(self, products: Sequence[Product], out_features: int) -> None:
        self.products, self._out_features = products, out_features
        self._stacked: CpuProduct | None = None
        packed = [product for product in products if isinstance(product, CpuProduct) and product.has_blocks]
        if len(packed) == len(products):
            self._stacked = CpuProduct.stack(packed)

    @property
    def has_invariant_rows(self) -> bool:
        """Whether a row's bits do not depend on other rows in an invariant forward (see `Backend`)."""
        return all(isinstance(product, CpuProduct) and product.has_invariant_rows for product in self.products)

    def __len__(self) -> int:
        return len(self.products)

    def __call__(
        self, x: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the products [num_entries, out_features] in x's dtype.

        Args:
            x: [num_rows, in_features].
            ends: int32 [num_experts], the end of each expert's entries. Results beyond the last end are undefined.
            rows: int64 [num_entries], each entry's row of x; None if entries are rows.
            bias: float32 [num_experts, out_features], contiguous, or None.
        """
        num_entries = len(x) if rows is None else len(rows)
        if self._stacked is not None and x.stride(1) == 1:
            # With AMX, many rows take less time with weights that are unpacked a tile at a time.
            unpacks = this_cpu().has_amx and num_entries >= MANY_ROWS * len(self) and not backend().is_invariant
            if not unpacks and takes_numba(x):
                return self._stacked.multiply(x, bias, ends, rows)
        out = x.new_empty(num_entries, self._out_features)
        for expert, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
            if end > start:
                of_expert = x[start:end] if rows is None else x[rows[start:end]]
                expert_bias = None if bias is None else bias[expert].to(x.dtype)
                out[start:end] = self.products[expert](of_expert, expert_bias)
        return out
