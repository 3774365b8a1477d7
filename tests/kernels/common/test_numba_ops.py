"""Loops compiled by numba: in bfloat16, which the tests of their families leave to a GPU, on several threads, and where
they are not asked for or not there."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

import paged
from paged.bench.attention.problem import make
from paged.kernels.attention import reference
from paged.kernels.attention.plan import AttentionPlan
from paged.kernels.common import device as device_module
from paged.kernels.common.launch import forget_launches
from paged.kernels.common.numba_ops import launch
from paged.kernels.common.torch_ops import rms_norm as torch_op
from paged.kernels.layers import reference as layer_reference
from paged.kernels.moe import reference as moe_reference
from tests.backends import needs_numba
from tests.kernels.attention import test_paged_attention as attention
from tests.kernels.attention.problem import check
from tests.kernels.cache import test_qk_norm_rope_and_cache as cache
from tests.kernels.layers import test_rms_norm as norms
from tests.kernels.layers import test_silu_and_mul as activations
from tests.kernels.moe import test_fused_moe as experts
from tests.tolerance import assert_close

CPU, BF16 = torch.device("cpu"), torch.bfloat16
PROBLEMS = [problem for problem in attention.PROBLEMS if problem.dtype == torch.float32 and problem.lengths]


@pytest.fixture(params=[1, 3])
def _numba(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call by so many threads, however small."""
    forget_launches()
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    monkeypatch.setattr(launch, "_WORK_OF_A_THREAD", 1)


by_numba = [needs_numba, pytest.mark.usefixtures("_numba")]


class TestBfloat16:
    pytestmark = by_numba

    @pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
    def test_attention(self, problem: attention.Problem) -> None:
        check(replace(problem, dtype=BF16), CPU, return_lse=False)

    @pytest.mark.parametrize("shape", [(3, 64), (5, 100), (2, 3, 48), (0, 16)])
    def test_norms(self, shape: tuple[int, ...]) -> None:
        norms.test_matches_reference(shape, BF16, CPU)
        norms.test_weights_may_be_more_exact_than_rows(BF16, CPU)

    @pytest.mark.parametrize("with_norm", [False, True])
    @pytest.mark.parametrize(
        "sizes", [(4, 2, 64, 64, 64, False), (24, 3, 96, 96, 24, False), (3, 3, 192, 128, 64, True)]
    )
    def test_cache_write(self, sizes: tuple[int, int, int, int, int, bool], with_norm: bool) -> None:
        cache.test_matches_the_composition(*sizes, BF16, with_norm, CPU)

    @pytest.mark.parametrize("shape", [(3, 128), (20, 18), (0, 16), (3, 0)])
    def test_activation(self, shape: tuple[int, ...]) -> None:
        activations.test_matches_reference(shape, BF16, CPU)

    def test_values_that_are_no_numbers(self) -> None:
        """Rounding by arithmetic on bits would make a zero of a NaN, and a NaN of an infinity."""
        inf, nan = torch.inf, torch.nan
        x = torch.tensor([[nan, 1.0, inf, -nan, 2.0, 3.0, -inf, 4.0]], dtype=BF16)
        out = activations.silu_and_mul(x)
        assert torch.equal(out.isnan(), torch.tensor([[True, False, False, True]]))
        assert out[0, 2] == -inf
        assert norms.rms_norm(x, torch.ones(8, dtype=BF16)).isnan().all()


