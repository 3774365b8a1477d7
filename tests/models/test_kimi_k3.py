"""Kimi K3's text model inside of its multimodal one, and options that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.errors import UnsupportedError
from paged.models.parallel.share import Share
from paged.models.registry import load_model, read_model_config
from tests.models.edits import Tensors, assert_refused, edit_config, edit_tensors
from tests.models.families import FAMILIES, assert_same_logits, logits_of, save_checkpoint, tokens


def test_text_of_the_multimodal_model(tmp_path: Path) -> None:
    """Its pictures' placeholder is embedded as padding."""
    theirs = save_checkpoint(FAMILIES["kimi_k3"], tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    del text["architectures"]
    wrapped = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}
    wrapped |= {"media_placeholder_token_id": 100, "tie_word_embeddings": False, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(wrapped))

    def rename(stored: Tensors) -> None:
        for name in list(stored):
            stored[f"language_model.{name}"] = stored.pop(name)
        stored["vision_tower.weight"] = torch.zeros(1)

    edit_tensors(tmp_path, rename)
    model = load_model(tmp_path, block_size=8, num_blocks=32)
    ids = [*tokens(20), 100, 7]
    want = logits_of(theirs, [*ids[:20], 0, 7])
    assert_same_logits(model.forward_verify("a", ids), want)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"activation_situ_beta": 2.0}, "activation_situ_beta = 2.0 is not supported, known is 4.0"),
        ({"mla_use_nope": False}, "mla_use_nope = False is not supported, known are True"),
        ({"linear_attn_config": {"mixes_heads": True}}, "linear_attn_config: 'mixes_heads' is unknown, known are"),
    ],
)
def test_options_that_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["kimi_k3"], tmp_path)
    edit_config(tmp_path, **changed)
    assert_refused(tmp_path, message, UnsupportedError)


def test_ranks_are_refused(tmp_path: Path) -> None:
    """Each would normalise its own part of the experts' sum."""
    save_checkpoint(FAMILIES["kimi_k3"], tmp_path)
    with pytest.raises(UnsupportedError, match="tensor_parallel_size 2: a norm of the experts' sum, supported is 1"):
        Share(0, 2).config(read_model_config(tmp_path)[1])


def test_situ_is_refused_with_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paged import silu_and_mul

    x = torch.randn(3, 8)
    gate, up = x.double().chunk(2, -1)
    want = 4 * (gate / 4).tanh() / (1 + (-gate).exp()) * 25 * (up / 25).tanh()
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    assert (silu_and_mul(x, activation="situ") - want).abs().max() < 1e-6
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    with pytest.raises(UnsupportedError, match="activation: 'situ', known are 'silu'"):
        silu_and_mul(x, activation="situ")
