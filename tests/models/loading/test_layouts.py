"""One model under the names and in the shapes that different writers give its tensors."""

import json
import logging
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paged.errors import UnsupportedError
from paged.models.loading.hf_config import HfConfig
from paged.models.parallel.share import Share
from paged.models.registry import load_model, model_config
from tests.models.edits import WEIGHTS, Tensors, assert_refused, edit_config, edit_tensors
from tests.models.families import (
    FAMILIES,
    OF_TRANSFORMERS,
    PARTS,
    VARIANTS,
    VISION,
    assert_same_logits,
    logits_of,
    options,
    save_checkpoint,
    tokens,
    with_pictures,
)
from tests.models.parallel.parts import load_part

PROMPT = tokens(30)


def assert_unexpected(folder: Path, *names: str) -> None:
    """Each of these tensors, added to those before it, is refused."""
    for name in names:
        edit_tensors(folder, lambda t, name=name: t.update({name: torch.ones(1)}))  # type: ignore[misc]
        assert_refused(folder, rf"{name}: unexpected tensor")


# Families whose names in files differ from those of transformers' own parameters.
RENAMED = (
    *("ernie4_5_moe", "glm4_moe", "granite_moe_shared", "hy_v3", "laguna", "minimax_m2", "mixtral", "nemotron_h"),
    *("olmo_hybrid", "phimoe", "qwen2_moe", "qwen3_moe"),
)


@pytest.mark.parametrize(
    "name",
    [
        *RENAMED,
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in sorted({*OF_TRANSFORMERS, *VARIANTS} - {*RENAMED})
        ),
    ],
)
def test_names_of_transformers_own_parameters(name: str, tmp_path: Path) -> None:
    """The model has the same weights as by published names, and so has each of two ranks."""
    folders = published, own = tmp_path / "published", tmp_path / "own"
    theirs = save_checkpoint((FAMILIES | VARIANTS)[name], published)
    theirs.save_pretrained(own, save_original_format=False)
    assert name not in RENAMED or load_file(published / WEIGHTS).keys() != load_file(own / WEIGHTS).keys()
    assert_same_logits(*(load_model(folder).prefill("a", PROMPT) for folder in folders))
    for rank in range(2):
        try:
            parts = [load_part(folder, Share(rank, 2)).state_dict() for folder in folders]
        except UnsupportedError:
            assert name not in RENAMED
            continue
        assert parts[0].keys() == parts[1].keys()
        for parameter, weight in parts[0].items():
            assert torch.equal(weight, parts[1][parameter]), parameter


LAYERS = "model.layers."
# Published checkpoints hold keys and values for layers that read another's.
OTHERS_KV = [f"{LAYERS}4.self_attn.{name}" for name in ("k_norm.weight", "k_proj.weight", "v_proj.weight", "k_scale")]


@pytest.mark.parametrize(
    ("family", "left", "refused"),
    [
        ("ernie4_5_moe", ["model.mtp_emb_norm.0.weight"], ["model.mt.0.weight"]),  # layers that predict further ahead
        ("gemma4_shared_kv", OTHERS_KV, [f"{LAYERS}3.self_attn.q_bias", f"{LAYERS}0.self_attn.k_taste"]),
        ("glm4_moe", [f"{LAYERS}2.eh_proj.weight"], [f"{LAYERS}3.eh_proj.weight"]),  # likewise
    ],
)
def test_tensors_that_no_layer_has_are_left(
    family: str, left: list[str], refused: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = save_checkpoint(FAMILIES[family], tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({name: torch.ones(1) for name in left}))
    with caplog.at_level(logging.WARNING, "paged"):
        assert_same_logits(load_model(tmp_path).prefill("a", PROMPT), logits_of(theirs, PROMPT)[-1])
    assert f"{len(left)} tensors are not loaded, because text does not need them; first: {left[0]}" in caplog.text
    assert_unexpected(tmp_path, *refused)


def _wrapped(name: str) -> Any:
    """The configuration of a model that reads pictures, around a family's."""
    import transformers

    if name in PARTS:
        return with_pictures(name, PARTS[name].to_dict())
    text, vision = FAMILIES[name].to_dict(), options(VISION)
    if name == "gemma3":
        return transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    if name == "gemma4_shared_kv":
        vision |= options("num_key_value_heads=2 head_dim=16 position_embedding_size=64")
        ids = options("image_token_id=125 video_token_id=126 audio_token_id=127 pad_token_id=0")  # none of the prompt
        return transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **ids)
    if name == "llama4":
        vision |= options("vision_output_dim=32 projector_input_dim=32 projector_output_dim=32")
        own = transformers.Llama4TextConfig(**text)
        return transformers.Llama4Config(text_config=own, vision_config=vision, tie_word_embeddings=False)
    vision |= options("model_type='pixtral' head_dim=16")
    return transformers.Mistral3Config(text_config=text, vision_config=vision)


