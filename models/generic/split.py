"""Split transformers' own module over ranks, by the module's `tp_plan`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paged.errors import UnsupportedError
from paged.models.generic.config import ModuleConfig
from paged.models.parallel.share import Section, Share, cut

# Styles of a `tp_plan` that do not change the forward. Every rank holds the embedding.
_WHOLE = frozenset(("embedding_rowwise", "local_params", "replicated_with_grad_allreduce"))
# Style that cuts a weight -> the cut dimension, counted from the last because a bias has only one.
_DIMS = {"colwise": -2, "colwise_gather_output": -2, "packed_colwise": -2, "rowwise": -1}
# Style of the LM head: a rank computes the logits of its part of the vocabulary.
_HEAD = "colwise_gather_output"
# Style of experts: ranks sum their outputs.
_EXPERTS = "moe_tp_experts"


def tp_styles_of(module: nn.Module) -> dict[str, str]:
    """Return the styles of a module's `tp_plan` by the names of its submodules and parameters."""
    patterns: Mapping[str, str] = getattr(module, "tp_plan", None) or {}
    styles: dict[str, str] = {}
    for pattern, style in patterns.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name, _ in (*module.named_modules(), *module.named_parameters()):
            if expression.fullmatch(name):
                styles[name] = style
    return styles


def split(module: Any, config: ModuleConfig, share: Share) -> None:
    """Cut the weights of a whole module to a rank's part.

    Raises:
        UnsupportedError: `tp_plan` leaves the head or a layer's attention whole or has an unknown style, or a size is
            no multiple of the number of ranks.
    """
    if share.size == 1:
        return
    _check(module, config, share)
    for name, style in config.tp_styles.items():
        if style not in _DIMS:
            continue
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        part = getattr(owner, attribute)
        if isinstance(part, nn.Parameter):
            setattr(owner, attribute, _cut(part, name, style, config, share))
            continue
        part.weight = _cut(part.weight, name, style, config, share)
        if part.bias is not None and style != "rowwise":
            part.bias = _cut(part.bias, name, style, config, share)
        elif part.bias is not None and share.rank:
            part.bias = nn.Parameter(torch.zeros_like(part.bias), requires_grad=False)  # rank 0 adds it


def summed(config: ModuleConfig) -> list[str]:
    """Return the names of the modules whose outputs ranks sum."""
    rowwise = [name for name in config.linears if config.tp_styles.get(name) == "rowwise"]
    return _with_style(config, _EXPERTS) + rowwise


def _with_style(config: ModuleConfig, style: str) -> list[str]:
    """Return the names to which `tp_plan` gives a style."""
    return [name for name, style_of_name in config.tp_styles.items() if style_of_name == style]


def _check(module: Any, config: ModuleConfig, share: Share) -> None:
    beginning = f"tensor_parallel_size {share.size}: transformers' plan of {config.architecture}"
    if share.expert_parallel:
        raise UnsupportedError(f"{beginning} splits every expert, expected expert_parallel=False")
    other_styles = set(config.tp_styles.values()) - _DIMS.keys() - _WHOLE - {_EXPERTS}
    if other_styles:
        raise UnsupportedError(f"{beginning} has the style {min(other_styles)!r}")
    heads = list(map(module.get_submodule, _with_style(config, _HEAD)))
    if heads != [module.get_output_embeddings()]:
        raise UnsupportedError(f"{beginning} does not split the head, or gathers other outputs")
    columns = _with_style(config, "colwise")
    for place, attention in zip(config.places, config.attention, strict=True):
        if not any(name.startswith(f"{place}.") for name in columns):
            raise UnsupportedError(f"{beginning} leaves {place} whole")
        if attention.num_kv_heads % share.size:
            num_heads = f"num_key_value_heads {attention.num_kv_heads}"
            raise UnsupportedError(f"tensor_parallel_size {share.size}: {num_heads}, supported are multiples")


def _cut(tensor: torch.Tensor, name: str, style: str, config: ModuleConfig, share: Share) -> nn.Parameter:
    dim = -1
    if tensor.dim() > 1:
        dim = _DIMS[style]
    if style == _HEAD:
        sections = [share.vocabulary(config.vocab_size)]
    else:
        num_sections = 2 if style == "packed_colwise" else 1  # gate and up are two sections
        size = tensor.shape[dim] // num_sections
        if size % share.size:
            raise UnsupportedError(f"tensor_parallel_size {share.size}: {name} of {size}, supported are multiples")
        part = size // share.size
        sections = [Section(size, share.rank * part, (share.rank + 1) * part)] * num_sections
    return nn.Parameter(cut(tensor, sections, dim), requires_grad=False)
