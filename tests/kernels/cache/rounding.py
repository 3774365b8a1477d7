"""What a cache holds of numbers in float64."""

import torch

from tests.float64 import f64, to_float8
from tests.kernels.attention import loops

_E4M3 = torch.float8_e4m3fn


def rounded(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest numbers of a cache's dtype, ties to even."""
    return to_float8(numbers, dtype) if dtype.itemsize == 1 else numbers.to(dtype)


def rounded_latents(numbers: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
    """The numbers that a latent cache like this one holds once `numbers` are written, float64. Others stay."""
    before = loops.numbers(kv_cache)
    if kv_cache.dtype != torch.uint8:
        held = rounded(numbers, kv_cache.dtype).double()
    elif kv_cache.shape[-1] == 656:
        held = torch.cat([_packed(numbers[..., :512]), numbers[..., 512:].bfloat16().double()], -1)
    else:
        held = torch.cat([_nvfp4(numbers[..., :512]), f64(to_float8(numbers[..., 512:], _E4M3))], -1)
    return torch.where(numbers == before, before, held)


def _packed(latents: torch.Tensor) -> torch.Tensor:
    groups = latents.unflatten(-1, (-1, 128))
    largest = groups.abs().amax(-1, keepdim=True)
    codes = to_float8(groups * (448 / largest.clamp(min=2.0**-100)), _E4M3)
    return (f64(codes) * (largest / 448).float().double()).flatten(-2)


def _nvfp4(latents: torch.Tensor) -> torch.Tensor:
    groups = latents.unflatten(-1, (-1, 16))
    scales = f64(to_float8((groups.abs().amax(-1, keepdim=True) / 6).clamp(min=2.0**-9), _E4M3))
    distances = ((groups / scales).abs().unsqueeze(-1) - loops.E2M1).abs()
    is_nearest = distances == distances.amin(-1, keepdim=True)
    codes = (is_nearest * (2 - torch.arange(8) % 2)).argmax(-1)  # ties to the even code
    return (loops.E2M1[codes].copysign(groups) * scales).flatten(-2)
