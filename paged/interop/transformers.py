"""Attention and fused MoE for transformers' models: call `register`, then select `paged_triton` by name.

    register()
    model.set_attn_implementation("paged_triton")
    model.set_experts_implementation("paged_triton")
    model.generate_batch(...)

Continuous batching keeps K and V in transformers' own pages. Layers with full attention read them in place. Models
with layers that transformers does not batch run in an engine of this package, see `transformers_batches`.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import transformers
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.activations import SiLUActivation
from transformers.generation.continuous_batching import cache, continuous_api, initialization
from transformers.integrations.moe import ExpertsInterface, _default_apply_gate
from transformers.modeling_utils import AttentionInterface
from transformers.utils import generic

from paged.errors import UnsupportedError
from paged.interop.flash_attention import flash_attn_varlen_func
from paged.interop.transformers_batches import generate_batch, is_hybrid
from paged.kernels.attention.paged_attention import paged_attention
from paged.kernels.attention.plan import AttentionPlan
from paged.kernels.cache.reshape_and_cache import reshape_and_cache
from paged.kernels.core.operation import bound_for, layout
from paged.kernels.moe.fused_moe import fused_moe

NAME = "paged_triton"

# Modules of continuous batching that ask `is_flash_attention_requested` whether an implementation needs masks. Besides
# "sdpa" and "paged|eager", they admit only names with "flash".
_ASKING: tuple[Any, ...] = (cache, continuous_api, initialization)
# The cache's own method. In transformers 5.24 models call it before the attention function; in 5.23 the attention
# function calls it.
_UPDATE = cache.PagedAttentionCache.update
# Arguments of some models' attention that change its result: chosen keys (`indices`, `block_indices`), sinks with
# values, and a table of blocks for new keys.
_REFUSED = ("indices", "block_indices", "sinks", "block_table")
_GENERATE_BATCH = continuous_api.ContinuousMixin.generate_batch
# Constants of gpt-oss's gate in "swiglu_oai" of `fused_moe`.
_CLAMPED = {"limit": 7.0, "alpha": 1.702}


def register() -> None:
    """Register `paged_triton` as attention and experts function of transformers, also for continuous batching.

    May be called repeatedly. For inference only, because the attention needs the cache of `generate_batch`.

    Raises:
        UnsupportedError: this version of transformers selects implementations differently; 5.23 and 5.24 work.
    """
    for module in _ASKING:
        if not hasattr(module, "is_flash_attention_requested"):
            raise UnsupportedError(f"transformers {transformers.__version__}: {module.__name__} differs from 5.23")
    if signature(_UPDATE).parameters.keys() != signature(_update_or_pass_on).parameters.keys():
        raise UnsupportedError(f"transformers {transformers.__version__}: PagedAttentionCache.update differs from 5.23")
    AttentionInterface.register(NAME, PagedTritonAttention())
    ExpertsInterface.register(NAME, fused_experts_forward)
    for module in _ASKING:
        module.is_flash_attention_requested = _needs_no_mask
    cache.PagedAttentionCache.update = _update_or_pass_on  # type: ignore[method-assign]
    continuous_api.ContinuousMixin.generate_batch = _generate_batch  # type: ignore[method-assign]


def _needs_no_mask(
    config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
) -> bool:
    """Replacement of `is_flash_attention_requested`: also true for `paged_triton`, unless a version is given."""
    name = requested_attention_implementation if config is None else config._attn_implementation
    if name == NAME:
        return version is None
    return bool(generic.is_flash_attention_requested(config, requested_attention_implementation, version))


def _update_or_pass_on(
    self: Any, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replacement of `PagedAttentionCache.update`: for `paged_triton`, leave the update to the attention function.

    The attention function then gets only the new keys and values, with the cache as an argument.
    """
    if self.config._attn_implementation != NAME:
        return _UPDATE(self, key_states, value_states, layer_idx, kwargs)  # type: ignore[no-any-return]
    kwargs["cache"] = self
    return key_states, value_states