@pytest.mark.parametrize(
    ("name", "is_published"),
    [
        *product(["gemma3", "gemma4_shared_kv", "llama4", "ministral3"], [True, False]),
        *((name, True) for name in PARTS if name != "glm_ocr"),
        pytest.param("glm_ocr", True, marks=pytest.mark.thorough),  # glm4v without biases
        *(pytest.param(name, False, marks=pytest.mark.thorough) for name in PARTS),
    ],
)
def test_text_part_of_a_model_that_reads_pictures(
    name: str, is_published: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForImageTextToText

    theirs = AutoModelForImageTextToText.from_config(_wrapped(name), attn_implementation="eager").eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path, save_original_format=is_published)
    if name == "qwen3_vl_moe" and is_published:  # as published; transformers reads both and writes the other
        edit_tensors(tmp_path, lambda t: t.update({key: one.mT for key, one in t.items() if ".experts." in key}))
    with caplog.at_level(logging.WARNING, "paged"):
        model = load_model(tmp_path, num_blocks=32)
    assert "tensors are not loaded, because text does not need them" in caplog.text
    # Without a picture Llama 4 is its language model; the forward around it fails in transformers 5.24.
    text_model = theirs.language_model if name == "llama4" else theirs
    assert_same_logits(model.forward_verify("a", PROMPT), logits_of(text_model, PROMPT))
    names = " ".join(load_file(tmp_path / WEIGHTS))
    embedding = re.search(r"(\S*)(embed_tokens|tok_embeddings)\.weight", names)
    assert embedding is not None
    # Mistral's own names have no beginning for the text, so other parts may be beside its layers.
    layer = "layers.0." if embedding[2] == "tok_embeddings" else ""
    assert_unexpected(tmp_path, f"{embedding[1]}{layer}taste.weight")


# Beginnings of names where wrappers keep a text model's body and its head.
PLACES = [
    ("language_model.model.", "language_model."),
    ("model.language_model.", ""),
    ("model.text_model.", ""),
    ("thinker.model.", "thinker."),
    ("model.language_model.model.", "model.language_model."),
    ("model.", ""),
]


def _wrap(folder: Path, body: str, head: str) -> Any:
    """Save a random Llama as the text model of an unknown multimodal one; transformers' model of it."""
    theirs = save_checkpoint(FAMILIES["llama"], folder)

    def rename(tensors: Tensors) -> None:
        names = {name: name.replace("model.", body, 1) for name in tensors if name.startswith("model.")}
        for name, new_name in (names | {"lm_head.weight": f"{head}lm_head.weight"}).items():
            tensors[new_name] = tensors.pop(name)
        for name in ("tower.layers.0.self_attn.q_proj.weight", "talker.lm_head.weight"):
            tensors[name] = torch.ones(1)

    edit_tensors(folder, rename)
    text = json.loads((folder / "config.json").read_text())
    values = {"architectures": ["NewForConditionalGeneration"], "model_type": "new", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(values | {"text_config": text}))
    return theirs


