"""SGLang's attention backend over latents that an indexer chooses (DeepSeek-V3.2, GLM-5); imports SGLang.

SGLang scores index keys with kernels of DeepGEMM, AITER or its own, which few GPUs run. Here `choose_keys` scores them
and takes the best, on every GPU. Projections, norms and rotations stay SGLang's. Index keys lie in SGLang's pool and in
its layout.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    eager_on_graph,
    is_in_breakable_cuda_graph,
)
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import is_in_tc_piecewise_cuda_graph
from sglang.srt.model_executor.runner_utils.forward_batch import get_forward_batch
from sglang.srt.runtime_context import get_exec

from paged.errors import UnsupportedError
from paged.interop.sglang_backend import SglangStep, full_pool, refuse_arguments
from paged.interop.sglang_interface import BACKEND
from paged.interop.sglang_latents import PagedLatentBackend
from paged.kernels.attention.choose_keys import choose_keys
from paged.kernels.cache.latent_cache import LATENT_CODES, LATENT_ROPE, write_index_keys
from paged.kernels.core.operation import bound_for, layout


class PagedSparseLatentBackend(PagedLatentBackend):
    """Attention to chosen latents of a model runner, and the choice: steps and graphs as in `PagedAttnBackend`.

    A chosen key is a position in the sequence, -1 for none. Layers without an indexer attend to the last choice.
    """

    pool_kind = DSATokenToKVPool

    def __init__(self, runner: Any) -> None:
        """Keep the runner's pools, and have the model's indexers choose by `choose`.

        Raises:
            UnsupportedError: as `PagedLatentBackend`; keys of pools of tokens (`index_kpool`), fp8 rows of other sizes,
                another backend for decodes or prompts, sinks, tokens that are always chosen, or choices in the output.
        """
        super().__init__(runner)
        for module in runner.model.modules():
            if isinstance(module, Indexer):
                module._forward_method = partial(choose, module)  # where SGLang keeps the implementation

    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> SglangStep | None:
        """Return the metadata of the step, which is that of attention."""
        return self.step

    def _check(self, runner: Any) -> None:
        super()._check(runner)
        pool = full_pool(runner)
        if pool.index_kpool != 1:
            raise UnsupportedError(f"index_kpool: {pool.index_kpool}, expected 1, a key of each token")
        sizes = pool.kv_lora_rank, pool.qk_rope_head_dim
        if pool.dsa_kv_cache_store_fp8 and sizes != (LATENT_CODES, LATENT_ROPE):
            raise UnsupportedError(f"kv_lora_rank, qk_rope_head_dim: {sizes} in fp8 rows with scales")
        # SGLang multiplies the keys that it writes by a Hadamard matrix, and this backend does not.
        for phase in ("prefill", "decode"):
            name = getattr(runner, f"{phase}_attention_backend_str")
            if name != BACKEND:
                raise UnsupportedError(f"{phase}_attention_backend: {name!r}, expected {BACKEND!r} for both phases")
        if runner.is_draft_worker and getattr(runner.model_config.hf_config, "index_share_for_mtp_iteration", False):
            raise UnsupportedError(
                "index_share_for_mtp_iteration: drafts that share a choice of keys are not supported, choose another "
                "--speculative-draft-attention-backend"
            )
        if get_exec().features.enable_return_indexer_topk:
            raise UnsupportedError("enable_return_indexer_topk: chosen keys are not returned")
        for module in runner.model.modules():
            if getattr(module, "learnable_sink_param", None) is not None:
                raise UnsupportedError(
                    "learnable_sink_param: SGLang gives sinks over latents to its own backends alone"
                )
            if isinstance(module, Indexer) and (module.num_init_tokens or module.num_local_tokens):
                raise UnsupportedError("index_init_tokens, index_local_tokens: no keys are always chosen")


def choose(
    indexer: Any,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    layer_id: int,
    **unknown: Any,
) -> torch.Tensor | None:
    """Write the index keys of a step's tokens, and return the keys that each token attends to, int32 [num_tokens, k].

    Return None if no sequence of the step can have more than `index_topk` keys: attention sees all of them.

    x: hidden states [num_tokens, hidden_size]. q_lora: the queries' latent after its norm, [num_tokens, q_lora_rank].
    positions: int64 [num_tokens].

    Raises:
        UnsupportedError: an argument that the backend does not know, quantised hidden states, or piecewise graphs.
    """
    refuse_arguments(unknown)
    if isinstance(x, tuple):
        raise UnsupportedError("x: quantised hidden states, set SGLANG_USE_AITER=0")
    if is_in_tc_piecewise_cuda_graph():
        raise UnsupportedError("cuda_graph_backend_prefill: 'tc_piecewise', expected 'breakable' or 'disabled'")
    if is_in_breakable_cuda_graph() and forward_batch.forward_mode.is_extend_without_speculative():
        chosen = torch.empty(len(x), indexer.index_topk, dtype=torch.int32, device=x.device)
        _choose_between_graphs(indexer, x, q_lora, positions, layer_id, chosen)
        return chosen
    return _choose(indexer, x, q_lora, positions, forward_batch, layer_id)


@eager_on_graph  # type: ignore[untyped-decorator]
def _choose_between_graphs(
    indexer: Any, x: torch.Tensor, q_lora: torch.Tensor, positions: torch.Tensor, layer_id: int, chosen: torch.Tensor
) -> None:
    """Choose for the step that replays a prompt's graphs. Rows of padding choose no key.

    chosen: int32 [tokens of the graphs, index_topk], the result.
    """
    batch = get_forward_batch()
    num_tokens = batch.extend_num_tokens
    columns = _choose(indexer, x[:num_tokens], q_lora[:num_tokens], positions[:num_tokens], batch, layer_id)
    if columns is None:  # attention leaves out the positions that a query does not see
        columns = torch.arange(indexer.index_topk, dtype=torch.int32, device=x.device).expand(num_tokens, -1)
    chosen.fill_(-1)
    chosen[:num_tokens, : columns.shape[1]] = columns


def _choose(
    indexer: Any, x: torch.Tensor, q_lora: torch.Tensor, positions: torch.Tensor, forward_batch: Any, layer_id: int
) -> torch.Tensor | None:
    """Do what `choose` says for tokens of a step without padding."""
    # SGLang keeps the projection of weights in bfloat16, also where it is one with that of keys.
    if indexer.use_dsa_indexer_fusion:
        projected, _ = indexer.wk_weights_proj(x.to(torch.bfloat16))
        keys, weights = projected.split_with_sizes([indexer.head_dim, indexer.n_heads], 1)
    else:
        keys, _ = indexer.wk(x)
        weights, _ = indexer.weights_proj(x.to(torch.bfloat16))
    keys = indexer.k_norm(keys)  # [T, head_dim]
    key_heads = keys.unsqueeze(1)  # [T, 1, head_dim]
    _rotate(indexer, positions, torch.empty_like(key_heads), key_heads)
    pool = get_token_to_kv_pool()
    key_cache = pool.get_index_k_with_scale_buffer(layer_id)  # uint8 [pages, page_size * (head_dim + 4)]
    write_index_keys(keys, key_cache, forward_batch.out_cache_loc[: len(keys)])
    step: Any = get_attn_backend().get_indexer_metadata(layer_id, forward_batch)
    if step is None or step.table.shape[1] * pool.page_size <= indexer.index_topk:
        return None
    q, _ = indexer.wq_b(q_lora)
    q = q.view(-1, indexer.n_heads, indexer.head_dim)  # [T, H, head_dim]
    _rotate(indexer, positions, q, torch.empty_like(key_heads))
    weights = weights.float() * (indexer.n_heads * indexer.head_dim) ** -0.5  # [T, H]
    bound = bound_for(choose_keys, indexer.index_topk, step.table.stride(), *layout(key_cache, weights))
    return bound(  # type: ignore[no-any-return]
        q,
        weights,
        key_cache,
        block_table=step.table,
        cu_seqlens_q=step.cu_seqlens_q,
        seq_lens=step.seq_lens,
        top_k=indexer.index_topk,
        plan=step.plan(),
    )


def _rotate(indexer: Any, positions: torch.Tensor, q: torch.Tensor, keys: torch.Tensor) -> None:
    """Rotate queries [T, heads, head_dim] and keys [T, 1, head_dim] in place.

    SGLang's module may return copies, its native form of `DeepseekScalingRotaryEmbedding` with a dimension more.
    """
    parts = q[..., : indexer.rope_head_dim], keys[..., : indexer.rope_head_dim]
    rotated = indexer.rotary_emb(positions, *parts)
    for part, result in zip(parts, rotated, strict=True):
        if part.data_ptr() != result.data_ptr():
            part.copy_(result.reshape(part.shape))
