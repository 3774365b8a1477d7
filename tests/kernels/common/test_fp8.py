"""The e4m3 codec of kernels: every code there is, and every kind of value, as PyTorch converts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged import InvalidInputError
from paged.kernels.common import reference
from paged.kernels.common.checks import check_scale, scale_stride
from paged.kernels.common.compat import HAS_TRITON, tl, triton
from paged.kernels.common.fp8 import decode_e4m3, encode_e4m3, has_native_e4m3

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="the codec is for Triton kernels")


@triton.jit
def _decode(bits_ptr, out_ptr, num_elements, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_elements
    tl.store(out_ptr + offs, decode_e4m3(tl.load(bits_ptr + offs, mask=mask), NATIVE), mask=mask)


@triton.jit
def _encode(x_ptr, out_ptr, num_elements, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_elements
    tl.store(out_ptr + offs, encode_e4m3(tl.load(x_ptr + offs, mask=mask), NATIVE), mask=mask)


def _run(kernel: Any, x: torch.Tensor, dtype: torch.dtype, native: bool) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    kernel[(triton.cdiv(x.numel(), 65536),)](x, out, x.numel(), NATIVE=native, BLOCK=65536, num_warps=32)
    return out


@pytest.fixture(params=["integer", "native"])
def native(request: pytest.FixtureRequest, device: torch.device) -> bool:
    if request.param == "native" and not has_native_e4m3(device):
        pytest.skip("this machine does not convert e4m3 by itself")
    return bool(request.param == "native")


@needs_triton
def test_every_code(native: bool, device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).to(device)
    decoded = _run(_decode, codes, torch.float16, native)
    expected = codes.view(torch.float8_e4m3fn).to(torch.float16)
    assert int(expected.isnan().sum()) == 2
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(decoded.signbit()[[0, 128]].cpu(), torch.tensor([False, True]))


def _values() -> dict[str, torch.Tensor]:
    grid = torch.arange(127, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat([(grid[1:] + grid[:-1]) / 2, torch.tensor([464.0])])
    around = [torch.nextafter(ties, torch.full_like(ties, toward)) for toward in (-1e9, 1e9)]
    return {
        "every float16": torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float(),
        "random bits": torch.randint(-(2**31), 2**31, (2**18,)).to(torch.int32).view(torch.float32),
        "normal": torch.randn(2**16) * 10,
        "subnormal": torch.randn(2**16) * 2**-8,
        "ties and their neighbours": torch.cat([ties, *around, -ties, *(-x for x in around)]),
    }


@needs_triton
@pytest.mark.parametrize("kind", _values())
def test_rounds_as_pytorch_does_once_clamped(kind: str, native: bool, device: torch.device) -> None:
    x = _values()[kind]
    codes = _run(_encode, x.to(device), torch.uint8, native).cpu()
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    is_nan = x.isnan()
    assert torch.equal(codes[~is_nan], expected[~is_nan])
    assert (codes[is_nan] & 0x7F == 0x7F).all()


def test_the_reference_rounds_as_pytorch_does() -> None:
    x = torch.cat([_values()["ties and their neighbours"], torch.randn(2000) * 100, torch.tensor([torch.nan])])
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(reference.to_e4m3(x).float(), expected, rtol=0, atol=0, equal_nan=True)


def test_shapes_of_scales(device: torch.device) -> None:
    per_head = torch.ones(3, 2, device=device)[:, 0]
    for scale in (None, torch.ones((), device=device), torch.ones(1, device=device), per_head):
        check_scale("k_scale", scale, 3, device)
    assert [scale_stride(scale) for scale in (None, torch.ones(1), per_head)] == [0, 0, 2]
    with pytest.raises(InvalidInputError, match=r"k_scale: shape \[2\], expected \[\], \[1\] or \[3\]"):
        check_scale("k_scale", torch.ones(2, device=device), 3, device)
    with pytest.raises(InvalidInputError, match=r"k_scale: shape \[3, 1\]"):
        check_scale("k_scale", torch.ones(3, 1, device=device), 3, device)
    with pytest.raises(InvalidInputError, match=r"k_scale: dtype torch.float16, expected torch.float32"):
        check_scale("k_scale", torch.ones(3, device=device).half(), 3, device)
    with pytest.raises(InvalidInputError, match=r"k_scale: on meta"):
        check_scale("k_scale", torch.ones(3, device="meta"), 3, device)
