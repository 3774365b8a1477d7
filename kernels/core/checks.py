"""Argument checks that wrappers share: shapes, dtypes and devices, without waiting for a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .dtypes import KV_KINDS, kv_kind
from .errors import InvalidInputError, UnsupportedError, as_float, shown

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The largest head_dim: 16 rows of an accumulator then take 64 registers of a thread with 4 warps.
MAX_HEAD_DIM = 512


def check_is_tensor(name: str, tensor: object) -> None:
    """Raise InvalidInputError unless `tensor` is strided, has memory, and is neither quantised nor lazily negated."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInputError(f"{name}: {shown(tensor)}, expected a tensor")
    if tensor.layout is not torch.strided or tensor.is_nested:
        if tensor.is_nested:
            raise InvalidInputError(f"{name}: layout nested, expected {torch.strided}")
        raise InvalidInputError(f"{name}: layout {tensor.layout}, expected {torch.strided}")
    if tensor.is_quantized:
        raise InvalidInputError(f"{name}: dtype {tensor.dtype}, expected one that PyTorch does not quantize")
    if tensor.is_neg():  # kernels read memory, where the values are not yet negated
        raise InvalidInputError(f"{name}: a view that negates, expected its resolve_neg()")
    try:
        has_memory = tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:  # tensors of torch.func and of a trace have no memory of their own
        has_memory = False
    if not has_memory and tensor.device.type != "meta":  # `use_triton` and `check_device` refuse "meta" tensors
        raise InvalidInputError(f"{name}: {type(tensor).__name__} without memory, expected one with values (no vmap)")


def refuse_gradients(operation: str, *values: object) -> None:
    """Raise UnsupportedError if autograd would record the operation: operations here have no backward."""
    if not torch.is_grad_enabled():
        return
    for value in values:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise UnsupportedError(
                f"{operation} has no gradients: run under torch.no_grad(), or give it detached tensors"
            )


def check_shape(name: str, tensor: torch.Tensor, expected: Sequence[int | str]) -> None:
    """Raise InvalidInputError unless `tensor` has the expected shape. A str stands for any size and names the axis."""
    check_tensor(name, tensor, expected)


def check_dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Raise InvalidInputError unless `tensor` has one of the allowed dtypes."""
    check_tensor(name, tensor, None, allowed)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    expected: Sequence[int | str] | None,
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
) -> None:
    """Run `check_shape`, `check_dtype` and `check_device` in one call; None skips a check."""
    check_is_tensor(name, tensor)
    if expected is not None:
        fits = len(tensor.shape) == len(expected)
        for size, expected_size in zip(tensor.shape, expected, strict=False):
            if size != expected_size and not isinstance(expected_size, str):
                fits = False
        if not fits:
            shape = ", ".join(str(size) for size in expected)
            raise InvalidInputError(f"{name}: shape {list(tensor.shape)}, expected [{shape}]")
    if dtypes is not None and tensor.dtype not in dtypes:
        raise InvalidInputError(f"{name}: dtype {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if device is not None and tensor.device != device:
        check_device(name, tensor, device)


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise InvalidInputError unless `tensor` lies on `device`."""
    if tensor.device != device:
        raise InvalidInputError(f"{name}: on {tensor.device}, expected {device}")


def check_last_dim_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidInputError unless the last axis has stride 1."""
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InvalidInputError(f"{name}: last dimension has stride {tensor.stride(-1)}, expected 1")


def check_sequences_fit(
    block_table: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, device: torch.device
) -> None:
    """Raise InvalidInputError unless both are int32 on `device`, for the same number of sequences."""
    check_tensor("seq_lens", seq_lens, ("num_seqs",), (torch.int32,), device)
    num_seqs = len(seq_lens)
    check_tensor("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), (torch.int32,), device)
    check_tensor("block_table", block_table, (num_seqs, "max_blocks_per_seq"), (torch.int32,), device)
    check_last_dim_contiguous("block_table", block_table)


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidInputError unless `tensor` is contiguous."""
    if not tensor.is_contiguous():
        raise InvalidInputError(f"{name}: strides {tensor.stride()}, expected a contiguous tensor")


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidInputError if elements of a tensor to write share memory, as after `expand`."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                expected = "no two elements at one address"
                raise InvalidInputError(f"{name}: strides {tensor.stride()}, expected {expected}")
            reach += stride * (size - 1)


def check_out(out: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor) -> None:
    """Raise InvalidInputError unless `out` is None or contiguous, with this shape, and dtype and device of `like`."""
    if out is not None:
        check_tensor("out", out, shape, (like.dtype,), like.device)
        check_contiguous("out", out)