class TestExperts:
    pytestmark = by_numba

    @pytest.mark.parametrize("dtype", [torch.float32, BF16])
    @pytest.mark.parametrize("num_tokens", [1, 3, 9, 14])
    def test_match_the_definition(self, num_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of all numbers of entries an expert, with idle experts, those that are elsewhere, biases and strides."""
        linear = import_module("paged.kernels.common.numba_ops.linear")
        runs: list[object] = []
        monkeypatch.setattr(linear, "LoopLaunch", lambda *given: runs.append(given) or launch.LoopLaunch(*given))
        sizes = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 6, "top_k": 2}
        x, w1, w2, weights, ids = experts.make_inputs(CPU, num_tokens=num_tokens, dtype=dtype, **sizes)
        strided = torch.stack((x, x), 1)[:, 0], torch.cat((w1, w1), 1)[:, :64], w2
        elsewhere = torch.tensor([0, -1, 1, 2, -1, 3], dtype=torch.int32)
        biases = {"w1_bias": torch.randn(6, 64, dtype=dtype), "w2_bias": torch.randn(6, 64, dtype=dtype)}
        for options in ({}, {"expert_map": elsewhere}, biases, {"activation": "gelu_tanh"}, {"interleaved": True}):
            inputs = x, w1, w2, weights, ids
            mapped = elsewhere[ids.long()] if "expert_map" in options else ids
            there = x, w1, w2, weights * (mapped >= 0), mapped.clamp(min=0)
            rounded = experts.rounded_moe(there, "numba", options)
            want = moe_reference.fused_moe(*inputs, **options)
            assert_close(paged.fused_moe(*strided, weights, ids, **options), want, rounded=rounded)
        is_few = dtype == torch.float32 and num_tokens < 9  # products of their own
        assert len(runs) == (0 if is_few else 2 * 5)

    def test_products_of_pairs_on_processors_without_the_instruction(self, tmp_path: Path) -> None:
        code = """
import torch
from paged.kernels.common.numba_ops import vectors
vectors._HAS_BF16_PRODUCTS = False
from paged.kernels.common.numba_ops.linear import grouped_linear
x, weight = torch.randn(7, 96).bfloat16(), torch.randn(2, 8, 96).bfloat16()
ends = torch.tensor([3, 7], dtype=torch.int32)
want = torch.cat((x[:3].double() @ weight[0].double().T, x[3:].double() @ weight[1].double().T))
torch.testing.assert_close(grouped_linear(x, weight, ends).double(), want, rtol=0, atol=1e-4)
"""
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)


class TestRepeatedCalls:
    """Calls that differ from an earlier one in their tensors' addresses alone skip the checks of all but ids."""

    pytestmark = by_numba

    def test_are_not_checked_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64)
        qkv = [torch.randn(3, heads, 16) for heads in (4, 2, 2)]
        k_cache, v_cache = torch.zeros(2, 8, 2, 16), torch.zeros(2, 8, 2, 16)
        where = torch.tensor([1, 9, -1]), torch.tensor([0, 4, 2]), torch.randn(8, 16)
        tensors = make(attention.Problem("", ((1, 20), (1, 9))), CPU)
        plan = AttentionPlan(tensors.cu_seqlens_q, tensors.seq_lens, max_seqlen_q=1, max_seqlen_k=20)

        def results() -> list[torch.Tensor]:
            """Of tensors at other addresses."""
            stream, caches = residual.clone(), (k_cache.clone(), v_cache.clone())
            rotated = paged.qk_norm_rope_and_cache(*(part.clone() for part in qkv), *caches, *where)
            attended = paged.paged_attention(**{**vars(tensors), "q": tensors.q.clone()}, max_seqlen_q=1, plan=plan)
            normed = paged.fused_add_rms_norm(x.clone(), stream, weight)
            return [
                paged.rms_norm(x.clone(), weight),
                *normed,
                paged.silu_and_mul(x.clone()),
                rotated,
                *caches,
                attended,
            ]

        first = results()

        def refuse(*_arguments: object, **_options: object) -> None:
            raise AssertionError("checked again")

        for name in ("layers.rms_norm", "layers.silu_and_mul", "cache.write", "attention.paged_attention"):
            module = import_module(f"paged.kernels.{name}")
            for checking in [each for each in vars(module) if each.startswith(("check_", "_check"))]:
                if checking != "checks_ids":
                    monkeypatch.setattr(module, checking, refuse)
        for again, before in zip(results(), first, strict=True):
            assert torch.equal(again, before)

    def test_of_ids_out_of_range_write_nothing(self) -> None:
        q, k, v = (torch.randn(2, heads, 16) for heads in (4, 2, 2))
        caches, angles = (torch.zeros(2, 8, 2, 16), torch.zeros(2, 8, 2, 16)), torch.randn(8, 16)
        good = torch.tensor([3, 4])
        paged.qk_norm_rope_and_cache(q, k, v, *caches, good, good, angles)
        before = [tensor.clone() for tensor in (q, *caches)]
        for slots, positions in (([0, 16], [0, 1]), ([0, 1], [0, 8]), ([0, 1], [-1, 0])):
            with pytest.raises(paged.InvalidInputError, match=r"slot_mapping|positions"):
                paged.qk_norm_rope_and_cache(q, k, v, *caches, torch.tensor(slots), torch.tensor(positions), angles)
        assert all(torch.equal(tensor, kept) for tensor, kept in zip((q, *caches), before, strict=True))

    def test_over_another_block_table_are_checked(self) -> None:
        tensors = make(attention.Problem("", ((1, 20), (1, 9))), CPU)
        plan = AttentionPlan(tensors.cu_seqlens_q, tensors.seq_lens, max_seqlen_q=1, max_seqlen_k=20)
        paged.paged_attention(**vars(tensors), max_seqlen_q=1, plan=plan)
        for block in (-1, len(tensors.k_cache), 2**30):
            table = tensors.block_table.clone()
            table[0, 0] = block
            with pytest.raises(paged.InvalidInputError, match="block_table"):
                paged.paged_attention(**{**vars(tensors), "block_table": table}, max_seqlen_q=1, plan=plan)

    def test_of_other_options_are_others(self) -> None:
        """What a launch holds as numbers is in its key."""
        tensors = make(attention.Problem("", ((1, 20), (2, 9))), CPU)
        plan = AttentionPlan(tensors.cu_seqlens_q, tensors.seq_lens, max_seqlen_q=2, max_seqlen_k=20)
        for options in (
            {},
            {"softmax_scale": 0.5},
            {"window_size": (3, 0)},
            {"attention_chunk_size": 4},
            {"causal": False},
        ):
            for _ in range(2):
                got = paged.paged_attention(**vars(tensors), **options, max_seqlen_q=2, plan=plan)
                assert_close(got, reference.paged_attention(**vars(tensors), **options)[0])
        for eps in (1e-6, 1.0):
            x, weight = torch.randn(3, 64), torch.randn(64)
            assert_close(paged.rms_norm(x, weight, eps), layer_reference.rms_norm(x, weight, eps))


