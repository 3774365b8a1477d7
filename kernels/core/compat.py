"""Triton if it is installed; otherwise (macOS, CPU-only) names that let the kernel files load.

Kernel files import `triton` and `tl` from here. Without Triton a launch raises UnsupportedError, and every public
operation still works on CPU tensors through the PyTorch implementations.

This file also fixes bfloat16 in Triton's interpreter. NumPy has no bfloat16, so the interpreter stores the bits as
integers and computes with the integers. Fixed operations compute in float32 and round to nearest, ties to even, as
chips do. And it spares the interpreter half of its time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .errors import UnsupportedError

if TYPE_CHECKING:
    triton: Any
    tl: Any
    TensorDescriptor: Any
    HAS_TRITON: bool
else:
    try:
        import triton
        import triton.language as tl
        from triton.tools.tensor_descriptor import TensorDescriptor

        HAS_TRITON = True
    except ImportError:
        HAS_TRITON = False

        class _MissingKernel:
            """Stand-in for a kernel. It fails when it is launched, not when its file is imported."""

            def __init__(self, fn):
                self.fn = fn

            def run(self, **_):
                raise UnsupportedError(f"{self.fn.__name__} needs triton, which is not installed here")

        TensorDescriptor = None

        class triton:  # noqa: N801
            @staticmethod
            def jit(fn=None, **_options):
                return _MissingKernel if fn is None else _MissingKernel(fn)

        class tl:  # noqa: N801
            class constexpr:  # noqa: N801
                def __init__(self, value):
                    self.value = value


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up. On the host, `triton.cdiv` takes 2.6 us."""
    return -(-a // b)


def interpreting() -> bool:
    """Return whether Triton kernels run in the interpreter (TRITON_INTERPRET=1), on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


# Methods through which the interpreter runs arithmetic, besides casts. All other methods only move bits.
_ARITHMETIC = ("binary_op", "unary_op", "ternary_op", "create_fma", "create_rsqrt", "create_dot")


def _mend(builder: Any) -> None:
    """Replace operations that the interpreter computes wrongly."""
    for name in _ARITHMETIC:
        setattr(builder, name, _in_float32(getattr(builder, name)))
    builder.cast_impl = _cast_through_float32(builder.cast_impl)
    builder.get_bf16 = lambda self, value: _narrowed(self.get_fp32(value))
    if not triton.__version__.startswith(("3.6", "3.7")):
        builder.create_masked_load = _with_bools(builder.create_masked_load, 1)
        builder.create_masked_store = _with_bools(builder.create_masked_store, 2)


def _is_bfloat16(operand: Any) -> bool:
    """Return whether an argument is a bfloat16 tensor. Others are tensors, shapes, flags or functions."""
    return hasattr(operand, "data") and operand.dtype.scalar == tl.bfloat16


def _widened(operand: Any) -> Any:
    """Return a tensor of bfloat16 in float32, anything else as it is."""
    if not _is_bfloat16(operand):
        return operand
    bits = torch.from_numpy(operand.data.copy().view("int16"))
    return type(operand)(bits.view(torch.bfloat16).float().numpy(), tl.float32)


def _narrowed(operand: Any) -> Any:
    """Return a tensor of float32 rounded to bfloat16."""
    rounded = torch.from_numpy(operand.data.copy()).bfloat16()
    return type(operand)(rounded.view(torch.int16).numpy().view("uint16"), tl.bfloat16)


def _in_float32(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operation whose result has the dtype of its last tensor, or is a mask."""

    def run(self: Any, *operands: Any) -> Any:
        result = compute(self, *map(_widened, operands))
        *_, last = (operand for operand in operands if hasattr(operand, "data"))
        if _is_bfloat16(last) and result.data.dtype == "float32":
            result = _narrowed(result)
        return result

    return run


def _cast_through_float32(cast: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, operand: Any, dtype: Any) -> Any:
        operand = _widened(operand)
        if dtype.scalar == tl.bfloat16:
            return _narrowed(cast(self, operand, tl.float32))
        return cast(self, operand, dtype)

    return run


def _with_bools(access: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Wrap a load or store. Triton 3.9 broadcasts a bool mask to integers, but its interpreter takes only bools."""

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        mask = arguments[position]
        if hasattr(mask, "data"):
            mask = type(mask)(mask.data.astype(bool), tl.int1)
        return access(self, *arguments[:position], mask, *arguments[position + 1 :], **options)

    return run


def _spare(interpreter: Any) -> None:
    """Leave out work of the interpreter that no result depends on."""
    builder = interpreter.interpreter_builder
    # It adds and multiplies integers a second time in int64 to find overflows, which it reports only with `debug`.
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    find_numpy_dtype = interpreter._get_np_dtype  # makes a table of all dtypes in every call
    numpy_dtypes: dict[str, Any] = {}

    def numpy_dtype_of(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in numpy_dtypes:
            numpy_dtypes[scalar.name] = find_numpy_dtype(scalar)
        return numpy_dtypes[scalar.name]

    interpreter._get_np_dtype = numpy_dtype_of


if HAS_TRITON and interpreting():
    from triton.runtime import interpreter

    _mend(interpreter.InterpreterBuilder)
    _spare(interpreter)


@triton.jit
def locate_block(program, num_blocks_m, num_blocks_n, GROUP_M: tl.constexpr):
    """Return a program's block of rows and of columns: GROUP_M blocks of rows take a column before the next column."""
    first_m = program // (GROUP_M * num_blocks_n) * GROUP_M
    group_size = min(num_blocks_m - first_m, GROUP_M)
    in_group = program % (GROUP_M * num_blocks_n)
    return first_m + in_group % group_size, in_group // group_size


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, accumulated in float32. float32 operands are never rounded to tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")
