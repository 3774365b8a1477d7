"""Loops compiled by numba: in bfloat16, which the tests of their families leave to a GPU, on several threads, and where
they are not asked for or not there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from paged.kernels.common import device as device_module
from paged.kernels.common.launch import forget_launches
from paged.kernels.common.numba_ops import launch
from paged.kernels.common.torch_ops import rms_norm as torch_op
from tests.backends import needs_numba
from tests.kernels.attention import test_paged_attention as attention
from tests.kernels.attention.problem import check
from tests.kernels.cache import test_qk_norm_rope_and_cache as cache
from tests.kernels.layers import test_rms_norm as norms
from tests.kernels.layers import test_silu_and_mul as activations

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
