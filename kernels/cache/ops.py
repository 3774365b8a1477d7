"""Writes to the cache as custom ops."""

from __future__ import annotations

from paged.kernels.common.custom_ops import CACHE_SCALES, define, ops, writes_only

__all__ = ["ops"]

define(
    "reshape_and_cache",
    "paged.kernels.cache.reshape_and_cache",
    f"Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, {CACHE_SCALES}",
    mutates=("k_cache", "v_cache"),
)(writes_only)
define(
    "qk_norm_rope_and_cache",
    "paged.kernels.cache.qk_norm_rope_and_cache",
    "Tensor(a!) q, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slot_mapping, Tensor positions, "
    "Tensor cos_sin_cache, Tensor? q_weight=None, Tensor? k_weight=None, float eps=1e-06, bool interleaved=False, "
    f"{CACHE_SCALES}",
    mutates=("q", "k_cache", "v_cache"),
)(writes_only)
define(
    "copy_blocks",
    "paged.kernels.cache.copy_blocks",
    "Tensor(a!)[] caches, Tensor block_pairs",
    mutates=("caches",),
)(writes_only)
