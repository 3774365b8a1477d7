"""Experts whose weights are packed run as the same weights unpacked do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from paged.errors import CheckpointError, UnsupportedError
from paged.executors.command_line.checkpoint_summary import summarize
from paged.models.layers import sparse_moe
from tests.models.families import save_checkpoint
from tests.models.quantization.checkpoints import MOE_CONFIG, PROMPT, WEIGHTS, Folders, load, packed_weights
from tests.models.quantization.checkpoints import _rounding as rounding
from tests.models.quantization.packers import FORMATS, rounded

MLP = "model.layers.0.mlp"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    save_checkpoint(MOE_CONFIG, folder)
    found = load_file(folder / WEIGHTS)
    experts = f"{MLP}.experts"
    pairs = zip(*(found.pop(f"{experts}.{name}", ()) for name in ("gate_up_proj", "down_proj")), strict=True)
    for expert, (gate_up, down) in enumerate(pairs):
        parts = dict(zip(("gate_proj", "up_proj", "down_proj"), (*gate_up.chunk(2), down), strict=True))
        found |= {f"{experts}.{expert}.{name}.weight": part.contiguous() for name, part in parts.items()}
    save_file(found, folder / WEIGHTS)
    return folder


def _one_by_one(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, **_: Any
) -> torch.Tensor:
    """`fused_moe` expert by expert, of activations that are rounded before each product, in groups always."""
    out = torch.zeros_like(x)
    for expert, (gate_up, down) in enumerate(zip(w1, w2, strict=True)):
        gate, up = (rounded(x, "e4m3 groups") @ gate_up.T).chunk(2, -1)
        part = rounded(functional.silu(gate) * up, "e4m3 groups") @ down.T
        out += (weights * (ids == expert)).sum(1, keepdim=True) * part
    return out


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize(
    "folders",
    ["awq", "fp8 blocks", "gptq", "float-quantized rows", "nvfp4-pack-quantized", "pack-quantized", "gptq_v2 8 bits"],
    indirect=True,
)
def test_logits_of_the_unpacked_weights(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a ten thousandth, or a tenth of what the format's rounding of activations does."""
    packed = load(folders.packed)
    got = packed.prefill("a", PROMPT)
    plain = load(folders.plain).prefill("a", PROMPT)
    want, budget = plain, 1e-4 * float(plain.abs().max())
    if how := FORMATS[folders.name].rounds:
        monkeypatch.setattr(sparse_moe, "fused_moe", _one_by_one)
        want = rounding(load(folders.plain), how, packed_weights(packed)).prefill("a", PROMPT)
        budget += 0.1 * float((want - plain).abs().max())
    assert (got - want).abs().max() < budget
    summary = summarize(folders.packed)
    assert summary.parameters == summarize(folders.plain).parameters == packed.num_parameters()
    assert summary.weight_bytes == packed.parameter_bytes()


@pytest.mark.parametrize("folders", ["nvfp4-pack-quantized"], indirect=True)
def test_kernels(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Triton."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    want = load(folders.packed).prefill("a", PROMPT)
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    torch.testing.assert_close(load(folders.packed).prefill("a", PROMPT), want, rtol=0, atol=1e-3)


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ("pack-quantized zeros, order", "supported are experts in their own order"),
        ("mxfp4-pack-quantized", "in other forms than MXFP4"),
        ("mixed-precision", "e4m3 without input_activations"),
    ],
    indirect=["folders"],
)
def test_what_experts_do_not_take(folders: Folders, message: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"experts.0.gate_proj: .*{message}"):
        load(folders.packed)


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize("folders", ["nvfp4-pack-quantized"], indirect=True)
def test_gate_and_up_of_other_sizes(folders: Folders) -> None:
    name = "mlp__experts__1__up_proj__weight_global_scale"
    folders.edit(**{name: 2 * folders.tensor(name)})
    with pytest.raises(UnsupportedError, match="another scale of all weights of gate than of up"):
        load(folders.packed)
    folders.edit(**{name: None})
    with pytest.raises(CheckpointError, match=r"experts.1.up_proj.weight_global_scale: missing in"):
        load(folders.packed)