@needs_numba
def test_vectors_are_what_floats_are() -> None:
    """exp2 of each kind, over its whole range, and sums of each length."""
    import numba
    import numpy as np
    from numba import types

    from paged.kernels.common.numba_ops import kernel, vectors

    @numba.cfunc(types.void(types.CPointer(types.float32), types.CPointer(types.float32)))
    def both(x, out):
        out_of_vector = vectors.exp2_of(vectors.load_vector(x, np.int64(0)))
        vectors.store_vector(out, np.int64(0), out_of_vector)
        for i in range(16):
            out[16 + i] = kernel.exp2(x[i])
        out[32], out[33] = vectors.sum_of(out_of_vector), vectors.largest_of(out_of_vector)

    steps = torch.linspace(-150, 123.9, 160).tolist() + [-torch.inf] * 16
    for start in range(0, len(steps), 16):
        x, out = torch.tensor(steps[start : start + 16]), torch.empty(34)
        both.ctypes(*(ctypes.cast(each.data_ptr(), ctypes.POINTER(ctypes.c_float)) for each in (x, out)))
        want = torch.exp2(x.double())
        for got in (out[:16], out[16:32]):
            torch.testing.assert_close(got.double(), want, rtol=3e-7, atol=2.0**-126)
        torch.testing.assert_close(out[32].double(), want.sum(), rtol=1e-6, atol=2.0**-120)
        assert out[33] == out[:16].max()


@needs_numba
def test_compiled_code_is_kept_by_what_it_was_made_of(tmp_path: Path) -> None:
    """A change of a device function compiles kernels of other files anew; without one they are read."""
    kernels, copy = Path(paged.__file__).parent / "kernels", tmp_path / "paged" / "kernels"
    shutil.copytree(kernels, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy.parent / "__init__.py").touch()
    code = "import paged.kernels.layers.numba_ops.silu_and_mul as module; module._silu_and_mul.address"
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}

    def kept() -> int:
        subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True)
        return len(list(tmp_path.rglob("*.nbc")))

    assert [kept(), kept()] == [1, 1]
    with (copy / "common" / "numba_ops" / "rms_norm.py").open("a") as file:
        file.write("# changed")
    assert [kept(), kept()] == [2, 2]


@needs_numba
def test_only_where_a_model_has_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, half = torch.randn(2, 8), torch.randn(2, 8).half()

    def has_loops(*tensors: torch.Tensor, **weights: list[torch.Tensor]) -> bool:
        return device_module.loops_of(torch_op, *tensors, **weights) is not None

    monkeypatch.delenv("PAGED_BACKEND", raising=False)
    monkeypatch.setattr(device_module, "_NUMBA_IS_WANTED", type(device_module._NUMBA_IS_WANTED)())
    assert not has_loops(rows)
    assert device_module.load_numba()
    assert has_loops(rows)
    assert has_loops(rows.bfloat16(), weights=[rows])
    assert not has_loops(rows.bfloat16(), rows)
    assert not has_loops(rows, weights=[half])
    assert not has_loops(half)
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    assert not has_loops(rows)


def test_without_numba_every_operation_runs() -> None:
    code = """
import os, sys
sys.modules["numba"] = None
os.environ["TRITON_INTERPRET"] = "0"
import torch, paged
from paged.kernels.common.device import has_numba, load_numba
assert not has_numba() and not load_numba()
x = torch.randn(2, 16)
assert paged.rms_norm(x, torch.ones(16)).shape == x.shape
os.environ["PAGED_BACKEND"] = "numba"
try:
    paged.rms_norm(x, torch.ones(16))
except paged.UnsupportedError as error:
    assert "numba is not installed" in str(error)
else:
    raise SystemExit("ran without numba")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
