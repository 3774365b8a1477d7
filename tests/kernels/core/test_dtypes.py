"""The table of KV kinds, and the codecs of 8-bit floats: every code and kind of value, as PyTorch converts them."""

from functools import partial

import pytest
import torch

from paged import PagedKvCacheConfig, PagedKvCacheManager, paged_attention, reshape_and_cache
from paged.kernels.core.checks import check_scale, scale_strides
from paged.kernels.core.compat import HAS_TRITON, tl, triton
from paged.kernels.core.dtypes import (
    KV_KINDS,
    KvKind,
    decode_e4m3,
    decode_e5m2,
    encode_e4m3,
    encode_e5m2,
    has_native_e4m3,
    kv_kind,
)
from tests.kernels.refusals import assert_refuses
from tests.tolerance import assert_within

FORMATS = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="the codec is for Triton kernels")


@triton.jit
def _convert(x_ptr, out_ptr, num_elements, E5M2: tl.constexpr, NATIVE: tl.constexpr, DECODE: tl.constexpr):
    offs = tl.program_id(0) * 65536 + tl.arange(0, 65536)
    mask = offs < num_elements
    x = tl.load(x_ptr + offs, mask=mask)
    if DECODE:
        tl.store(out_ptr + offs, decode_e5m2(x) if E5M2 else decode_e4m3(x, NATIVE), mask=mask)
    else:
        tl.store(out_ptr + offs, encode_e5m2(x, NATIVE) if E5M2 else encode_e4m3(x, NATIVE), mask=mask)


def _run(x: torch.Tensor, out_dtype: torch.dtype, dtype: torch.dtype, native: bool) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    options = {"E5M2": dtype == torch.float8_e5m2, "NATIVE": native, "DECODE": x.dtype == torch.uint8, "num_warps": 32}
    _convert[(triton.cdiv(x.numel(), 65536),)](x, out, x.numel(), **options)
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
    decoded = _run(codes, torch.float16, dtype, native)
    expected = codes.view(dtype).to(torch.float16)
    assert int(expected.isnan().sum()) == (2 if dtype == torch.float8_e4m3fn else 6)
    assert_within(decoded, expected, 0.0, is_exact=True)
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
    codes = _run(x.to(device), torch.uint8, dtype, native).cpu()
    expected = _rounded(x, dtype).view(torch.uint8)
    is_nan = x.isnan()
    assert torch.equal(codes[~is_nan], expected[~is_nan])
    assert codes[is_nan].view(dtype).float().isnan().all()


def _read_back(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Write rows [n, 2 heads, width] as keys and values of a cache; return each as attention to it alone reads it."""
    device = rows.device
    sizes = {"num_layers": 1, "num_kv_heads": 2, "head_dim": rows.shape[2], "block_size": 4, "num_blocks": 5}
    manager = PagedKvCacheManager(PagedKvCacheConfig(**sizes, dtype=dtype, device=device))
    caches = manager.k_cache(0), manager.v_cache(0)
    scales = dict(zip(("k_scale", "v_scale"), manager.scales(0), strict=True))
    blocks = torch.arange(1, len(rows) + 1, dtype=torch.int32, device=device)
    reshape_and_cache(rows, rows, *caches, 4 * blocks.long(), **scales)
    ends, ones = torch.arange(len(rows) + 1, dtype=torch.int32, device=device), torch.ones_like(blocks)
    batch = {"block_table": blocks[:, None], "cu_seqlens_q": ends, "seq_lens": ones, "max_seqlen_q": 1}
    return paged_attention(torch.randn_like(rows), *caches, **batch, **scales)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", KV_KINDS)
def test_kernels_know_every_kind(dtype: torch.dtype, device: torch.device) -> None:
    """They write and read what the table's conversions do."""
    rows, kind = torch.randn(4, 2, 32, device=device), kv_kind(dtype)
    expected = kind.decode(*kind.encode(rows, None), torch.float32)
    assert_within(_read_back(rows, dtype), expected.double(), 1e-6 * rows.abs().max())
    sizes = {"int8": 32 + 4, "e4m3_rows": 32 + 4, "int4": 16 + 2, "nvfp4": 16 + 2}
    assert kind.row_bytes(32) == sizes.get(kind.name, 32)


class _Int16(KvKind):
    def encode(self, rows: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        step = rows.abs().amax(-1) / 32767
        return (rows / step.unsqueeze(-1)).round().to(self.dtype), step

    def decode(self, rows: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        assert scales is not None
        return rows.to(dtype) * scales.unsqueeze(-1)


def test_a_row_adds_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """In PyTorch nothing else knows the kinds."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    monkeypatch.setitem(KV_KINDS, torch.int16, _Int16(torch.int16, "int16", group_size=0))
    rows = torch.randn(4, 2, 32)
    step = rows.double().abs().amax(-1, keepdim=True) / 32767
    assert_within(_read_back(rows, torch.int16), rows.double(), 1e-5 * step.max(), rounding=step / 2)


def test_shapes_of_scales(device: torch.device) -> None:
    cache, ones = torch.zeros(4, 8, 3, 16, device=device), partial(torch.ones, device=device)
    per_head, of_rows = ones(3, 2)[:, 0], ones(4, 8, 3)
    strides = {None: (0, 0, 0), ones(1): (0, 0, 0), per_head: (0, 0, 2), of_rows: (24, 3, 1)}
    assert all(tuple(scale_strides(k=scale).values()) == expected for scale, expected in strides.items())
    for scale in (None, ones(()), ones(1)):
        check_scale("k_scale", scale, cache)
    check = partial(check_scale, "k_scale")
    assert_refuses(
        check,
        {"scale": per_head, "cache": cache},
        ("scale", ones(2), r"k_scale: shape \[2\], expected \[\], \[1\] or \[3\]"),
        ("scale", ones(3, 1), r"k_scale: shape \[3, 1\]"),
        ("scale", ones(3).half(), "k_scale: dtype torch.float16, expected torch.float32"),
        ("scale", ones(3).to("meta"), "k_scale: on meta"),
        ("scale", of_rows, r"k_scale: shape \[4, 8, 3\], expected \[\]"),
    )
    assert_refuses(
        check,
        {"scale": of_rows, "cache": cache.char()},
        ("scale", per_head, r"k_scale: shape \[3\], expected \[4, 8, 3\]"),
        ("scale", None, r"k_scale: None, expected \[4, 8, 3\], a scale for each row of int8"),
        ("scale", of_rows.double(), "k_scale: dtype torch.float64, expected torch.float32"),
    )
