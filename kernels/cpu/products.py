"""Choose a product on a CPU: oneDNN, MKL, ATen or numba kernels, by weights, rows and processor.

limits.md holds the measurements behind every constant.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..core.device import NUMBA_DTYPES, backend, forward_backend, has_numba, load_numba, wants_numba

# PyTorch multiplies float32 by MKL. On CPUs that are not Intel's, oneDNN takes half of MKL's time.
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
# Keep the overload: each look-up takes 7 us, a fifth of a small product.
_multiply: Any = torch.ops.mkldnn._linear_pointwise.default if _HAS_ONEDNN else None
_HAS_INT8 = hasattr(torch.ops.onednn, "qlinear_pointwise")
_multiply_int8: Any = torch.ops.onednn.qlinear_pointwise.default if _HAS_INT8 else None
_capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
# Whether oneDNN multiplies bfloat16 by instructions of the CPU that sum in float32. oneDNN itself reports support for
# any AVX-512. Computed at import, because a recorded step could not repeat the query.
_is_x86 = _capabilities.get("architecture") == "x86_64"
_has_products = not _is_x86 or any(_capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
MULTIPLIES_BF16 = _HAS_ONEDNN and _has_products and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
IS_INTEL = "Intel" in str(_capabilities.get("cpu_name"))
_HAS_INTEL_MKL = torch.backends.mkl.is_available() and IS_INTEL
# Without numba kernels, MKL multiplies plain weights up to this size faster than oneDNN multiplies packed ones, because
# they fit the cache.
_MKL_BYTES = 2 << 20
# Number of rows that oneDNN packs plain and int8 weights for. For products with more rows, packing for more saves no
# time.
PACKED_ROWS = 32
# oneDNN compiles a product for each number of rows, in 2 ms. So rows are padded to a multiple of an AMX tile's rows.
# Fewer products are kept than oneDNN's 1,024, because each takes memory, see limits.md.
_ROW_STEP = 16
_KEPT_PRODUCTS = 256
# Numba kernels multiply plain weights for these numbers of rows, and libraries for all others.
_MOST_BF16_ROWS = 256
if MULTIPLIES_BF16:
    _MOST_BF16_ROWS = 512 if _capabilities.get("amx_bf16") else 64
_NUMBA_ROWS = {torch.bfloat16: range(1, _MOST_BF16_ROWS + 1), torch.float32: range(4, 129)}
# Libraries multiply this many rows at once in an invariant forward, because their order of sums depends on the number
# of rows. Below 12 rows, MKL's also depends on a row's place.
_INVARIANT_ROWS = 16
# From this many rows on, packed weights are unpacked a tile at a time, for a dense product.
MANY_ROWS = 512
# Most rows of int8 that numba kernels multiply instead of oneDNN, without and with AMX. Only oneDNN uses AMX, which
# multiplies 16 rows at once.
_MOST_INT8_ROWS, _MOST_INT8_ROWS_BESIDE_AMX = 64, 8
# Numbers of rows for which warm-up times two products of packed weights.
_TIMED_ROWS = (8, 32, 128, 512)
# Added to int8 activations, because oneDNN multiplies unsigned bytes 400 times as fast as signed bytes: VNNI takes
# unsigned bytes.
ZERO = 128
# Outputs of a block of numba kernels. With 4-bit codes, the columns of a row must be a multiple of `CODE_COLUMNS`.
BLOCK = 64
CODE_COLUMNS = {"int4": 32, "mxfp4": 32, "nvfp4": 16}
# Limits of ATen's int4 product: numbers of columns that may share a scale, a divisor of the rows of weights, and the
# rows of a block by instruction set.
_INT4_GROUPS, _INT4_ROWS = (256, 128, 64, 32), 16
INT4_BLOCKS = {"AVX512": 64, "AVX2": 32}
# From this many rows an expert on, oneDNN's float32 products are faster than PyTorch's grouped ones by MKL. On Intel's
# CPUs they never are.
_MIN_ROWS_ALONE = math.inf if IS_INTEL else 64
# In bfloat16, the rows of an expert are padded to a multiple of the first step up to `_FEW_ROWS`, and of the second
# step above, because PyTorch compiles a grouped product for each number of rows.
_ROW_STEPS, _FEW_ROWS = (16, 64), 256


class Cpu(NamedTuple):
    """What the choice of a product of packed weights depends on.

    capability: the instructions that ATen uses, as PyTorch names them.
    multiplies_int8: whether the CPU has int8 products (VNNI or AMX), and oneDNN's sums of them are exact.
    multiplies_bf16: whether the CPU has products of bfloat16.
    has_amx: whether the CPU has AMX for int8.
    multiplies_codes: whether numba kernels multiply int8 and 4-bit codes (AVX2).
    """

    capability: str
    multiplies_int8: bool
    multiplies_bf16: bool
    has_amx: bool = False
    multiplies_codes: bool = False


@cache
def this_cpu() -> Cpu:
    """Return the instructions of this CPU that PyTorch and oneDNN use."""
    names = {name for name, value in _capabilities.items() if value is True}
    has_int8 = not names.isdisjoint(("avx512_vnni", "avx_vnni", "amx_int8")) and _is_int8_exact()
    has_bf16 = not names.isdisjoint(("avx512_bf16", "amx_bf16")) and MULTIPLIES_BF16
    capability = torch.backends.cpu.get_cpu_capability()
    return Cpu(capability, has_int8, has_bf16, "amx_int8" in names, has_numba() and "int4" in code_kernels())


def _is_int8_exact() -> bool:
    """Return whether oneDNN multiplies the largest codes exactly.

    Older instructions, which ONEDNN_MAX_CPU_ISA may ask for, saturate the sum of two products at 16 bits.
    """
    if not _HAS_INT8:
        return False
    codes = torch.tensor([127, -128], dtype=torch.int8)[:, None].expand(2, 64).contiguous()
    packed = torch.ops.onednn.qlinear_prepack(codes, [2, 64])
    zeros = torch.zeros(2, dtype=torch.int32)
    out = multiply_bytes((codes.int() + ZERO).to(torch.uint8), packed, torch.ones(2), zeros)
    return bool(torch.equal(out, codes.float() @ codes.float().T))


def multiply_bytes(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return (x - ZERO) @ (packed * scale)^T by oneDNN in float32, [num_rows, out_features]."""
    numbers = x, 1.0, ZERO, packed, scale, zeros, None, 1.0, 0
    out: torch.Tensor = _multiply_int8(*numbers, torch.float32, "none", [], "")
    return out


