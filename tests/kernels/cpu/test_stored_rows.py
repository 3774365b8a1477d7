"""Faults of numba's writes to a cache, in every format, that the bounds must see."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paged.bench.cards.cards import CARDS
from paged.kernels.core.dtypes import kv_kind
from tests.backends import needs_numba
from tests.kernels.cache.test_qk_norm_rope_and_cache import BLOCK_SIZE, NUM_BLOCKS, draw_signs, make_inputs
from tests.kernels.faulty import exceeds_no_bound_twice, replace_modules, turns_red

pytestmark = [pytest.mark.by_cpu, pytest.mark.thorough, needs_numba]
CPU = torch.device("cpu")
INT4, NVFP4 = torch.bits4x2, torch.float4_e2m1fn_x2
ROWS, OPERATION = "store_rows", "qk_norm_rope_and_cache"
# module, dtype of the cache, text, what the faulty copy has instead. No fault writes out of its tensors: compiled code
# would write to other memory of the test process.
FAULTS = (
    (ROWS, INT4, "", ""),  # no fault
    (ROWS, INT4, "[4] * odd.type.count", "[3] * odd.type.count"),
    (ROWS, INT4, "scale_at + group // _INT4_GROUP", "scale_at + (group // _INT4_GROUP ^ 1)"),
    (ROWS, INT4, "multiply(second, inverse)", "multiply(first, inverse)"),
    (ROWS, NVFP4, "scales[scale_at + index]", "scales[scale_at + (index ^ 1)]"),
    (ROWS, NVFP4, "np.float32(1) / nb.floats(table_scale)[0]", "np.float32(1)"),
    (ROWS, torch.int8, "scales[scale_at] = largest / largest_code", "scales[scale_at] = largest"),
    (ROWS, torch.int8, "block * target[7] + slot * target[8] + head", "block * target[7] + head"),
    (OPERATION, torch.float32, "lane ^ half", "lane ^ 1"),
    (OPERATION, torch.float32, "multiply_add(b, minus_one, a)", "multiply_add(a, minus_one, b)"),
)


def _caches(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if not kv_kind(dtype).has_scales:
        k_cache, v_cache = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, 3, 128, dtype=dtype)
        return {"k_cache": k_cache, "v_cache": v_cache}
    kind, caches = kv_kind(dtype), {}
    for name in ("k", "v"):
        cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 3, kind.num_elements(128), dtype=torch.uint8).view(dtype)
        caches[f"{name}_cache"] = cache
        caches[f"{name}_scale"] = torch.zeros(kind.scales_shape(cache), dtype=kind.scale_dtype)
        if kind.has_table_scale:
            caches[f"{name}_table_scale"] = torch.tensor([4.0])
    return caches


@pytest.mark.parametrize(("module", "dtype", "text", "replacement"), FAULTS)
def test_checks_see_a_fault(
    module: str,
    dtype: torch.dtype,
    text: str,
    replacement: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of rows behind a norm, a rotation and a transform."""
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    names = (ROWS, OPERATION)
    paths = [f"paged.kernels.cpu.cache.{name}" for name in names[names.index(module) :]]
    replace_modules(paths, tmp_path, text, replacement, monkeypatch)
    arguments: dict[str, Any] = make_inputs((5, 3, 128, 128, 48, True), torch.float32, CPU)
    arguments |= {"q_weight": torch.rand(128), "k_weight": torch.rand(128), "hadamard_signs": draw_signs(128, CPU)}
    arguments |= _caches(dtype)
    assert turns_red(exceeds_no_bound_twice, CARDS["qk_norm_rope_and_cache"], arguments) == bool(text)
