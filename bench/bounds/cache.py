"""First-order errors of rows that are written to the cache. docs/bounds.md derives them."""

from __future__ import annotations

import torch

from paged.bench.bounds.first_order import ELEMENTARY, Defined, gamma, independent, rounding
from paged.bench.bounds.layers import norm_error, rotation
from paged.bench.problems.arguments import Arguments, Tensors, marked
from paged.kernels.cache import definition
from paged.kernels.cache.latent_cache import RecordForm, record_form
from paged.kernels.core.dtypes import KV_KINDS, kv_kind

# Half a unit of e4m3: relative to a number, and to the scale for numbers below the smallest normal one, 2^-6.
_HALF_CODE, _HALF_SUBNORMAL = 2.0**-4, 2.0**-10


def stored_error(want: torch.Tensor, dtype: torch.dtype, before: torch.Tensor) -> torch.Tensor:
    """Return the error of rows in a cache of `dtype`. before: the error of the rows before they are rounded."""
    kind = kv_kind(dtype)
    if kind.group_size:
        groups = torch.nn.functional.pad(want.abs(), (0, -want.shape[-1] % kind.group_size))
        largest = groups.unflatten(-1, (-1, kind.group_size)).amax(-1).repeat_interleave(kind.group_size, -1)
        largest = largest[..., : want.shape[-1]]
        # int4: a step is 1/8 of the largest magnitude, less up to 2^-7 of it. The number of the same magnitude and the
        # other sign is 7 steps.
        error: torch.Tensor = (1 / 8 + 1 / 128) * largest
        if kind.name == "nvfp4":
            # Half a step is 1/4 of the scale, and above two scales at most 1/4 of the number. A scale is largest / 6,
            # rounded by up to 2^-4 of it or 2^-10. If it is smaller, numbers beyond 6 scales are cut.
            error = torch.maximum(17 / 96 * largest + 2.0**-10, want.abs()) / 4 + 6 * 2.0**-10
        return error + 2 * before + 2 * before.amax(-1, keepdim=True)
    if kind.has_scales:
        largest = want.abs().amax(-1, keepdim=True)
        error = 0.5 / 127 * largest
        if kind.name == "e4m3_rows":
            error = want.abs() / 16 + 2.0**-10 / 448 * largest
        return error + ELEMENTARY * largest + before + before.amax(-1, keepdim=True)
    if dtype in KV_KINDS:
        return _distance_to_code(want, dtype) + before + ELEMENTARY * want.abs()
    return rounding(want, dtype) + before


def record_error(want: torch.Tensor, form: RecordForm, before: torch.Tensor) -> torch.Tensor:
    """Return the error of rows [..., num_numbers] in records. before: as in `stored_error`."""
    codes, rope = want.tensor_split([form.num_codes], -1)
    before_codes, before_rope = before.tensor_split([form.num_codes], -1)
    if form.codes_per_byte == 2:
        error = stored_error(codes, torch.float4_e2m1fn_x2, before_codes)
    else:
        groups = codes.unflatten(-1, (-1, form.group))
        scales = groups.abs().amax(-1, keepdim=True) / 448
        if form.scale_dtype == torch.uint8:
            scales = 2 * scales  # at most: they are rounded up to powers of two
        error = before_codes + half_code(groups, scales).flatten(-2)
    return torch.cat([error, stored_error(rope, form.rope_dtype, before_rope)], -1)


def half_code(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the error of numbers that are rounded to e4m3 codes with these scales."""
    return torch.maximum(_HALF_CODE * numbers.abs(), _HALF_SUBNORMAL * scales) + ELEMENTARY * numbers.abs()


def _distance_to_code(want: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return how far 8-bit floats are from the nearest code. A tie is as far from both of its codes."""
    return (want.to(dtype).double() - want).abs()


def _in_slots(error: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
    """Return the error of a cache [num_blocks, block_size, ...] in the slots that are written, and 0 elsewhere."""
    is_written = marked(error.shape[0] * error.shape[1], slot_mapping).view(error.shape[:2])
    return torch.where(is_written.view(*error.shape[:2], *[1] * (error.dim() - 2)), error, 0.0)


def cache_write(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    errors = {}
    for name in ("k_cache", "v_cache"):
        error = stored_error(want[name], arguments[name].dtype, torch.zeros_like(want[name]))
        errors[name] = _in_slots(error, arguments["slot_mapping"])
    return errors


def qk_norm_write(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    errors = cache_write(card, arguments, want)
    sizes = {}
    for name in ("q", "k"):
        sizes[name] = arguments["q"].shape[-1] if arguments.get(f"{name}_weight") is not None else 0
    before = _rotated(want["k_cache"], arguments, sizes["k"])
    error = stored_error(want["k_cache"], arguments["k_cache"].dtype, before)
    errors["k_cache"] = _in_slots(error, arguments["slot_mapping"])
    errors["q"] = rounding(want["q"], arguments["q"].dtype) + _rotated(want["q"], arguments, sizes["q"])
    return errors


def _rotated(want: torch.Tensor, arguments: Arguments, norm_size: int) -> torch.Tensor:
    """Return the float32 error of heads after a norm of `norm_size` numbers, a rotation and a Hadamard transform."""
    signs = arguments.get("hadamard_signs")
    if signs is None:
        return rotation(want, arguments, norm_size)
    # The matrix is its own inverse, so this is what the transform took.
    before = definition.hadamard(want, torch.ones_like(signs)) * signs
    size = want.shape[-1] & -want.shape[-1]
    numbers = before.unflatten(-1, (-1, size))  # [..., head_dim / size, size]
    errors = (rotation(before, arguments, norm_size) + ELEMENTARY * before.abs()).unflatten(-1, (-1, size))
    mixed = independent(errors.sum(-1), errors.square().sum(-1)) + gamma(size) * numbers.abs().sum(-1)
    error: torch.Tensor = (mixed * size**-0.5).repeat_interleave(size, -1)
    if norm_size:
        error = error + norm_error(norm_size) * want.abs()  # all numbers of a head are divided by the same root
    return error


def latent_write(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    is_normed = "latent_weight" in arguments
    size = arguments["latent"].shape[1]
    relative = ELEMENTARY
    if is_normed:
        relative += norm_error(size)
    rows, cache = want["kv_cache"], arguments["kv_cache"]
    before = torch.zeros_like(rows)
    if is_normed:
        before[..., :size] = relative * rows[..., :size].abs()
        before[..., size:] = rotation(rows[..., size:], arguments)
    form = record_form(cache, rows.shape[-1])
    error = stored_error(rows, cache.dtype, before) if form is None else record_error(rows, form, before)
    errors = {"kv_cache": _in_slots(error, arguments["slot_mapping"])}
    if "q_rope" in want:
        errors["q_rope"] = rounding(want["q_rope"], arguments["q_rope"].dtype)
        errors["q_rope"] += rotation(want["q_rope"], arguments)
    return errors
