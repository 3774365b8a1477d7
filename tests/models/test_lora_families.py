"""Adapters on the families whose layers are not Llama's."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged.batch import UnifiedBatchItem
from paged.models.registry import load_model
from tests.models.families import FAMILIES, assert_same_logits, save_checkpoint, tokens
from tests.models.lora_folders import Adapter

pytestmark = pytest.mark.usefixtures("_fast")

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = {
    "gemma3": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
    "qwen2": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
}


@pytest.mark.parametrize("family", TARGETS)
def test_beside_the_base_model(family: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_checkpoint(FAMILIES[family], base)
    adapter = Adapter(TARGETS[family])
    folder = adapter.save(tmp_path / "adapter", base)
    merged = load_model(adapter.merge(folder, base, tmp_path / "merged"))
    model = load_model(base)
    expected = [merged.prefill("a", tokens(20)), model.prefill("base", tokens(20))]
    model.release("base")
    assert float((expected[0] - expected[1]).abs().max()) > 0.1
    model.adapters.load("adapter", folder)
    model.set_lora_adapter_for_cache("a", "adapter")
    rows = model.unified_forward([UnifiedBatchItem("a", tokens(20)), UnifiedBatchItem("base", tokens(20))])
    for row, want in zip(rows, expected, strict=True):
        assert_same_logits(row, want)
