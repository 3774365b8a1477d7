"""Experts whose weights are packed run as the same weights unpacked do."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from paged.errors import UnsupportedError
from paged.models.layers import sparse_moe
from paged.serving.command_line.checkpoint_summary import summarize
from tests.models.edits import assert_refused
from tests.models.families import PACKABLE, save_checkpoint
from tests.models.quantization.checkpoints import PROMPT, WEIGHTS, Folders, assert_as_unpacked, load, write
from tests.models.quantization.packers import FORMATS, rounded
from tests.operations import stand_in
from tests.tolerance import assert_within

MLP = "model.layers.0.mlp"


@pytest.fixture(scope="module")
def packable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the projections of every expert as tensors of their own."""
    folder = tmp_path_factory.mktemp("experts")
    save_checkpoint(PACKABLE["experts"], folder)
    assert f"{MLP}.experts.3.up_proj.weight" in load_file(folder / WEIGHTS)
    return folder


def _one_by_one(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    how: str = "e4m3 groups",
    **_: Any,
) -> torch.Tensor:
    """`fused_moe` expert by expert, of activations that are rounded before each product, in groups always."""
    out = torch.zeros_like(x)
    for expert, (gate_up, down) in enumerate(zip(w1, w2, strict=True)):
        gate, up = (rounded(x, how) @ gate_up.T).chunk(2, -1)
        part = rounded(functional.silu(gate) * up, how) @ down.T
        out += (weights * (ids == expert)).sum(1, keepdim=True) * part
    return out


@pytest.mark.parametrize(
    "folders",
    [
        *("awq", "fp8 blocks", "gptq", "float-quantized rows", "mxfp4-pack-quantized", "nvfp4-pack-quantized"),
        *("pack-quantized", "gptq_v2 8 bits"),
    ],
    indirect=True,
)
def test_logits_of_the_unpacked_weights(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = assert_as_unpacked(folders, lambda: monkeypatch.setattr(sparse_moe, "fused_moe", stand_in(_one_by_one)))
    summary = summarize(folders.packed)
    assert summary["parameters"] == summarize(folders.plain)["parameters"] == packed.num_parameters()
    assert summary["weight_bytes"] == packed.parameter_bytes()


@pytest.mark.by_cpu
@pytest.mark.parametrize(
    "folders",
    ["awq", "fp8 blocks", "float-quantized rows", "int-quantized rows", "nvfp4-pack-quantized", "pack-quantized"],
    indirect=True,
)
def test_logits_in_the_order_of_a_cpu(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """With activations rounded as the configuration says."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    one_by_one = partial(_one_by_one, how=FORMATS[folders.name].rounds)
    model = assert_as_unpacked(
        folders, lambda: monkeypatch.setattr(sparse_moe, "fused_moe", stand_in(one_by_one)), is_repacked=True
    )
    assert model.num_parameters() == summarize(folders.plain)["parameters"]


@pytest.mark.thorough
def test_experts_without_gates(tmp_path: Path) -> None:
    save_checkpoint(PACKABLE["experts_without_gates"], tmp_path / "base")
    assert_as_unpacked(write("awq", tmp_path / "base", tmp_path))


@pytest.mark.thorough
@pytest.mark.parametrize("folders", ["nvfp4-pack-quantized"], indirect=True)
def test_kernels(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Triton."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    want = load(folders.packed).prefill("a", PROMPT)
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    assert_within(load(folders.packed).prefill("a", PROMPT), want, 1e-3)


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ("pack-quantized zeros, order", "supported are experts in their own order"),
        ("mixed-precision", "e4m3 weights without input_activations"),
    ],
    indirect=["folders"],
)
def test_what_experts_do_not_take(folders: Folders, message: str) -> None:
    assert_refused(folders.packed, rf"experts.0.gate_proj: .*{message}", UnsupportedError)


@pytest.mark.parametrize("folders", ["nvfp4-pack-quantized"], indirect=True)
def test_gate_and_up_of_other_sizes(folders: Folders) -> None:
    name = "mlp.experts.1.up_proj.weight_global_scale"
    folders.edit(name, 2 * folders.tensor(name))
    assert_refused(folders.packed, "gate and up have different tensor scales", UnsupportedError)
    folders.edit(name, None)
    assert_refused(folders.packed, r"experts.1.up_proj.weight_global_scale: missing in")
