"""Attention functions for transformers' own modules: one over our paged KV cache, one that notes a module's calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from paged.errors import UnsupportedError
from paged.kernels.attention.paged_attention import paged_attention
from paged.kernels.cache.qk_norm_rope_and_cache import qk_norm_rope_and_cache
from paged.kernels.core.operation import Bound
from paged.models.generic.experts import ModuleExperts
from paged.models.layers.attention_config import AttentionConfig
from paged.step.metadata import AttentionMetadata

# Names in transformers' attention interface. transformers makes masks for PROBE only.
PAGED, PROBE = "paged_cache", "paged_probe"
# Name in transformers' experts interface.
EXPERTS = "paged_experts"
# Attribute of an attention module that holds its `PagedLayer` or the list of `AttentionCall`s.
_PLACE = "paged_place"
# Tensors that transformers passes to every attention function, and that do not change its result.
_HARMLESS = frozenset(("position_ids", "cache_position", "position_embeddings", "input_ids"))


def register() -> None:
    """Add the functions to transformers' interfaces; may be called repeatedly."""
    ExpertsInterface.register(EXPERTS, _run_experts)
    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(PROBE, _note_call)
    AttentionMaskInterface.register(PROBE, _noted_mask)


@dataclass
class Step:
    """The step that runs, shared by a network's attention layers."""

    metadata: AttentionMetadata | None = None


@dataclass
class PagedLayer:
    """The cache of one attention module; `PagedLayer.of` finds it from the module.

    no_rotation: rotary table without columns, [max_seq_len, 0], because the module rotates by itself.
    k_scale, v_scale: factors of an 8-bit cache; a missing factor is 1.
    """

    config: AttentionConfig
    step: Step
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    table: int
    no_rotation: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        # `no_rotation` has no columns, so this call only writes K/V: the module has rotated them. This operation is
        # chosen because it has a numba kernel for CPUs.
        self.write = Bound(qk_norm_rope_and_cache, by=1)
        self.attend = Bound(paged_attention)
        self.window_size = self.config.window_size

    def attach(self, module: torch.nn.Module) -> None:
        """Let an attention module use this cache."""
        setattr(module, _PLACE, self)


@dataclass
class AttentionCall:
    """One call of the attention function, as `_note_call` sees it.

    Attributes:
        query, key, value: shapes [1, heads, tokens, head size].
        mask: the mask, which has transformers' `mask_function` unless the model made or changed it.
        options: the other arguments that are not None.
    """

    module: torch.nn.Module
    query: torch.Size
    key: torch.Size
    value: torch.Size
    mask: torch.Tensor | None
    options: dict[str, Any]


@dataclass
class Calls:
    """The recorded calls of one forward."""

    calls: list[AttentionCall] = field(default_factory=list)

    def attach(self, module: torch.nn.Module) -> None:
        """Note the calls of all modules below `module`."""
        for part in module.modules():
            setattr(part, _PLACE, self)

    def detach(self, module: torch.nn.Module) -> None:
        """Stop noting calls."""
        for part in module.modules():
            if hasattr(part, _PLACE):  # the forward of some models replaces modules, so the attribute may be gone
                delattr(part, _PLACE)


def _noted_mask(*_: Any, q_length: int, kv_length: int, mask_function: Any, device: Any, **__: Any) -> torch.Tensor:
    """Return an empty mask that carries its function of positions."""
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    mask.mask_function = mask_function  # type: ignore[attr-defined]
    return mask


def _note_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Note the call; return uninitialised attention of the right shape."""
    calls: Calls | None = getattr(module, _PLACE, None)
    if calls is None:
        raise UnsupportedError(f"{type(module).__name__} is made anew in a forward")
    options = {name: option for name, option in options.items() if option is not None}
    calls.calls.append(AttentionCall(module, query.shape, key.shape, value.shape, attention_mask, options))
    return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    s_aux: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write keys and values of the step to the cache and attend to it.

    Args:
        query: [1, num_heads, num_tokens, head_dim].
        key, value: [1, num_kv_heads, num_tokens, head size].

    Returns:
        Attention [1, num_tokens, num_heads, v_head_dim], and None in place of weights.

    Raises:
        UnsupportedError: the model passes a mask.
    """
    if attention_mask is not None:
        raise UnsupportedError(f"{type(module).__name__}: a mask of {list(attention_mask.shape)}, expected none")
    layer: PagedLayer = getattr(module, _PLACE)
    config, metadata = layer.config, layer.step.metadata
    assert metadata is not None
    block_table, slot_mapping = metadata.table(layer.table)
    dtype = value.dtype  # some models rotate in float32 and expect attention to round
    q, k, v = query[0].transpose(0, 1).to(dtype), key[0].transpose(0, 1).to(dtype), value[0].transpose(0, 1)
    layer.write(
        q[:, :0],
        k,
        v,
        layer.k_cache,
        layer.v_cache,
        slot_mapping,
        metadata.positions,
        layer.no_rotation,
        k_scale=layer.k_scale,
        v_scale=layer.v_scale,
    )
    out = torch.empty(*q.shape[:2], config.v_head_dim, dtype=dtype, device=q.device)
    layer.attend(
        q,
        layer.k_cache,
        layer.v_cache,
        block_table=block_table,
        cu_seqlens_q=metadata.cu_seqlens_q,
        seq_lens=metadata.seq_lens,
        max_seqlen_q=metadata.max_seqlen_q,
        softmax_scale=config.softmax_scale,
        window_size=layer.window_size,
        softcap=config.softcap,
        sinks=s_aux,
        alibi_slopes=alibi_slopes,
        k_scale=layer.k_scale,
        v_scale=layer.v_scale,
        plan=metadata.plan,
        out=out,
    )
    return out[None], None


def _run_experts(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run a module's experts; on the meta device, return a tensor of the right shape."""
    if hidden_states.is_meta:
        return torch.empty_like(hidden_states)
    ours = ModuleExperts.of(experts)
    if ours is not None:
        return ours.forward(hidden_states, top_k_index, top_k_weights)
    out: torch.Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    return out


def placed_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, None]:
    """Note a call of attention, or attend, whichever the module is attached for; arguments as in `_attend`."""
    attend = _attend
    if isinstance(getattr(module, _PLACE, None), Calls):
        attend = _note_call
    return attend(module, query, key, value, **options)


def unexpected_options(call: AttentionCall) -> list[str]:
    """Return the names of a call's arguments that `_attend` would ignore although they may matter."""
    known = {"scaling", "sliding_window", "softcap", "s_aux", "alibi_slopes", "is_causal", "dropout"}
    names = []
    for name, option in call.options.items():
        if isinstance(option, torch.Tensor) and name not in known | _HARMLESS:
            names.append(name)
    if call.options.get("dropout"):
        names.append("dropout")
    return names
