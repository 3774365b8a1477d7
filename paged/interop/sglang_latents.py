"""SGLang's attention backend over latents (MLA); importing this imports SGLang.

A layer's pool has one row a token, [slots, 1, latent + rope]. Queries come with the up-projection of keys absorbed, for
prompts as for decodes, so all steps read the pool alone.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

from paged.errors import UnsupportedError
from paged.interop.sglang_backend import PagedAttnBackend, check_layer, refuse_arguments
from paged.interop.sglang_interface import BACKEND
from paged.kernels.attention.paged_mla_attention import paged_mla_attention
from paged.kernels.cache.concat_and_cache_mla import concat_and_cache_mla
from paged.kernels.cache.latent_cache import LATENT_CODES, LATENT_ROPE, PACKED_BYTES
from paged.kernels.core.checks import FLOAT_DTYPES
from paged.kernels.core.operation import bound_for, layout


def always_absorbed(attention: Any, forward_batch: Any) -> AttnForwardMethod:
    """Have SGLang's MLA layers absorb the up-projections in every step.

    By default it expands the latents of prompts to keys and values that are in no pool.
    """
    return AttnForwardMethod.MLA


class PagedLatentBackend(PagedAttnBackend):
    """Attention of all MLA layers of a model runner: steps and graphs as in `PagedAttnBackend`."""

    pool_kind = MLATokenToKVPool
    cache_dtypes = (*FLOAT_DTYPES, torch.float8_e4m3fn)

    def __init__(self, runner: Any) -> None:
        """Keep the runner's pools, and have MLA layers absorb.

        Raises:
            UnsupportedError: as `PagedAttnBackend`.
        """
        super().__init__(runner)
        AttentionBackendRegistry.register(BACKEND, always_absorbed)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
        **unknown: Any,
    ) -> torch.Tensor:
        """Write latents to the layer's pool, attend to it, and return [num_tokens, num_heads * latent].

        q: [num_tokens, num_heads * (latent + rope)]. k: [num_tokens, 1, latent + rope], the rows to write. v: its
        latents. topk_indices: the positions that each query sees, as `indices` of `paged_mla_attention`.

        Raises:
            UnsupportedError: an argument, or a property of the layer, asks for what the backend does not do.
        """
        refuse_arguments(unknown)
        check_layer(layer)
        if layer.logit_cap:
            raise UnsupportedError(f"logit_cap: {layer.logit_cap} over latents, expected none")
        if layer.tp_k_head_num != 1:
            raise UnsupportedError(f"tp_k_head_num: {layer.tp_k_head_num} heads of expanded latents, expected latents")
        step, pool = self.step, self.token_to_kv_pool
        assert step is not None
        kv_cache = self._as_blocks(pool.get_key_buffer(layer.layer_id)).squeeze(2)  # [pages, page_size, size of a row]
        k_scale = None
        if kv_cache.shape[2] == PACKED_BYTES:
            kv_cache = kv_cache.view(torch.uint8)
        elif kv_cache.dtype.itemsize == 1:
            k_scale = layer.k_scale
        if save_kv_cache and k is not None:
            self._write(layer, forward_batch.out_cache_loc, k, kv_cache, k_scale)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)  # [T, H, latent + rope]
        out = query.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)  # [T, H, latent]
        options: dict[str, Any] = {
            "v_head_dim": layer.v_head_dim,
            "softmax_scale": layer.scaling,
            "causal": layer.attn_type == AttentionType.DECODER,
            "window_size": self._window(layer),
        }
        tensors = layout(kv_cache, out, query, sinks, k_scale, topk_indices)
        bound_for(paged_mla_attention, *options.values(), step.table.stride(), *tensors)(
            query,
            kv_cache,
            block_table=step.table,
            cu_seqlens_q=step.cu_seqlens_q,
            seq_lens=step.seq_lens,
            max_seqlen_q=step.max_seqlen_q,
            sinks=sinks,
            k_scale=k_scale,
            indices=topk_indices,
            plan=step.plan(),
            out=out,
            **options,
        )
        return out.flatten(1)

    forward_decode = forward_extend

    def _write(
        self, layer: Any, slots: torch.Tensor, rows: torch.Tensor, kv_cache: torch.Tensor, k_scale: torch.Tensor | None
    ) -> None:
        """Write rows [num_tokens, 1, latent + rope]. The pool casts them without a scale, and does not pack them."""
        if kv_cache.dtype == torch.uint8:
            latents, rope = rows.squeeze(1).split_with_sizes([LATENT_CODES, LATENT_ROPE], 1)
            concat_and_cache_mla(latents, rope, kv_cache, slots)
            return
        if k_scale is not None:
            rows = rows / k_scale
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(slots), rows, rows[..., : layer.v_head_dim])
