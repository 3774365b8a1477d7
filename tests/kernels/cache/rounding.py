"""What a cache holds of numbers in float64."""

import torch

from paged.kernels.cache.latent_cache import LatentParts, typed_parts
from tests.float64 import to_float8


def rounded(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest numbers of a cache's dtype, ties to even."""
    return to_float8(numbers, dtype) if dtype.itemsize == 1 else numbers.to(dtype)


def rounded_latents(parts: LatentParts, kv_cache: torch.Tensor) -> torch.Tensor:
    """The numbers that a latent cache like this one stands for when its parts are rounded, float64."""
    held = []
    for part, like in zip(parts, typed_parts(kv_cache, parts.latent.shape[-1]), strict=True):
        if part is not None and like is not None:
            held.append(rounded(part, like.dtype).double())
    latent, rope, *scales = held
    for scale in scales:
        latent = latent * scale.repeat_interleave(128, -1)
    return torch.cat([latent, rope], -1)
