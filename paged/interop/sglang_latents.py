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
            UnsupportedError: as `PagedAttnBackend`; the pool of sparse latents, `DSATokenToKVPool`.
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
        **unknown: Any,
    ) -> torch.Tensor:
        """Write latents to the layer's pool, attend to it, and return [num_tokens, num_heads * latent].

        q: [num_tokens, num_heads * (latent + rope)]. k: [num_tokens, 1, latent + rope], the rows to write. v: its
        latents.

        Raises:
            UnsupportedError: an argument (`topk_indices` of sparse latents is one), or a property of the layer, asks
                for what the backend does not do.
        """
        refuse_arguments(unknown)
        check_layer(layer)
        if layer.logit_cap:
            raise UnsupportedError(f"logit_cap: {layer.logit_cap} over latents, expected none")
        if layer.tp_k_head_num != 1:
            raise UnsupportedError(f"tp_k_head_num: {layer.tp_k_head_num} heads of expanded latents, expected latents")
        step, pool = self.step, self.token_to_kv_pool
        assert step is not None
        buffer = pool.get_key_buffer(layer.layer_id)
        k_scale = None
        if buffer.dtype.itemsize == 1:
            k_scale = layer.k_scale
        if save_kv_cache and k is not None:
            if k_scale is not None:
                k = k / k_scale  # the pool casts without a scale
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
        kv_cache = self._as_blocks(buffer).squeeze(2)  # [pages, page_size, latent + rope]
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)  # [T, H, latent + rope]
        out = query.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)  # [T, H, latent]
        options: dict[str, Any] = {
            "v_head_dim": layer.v_head_dim,
            "softmax_scale": layer.scaling,
            "causal": layer.attn_type == AttentionType.DECODER,
            "window_size": self._window(layer),
        }
        tensors = layout(kv_cache, out, query, sinks, k_scale)
        bound_for(paged_mla_attention, *options.values(), step.table.stride(), *tensors)(
            query,
            kv_cache,
            block_table=step.table,
            cu_seqlens_q=step.cu_seqlens_q,
            seq_lens=step.seq_lens,
            max_seqlen_q=step.max_seqlen_q,
            sinks=sinks,
            k_scale=k_scale,
            plan=step.plan(),
            out=out,
            **options,
        )
        return out.flatten(1)

    forward_decode = forward_extend
