"""A fixed rotation of heads in the KV cache, the randomised Hadamard transform (QuaRot, Ashkboos et al., 2024).

It spreads outliers of a channel over the head, so that caches of 4 and 8 bits lose less. Queries and keys are rotated
when they are written, which keeps scores. The rotation of values is folded into the projections before and after
attention, which costs nothing in a step.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from paged.errors import UnsupportedError
from paged.kernels.cache import definition
from paged.kernels.cache.ordered_heads import hadamard_size
from paged.models.layers.attention_config import AttentionConfig

KEYS_AND_VALUES, KEYS = "hadamard", "hadamard_keys"
# Another seed is another rotation.
_SEED = "signs of rotated heads, 1"
OPTION = "kv_cache_rotation"


def rotation_name(rotation: str | None) -> str | None:
    """Return the name of a rotation and its signs, which is part of a cache's layout; None for no rotation."""
    if rotation is None:
        return None
    return f"{rotation}: {_SEED}"


def hadamard_signs(head_dim: int, device: torch.device) -> torch.Tensor:
    """Return the signs of all heads of this size, float32 [head_dim], the same in every process."""
    digest = hashlib.shake_256(_SEED.encode()).digest(-(-head_dim // 8))
    bits = np.unpackbits(np.frombuffer(digest, np.uint8))[:head_dim]
    return torch.from_numpy(bits * np.float32(2) - np.float32(1)).to(device)


def rotated(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return rows [..., heads * head_dim] with every head rotated in float32, in the dtype of rows."""
    signs = hadamard_signs(head_dim, rows.device)
    heads = rows.unflatten(-1, (-1, head_dim))  # [..., heads, head_dim]
    return definition.hadamard(heads, signs, compute=torch.float32).flatten(-2).to(rows.dtype)


def check_layer(name: str, layer: AttentionConfig, rotation: str) -> None:
    """Raise unless heads of this layer can be rotated. name: of the layer in messages.

    Raises:
        InvalidInputError: a size of heads is not a multiple of 16.
        UnsupportedError: the layer has no keys and values of its own; or values shall be rotated, but they are keys, or
            the elements of a head's output are gated.
    """
    if layer.latent is not None or layer.compressed is not None:
        raise UnsupportedError(f"{OPTION}: {rotation!r} for latents or compressed entries, expected None")
    if layer.shares_kv_with is not None:
        raise UnsupportedError(
            f"{OPTION}: {rotation!r}, but {name} reads K/V of layer {layer.shares_kv_with}, expected None"
        )
    hadamard_size(OPTION, layer.head_dim)
    if rotation == KEYS:
        return
    hadamard_size(OPTION, layer.v_head_dim)
    if layer.k_eq_v:
        raise values_error(rotation, f"values of {name} are its keys before their rotation")
    if layer.output_gate or (layer.head_gate is not None and layer.head_gate_size != 1):
        raise values_error(rotation, f"{name} gates the elements of a head's output")


def values_error(rotation: str, reason: str) -> UnsupportedError:
    """Return the error for values that cannot be rotated."""
    return UnsupportedError(f"{OPTION}: {rotation!r}, but {reason}, expected {KEYS!r} or None")