def code_kernels() -> Mapping[str, object]:
    """Return the numba kernels of packed weights by format; empty if the CPU lacks their instructions."""
    from .quantization.block_product import KERNELS

    return KERNELS


def choose_product(form: str, group: tuple[int, int], rows: int, columns: int, rounds_input: bool, cpu: Cpu) -> str:
    """Return the product for weights [rows, columns] on a CPU: "int8", "int4", "blocks" or "unpacked".

    "int8": int8 weights, if activations are rounded to int8; oneDNN or numba kernels multiply them. "blocks": 4-bit
    weights of any format for numba kernels. "int4": ATen's product. "unpacked": weights in the model's dtype. int8
    weights with plain activations are unpacked too, because ATen multiplies them slower than bfloat16.
    """
    fits_blocks = cpu.multiplies_codes and rows % BLOCK == 0
    if form == "int8" and rounds_input:
        return "int8" if cpu.multiplies_int8 or fits_blocks else "unpacked"
    if fits_blocks and form in CODE_COLUMNS and columns % CODE_COLUMNS[form] == 0:
        return "blocks"
    has_int4 = form == "int4" and cpu.capability in INT4_BLOCKS and rows % _INT4_ROWS == 0
    return "int4" if has_int4 and int4_group(group, columns) else "unpacked"


def int4_group(group: tuple[int, int], columns: int) -> int:
    """Return the largest group of ATen's int4 product that divides the weight's groups; 0 if none does."""
    width = group[1] or columns
    return next((size for size in _INT4_GROUPS if width % size == 0), 0)


def cpu_of_experts(out_features: int, dtype: torch.dtype) -> Cpu:
    """Return this CPU without oneDNN's products of int8 if numba kernels multiply all experts at once.

    With AMX, oneDNN's products stay, because they are faster for many rows.
    """
    cpu = this_cpu()
    has_numba_kernels = cpu.multiplies_codes and not cpu.has_amx and dtype in NUMBA_DTYPES and load_numba()
    if has_numba_kernels and out_features % BLOCK == 0:
        cpu = cpu._replace(multiplies_int8=False)
    return cpu


