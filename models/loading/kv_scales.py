"""Scales of an 8-bit KV cache in a checkpoint: their published names, and their values."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.models.loading.weights import FLOATING, StoredTensor, StoredTensors, check_dtype, read_tensor

_LOG = logging.getLogger("paged")

# Last word of a tensor's name -> the caches that the tensor scales: k, v or both. Zero points are refused
# unless they are 0, because 8-bit floats have none.
_CACHES = {
    "k_scale": "k",
    "v_scale": "v",
    "kv_scale": "kv",
    "k_zero_point": "k",
    "v_zero_point": "v",
    # Scales of queries and probabilities, which are in no cache.
    **dict.fromkeys(("q_scale", "p_scale", "prob_scale", "prob_output_scale", "q_zero_point"), ""),
}
_OUTPUT = "output_scale"
# A scale stands beside the attention module (compressed-tensors, AutoFP8), inside of it in a submodule (vLLM), or
# beside the projection whose output it scales (ModelOpt, Quark).
_PLACE = re.compile(r"(?P<module>.+?)(?:\.(?:mla_)?attn)*(?:\.(?P<projection>q|k|v|kv|qkv|qkqkv|kv_b)_proj)?")
_ATTENTION = re.compile(r"model\.layers\.(\d{1,9})\.self_attn")
# Projection -> caches that hold its output; empty for queries and expanded latents, which no cache holds.
_OUTPUTS = {"k": "k", "v": "v", "kv": "kv", "qkv": "kv", "qkqkv": "kv", "q": "", "kv_b": ""}
_MAX_SHOWN = 4


class _KvScale(NamedTuple):
    """The parts of a scale's name.

    module: name of the attention module.
    kinds: letters of the caches that it scales: "k", "v", "kv", or "" for another operand of attention.
    is_offset: whether it is a zero point.
    """

    module: str
    kinds: str
    is_offset: bool


def is_kv_scale(name: str) -> bool:
    """Return whether a tensor's name, in any layer, is a scale of the KV cache or of another operand of attention."""
    return _parse(name) is not None


def split_kv_scales(stored: StoredTensors) -> tuple[StoredTensors, StoredTensors]:
    """Split tensors, under the family's names, into the weights and the scales that `is_kv_scale` finds in layers."""
    weights: StoredTensors = {}
    scales: StoredTensors = {}
    for name, tensor in stored.items():
        parsed = _parse(name)
        if parsed is not None and _ATTENTION.fullmatch(parsed.module):
            scales[name] = tensor
        else:
            weights[name] = tensor
    return weights, scales


def load_kv_scales(
    stored: StoredTensors, num_kv_heads: Sequence[int], caches: Sequence[str], device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """Return `k_scale` and `v_scale` of every layer that has them, float32, [1] or [num_kv_heads].

    A value is stored * scale. If some layers have scales, a warning names the layers that lack one.

    Args:
        stored: the scales that `split_kv_scales` returns.
        num_kv_heads: KV heads of each layer.
        caches: letters of the caches that each layer fills: "kv", "k" or "".

    Raises:
        CheckpointError: a scale occurs twice, belongs to no layer, has another size or no floating dtype, or is not
            finite and above 0.
        UnsupportedError: a zero point is not 0.
    """
    scales: list[dict[str, torch.Tensor]] = [{} for _ in num_kv_heads]
    for name, tensor in sorted(stored.items()):
        parsed = _parse(name)
        assert parsed is not None
        layer = int(parsed.module.split(".")[2])
        if layer >= len(scales):
            raise CheckpointError(f"{name}: unexpected tensor in {tensor.file}")
        if parsed.is_offset:
            if parsed.kinds:
                _check_zero(stored, name)
            continue
        for kind in parsed.kinds:
            if f"{kind}_scale" in scales[layer]:
                raise CheckpointError(f"{name}: a second {kind}_scale, again in {tensor.file}")
            scale = _read_scale(stored, name, tensor, num_kv_heads[layer])
            scales[layer][f"{kind}_scale"] = scale.to(device)
    if any(scales):
        _warn_of_missing(scales, caches)
    return scales


def _parse(name: str) -> _KvScale | None:
    """Return the parts of a scale's name; None for another tensor, or if the projection contradicts the name."""
    place, _, scale = name.rpartition(".")
    if scale not in _CACHES and scale != _OUTPUT:
        return None
    match = _PLACE.fullmatch(place)
    if match is None:
        return None
    projection = match["projection"]
    if scale == _OUTPUT:
        kinds = _OUTPUTS.get(projection)
        if kinds is None:
            return None
    else:
        kinds = _CACHES[scale]
        if projection is not None and kinds and not set(kinds) <= set(projection):
            return None
    return _KvScale(match["module"], kinds, scale.endswith("zero_point"))


def _read_scale(stored: StoredTensors, name: str, tensor: StoredTensor, num_heads: int) -> torch.Tensor:
    check_dtype(name, tensor, FLOATING)
    if math.prod(tensor.shape) not in (1, num_heads):
        raise CheckpointError(f"{name}: shape {tensor.shape} in {tensor.file}, expected 1 or {num_heads} values")
    scale = read_tensor(stored, name).float().flatten()
    if not (scale.isfinite() & (scale > 0)).all():
        raise CheckpointError(f"{name}: {scale.tolist()} in {tensor.file}, expected numbers above 0")
    return scale


def _check_zero(stored: StoredTensors, name: str) -> None:
    if read_tensor(stored, name).float().any():
        raise UnsupportedError(f"{name}: a zero point other than 0 in {stored[name].file}; an 8-bit float has none")


def _warn_of_missing(scales: Sequence[dict[str, torch.Tensor]], caches: Sequence[str]) -> None:
    missing: list[str] = []
    for layer, letters in enumerate(caches):
        for letter in letters:
            if f"{letter}_scale" not in scales[layer]:
                missing.append(f"{letter}_scale of layer {layer}")
    if missing:
        names = ", ".join(missing[:_MAX_SHOWN])
        _LOG.warning("the checkpoint holds scales of the KV cache, but not %s (%d in all): 1 each", names, len(missing))
