"""Kimi K3's layers beside vLLM's code for them, whose kernels Triton's interpreter runs.

transformers has no class for K3. `KimiMoE` cannot be made without CUDA: its constructor makes streams and events.
"""

from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton import language as tl

import paged
from paged.models.families.attention_residual import ResidualMix
from paged.models.layers.config import NormConfig
from tests.kernels.recurrent.problem import Problem, Seq, run
from tests.tolerance import assert_close


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of vLLM's K3 with Triton, which vLLM leaves out where there is no GPU."""
    utils = import_module("vllm.triton_utils")
    monkeypatch.setattr(utils, "triton", triton)
    monkeypatch.setattr(utils, "tl", tl)

    def module(name: str) -> ModuleType:
        return import_module(f"vllm.models.kimi_k3.amd.ops.{name}")

    return module


def test_situ() -> None:
    from vllm.model_executor.layers.activation import SituAndMul

    x = 8 * torch.randn(5, 96)
    layer = SimpleNamespace(beta=4.0, linear_beta=25.0)
    assert_close(paged.silu_and_mul(x, activation="situ"), SituAndMul.forward_native(layer, x).double())


@pytest.mark.parametrize("num_snapshots", [0, 1, 5])
def test_attention_residual(num_snapshots: int, theirs: Any) -> None:
    """Adds to the sum, mixes it with snapshots, and applies the layer's norm."""
    norms = SimpleNamespace(hidden_size=48, norms=NormConfig(eps=1e-5))
    rows = torch.randn(num_snapshots + 2, 7, 48)  # snapshots, sum, what is added
    mix = ResidualMix(norms, "mlp_res")
    mix.norm.weight.data.uniform_(0.5, 1.5)
    mix.score.data.normal_()
    weight = torch.rand(48)
    mixed = mix([*rows[:-2], rows[-2] + rows[-1]])
    want = theirs("attn_res").attn_res(
        rows[-2].clone(), rows[-1], rows[:-2].transpose(0, 1).contiguous(), mix.norm.weight.detach(),
        mix.score[0].detach(), weight, num_snapshots, -1, 1e-5, 1e-5,
    )  # fmt: skip
    assert_close(paged.rms_norm(mixed, weight, 1e-5), want.double())


def test_delta_attention(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bounded gate of every channel, one token at a time."""
    problem = Problem.make(torch.device("cpu"), Seq(9), channels=True, key_heads=4)
    name, arguments = problem.delta(lower_bound=-5.0)
    out = run(name, arguments).out
    q, k, v = (part.unflatten(1, (4, 16))[None].contiguous() for part in arguments["mixed"].split(64, 1))
    state = torch.zeros(3, 4, 16, 16)
    module = theirs("third_party.kda.fused_recurrent")
    monkeypatch.setattr(module, "exp", lambda x: tl.exp(x))  # the interpreter replaces attributes of tl, no copies
    want, _ = module.fused_recurrent_kda_fwd(
        q, k, v, arguments["a"][None], arguments["b"][None],
        initial_state=state,
        cu_seqlens=torch.tensor([0, 9]),
        ssm_state_indices=torch.tensor([[1] * 9]),
        A_log=arguments["A_log"],
        dt_bias=arguments["dt_bias"].flatten(),
        lower_bound=-5.0,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    assert_close(out, want[0].double(), float32=2e-5)
