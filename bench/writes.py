"""What each operation may write: arguments, or fields of them, and of caches and states which slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Masks = dict[str, torch.Tensor | None]
"""By argument, "state.conv" for a field and "caches[0]" for an item: True for each entry of the first dimensions that
may be written, None for all."""
_Writes = Callable[[dict[str, Any]], Masks]


def writes_of(operation: str, arguments: dict[str, Any]) -> Masks:
    """Return what a call may write; nothing else may change by a bit."""
    masks: Masks = {}
    if operation in _WRITES:
        masks = _WRITES[operation](arguments)
    if arguments.get("out") is not None:
        masks["out"] = None
    return masks


def _whole(*names: str) -> _Writes:
    """Return arguments of which everything may be written."""
    return lambda _: dict.fromkeys(names)


def _marked(size: int, ids: torch.Tensor) -> torch.Tensor:
    """Return a mask over `size` entries, True for the ids that are not negative."""
    ids = ids.flatten().long()
    mask = torch.zeros(size, dtype=torch.bool, device=ids.device)
    mask[ids[ids >= 0]] = True
    return mask


def _slots(*caches: str, whole: tuple[str, ...] = ()) -> _Writes:
    """Return the slots of `slot_mapping` in caches, and in the scales of an int8 cache's rows."""

    def writes(arguments: dict[str, Any]) -> Masks:
        masks: Masks = dict.fromkeys(whole)
        for name in caches:
            cache = arguments[name]
            mask = _marked(cache.shape[0] * cache.shape[1], arguments["slot_mapping"]).view(cache.shape[:2])
            masks[name] = mask
            if cache.dtype == torch.int8:
                masks[name.replace("cache", "scale")] = mask
        return masks

    return writes


def _destinations(arguments: dict[str, Any]) -> Masks:
    pairs = torch.as_tensor(arguments["block_pairs"], dtype=torch.int64).view(-1, 2)
    masks: Masks = {}
    for index, cache in enumerate(arguments["caches"]):
        masks[f"caches[{index}]"] = _marked(len(cache), pairs[:, 1].to(cache.device))
    return masks


def _states(*fields: str) -> _Writes:
    """Return the slots of a batch that sequences write."""

    def writes(arguments: dict[str, Any]) -> Masks:
        batch, state = arguments["batch"], arguments["state"]
        mask = _marked(len(state.conv), torch.cat([batch.write_slots, batch.snapshot_slots]))
        return {f"state.{field}": mask for field in fields}

    return writes


_SCAN = _states("state", "ring_k", "ring_u", "ring_g")
_WRITES: dict[str, _Writes] = {
    "add_lora": _whole("out"),
    "causal_conv1d": _states("conv"),
    "concat_and_cache_mla": _slots("kv_cache"),
    "copy_blocks": _destinations,
    "fused_add_rms_norm": _whole("x", "residual"),
    "gated_delta_rule": _SCAN,
    "mamba2_scan": _SCAN,
    "mla_norm_rope_and_cache": _slots("kv_cache", whole=("q_rope",)),
    "qk_norm_rope_and_cache": _slots("k_cache", "v_cache", whole=("q",)),
    "reshape_and_cache": _slots("k_cache", "v_cache"),
    "rotary_embedding": _whole("query", "key"),
    "route_and_align": _whole("ticket"),
}
