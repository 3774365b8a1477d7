"""Kernels calculate with bfloat16 as PyTorch does, bit by bit, in Triton's interpreter as on a GPU."""

from collections.abc import Callable

import pytest
import torch

from paged.kernels.core.compat import dot, tl, triton

pytest.importorskip("triton")
SIZE = 64


@triton.jit
def _arithmetic_kernel(a_ptr, b_ptr, out_ptr, OPERATION: tl.constexpr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    a, b = tl.load(a_ptr + offsets), tl.load(b_ptr + offsets)
    if OPERATION == "add":
        result = a + b
    elif OPERATION == "subtract":
        result = a - b
    elif OPERATION == "multiply":
        result = a * b
    elif OPERATION == "scale":
        result = a * tl.full((), 2.0**120, a.dtype)
    elif OPERATION == "negate":
        result = -a
    elif OPERATION == "smaller":
        result = tl.where(a < b, a, b)
    else:
        result = tl.maximum(a, b).to(a.dtype)
    tl.store(out_ptr + offsets, result)


@triton.jit
def _cast_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets).to(out_ptr.dtype.element_ty))


@triton.jit
def _product_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = dot(tl.load(a_ptr + rows), tl.load(b_ptr + rows), tl.zeros((SIZE, SIZE), tl.float32))
    tl.store(out_ptr + rows, product)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("add", torch.add),
        ("subtract", torch.sub),
        ("multiply", torch.mul),
        ("scale", lambda a, b: a * 2.0**120),
        ("negate", lambda a, b: -a),
        ("smaller", torch.minimum),
        ("larger", torch.maximum),
    ],
)
def test_arithmetic(operation: str, expected: Callable[..., torch.Tensor], device: torch.device) -> None:
    a, b = torch.randn(2, SIZE, device=device).bfloat16()
    b[:8] *= 2.0**-10  # half of a step of the sum, and less
    out = torch.empty_like(a)
    _arithmetic_kernel[1,](a, b, out, OPERATION=operation, SIZE=SIZE)
    assert torch.equal(out, expected(a, b))


def _numbers() -> torch.Tensor:
    """Ties, numbers beside them, the largest, subnormals, infinities and NaN, and others at random."""
    special = [1.00390625, 1.01171875, 1.00390637, 3.4e38, 3.38e38, 1e-40, 0.0, -0.0, torch.inf, -torch.inf, torch.nan]
    return torch.cat([torch.tensor(special), torch.randn(SIZE - len(special))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.int32])
def test_casts(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.arange(SIZE) * 4 - 127
    if dtype.is_floating_point:
        x = _numbers()
    x = x.to(dtype).to(device)
    narrow, wide = torch.empty(SIZE, dtype=torch.bfloat16, device=device), torch.empty_like(x)
    _cast_kernel[1,](x, narrow, SIZE=SIZE)
    assert torch.equal(narrow.nan_to_num(7.0), x.bfloat16().nan_to_num(7.0))
    assert torch.equal(narrow.isnan(), x.isnan())
    _cast_kernel[1,](narrow, wide, SIZE=SIZE)
    assert torch.equal(wide.nan_to_num(7.0), narrow.to(dtype).nan_to_num(7.0))


def test_products(device: torch.device) -> None:
    """Of small whole numbers, whose sums float32 holds."""
    a, b = torch.randint(-9, 10, (2, SIZE, SIZE), device=device).bfloat16()
    out = torch.empty(SIZE, SIZE, device=device)
    _product_kernel[1,](a, b, out, SIZE=SIZE)
    assert torch.equal(out, a.float() @ b.float())