def _generate_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement of `generate_batch`: a hybrid model with `paged_triton` runs in an engine of this package."""
    if self.config._attn_implementation == NAME and is_hybrid(self.config):
        return generate_batch(self, *args, **kwargs)
    return _GENERATE_BATCH(self, *args, **kwargs)


class PagedTritonAttention:
    """Attention function of transformers for continuous batching."""

    def __init__(self) -> None:
        # Block table and plan of a step, by its write index and by whether a graph is being captured. A capture needs
        # its own objects, because objects made before it are not part of the graph.
        self._steps: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    # Not compiled, like transformers' own paged functions, because the cache returns views of one tensor.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Write new keys and values to the cache and attend to it.

        Args:
            query: [1, num_q_heads, num_tokens, head_dim].
            key, value: [1, num_kv_heads, num_tokens, head_dim]; with full attention, value may have a smaller head_dim.

        Returns:
            Attention [1, num_tokens, num_q_heads, the values' head_dim], and None in place of attention weights.

            Raises:
                UnsupportedError: there is no paged cache, or there is a mask, a position bias, dropout, another
                    argument of `_REFUSED`, or a head size that differs from the cache's.
        """
        paged_cache = kwargs.get("cache")
        refused = {"attention_mask": attention_mask, "position_bias": position_bias, "dropout": dropout or None}
        for name in _REFUSED:
            refused[name] = kwargs.get(name)
        for name, argument in refused.items():
            if argument is not None:
                raise UnsupportedError(f"{name}: {NAME} does not take it")
        if paged_cache is None:
            raise UnsupportedError(f"cache: None, but {NAME} needs the paged cache of generate_batch")
        if is_causal is None:
            is_causal = module.is_causal
        window_size = (-1, -1)
        if sliding_window is not None:
            window_size = (sliding_window - 1, -1)
        kind: dict[str, Any] = {
            "softmax_scale": scaling,
            "causal": is_causal,
            "window_size": window_size,
            "softcap": softcap or 0.0,
        }
        options = {"max_seqlen_q": kwargs["max_length_q"], **kind}
        layer, q, v_head_dim = module.layer_idx, query[0].transpose(0, 1), value.shape[3]
        out = torch.empty(*q.shape[:2], v_head_dim, dtype=q.dtype, device=q.device)
        allocator = paged_cache.layer_to_allocator[layer]
        heads, head_dim = allocator.num_key_value_heads, allocator.head_dim
        narrowest = 1 if allocator.supports_block_table else head_dim
        if key.shape[1::2] != (heads, head_dim) or not narrowest <= v_head_dim <= head_dim:
            shapes = f"key: shape {list(key.shape)}, value: shape {list(value.shape)}"
            expected = f"in this layer the cache of generate_batch has {heads} heads of {head_dim}"
            raise UnsupportedError(f"{shapes}; {expected}")
        if not allocator.supports_block_table:
            # The cache of a layer with a window is a ring. Use the keys that the update returns: it overwrites the
            # oldest keys in the ring.
            key, value = _UPDATE(paged_cache, key, value, layer, kwargs)
            flash_attn_varlen_func(
                q,
                key[0].transpose(0, 1),
                value[0].transpose(0, 1),
                kwargs["cu_seq_lens_q"],
                kwargs["cu_seq_lens_k"],
                max_seqlen_k=kwargs["max_length_k"],
                s_aux=s_aux,
                out=out,
                **options,
            )
            return out.unsqueeze(0), None
        k_cache, v_cache = allocator.get_cache_for_block_table(layer)
        v_cache = v_cache[..., :v_head_dim]
        write_index = kwargs["write_index"][allocator.index]
        reshape_and_cache(key[0].transpose(0, 1), value[0].transpose(0, 1), k_cache, v_cache, write_index)
        block_table, plan = self._step(allocator, write_index, kwargs)
        bound_for(paged_attention, *kind.values(), *layout(k_cache, v_cache, s_aux))(
            q,
            k_cache,
            v_cache,
            block_table=block_table,
            cu_seqlens_q=kwargs["cu_seq_lens_q"],
            seq_lens=plan.seq_lens,
            sinks=s_aux,
            plan=plan,
            out=out,
            **options,
        )
        return out.unsqueeze(0), None

    def _step(
        self, allocator: Any, write_index: torch.Tensor, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, AttentionPlan]:
        """Return the block table and the plan, derived from the index of every token to read.

        Tokens fill each page from its first slot. If nothing was cached before, the index is empty and the tokens to
        read are the new tokens.
        """
        steps: dict[bool, tuple[torch.Tensor, AttentionPlan]] = self._steps.setdefault(write_index, {})
        capturing = write_index.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing not in steps:
            read_index = kwargs["read_index"][allocator.index]
            index = read_index if read_index.numel() else write_index
            cu_seqlens_k = kwargs["cu_seq_lens_k"][allocator.layer_type]
            longest = kwargs["max_length_k"][allocator.layer_type]
            first_tokens = torch.arange(0, longest, allocator.tokens_per_page, device=index.device)
            slots = (cu_seqlens_k[:-1, None] + first_tokens).clamp_(max=index.shape[0] - 1)
            lengths = {"max_seqlen_q": kwargs["max_length_q"], "max_seqlen_k": longest}
            plan = AttentionPlan(kwargs["cu_seq_lens_q"], cu_seqlens_k.diff(), **lengths)
            steps[capturing] = (index[slots] // allocator.tokens_per_page).to(torch.int32), plan
        return steps[capturing]


def fused_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run transformers' experts with `fused_moe`, without gradients.

    Raises:
        UnsupportedError: a tensor requires a gradient, or `_read_experts` raises it.
    """
    weights, ids = top_k_weights.float().contiguous(), top_k_index.to(torch.int32).contiguous()
    return fused_moe(hidden_states, topk_weights=weights, topk_ids=ids, **_read_experts(self))


def _read_experts(experts: Any) -> dict[str, Any]:
    """Return weights, biases and activation of an experts module, as arguments of `fused_moe`.

    Weights [num_experts, in, out] are reordered in memory once, so that the row of each output is contiguous. The
    parameter keeps its shape and values.

    Raises:
        UnsupportedError: the experts are neither gated SiLU nor gpt-oss MLPs, or their weights have another order.
    """
    gate = type(experts)._apply_gate
    is_clamped = gate.__qualname__ == "GptOssExperts._apply_gate"
    expected: dict[str, Any] = {"has_gate": True, "has_post_expert_norm": False, "is_concatenated": not is_clamped}
    if is_clamped:
        expected |= _CLAMPED
    for name, value in expected.items():
        if getattr(experts, name) != value:
            raise UnsupportedError(f"{name}: {getattr(experts, name)}, expected {value}")
    if not is_clamped and gate is not _default_apply_gate:
        raise UnsupportedError(f"_apply_gate: {type(experts).__name__}'s own, expected act_fn(gate) * up or gpt-oss's")
    if not is_clamped and not isinstance(experts.act_fn, torch.nn.SiLU | SiLUActivation):
        raise UnsupportedError(f"act_fn: {experts.act_fn}, expected SiLU")
    w1, w2 = experts.gate_up_proj, experts.down_proj
    if experts.is_transposed:
        if w1.shape[-1] != 2 * w2.shape[-2]:
            shapes = f"{list(w1.shape)} and {list(w2.shape)}"
            raise UnsupportedError(f"is_transposed: True, but the weights are {shapes}")
        w1, w2 = _transposed(w1), _transposed(w2)
    w1_bias = w2_bias = None
    if experts.has_bias:
        w1_bias, w2_bias = experts.gate_up_proj_bias, experts.down_proj_bias
    return {
        "w1": w1,
        "w2": w2,
        "w1_bias": w1_bias,
        "w2_bias": w2_bias,
        "activation": "swiglu_oai" if is_clamped else "silu",
        "interleaved": is_clamped,
    }


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    """Return [num_experts, out, in] with contiguous rows."""
    if weight.stride(-2) == 1:
        return weight.mT
    # Do not keep the copy in a graph, because memory allocated there belongs to the graph.
    if torch.compiler.is_compiling() or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        return weight.mT.contiguous()
    weight.data = weight.data.mT.contiguous().mT
    return weight.mT