def check_strided_out(out: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor) -> None:
    """Run `check_out` for an operation whose `out` may have any strides with the last dimension contiguous."""
    if out is not None:
        check_tensor("out", out, shape, (like.dtype,), like.device)
        check_last_dim_contiguous("out", out)
        check_writable("out", out)


def check_choice(name: str, chosen: torch.Tensor, shape: Sequence[int | str], q: torch.Tensor, noun: str) -> None:
    """Raise InvalidInputError unless `chosen` holds int32 ids, at least one a row, on the device of q.

    noun: what an id names.
    """
    check_tensor(name, chosen, shape, (torch.int32,), q.device)
    check_last_dim_contiguous(name, chosen)
    if chosen.shape[-1] == 0:
        raise InvalidInputError(f"{name}: 0 columns, expected at least 1; -1 chooses no {noun}")


def check_scale(name: str, scale: torch.Tensor | None, cache: torch.Tensor) -> None:
    """Raise InvalidInputError unless `scale` fits a cache [num_blocks, block_size, num_kv_heads, head_dim].

    It lies on the cache's device. If the cache's kind has scales, it has their dtype and `KvKind.scales_shape`; else it
    is float32, one value, [num_kv_heads] or None.
    """
    kind = KV_KINDS.get(cache.dtype)
    if kind is not None and kind.has_scales:
        if scale is None:
            expected = f"{list(kind.scales_shape(cache))}, a scale for each row of {kind.name}"
            if kind.group_size:
                expected = f"{list(kind.scales_shape(cache))}, a scale for {kind.group_size} numbers of {kind.name}"
            raise InvalidInputError(f"{name}: None, expected {expected}")
        check_tensor(name, scale, kind.scales_shape(cache), (kind.scale_dtype,), cache.device)
        if kind.group_size:
            check_last_dim_contiguous(name, scale)
        return
    if scale is None:
        return
    num_kv_heads = cache.shape[2]
    check_dtype(name, scale, torch.float32)
    check_device(name, scale, cache.device)
    if scale.dim() > 1 or scale.numel() not in (1, num_kv_heads):
        raise InvalidInputError(f"{name}: shape {list(scale.shape)}, expected [], [1] or [{num_kv_heads}]")


def check_table_scale(name: str, scale: torch.Tensor | None, cache: torch.Tensor) -> None:
    """Raise InvalidInputError unless `scale` is None, or one float32 value beside a cache that takes it."""
    if scale is None:
        return
    kind = kv_kind(cache.dtype)
    if not kind.has_table_scale:
        raise InvalidInputError(f"{name}: a tensor beside a cache of {cache.dtype}, expected None")
    check_tensor(name, scale, None, (torch.float32,), cache.device)
    if scale.dim() > 1 or scale.numel() != 1:
        raise InvalidInputError(f"{name}: shape {list(scale.shape)}, expected [] or [1]")


def check_cache(
    name: str,
    cache: torch.Tensor,
    shape: Sequence[int | str],
    width: int | str,
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Run `check_tensor` on a cache [*shape, elements], whose rows hold `width` numbers; a str stands for any width."""
    check_is_tensor(name, cache)
    kind, elements = kv_kind(cache.dtype), width
    if isinstance(width, int):
        if width % kind.numbers_per_element:
            expected = f"a multiple of {kind.numbers_per_element} for {kind.name}"
            raise InvalidInputError(f"{name}: rows of {width} numbers, expected {expected}")
        elements = kind.num_elements(width)
    check_tensor(name, cache, (*shape, elements), dtypes, device)


def scale_strides(**scales: torch.Tensor | None) -> dict[str, int]:
    """Return kernel arguments `stride_<scale>_<axis>` for block, slot and head; 0 for an axis that the scale lacks."""
    strides: dict[str, int] = {}
    for name, scale in scales.items():
        block_step, slot_step, head_step = 0, 0, 0
        if scale is not None and scale.dim() >= 3:
            block_step, slot_step, head_step = scale.stride()[:3]
        elif scale is not None and scale.numel() > 1:
            head_step = scale.stride(0)
        strides[f"stride_{name}_block"] = block_step
        strides[f"stride_{name}_slot"] = slot_step
        strides[f"stride_{name}_head"] = head_step
    return strides


def check_eps(eps: float) -> float:
    """Return eps as a float; it must be 0 or a normal float32."""
    number = as_float("eps", eps, 0.0)
    if number == 0 and eps != 0:
        raise InvalidInputError(f"eps: {eps}, expected 0 or at least 1.2e-38")
    return number
