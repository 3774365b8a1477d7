"""The codecs of 8-bit floats in kernels: every code there is, and every kind of value, as PyTorch converts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged import InvalidInputError
from paged.kernels.common import reference
from paged.kernels.common.checks import check_scale, scale_strides
from paged.kernels.common.compat import HAS_TRITON, tl, triton
from paged.kernels.common.fp8 import decode_e4m3, decode_e5m2, encode_e4m3, encode_e5m2, has_native_e4m3

FORMATS = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="the codec is for Triton kernels")


@triton.jit
def _decode(bits_ptr, out_ptr, num_elements, E5M2: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_elements
    bits = tl.load(bits_ptr + offs, mask=mask)
    tl.store(out_ptr + offs, decode_e5m2(bits) if E5M2 else decode_e4m3(bits, NATIVE), mask=mask)


@triton.jit
def _encode(x_ptr, out_ptr, num_elements, E5M2: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_elements
    x = tl.load(x_ptr + offs, mask=mask)
    tl.store(out_ptr + offs, encode_e5m2(x, NATIVE) if E5M2 else encode_e4m3(x, NATIVE), mask=mask)


def _run(kernel: Any, x: torch.Tensor, out_dtype: torch.dtype, dtype: torch.dtype, native: bool) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    options = {"E5M2": dtype == torch.float8_e5m2, "NATIVE": native, "BLOCK": 65536, "num_warps": 32}
    kernel[(triton.cdiv(x.numel(), 65536),)](x, out, x.numel(), **options)
    return out


@pytest.fixture(params=["integer", "native"])
def native(request: pytest.FixtureRequest, device: torch.device) -> bool:
    if request.param == "native" and not has_native_e4m3(device):
        pytest.skip("this machine does not convert 8-bit floats by itself")
    return bool(request.param == "native")


@needs_triton
@FORMATS
def test_every_code(dtype: torch.dtype, native: bool, device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).to(device)
    decoded = _run(_decode, codes, torch.float16, dtype, native)
    expected = codes.view(dtype).to(torch.float16)
    assert int(expected.isnan().sum()) == (2 if dtype == torch.float8_e4m3fn else 6)
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(decoded.signbit()[[0, 128]].cpu(), torch.tensor([False, True]))


def _values(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    grid = torch.arange(127, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    grid = grid[grid.isfinite()]
    ties = torch.cat([(grid[1:] + grid[:-1]) / 2, grid[-1:] + (grid[-1] - grid[-2]) / 2])
    around = [torch.nextafter(ties, torch.full_like(ties, toward)) for toward in (-1e9, 1e9)]
    return {
        "every float16": torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float(),
        "random bits": torch.randint(-(2**31), 2**31, (2**18,)).to(torch.int32).view(torch.float32),
        "normal": torch.randn(2**16) * 10,
        "subnormal": torch.randn(2**16) * 4 * grid[4],
        "ties and their neighbours": torch.cat([ties, *around, -ties, *(-x for x in around)]),
    }


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


@needs_triton
@FORMATS
@pytest.mark.parametrize("kind", _values(torch.float8_e4m3fn))
def test_rounds_as_pytorch_does_once_clamped(kind: str, dtype: torch.dtype, native: bool, device: torch.device) -> None:
    x = _values(dtype)[kind]
    codes = _run(_encode, x.to(device), torch.uint8, dtype, native).cpu()
    expected = _rounded(x, dtype).view(torch.uint8)
    is_nan = x.isnan()
    assert torch.equal(codes[~is_nan], expected[~is_nan])
    assert codes[is_nan].view(dtype).float().isnan().all()


@FORMATS
def test_the_reference_rounds_as_pytorch_does(dtype: torch.dtype) -> None:
    x = torch.cat([_values(dtype)["ties and their neighbours"], torch.randn(2000) * 100, torch.tensor([torch.nan])])
    expected = _rounded(x, dtype).float()
    torch.testing.assert_close(reference.to_float8(x, dtype).float(), expected, rtol=0, atol=0, equal_nan=True)


def test_shapes_of_scales(device: torch.device) -> None:
    cache = torch.zeros(4, 8, 3, 16, device=device)
    per_head = torch.ones(3, 2, device=device)[:, 0]
    for scale in (None, torch.ones((), device=device), torch.ones(1, device=device), per_head):
        check_scale("k_scale", scale, cache)
    of_rows = torch.ones(4, 8, 3, device=device)
    assert [tuple(scale_strides(k=scale).values()) for scale in (None, torch.ones(1), per_head, of_rows)] == [
        (0, 0, 0), (0, 0, 0), (0, 0, 2), (24, 3, 1)
    ]  # fmt: skip
    check_scale("k_scale", of_rows, cache.char())
    for given, wrong, message in (
        (cache, torch.ones(2, device=device), r"shape \[2\], expected \[\], \[1\] or \[3\]"),
        (cache, torch.ones(3, 1, device=device), r"shape \[3, 1\]"),
        (cache, torch.ones(3, device=device).half(), "dtype torch.float16, expected torch.float32"),
        (cache, torch.ones(3, device="meta"), "on meta"),
        (cache, of_rows, r"shape \[4, 8, 3\], expected \[\]"),
        (cache.char(), per_head, r"shape \[3\], expected \[4, 8, 3\]"),
        (cache.char(), None, r"None, expected \[4, 8, 3\], a scale for each row of int8"),
        (cache.char(), of_rows.double(), "dtype torch.float64, expected torch.float32"),
    ):
        with pytest.raises(InvalidInputError, match=f"k_scale: {message}"):
            check_scale("k_scale", wrong, given)
