"""Adapters on the families whose layers are not Llama's; what of them takes none is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged.batch import UnifiedBatchItem
from paged.errors import UnsupportedError
from paged.models.registry import load_model
from tests.models.families import FAMILIES, VARIANTS, assert_same_logits, save_checkpoint, tokens
from tests.models.lora.folders import Adapter

pytestmark = pytest.mark.usefixtures("_fast")

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = {
    "gemma3": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
    "gemma4_shared_kv": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
    "gpt_oss": ATTENTION,
    "llama4": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),  # of the shared expert
    "llama4_dense_layer": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "qwen2": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
}


@pytest.mark.parametrize("family", TARGETS)
def test_beside_the_base_model(family: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_checkpoint((FAMILIES | VARIANTS)[family], base)
    adapter = Adapter(TARGETS[family])
    folder = adapter.save(tmp_path / "adapter", base)
    merged = load_model(adapter.merge(folder, base, tmp_path / "merged"))
    model = load_model(base)
    expected = [merged.prefill("a", tokens(20)).cpu(), model.prefill("base", tokens(20)).cpu()]
    model.release("base")
    assert float((expected[0] - expected[1]).abs().max()) > 0.1
    model.adapters.load("adapter", folder)
    model.set_lora_adapter_for_cache("a", "adapter")
    rows = model.unified_forward([UnifiedBatchItem("a", tokens(20)), UnifiedBatchItem("base", tokens(20))])
    for row, want in zip(rows, expected, strict=True):
        assert_same_logits(row, want)


@pytest.mark.parametrize("form", ["settings", "tensors"])
def test_experts_of_gpt_oss_take_none(form: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_checkpoint(FAMILIES["gpt_oss"], base)
    model = load_model(base)
    settings = {"target_parameters": ["mlp.experts.down_proj"]} if form == "settings" else {}
    folder = Adapter(("q_proj",)).save(tmp_path / "adapter", base, **settings)
    if form == "tensors":
        model.adapters.load("sound", folder)
        file = folder / "adapter_model.safetensors"
        name = "base_model.model.model.layers.0.mlp.experts.down_proj.lora_A.weight"
        save_file(load_file(file) | {name: torch.ones(4, 96)}, file)
    with pytest.raises(
        UnsupportedError, match=r"target_parameters = |adapters of model.layers.0.mlp.experts.down_proj"
    ):
        model.adapters.load("a", folder)
