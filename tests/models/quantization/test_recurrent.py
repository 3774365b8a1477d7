"""Recurrent layers whose large projections are packed, and whose gates are not, as Qwen3-Next is published."""

from pathlib import Path

import pytest

from tests.models.families import PACKABLE, save_checkpoint
from tests.models.quantization.checkpoints import Folders, assert_as_unpacked, packed_weights, write


@pytest.fixture(scope="module")
def packable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    save_checkpoint(PACKABLE["hybrid"], folder)
    return folder


@pytest.mark.parametrize("folders", ["fp8 blocks", "awq", "gptq"], indirect=True)
def test_logits_of_the_unpacked_weights(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    gates = [f"model.layers.0.linear_attn.{name}" for name in ("in_proj_ba", "conv1d")]
    if folders.name != "gptq":
        folders.configure(modules_to_not_convert=[*gates, "lm_head"])
    packed = {name for name in packed_weights(assert_as_unpacked(folders)) if "linear_attn" in name}
    assert packed == {"layers.0.linear_attn.in_proj", "layers.0.linear_attn.out_proj"}


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("delta")
    save_checkpoint(PACKABLE["delta"], folder)
    return folder


@pytest.mark.parametrize("name", ["fp8 static", "gptq zeros, order"])
def test_delta_attention_whose_gates_are_packed_too(name: str, delta: Path, tmp_path: Path) -> None:
    """Its projections have attention's names in the checkpoint."""
    packed = packed_weights(assert_as_unpacked(write(name, delta, tmp_path)))
    names = ("in_proj", "gates_proj", "decay_proj", "gate_proj", "out_proj")
    assert {f"layers.0.linear_attn.{name}" for name in names} <= packed.keys()
    assert "layers.1.self_attn.down_proj" in packed