def most_code_rows(kind: str, *, by_onednn: bool) -> float:
    """Return up to how many rows numba kernels multiply packed weights of a kind of `choose_product` in blocks.

    by_onednn: whether oneDNN multiplies int8, too.
    """
    has_amx = this_cpu().has_amx
    if backend().is_invariant or (kind == "blocks" and not has_amx):
        return math.inf
    if by_onednn:
        return _MOST_INT8_ROWS_BESIDE_AMX if has_amx else _MOST_INT8_ROWS
    return MANY_ROWS - 1


def faster_rows(
    first: Callable[[torch.Tensor], object], second: Callable[[torch.Tensor], object], columns: int, dtype: torch.dtype
) -> float:
    """Return up to how many rows [num_rows, columns] to use the first of two products.

    The second must be a tenth faster: a disturbed time shall not change the choice, nor the rounding that hangs on it.
    """
    most_rows = _TIMED_ROWS[0] - 1.0
    for num_rows in _TIMED_ROWS:
        x = torch.randn(num_rows, columns).to(dtype)
        if 0.9 * _seconds(first, x) > _seconds(second, x):
            return most_rows
        most_rows = num_rows
    return math.inf


def _seconds(multiply_rows: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    """Return the shortest of three times. A first call is not timed, because it may compile."""
    multiply_rows(x)
    times: list[float] = []
    for _ in range(3):
        start = perf_counter()
        multiply_rows(x)
        times.append(perf_counter() - start)
    return min(times)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy of a weight [out_features, in_features] in the order that a CPU multiplies fastest.

    Only `multiply` can read the copy. The weight itself is returned if there is no such order: on other devices, for
    dtypes that the processor does not multiply, and if MKL or numba kernels are faster.
    """
    if weight.device.type != "cpu" or weight.is_mkldnn or not _has_onednn(weight.dtype):
        return weight
    if _has_numba(weight) or (has_mkl(weight.dtype) and weight.numel() * 4 <= _MKL_BYTES):
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_ROWS)
    return packed


def _has_onednn(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies this dtype with instructions for it on this CPU."""
    if dtype == torch.bfloat16:
        return MULTIPLIES_BF16
    return dtype == torch.float32 and _HAS_ONEDNN


def has_mkl(dtype: torch.dtype) -> bool:
    """Return whether MKL multiplies plain weights of this dtype on this CPU no slower than oneDNN.

    Numba kernels then take the products that are slow with MKL.
    """
    return dtype == torch.float32 and _HAS_INTEL_MKL


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `torch.nn.functional.linear` of x [..., in_features] and a weight, plain or from `pack`."""
    current = forward_backend() or backend()
    kernels: Any = None
    if current.wants_numba and (current.is_invariant or _takes_rows(x)):
        kernels = _numba_of(x, weight, bias)
    product: torch.Tensor
    if current.is_invariant:
        if kernels is None or not kernels.has_invariant_rows(weight):
            return _multiply_blocks(x, weight, bias)
        product = kernels.linear(x, weight, bias, by_row=True)
        return product
    if kernels is None:
        return _multiply_by_library(x, weight, bias)
    product = kernels.linear(x, weight, bias)
    return product


def multiply_and_silu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """Return silu(gate) * up for the halves of `multiply(x, weight)`, rounded once; None if no numba kernel does it."""
    current = forward_backend() or backend()
    if not current.wants_numba or current.is_invariant or not _takes_rows(x):
        return None
    kernels = _numba_of(x, weight)
    if kernels is None:
        return None
    activated: torch.Tensor | None = kernels.linear_and_silu(x, weight)
    return activated


def _takes_rows(x: torch.Tensor) -> bool:
    """Return whether numba kernels are fast for this number of rows."""
    return x.is_cpu and x.dtype in _NUMBA_ROWS and x.dim() == 2 and len(x) in _NUMBA_ROWS[x.dtype]


def _numba_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Return the module of numba kernels if they take these tensors, or None."""
    if x.dtype != weight.dtype or x.dim() != 2 or x.stride(1) != 1 or not _has_numba(weight):
        return None
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
        return None
    from .layers import linear

    return linear


def _has_numba(weight: torch.Tensor) -> bool:
    """Return whether numba kernels take a plain weight and are faster for few rows."""
    is_wanted = weight.dtype == torch.bfloat16 or has_mkl(weight.dtype)
    if not is_wanted or weight.is_mkldnn or not (wants_numba() and has_numba()):
        return False
    from .layers.linear import takes

    return takes(weight)


def _multiply_by_library(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    takes_plain = False  # whether oneDNN takes weights without packing
    if x.is_cpu and x.dtype == weight.dtype:
        if x.dtype == torch.float32:
            takes_plain = _HAS_ONEDNN and not _HAS_INTEL_MKL
        elif x.dtype == torch.bfloat16:
            takes_plain = MULTIPLIES_BF16
            if not MULTIPLIES_BF16 and x.numel() > _MOST_BF16_ROWS * x.shape[-1]:
                if bias is not None:
                    bias = bias.float()
                return _multiply_by_library(x.float(), weight.float(), bias).to(x.dtype)
    if not (takes_plain or weight.is_mkldnn):
        return functional.linear(x, weight, bias)
    product: torch.Tensor = _multiply(padded_rows(x), weight, bias, "none", [], "")
    if len(product) > len(x):
        product = product[: len(x)]
    return product


def has_grouped_product(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return whether PyTorch's grouped product is faster than one product for each group.

    w: [num_groups, out_features, in_features].
    """
    has_many_rows = x.dtype == torch.float32 and len(x) >= _MIN_ROWS_ALONE * len(w)
    strides = x.stride(0) | w.stride(0) | w.stride(1)
    return len(x) > 0 and strides * x.element_size() % 16 == 0 and not has_many_rows


def padded_lengths(bounds: Sequence[int], num_rows: int, dtype: torch.dtype) -> list[int]:
    """Return the padded number of rows of each group; an empty list if rows are not padded.

    All groups get equally many rows if one batch is faster than a product for each group. A batch computes one group a
    thread, which pays off for few rows. Otherwise, in bfloat16, groups are padded so that there are few different
    products.

    bounds: the beginning of the first group, and the end of each.
    """
    num_groups, is_wide = len(bounds) - 1, dtype == torch.float32
    is_alone = torch.get_num_threads() == 1
    if bounds[-1] < num_rows or (is_wide and is_alone):
        return []
    counts = [end - start for start, end in pairwise(bounds)]
    longest, num_idle = max(counts), counts.count(0)
    if longest == 0:
        return []
    max_length = 24.0
    if not is_wide:
        max_length += num_rows / num_groups
    max_idle = num_groups // 8 if is_wide or is_alone else num_groups // 2
    if longest <= max_length and num_idle <= max_idle:
        return [longest] * num_groups
    if dtype != torch.bfloat16 or not MULTIPLIES_BF16:
        return []
    steps = (_ROW_STEPS[count > _FEW_ROWS] for count in counts)
    return [-(-count // step) * step for count, step in zip(counts, steps, strict=True)]


def padded_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [num_rows, in_features], padded with rows of zeros if oneDNN would compile too many products."""
    missing = -len(x) % _ROW_STEP
    if x.dim() == 2 and len(x) > PACKED_ROWS and missing:
        return functional.pad(x, (0, 0, 0, missing))
    return x


def _multiply_blocks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x [num_rows, in_features] in blocks of `_INVARIANT_ROWS` rows, padded with zeros."""
    num_rows = len(x)
    num_blocks = max(-(-num_rows // _INVARIANT_ROWS), 1)
    missing = num_blocks * _INVARIANT_ROWS - num_rows
    if missing:
        x = functional.pad(x, (0, 0, 0, missing))
    products = [_multiply_by_library(rows, weight, bias) for rows in x.split(_INVARIANT_ROWS)]
    if len(products) == 1:
        return products[0][:num_rows]
    return torch.cat(products)[:num_rows]


def packed_address(packed: torch.Tensor) -> int | None:
    """Return the address of a tensor in oneDNN's order; None if this PyTorch does not report it."""
    if not hasattr(torch.ops.mkldnn, "data_ptr"):
        return None
    address: int = torch.ops.mkldnn.data_ptr(packed)
    return address


def limit_products() -> None:
    """Limit the products that oneDNN caches, unless the environment does; call it before the first product."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KEPT_PRODUCTS))
