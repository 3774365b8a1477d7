"""One model under the names and in the shapes that different writers give its tensors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Llama4Config,
    Llama4TextConfig,
    Mistral3Config,
    PreTrainedConfig,
)

from paged.errors import CheckpointError, UnsupportedError
from paged.models.loading.hf_config import HfConfig
from paged.models.registry import load_model, text_part
from tests.models.families import FAMILIES, assert_same_logits, save_checkpoint, tokens

pytestmark = pytest.mark.usefixtures("_fast")

PROMPT = tokens(30)
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.mark.parametrize(
    "family", ["glm4_moe", "granite_moe_shared", "minimax_m2", "mixtral", "qwen2_moe", "qwen3_moe"]
)
def test_experts_as_transformers_holds_them(family: str, tmp_path: Path) -> None:
    theirs = save_checkpoint(FAMILIES[family], tmp_path / "published")
    theirs.save_pretrained(tmp_path / "packed", save_original_format=False)
    names = [set(load_file(tmp_path / one / "model.safetensors")) for one in ("published", "packed")]
    assert names[0] != names[1]
    assert any(name.endswith(".experts.gate_up_proj") for name in names[1])
    logits = [load_model(tmp_path / one).prefill("a", PROMPT) for one in ("published", "packed")]
    assert torch.equal(*logits)


def test_layers_that_predict_further_ahead_are_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = save_checkpoint(FAMILIES["glm4_moe"], tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.2.eh_proj.weight": torch.ones(2, 2)}, file)
    with caplog.at_level(logging.WARNING, "paged"), torch.no_grad():
        assert_same_logits(load_model(tmp_path).prefill("a", PROMPT), theirs(torch.tensor([PROMPT])).logits[0, -1])
    assert (
        "1 tensors are not loaded, as text does not take them, model.layers.2.eh_proj.weight the first" in caplog.text
    )
    save_file(load_file(file) | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}, file)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.eh_proj\.weight: unexpected tensor"):
        load_model(tmp_path)


def test_keys_and_values_that_no_layer_has_are_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Published checkpoints hold them for layers that read another's."""
    theirs = save_checkpoint(FAMILIES["gemma4_shared_kv"], tmp_path)
    file, prefix = tmp_path / "model.safetensors", "model.layers.4.self_attn."
    names = [f"{prefix}{name}" for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight", "k_scale")]
    save_file(load_file(file) | {name: torch.ones(1) for name in names}, file)
    with caplog.at_level(logging.WARNING, "paged"), torch.no_grad():
        assert_same_logits(load_model(tmp_path).prefill("a", PROMPT), theirs(torch.tensor([PROMPT])).logits[0, -1])
    assert "4 tensors are not loaded, as text does not take them, model.layers.4.self_attn.k_norm" in caplog.text
    for name in ("model.layers.3.self_attn.q_bias", "model.layers.0.self_attn.k_taste"):
        save_file(load_file(file) | {name: torch.ones(1)}, file)
        with pytest.raises(CheckpointError, match=rf"{name}: unexpected tensor"):
            load_model(tmp_path)


def _text(name: str) -> dict[str, Any]:
    return FAMILIES[name].to_dict()


WRAPPED: dict[str, PreTrainedConfig] = {
    "gemma3": Gemma3Config(text_config=_text("gemma3"), vision_config=_VISION, mm_tokens_per_image=4),
    "gemma4_shared_kv": Gemma4Config(
        text_config=_text("gemma4_shared_kv"),
        vision_config={**_VISION, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64},
        audio_config=None,
        image_token_id=125,  # none of the prompt
        video_token_id=126,
        audio_token_id=127,
        pad_token_id=0,
    ),
    "llama4": Llama4Config(
        text_config=Llama4TextConfig(**_text("llama4")),
        vision_config={**_VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        tie_word_embeddings=False,
    ),
    "ministral3": Mistral3Config(
        text_config=_text("ministral3"), vision_config={**_VISION, "model_type": "pixtral", "head_dim": 16}
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("is_published", [True, False])
def test_text_part_of_a_model_that_reads_pictures(
    name: str, is_published: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    theirs = AutoModelForImageTextToText.from_config(WRAPPED[name], attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.1)
        expected = theirs(input_ids=torch.tensor([PROMPT])).logits[0]
    theirs.save_pretrained(tmp_path, save_original_format=is_published)
    with caplog.at_level(logging.WARNING, "paged"):
        model = load_model(tmp_path, num_blocks=32)
    assert "tensors are not loaded, as text does not take them" in caplog.text
    assert_same_logits(model.forward_verify("a", PROMPT), expected)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.taste_tower.weight": torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match=r"model\.taste_tower\.weight: unexpected tensor"):
        load_model(tmp_path)


def test_text_part_of_another_family() -> None:
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"model_type": "rwkv"}}
    with pytest.raises(UnsupportedError, match="with the text_config of 'rwkv'"):
        text_part(HfConfig(values, "config.json"))
