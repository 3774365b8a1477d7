"""Attention over latents by numba: its forms of rows, threads, and copies of its sources with one fault each."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from paged import concat_and_cache_mla, mla_norm_rope_and_cache, paged_mla_attention
from paged.bench.mla.problem import PROBLEMS, Problem, call_of, make
from paged.errors import InvalidInputError
from paged.kernels.attention import latent_definition
from paged.kernels.cpu import launch
from tests.backends import needs_numba
from tests.kernels.attention.latent_problem import LATENT_ATTENTION, check
from tests.kernels.faulty import exceeds_no_bound_twice, replace_modules, turns_red

CPU, BF16 = torch.device("cpu"), torch.bfloat16
pytestmark = [pytest.mark.by_cpu, needs_numba]
# The kernels of these rows compile for other tests, too.
FAST = {"mixed batch", "window", "sinks, not causal", "128 heads"}
MORE = (
    Problem("e4m3, chosen", ((3, 40), (1, 7)), heads=5, form="e4m3", sizes=(64, 32), chosen=20),
    Problem("a sequence for all threads", ((1, 90),), heads=48, sinks=True, block_size=24),
    Problem("17 heads, many tokens", ((90, 200), (1, 150)), heads=17, sinks=True),
    Problem("packed, many tokens", ((40, 170), (1, 150)), heads=3, sizes=(512, 64), form="packed", sinks=True),
    Problem("no keys, chosen", ((3, 1), (0, 4), (1, 9)), heads=33, chosen=8, padding_rows=2, sinks=True),
)


@pytest.fixture(params=[1, 3])
def _numba(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call by so many threads, however small."""
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    monkeypatch.setattr(launch, "_WORK_OF_A_THREAD", 1)


by_three_threads = pytest.mark.parametrize("_numba", [3], indirect=True)


@by_three_threads
@pytest.mark.usefixtures("_numba")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(problem, id=problem.name, marks=[pytest.mark.thorough] * (problem.name not in FAST))
        for problem in (*PROBLEMS, *MORE)
    ],
)
def test_matches_reference(problem: Problem, dtype: torch.dtype) -> None:
    definition = mock.Mock(wraps=latent_definition.paged_mla_attention, __name__="paged_mla_attention")
    with mock.patch.object(latent_definition, "paged_mla_attention", definition):
        check(replace(problem, dtype=dtype), CPU)
    assert not definition.called


@by_three_threads
@pytest.mark.usefixtures("_numba")
@pytest.mark.parametrize("chosen", [0, pytest.param(9, marks=pytest.mark.thorough)])
def test_queries_are_kept_if_the_output_takes_their_place(chosen: int) -> None:
    """Rows without a rotated part are as long as their values."""
    given: dict[str, Any] = make(Problem("", ((2, 20),), heads=3, sizes=(64, 0), chosen=chosen), CPU)
    expected = paged_mla_attention(**given, max_seqlen_q=2)
    paged_mla_attention(**given, max_seqlen_q=2, out=given["q"])
    assert torch.equal(given["q"], expected)


@pytest.mark.thorough
@pytest.mark.usefixtures("_numba")
@pytest.mark.parametrize("chosen", [0, 40])
def test_bits_do_not_depend_on_the_batch(chosen: int) -> None:
    """Nor on strides: caches and tables are views of larger tensors with NaN between the rows."""
    given = make(Problem("", ((1, 600), (1, 50), (9, 300)), heads=20, chosen=chosen), CPU) | {"deterministic": True}
    results = paged_mla_attention(**given, max_seqlen_q=9)
    starts = given["cu_seqlens_q"].tolist()
    wide = torch.full((*given["kv_cache"].shape[:2], 200), torch.nan)
    wide[..., 7:87] = given["kv_cache"]
    for seq in (0, 2):
        rows = slice(starts[seq], starts[seq + 1])
        alone = {name: given[name][seq : seq + 1] for name in ("block_table", "seq_lens")}
        alone |= {name: given[name][rows] for name in ("q", "indices") if name in given}
        alone["q"] = torch.cat([alone["q"], alone["q"]], 2)[..., : given["q"].shape[2]]
        alone["kv_cache"] = wide[..., 7:87]
        alone["cu_seqlens_q"] = given["cu_seqlens_q"][seq : seq + 2] - starts[seq]
        assert torch.equal(paged_mla_attention(**given | alone, max_seqlen_q=9), results[rows])


@by_three_threads
@pytest.mark.usefixtures("_numba")
def test_a_slot_out_of_range_changes_nothing() -> None:
    q, latent, rope, cache = torch.randn(3, 2, 16), torch.randn(3, 48), torch.randn(3, 16), torch.zeros(4, 8, 64)
    angles, weight, positions = torch.randn(9, 16), torch.rand(48), torch.tensor([0, 5, 8])
    before = q.clone()
    for slots, places in (([0, 32, 1], positions), ([0, -1, 1], positions + 1)):
        with pytest.raises(InvalidInputError, match=r"slot_mapping\[1\]: 32|positions\[2\]: 9"):
            mla_norm_rope_and_cache(q, latent, rope, cache, torch.tensor(slots), places, angles, weight)
        assert torch.equal(q, before)
        assert not cache.any()
    mla_norm_rope_and_cache(q, latent, rope, cache, torch.tensor([0, -1, 9]), positions, angles[:, :0], weight)
    assert torch.equal(q, before)
    expected = torch.zeros_like(cache)
    normed = torch.nn.functional.rms_norm(latent, (48,), weight, 1e-6)
    concat_and_cache_mla(normed, rope, expected, torch.tensor([0, -1, 9]))
    torch.testing.assert_close(cache, expected)


MUTATED = {
    "chosen": Problem("", ((20, 60), (1, 20)), heads=3, chosen=20, causal=False),
    "packed": Problem("", ((3, 40),), heads=3, sizes=(512, 64), form="packed"),
    "nvfp4": Problem("", ((3, 40),), heads=3, sizes=(512, 64), form="nvfp4"),
    "dense": Problem("", ((30, 200),), heads=3),
}
# module, problem that finds the fault, text, what the faulty copy has instead
FAULTS = (
    ("compressed_attention", "chosen", "", ""),  # no fault
    ("compressed_attention", "chosen", "if is_causal:", "if True:"),
    ("compressed_attention", "chosen", "indices[token * indices_token + column]", "indices[column]"),
    ("compressed_attention", "chosen", "padded, size, v_size, size, scale", "padded, size, v_size, v_size, scale"),
    ("vector_products", "packed", "(start + _PACKED_SCALES) // 4 + group", "(start + _PACKED_SCALES) // 4"),
    ("vector_products", "nvfp4", "start + _NVFP4_ROPE", "start + _NVFP4_ROPE + 1"),
    ("many_queries", "dense", "value_stride = size", "value_stride = v_size"),
)


@pytest.mark.thorough
@by_three_threads
@pytest.mark.usefixtures("_numba")
@pytest.mark.parametrize(("module", "name", "text", "replacement"), FAULTS)
def test_checks_see_a_fault(
    module: str, name: str, text: str, replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules that import the faulty one are copied, too."""
    names = ("many_queries", "vector_products", "compressed_attention", "paged_attention", "latent_attention")
    paths = [f"paged.kernels.cpu.attention.{name}" for name in names[names.index(module) :]]
    replace_modules(paths, tmp_path, text, replacement, monkeypatch)
    arguments = call_of(MUTATED[name], CPU)
    assert turns_red(exceeds_no_bound_twice, LATENT_ATTENTION, arguments) == bool(text)
