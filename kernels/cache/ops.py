"""Writes to the cache as custom ops."""

from __future__ import annotations

from typing import Any

import torch

from paged.kernels.common.custom_ops import CACHE_SCALES, define, ops, writes_only

__all__ = ["op_scales", "ops"]

# Those of int8 are written: a scale that is only read must not look as if it were.
_SCALES = f"{CACHE_SCALES}, Tensor(y!)? k_scale_cache=None, Tensor(z!)? v_scale_cache=None"
_SCALE_CACHES = ("k_scale_cache", "v_scale_cache")


def op_scales(
    k_cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """The last arguments of the ops below."""
    return (None, None, k_scale, v_scale) if k_cache.dtype == torch.int8 else (k_scale, v_scale, None, None)


def _merge_scales(arguments: dict[str, Any]) -> None:
    for name in _SCALE_CACHES:
        if (scale := arguments.pop(name, None)) is not None:
            arguments[name.removesuffix("_cache")] = scale


define(
    "reshape_and_cache",
    "paged.kernels.cache.reshape_and_cache",
    f"Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, {_SCALES}",
    mutates=("k_cache", "v_cache", *_SCALE_CACHES),
    prepare=_merge_scales,
)(writes_only)
define(
    "qk_norm_rope_and_cache",
    "paged.kernels.cache.qk_norm_rope_and_cache",
    "Tensor(a!) q, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slot_mapping, Tensor positions, "
    "Tensor cos_sin_cache, Tensor? q_weight=None, Tensor? k_weight=None, float eps=1e-06, bool interleaved=False, "
    f"{_SCALES}",
    mutates=("q", "k_cache", "v_cache", *_SCALE_CACHES),
    prepare=_merge_scales,
)(writes_only)
define(
    "copy_blocks",
    "paged.kernels.cache.copy_blocks",
    "Tensor(a!)[] caches, Tensor block_pairs",
    mutates=("caches",),
)(writes_only)
