"""Multimodal models: find the family and the configuration of the text model inside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from paged.errors import UnsupportedError
from paged.kernels.core.errors import shown
from paged.models.families.network import Network
from paged.models.layers.config import DecoderConfig
from paged.models.loading.hf_config import HfConfig


class UnknownArchitectureError(UnsupportedError):
    """No family has an architecture of a config.json."""


# Multimodal architecture -> type of its text model if text_config does not name it. Other architectures need no entry.
WRAPPERS = {
    "DeepseekV41ForCausalLM": "deepseek_v41_text",
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Glm4vForConditionalGeneration": "glm4v_text",
    "Glm5NextForConditionalGeneration": "glm5_next_text",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe_text",
    "GlmOcrForConditionalGeneration": "glm_ocr_text",
    "InternVLForConditionalGeneration": "qwen2",
    "Llama4ForConditionalGeneration": "llama4_text",
    "LlavaForConditionalGeneration": "llama",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3_vl_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "MistralLarge4ForConditionalGeneration": "mistral_large4_text",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
    "Qwen4ExpForConditionalGeneration": "qwen4_exp_text",
}
# Published models without a text_config: their config.json has the text model's keys beside its own.
_FLAT = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
# Names of the text model's section; the last two come from authors' own code.
_SECTIONS = ("text_config", "language_config", "llm_config")
# Type of a text model that is a known family by another name -> the family, and values of keys that a file omits.
TYPES: dict[str, tuple[str, dict[str, float]]] = {
    "exaone4_5_text": ("exaone4", {}),  # first published name
    "gemma4_unified_text": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262_144, "sliding_window": 1024},
    ),
    "kimi_k2": ("deepseek_v3", {}),
    "minimax_m3_text": ("minimax_m3_vl_text", {}),
    "qwen2_5_omni_text": (
        "qwen2_5_vl_text",
        {
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "max_window_layers": 28,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
        },
    ),
    "qwen3_omni_moe_text": (
        "qwen3_moe",
        {
            "intermediate_size": 18_944,
            "norm_topk_prob": True,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "rope_theta": 1e6,
            "vocab_size": 3584,
        },
    ),
}
# Architectures whose forward differs from the text model's -> the difference.
_OTHER_FORWARDS = {
    "PI0ForConditionalGeneration": "the tokens of a prompt see each other both ways",
    "PaliGemmaForConditionalGeneration": "the tokens of a prompt see each other both ways",
}
# Architectures whose logits lack the factor and the soft cap of the text model, in transformers 5.23.
_PLAIN_HEADS = frozenset(
    """AyaVisionForConditionalGeneration Cohere2VisionForConditionalGeneration GraniteSpeechForConditionalGeneration
    GraniteSpeechPlusForConditionalGeneration LlavaForConditionalGeneration LlavaNextForConditionalGeneration
    LlavaNextVideoForConditionalGeneration LlavaOnevisionForConditionalGeneration
    Mistral3ForConditionalGeneration""".split()
)
# Architectures whose logits have the factor and the soft cap of the text model.
_SCALED_HEADS = frozenset(
    """Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration
    MistralLarge4ForConditionalGeneration""".split()
)


class _Placeholders(NamedTuple):
    """Tokens that pictures or sound replace. Without media, the model embeds a padding token for them.

    ids: key in config.json -> transformers' default for the token id.
    padding_key: key of the padding token in the text_config; None for token 0.
    """

    ids: Mapping[str, int]
    padding_key: str | None = None


_GEMMA4_IDS = {"image_token_id": 258_880, "video_token_id": 258_884, "audio_token_id": 258_881}
_PLACEHOLDERS = {
    **dict.fromkeys(
        ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
        _Placeholders(_GEMMA4_IDS, "pad_token_id"),
    ),
    **dict.fromkeys(
        ("GraniteSpeechForConditionalGeneration", "GraniteSpeechPlusForConditionalGeneration"),
        _Placeholders({"audio_token_index": 49_155}),
    ),
    **dict.fromkeys(
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        _Placeholders({"image_token_id": 163_605, "video_token_id": 163_840}),
    ),
    "KimiK3ForConditionalGeneration": _Placeholders({"media_placeholder_token_id": 163_605}),
}


def wrapper_of(hf: HfConfig, names: list[str]) -> str | None:
    """Return the architecture of a multimodal model whose config.json has a text model; None for other models.

    names: the architectures in `hf`, none of which is a text model's.

    Raises:
        UnsupportedError: the model computes text in another way than its text model.
    """
    for name in names:
        if name in _OTHER_FORWARDS:
            raise UnsupportedError(f"{hf.source}: architectures {name!r} are not supported: {_OTHER_FORWARDS[name]}")
        if name in WRAPPERS or _section(hf) is not None:
            return name
    return None


def text_part(
    hf: HfConfig, wrapper: str, families: Mapping[str, type[Network]], architectures: Mapping[str, type[Network]]
) -> tuple[type[Network], HfConfig]:
    """Return the family of a multimodal model's text part, and its section of config.json.

    families: by model_type. architectures: families by architecture.

    Raises:
        UnknownArchitectureError: there is no such family.
    """
    text = _section(hf)
    if text is None and wrapper in _FLAT:
        text = hf.overridden({"model_type": WRAPPERS[wrapper]})
    model_type = "none"
    family = None
    defaults: dict[str, float] = {}
    if text is not None:
        model_type = text.text("model_type", WRAPPERS.get(wrapper, "none"))
        if text.values.get("use_mla") is False:
            model_type = "deepseek_ocr2_text"  # published as "deepseek_v2"
        family_type, defaults = TYPES.get(model_type, (model_type, {}))
        family = families.get(family_type)
        for name in text.items("architectures", str):
            family = family or architectures.get(name)
    if text is None or family is None:
        raise UnknownArchitectureError(
            f"{hf.source}: architectures {wrapper!r} with the text_config of {shown(model_type)}"
        )
    # Settings of the complete model take precedence. Without a setting, the head is tied unless it has weights.
    outer = {key: hf.values[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in hf.values}
    tied = {"tie_word_embeddings": hf.flag("tie_word_embeddings", True)}
    return family, HfConfig({**defaults, **text.values, **outer, **tied, "model_type": family.model_type}, text.source)


def wrapped(config: DecoderConfig, wrapper: str, hf: HfConfig, text: HfConfig) -> DecoderConfig:
    """Return the configuration of a text model inside a multimodal one, whose head and embedding may differ.

    hf, text: config.json, and its section of the text model.

    Raises:
        CheckpointError: a token id is malformed.
        UnknownArchitectureError: the text model scales or caps its logits, and the multimodal one may not.
    """
    config = replace(config, wrapper=wrapper)
    if wrapper in _PLACEHOLDERS:
        config = _with_placeholders(config, _PLACEHOLDERS[wrapper], hf, text)
    if wrapper in _PLAIN_HEADS:
        return replace(config, logits_scale=1.0, logits_softcap=0.0)
    if wrapper in _SCALED_HEADS or (config.logits_scale == 1 and not config.logits_softcap):
        return config
    raise UnknownArchitectureError(
        f"{text.source}: architectures {wrapper!r} around a {config.model_type}, whose logits are scaled or capped"
    )


def _with_placeholders(
    config: DecoderConfig, placeholders: _Placeholders, hf: HfConfig, text: HfConfig
) -> DecoderConfig:
    ids: list[int] = []
    for key, default in placeholders.ids.items():
        if hf.values.get(key, default) is not None:
            ids.append(hf.integer(key, default, minimum=0))
    padding = 0
    if placeholders.padding_key is not None:
        padding = text.integer(placeholders.padding_key, 0, minimum=0, maximum=config.vocab_size - 1)
    return replace(config, placeholder_ids=tuple(ids), placeholder_padding=padding)


def _section(hf: HfConfig) -> HfConfig | None:
    thinker = hf.values.get("thinker_config")
    if isinstance(thinker, dict):  # the thinker of Qwen's Omni models; their talker makes speech
        hf = HfConfig(thinker, f"{hf.source}: thinker_config")
    for key in _SECTIONS:
        if isinstance(hf.values.get(key), dict):
            return hf.section(key)
    return None