@pytest.mark.parametrize(("body", "head"), PLACES)
def test_text_models_are_found_by_their_names(body: str, head: str, tmp_path: Path) -> None:
    theirs = _wrap(tmp_path, body, head)
    assert_same_logits(load_model(tmp_path, num_blocks=8).forward_verify("a", PROMPT), logits_of(theirs, PROMPT))
    prefix = head or body if body != "model." else ""
    norm = f"{body}layers.1.input_layernorm.weight"
    edit_tensors(tmp_path, lambda t: t.update({"put.away": t.pop(norm)}))
    message = rf"layers\.1\.input_layernorm\.weight: missing in .* \(text model under '{re.escape(prefix)}'\) \(1 of"
    assert_refused(tmp_path, message)
    edit_tensors(tmp_path, lambda t: t.update({norm: t.pop("put.away")}))
    assert_unexpected(tmp_path, f"{body}taste.weight", f"{body}layers.1.taste.weight")


def test_of_two_bodies_that_with_a_head_is_the_text_model(tmp_path: Path) -> None:
    """Qwen2.5-Omni, whose configuration does not say that the head has weights."""
    theirs = _wrap(tmp_path, "thinker.model.", "thinker.")
    edit_config(tmp_path, tie_word_embeddings=True)

    def add_talker(tensors: Tensors) -> None:
        del tensors["talker.lm_head.weight"]
        for name in list(tensors):
            if name.startswith("thinker.model."):
                tensors[name.replace("thinker.", "talker.")] = tensors[name] + 1

    edit_tensors(tmp_path, add_talker)
    assert_same_logits(load_model(tmp_path, num_blocks=8).forward_verify("a", PROMPT), logits_of(theirs, PROMPT))


def test_two_text_models_are_refused(tmp_path: Path) -> None:
    _wrap(tmp_path, "thinker.model.", "thinker.")
    copied = ("thinker.", "talker.")
    edit_tensors(tmp_path, lambda t: t.update({name.replace(*copied): t[name] for name in list(t)}))
    assert_refused(tmp_path, "text model: 12 of its tensors under both 'talker.' and 'thinker.', expected one place")


def test_logits_are_scaled_and_capped_as_in_the_whole_model() -> None:
    scaled = options("model_type='cohere2' logit_scale=0.5")
    capped = options("model_type='gemma4_text' final_logit_softcapping=30.0")
    for wrapper, text, expected in (
        ("AyaVisionForConditionalGeneration", scaled, (1.0, 0.0)),
        ("Gemma4ForConditionalGeneration", capped, (1.0, 30.0)),
    ):
        config = model_config(HfConfig({"architectures": [wrapper], "text_config": text}, "config.json"))[1]
        assert (config.logits_scale, config.logits_softcap) == expected
        values = {"architectures": ["NewForConditionalGeneration"], "text_config": text}
        with pytest.raises(UnsupportedError, match=r"around a \w+, whose logits are scaled or capped"):
            model_config(HfConfig(values, "config.json"))


def test_prompts_that_attend_both_ways_are_refused() -> None:
    values = {"architectures": ["PaliGemmaForConditionalGeneration"], "text_config": {"model_type": "gemma"}}
    with pytest.raises(UnsupportedError, match="the tokens of a prompt see each other both ways"):
        model_config(HfConfig(values, "config.json"))


def test_text_part_of_another_family() -> None:
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"model_type": "rwkv"}}
    with pytest.raises(UnsupportedError, match="with the text_config of 'rwkv'"):
        model_config(HfConfig(values, "config.json"))


def test_a_deepseek_v2_without_latents() -> None:
    """DeepSeek-OCR, whose language_config names no model_type."""
    sizes = options("hidden_size=1280 num_attention_heads=10 num_key_value_heads=10 num_hidden_layers=12 v_head_dim=0")
    latents = options("use_mla=False kv_lora_rank=None q_lora_rank=None qk_nope_head_dim=0 qk_rope_head_dim=0")
    experts = options("first_k_dense_replace=1 n_routed_experts=64 num_experts_per_tok=6 lm_head=True rm_head=False")
    text = {"architectures": ["DeepseekV2ForCausalLM"], **sizes, **latents, **experts}
    values = {**text, "architectures": ["DeepseekOCRForCausalLM"], "language_config": text}
    config = model_config(HfConfig(values, "config.json"))[1]
    assert (config.attention[0].latent, config.head_dim, config.unknown_keys) == (None, 128, ())
    assert [moe is None for moe in config.moe] == [True] + [False] * 11
