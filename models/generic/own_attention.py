"""Replace attention of transformers' modules that do not use its attention interface.

Masks are not read, because all of these modules are causal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from paged.errors import UnsupportedError
from paged.models.generic.interface import PAGED, placed_attention


def use_paged_attention(module: Any) -> None:
    """Let the text part of a transformers model run over the paged cache, without masks."""
    text = module.config.get_text_config(decoder=True)
    if text.model_type not in _PLACES:
        module.set_attn_implementation(attention_of_text(module.config, PAGED))
        return
    replace_attention(module)
    if text.model_type != _NEEDS_MASK:
        text._attn_implementation_internal = PAGED  # `set_attn_implementation` skips models that choose themselves


def attention_of_text(config: Any, name: str) -> str | dict[str, str]:
    """Return an attention function's name for a model's text part, and transformers' own for its other parts.

    Some vision towers choose a class by the name and know only transformers' own names. So do text models with
    attention of their own. config: transformers' configuration.
    """
    text = config.get_text_config(decoder=True)
    if text.model_type in _PLACES:
        name = "eager"
    if text is config:
        return name
    names = {"": name}
    for key in config.sub_configs:
        section = getattr(config, key, None)
        if section is not None:
            names[key] = name if section is text else "eager"
    return names


def replace_attention(module: Any) -> None:
    """Let transformers' attention modules that do not use its interface call our functions; other modules stay."""
    place = _PLACES.get(module.config.get_text_config(decoder=True).model_type)
    if place is None:
        return
    class_name, method, function = place
    for part in module.modules():
        theirs = type(part)
        if not theirs.__module__.startswith("transformers.models."):  # the code of a checkpoint may differ
            continue
        if theirs.__name__ == class_name:
            setattr(part, method, partial(function, part))
        elif theirs.__name__ == _LINEAR:
            part.__class__ = torch.nn.Linear  # the same product, which `ModuleLinear` takes


def _of_heads(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, None]:
    """Attention of GPT-J, CodeGen and GPT-Neo, after projections and rotation."""
    window = None
    if getattr(module, "attention_type", None) == "local":  # GPT-Neo, which does not scale either
        window = module.config.window_size
    scaling = 1 / getattr(module, "scale_attn", 1.0)
    out, weights = placed_attention(module, query, key, value, scaling=scaling, sliding_window=window)
    return out.transpose(1, 2), weights


def _openai_gpt(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> list[torch.Tensor]:
    """Attention of the first GPT (2018), whose keys are transposed."""
    scaling = 1.0
    if module.scale:
        scaling = value.shape[-1] ** -0.5
    out = placed_attention(module, query, key.transpose(2, 3), value, scaling=scaling)[0]
    return [out.transpose(1, 2)]


def _xglm(module: Any, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    heads = []
    for projection in (module.q_proj, module.k_proj, module.v_proj):
        part = projection(hidden_states).view(*hidden_states.shape[:2], module.num_heads, module.head_dim)
        heads.append(part.transpose(1, 2))  # [1, H, T, D]
    out, weights = placed_attention(module, *heads, scaling=module.scaling)
    return module.out_proj(out.flatten(2)), weights


def _falcon(
    module: Any, hidden_states: torch.Tensor, *, alibi: Any, position_embeddings: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    if alibi is not None:
        raise UnsupportedError("alibi: transformers rounds it to bfloat16")
    num_rows, size = module.num_heads // module.num_kv_heads + 2, module.head_dim
    qkv = module.query_key_value(hidden_states)
    qkv = qkv.view(*hidden_states.shape[:2], module.num_kv_heads, num_rows, size)  # [1, T, Hkv, Hq / Hkv + 2, D]
    query, key, value = qkv.split((num_rows - 2, 1, 1), 3)
    query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in (query, key, value))  # [1, H, T, D]
    query, key = sys.modules[type(module).__module__].apply_rotary_pos_emb(query, key, *position_embeddings)
    out, weights = placed_attention(module, query, key, value, scaling=module.inv_norm_factor)
    return module.dense(out.flatten(2)), weights


def _bloom(module: Any, hidden_states: torch.Tensor, residual: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    slopes = getattr(module, "paged_slopes", None)
    if slopes is None:
        two_keys = torch.ones(1, 2, device=hidden_states.device)
        alibi = sys.modules[type(module).__module__].build_alibi_tensor(two_keys, module.num_heads, torch.float32)
        slopes = module.paged_slopes = alibi[:, 0, 1]
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    out, weights = placed_attention(module, query, key, value, scaling=module.inv_norm_factor, alibi_slopes=slopes)
    return module.dense(out.flatten(2)) + residual, weights


def _mpt(module: Any, hidden_states: torch.Tensor, position_bias: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(-module.clip_qkv, module.clip_qkv)
    heads = qkv.view(*hidden_states.shape[:2], 3, module.n_heads, module.head_dim)  # [1, T, 3, H, D]
    query, key, value = heads.transpose(1, 3).unbind(2)  # [1, H, T, D]
    slopes = (position_bias[:, 0, -1] - position_bias[:, 0, -2]).float()
    out, weights = placed_attention(module, query, key, value, scaling=module.softmax_scale, alibi_slopes=slopes)
    return module.out_proj(out.flatten(2)), weights


# model_type of a text model -> its attention class, the method that is replaced, and the function that replaces it.
_PLACES: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "bloom": ("BloomAttention", "forward", _bloom),
    "codegen": ("CodeGenAttention", "_attn", _of_heads),
    "falcon": ("FalconAttention", "forward", _falcon),
    "gpt_neo": ("GPTNeoSelfAttention", "_attn", _of_heads),
    "gptj": ("GPTJAttention", "_attn", _of_heads),
    "mpt": ("MptAttention", "forward", _mpt),
    "openai-gpt": ("Attention", "_attn", _openai_gpt),
    "xglm": ("XGLMAttention", "forward", _xglm),
}
# Class of Falcon's linear layers. It computes the same as `torch.nn.Linear`.
_LINEAR = "FalconLinear"
# model_type whose code converts the mask, which therefore may not be None.
_NEEDS_MASK = "mpt"
# model_type -> longest sequence in training, in tokens, for models whose config.json may not have this length.
LENGTHS = {"bloom": 2048}
