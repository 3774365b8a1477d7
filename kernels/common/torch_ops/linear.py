"""Products with weights; on a CPU by numba or oneDNN, which PyTorch itself uses only for 16-bit dtypes."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.nn import functional

from ..device import backend, forward_backend, has_numba, wants_loops

# PyTorch gives float32 to MKL. On one core of an AMD EPYC with AVX-512, for 32 to 2,048 rows, MKL reaches 60 to 87
# GFLOP/s, oneDNN 110 to 180, and 135 to 200 with packed weights.
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
# Looking up the overload takes 7 us per call, a fifth of a small product.
_multiply: Any = torch.ops.mkldnn._linear_pointwise.default if _HAS_ONEDNN else None
# Intel's own processors it multiplies with more, so that weights stay as they are where loops take few rows: on two
# cores of a Xeon with AMX 512 and 2,048 rows of 768 x 2304 take 1.0 and 1.15 of MKL's time with packed weights. Without
# loops those are faster for few rows, unless what MKL reads fits the cache of 2 MB: then it takes 0.75 of their time.
_capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
# Whether the CPU multiplies bfloat16 with sums in float32, and oneDNN uses that, which says so of any AVX-512. Asked
# once at import: in a step this would be an operation that a recording cannot repeat.
_is_x86 = _capabilities.get("architecture") == "x86_64"
_has_products = not _is_x86 or any(_capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
MULTIPLIES_BF16 = _HAS_ONEDNN and _has_products and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
_HAS_INTEL_MKL = torch.backends.mkl.is_available() and "Intel" in str(_capabilities.get("cpu_name"))
_MKL_BYTES = 2 << 20
# Rows that the packing is made for. On two cores 32 rows take 0.5 to 0.65 of the time in float32 and in bfloat16, for
# weights of 288 x 1536 and of 768 x 4608, 1 row 0.6 to 0.9, 2,048 rows the same; made for 256 rows it does not differ.
_PACKED_ROWS = 32
# oneDNN compiles a product for every number of rows, in 2 ms and, with AMX, 0.5 MB each, and keeps 1,024 of them. So
# larger numbers of rows are padded to a multiple of an AMX tile's rows, and fewer products are kept.
_ROW_STEP = 16
_KEPT_PRODUCTS = 256


# Rows that numba's loops take of plain weights. On two cores of a Xeon with AMX, in bfloat16, 1, 32, 128 and 512 rows
# of 1536 x 288 take 0.7, 0.7, 0.9 and 1.3 of the time of packed weights, of 768 x 2304 0.9, 0.7, 0.9 and 0.9; oneDNN's
# products with weights as they are take 1.5 to 1.7 for 1 row, 1.1 for 32, 1.2 for 512, the same for 2,048. In float32
# 3, 8, 16, 32, 128 and 256 rows take 1.1 to 1.2, 0.6 to 0.9, 0.75 to 0.85, 0.6, 0.95 to 1.1 and 1.05 of MKL's time.
# On one core of an AMD EPYC with AVX-512, which has no such MKL, 1 row of float32 takes 0.55 to 1.0 of the time of
# packed weights, 17 to 128 take 0.8 to 1.2. But 256 and 512 rows by oneDNN, with weights as they are, take 1.05 to 1.1:
# there weights stay packed.
# Without products of bfloat16, on two cores of a Xeon with AVX-512, 1, 8, 64, 256, 512 and 2,048 rows of 1024 x 3584
# take 0.9, 0.3, 0.4, 0.3, 0.35 and 0.4 of oneDNN's time in loops, and 4, 1.2, 0.5, 0.3, 0.3 and 0.25 in float32, with
# its conversions.
# With products of bfloat16 but without AMX, on one core of an AMD EPYC, 1, 8, 32 and 64 rows of 8192 x 1024 take 0.7,
# 0.7, 0.95 and 1.1 of the time of packed weights. Weights then stay as they are, which oneDNN multiplies with 128, 256
# and 512 rows in 1.08, 1.05 and 1.04 of that time.
_MOST_BF16_ROWS = 256
if MULTIPLIES_BF16:
    _MOST_BF16_ROWS = 512 if _capabilities.get("amx_bf16") else 64
_ROWS_IN_LOOPS = {torch.bfloat16: range(1, _MOST_BF16_ROWS + 1), torch.float32: range(4, 129)}
# Rows of every product of an invariant forward by libraries. Kernels and their orders of sums are chosen by
# the number of rows: on an AMD EPYC 1 row of float32 has other bits than 2 and, by MKL, than 4. MKL's bits also depend
# on a row's place in blocks of fewer than 12 rows. Numba kernels multiply any number of rows, row by row or in tiles.
_INVARIANT_ROWS = 16


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy of a weight [out_features, in_features] in the order that a CPU multiplies fastest.

    Only `linear` can read it. The weight itself is returned if there is no such order: on other devices, for dtypes
    that the processor does not multiply, and if MKL or numba kernels are faster.
    """
    has_onednn = weight.device.type == "cpu" and not weight.is_mkldnn and _has_onednn(weight.dtype)
    if not has_onednn or _loops_of(weight) is not None or (has_mkl(weight.dtype) and weight.numel() * 4 <= _MKL_BYTES):
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_ROWS)
    return packed


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `torch.nn.functional.linear` without gradients: x [..., in_features], weight [out_features, in_features].

    Packed weights work in eager mode only: a compiler cannot trace them.
    """
    if x.is_cuda or torch.compiler.is_dynamo_compiling():
        return functional.linear(x, weight, bias)
    current = forward_backend() or backend()
    if current.is_invariant:
        loops = _loops_by_row(x, weight, bias)
        if loops is not None:
            by_row: torch.Tensor = loops.linear(x, weight, bias, by_row=True)
            return by_row
        if len(x) != _INVARIANT_ROWS:
            return _linear_in_blocks(x, weight, bias)
    if current.wants_loops and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous())):
        loops = _loops(x, weight)
        if loops is not None:
            product: torch.Tensor = loops.linear(x, weight, bias)
            return product
    takes_plain = False  # whether oneDNN takes weights without packing
    if x.is_cpu and x.dtype == weight.dtype:
        if x.dtype == torch.float32:
            takes_plain = _HAS_ONEDNN and not _HAS_INTEL_MKL
        elif x.dtype == torch.bfloat16:
            takes_plain = MULTIPLIES_BF16
            if not MULTIPLIES_BF16 and x.numel() > _MOST_BF16_ROWS * x.shape[-1]:
                if bias is not None:
                    bias = bias.float()
                return linear(x.float(), weight.float(), bias).to(x.dtype)
    if not (takes_plain or weight.is_mkldnn):
        return functional.linear(x, weight, bias)
    num_rows = len(x)
    if num_rows > _PACKED_ROWS and num_rows % _ROW_STEP:
        x = padded_rows(x)
    product = _multiply(x, weight, bias, "none", [], "")
    if len(product) > num_rows:
        product = product[:num_rows]
    return product


def _linear_in_blocks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `linear` of x [num_rows, in_features], computed in blocks of `_INVARIANT_ROWS` rows, padded with zeros."""
    num_rows = len(x)
    num_blocks = max(-(-num_rows // _INVARIANT_ROWS), 1)
    missing = num_blocks * _INVARIANT_ROWS - num_rows
    if missing:
        x = functional.pad(x, (0, 0, 0, missing))
    products = [linear(rows, weight, bias) for rows in x.split(_INVARIANT_ROWS)]
    if len(products) == 1:
        return products[0][:num_rows]
    return torch.cat(products)[:num_rows]


def packed_address(packed: torch.Tensor) -> int | None:
    """Return the address of a tensor in oneDNN's order; None if this PyTorch does not tell it."""
    if not hasattr(torch.ops.mkldnn, "data_ptr"):
        return None
    address: int = torch.ops.mkldnn.data_ptr(packed)
    return address


def padded_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [num_rows, in_features] with rows of zeros after it, where oneDNN would compile too many products."""
    missing = -len(x) % _ROW_STEP
    if x.dim() == 2 and len(x) > _PACKED_ROWS and missing:
        return functional.pad(x, (0, 0, 0, missing))
    return x


def linear_and_silu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """Return silu(gate) * up for the halves of `linear(x, weight)`, rounded once; None if no numba kernel does it."""
    if torch.compiler.is_dynamo_compiling():
        return None
    current = forward_backend() or backend()
    if not current.wants_loops or current.is_invariant:
        return None
    loops = _loops(x, weight)
    if loops is None:
        return None
    activated: torch.Tensor | None = loops.linear_and_silu(x, weight)
    return activated


def _loops(x: torch.Tensor, weight: torch.Tensor) -> Any:
    """Return the numba kernels if they are fast for plain weights of these sizes and this number of rows, or None."""
    is_one = x.is_cpu and x.dtype == weight.dtype and x.dtype in _ROWS_IN_LOOPS
    is_few = is_one and x.dim() == 2 and len(x) in _ROWS_IN_LOOPS[x.dtype] and x.stride(1) == 1
    if not is_few:
        return None
    return _loops_of(weight)


def _loops_by_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """Return the numba kernels if they multiply these so that no row's bits depend on the others, or None."""
    if x.dtype != weight.dtype or x.dim() != 2 or x.stride(1) != 1:
        return None
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
        return None
    loops = _loops_of(weight)
    if loops is None or not loops.has_invariant_rows(weight):
        return None
    return loops


def _loops_of(weight: torch.Tensor) -> Any:
    """Return the numba kernels for plain weights of this dtype and these sizes, or None."""
    is_wanted = weight.dtype == torch.bfloat16 or has_mkl(weight.dtype)
    if not is_wanted or weight.is_mkldnn or not (wants_loops() and has_numba()):
        return None
    from ..numba_ops import linear as loops

    if not loops.takes(weight):
        return None
    return loops


def bound_products() -> None:
    """Let oneDNN cache fewer products, unless the environment sets a number; call it before the first product."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KEPT_PRODUCTS))


def _has_onednn(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies this dtype on this CPU with instructions for it."""
    if dtype == torch.bfloat16:
        return MULTIPLIES_BF16
    return dtype == torch.float32 and _HAS_ONEDNN


def has_mkl(dtype: torch.dtype) -> bool:
    """Return whether MKL multiplies plain weights of this dtype on this CPU, no slower than oneDNN.

    Numba kernels then take the products that MKL is slow at.
    """
    return dtype == torch.float32 and _HAS_INTEL_MKL
