"""Recurrent layers whose large projections are packed, and whose gates are not, as Qwen3-Next is published."""

from pathlib import Path

import pytest

from tests.models.families import PACKABLE, save_checkpoint
from tests.models.quantization.checkpoints import Folders, assert_as_unpacked, packed_weights


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
