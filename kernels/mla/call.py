"""The checked arguments of one `paged_mla_attention` call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.kernels.common.attention.latent_cache import check_latent_cache, check_latent_scale
from paged.kernels.common.checks import (
    FLOAT_DTYPES,
    check_last_dim_contiguous,
    check_sequences_fit,
    check_tensor,
)
from paged.kernels.common.errors import InvalidInputError

# Fields of a call that may differ between calls of one binding.
TENSORS = ("q", "kv_cache", "block_table", "cu_seqlens_q", "seq_lens", "sinks", "k_scale", "indices", "out", "lse")


@dataclass(frozen=True)
class MlaCall:
    """Arguments of `paged_mla_attention`, checked, with defaults filled in."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    v_head_dim: int
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_seqlen_q: int
    softmax_scale: float
    causal: bool
    sinks: torch.Tensor | None
    k_scale: torch.Tensor | None
    indices: torch.Tensor | None
    deterministic: bool
    out: torch.Tensor
    lse: torch.Tensor | None

    def check(self) -> None:
        """Raise InvalidInputError unless the tensors fit together."""
        q, device = self.q, self.q.device
        check_tensor("q", q, ("num_tokens", "num_heads", "latent + rope"), FLOAT_DTYPES)
        check_last_dim_contiguous("q", q)
        size = check_latent_cache(self.kv_cache, self.v_head_dim, q.dtype)
        check_tensor("q", q, ("num_tokens", "num_heads", size), (q.dtype,), self.kv_cache.device)
        if q.shape[1] == 0:
            raise InvalidInputError("q: 0 heads, expected at least 1")
        check_sequences_fit(self.block_table, self.cu_seqlens_q, self.seq_lens, device)
        if self.sinks is not None:
            check_tensor("sinks", self.sinks, (q.shape[1],), FLOAT_DTYPES, device)
        check_latent_scale("k_scale", self.k_scale, self.kv_cache)
        if self.indices is not None:
            check_tensor("indices", self.indices, (len(q), "k"), (torch.int32,), device)
            check_last_dim_contiguous("indices", self.indices)
            if self.indices.shape[1] == 0:
                raise InvalidInputError("indices: 0 columns, expected at least 1; -1 chooses no key")
