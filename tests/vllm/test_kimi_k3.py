"""Kimi K3's layers beside vLLM's code for them, whose kernels Triton's interpreter runs.

transformers has no class for K3. `KimiMoE` cannot be made without CUDA, because its constructor makes streams and
events: its parts are compared.
"""

import inspect
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.nn.functional import rms_norm
from triton import language as tl

import paged
from paged.models.families.attention_residual import ResidualMix
from paged.models.layers.config import NormConfig
from paged.models.layers.modules import RmsNorm
from paged.models.registry import load_model
from tests.kernels.recurrent.problem import Problem, Seq, run
from tests.models.families import FAMILIES, save_checkpoint
from tests.tolerance import assert_close

pytest.importorskip("vllm", reason="needs vLLM's Python files: make vllm")
pytestmark = pytest.mark.thorough


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of vLLM's K3 with Triton, which vLLM leaves out where there is no GPU."""
    utils = import_module("vllm.triton_utils")
    monkeypatch.setattr(utils, "triton", triton)
    monkeypatch.setattr(utils, "tl", tl)

    def module(name: str) -> ModuleType:
        return import_module(f"vllm.models.kimi_k3.amd.ops.{name}")

    return module


def _situ(x: torch.Tensor) -> torch.Tensor:
    from vllm.model_executor.layers.activation import SituAndMul

    found: torch.Tensor = SituAndMul.forward_native(SimpleNamespace(beta=4.0, linear_beta=25.0), x)
    return found


def test_situ() -> None:
    x = 8 * torch.randn(5, 96)
    assert_close(paged.silu_and_mul(x, activation="situ"), _situ(x).double())


def test_latent_experts(tmp_path: Path, theirs: Any) -> None:
    """Routing, activation, and what becomes of the sum of a token's experts, after products of plain matrices."""
    theirs("attn_res")  # imports the model's modules
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import grouped_topk
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.models.kimi_k3.nvidia.model import KimiRoutedOutputTransform

    saved = save_checkpoint(FAMILIES["kimi_k3"], tmp_path)
    config, prefix = saved.config, "model.layers.1.block_sparse_moe."
    w = {name.removeprefix(prefix): tensor for name, tensor in saved.tensors.items() if name.startswith(prefix)}
    x = torch.randn(9, config.hidden_size)

    def mlp(rows: torch.Tensor, path: str, gate: str, up: str, down: str) -> torch.Tensor:
        both = torch.cat([w[f"{path}.{gate}.weight"], w[f"{path}.{up}.weight"]])
        return _situ(rows @ both.T) @ w[f"{path}.{down}.weight"].T

    weights, ids = inspect.unwrap(grouped_topk)(
        x, x @ w["gate.weight"].T, config.num_experts_per_tok, True, 1, 1, "sigmoid",
        config.routed_scaling_factor, w["gate.e_score_correction_bias"],
    )  # fmt: skip
    latent = x @ w["routed_expert_down_proj.weight"].T
    routed = torch.zeros_like(latent)
    for expert in range(config.num_local_experts):
        share = (weights * (ids == expert)).sum(1, keepdim=True)
        routed += share * mlp(latent, f"experts.{expert}", "w1", "w3", "w2")
    transform = SimpleNamespace(
        norm=lambda rows: rms_norm(rows, rows.shape[1:], w["routed_expert_norm.weight"], config.rms_norm_eps),
        up_proj=SimpleNamespace(
            weight=w["routed_expert_up_proj.weight"], quant_method=object.__new__(UnquantizedLinearMethod)
        ),
    )
    shared = mlp(x, "shared_experts", "gate_proj", "up_proj", "down_proj")
    want = KimiRoutedOutputTransform.forward(transform, routed, residual=shared)
    layer = load_model(tmp_path, block_size=8, num_blocks=8).network.layers[1].mlp
    assert_close(layer(x), want.double())


@pytest.mark.parametrize("num_snapshots", [0, 1, 5])
def test_attention_residual(num_snapshots: int, theirs: Any) -> None:
    """Adds to the sum, mixes it with snapshots, and applies the layer's norm."""
    norms = SimpleNamespace(hidden_size=48, norms=NormConfig(eps=1e-5))
    rows = torch.randn(num_snapshots + 2, 7, 48)  # snapshots, sum, what is added
    mix = ResidualMix(norms, "mlp_res", num_snapshots)
    mix.norm.weight.data.uniform_(0.5, 1.5)
    mix.score.data.normal_()
    norm = RmsNorm(48, norms.norms)
    norm.weight.data.uniform_(0.5, 1.5)
    want = theirs("attn_res").attn_res(
        rows[-2].clone(), rows[-1], rows[:-2].transpose(0, 1).contiguous(), mix.norm.weight.detach(),
        mix.score[0].detach(), norm.weight.detach(), num_snapshots, -1, 1e-5, 1e-5,
    )  # fmt: skip
    assert_close(mix(rows[:-1].clone(), rows[-1], norm), want.double())


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
