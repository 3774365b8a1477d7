"""Checkpoints with the settings of published models are inspected, load, and give transformers' logits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.errors import CheckpointError, InvalidInputError, PagedError, UnsupportedError
from paged.models.families.defaults import DEFAULTS
from paged.models.loading.checkpoint_folder import checkpoint_folder
from paged.models.loading.hf_config import HfConfig
from paged.models.registry import ARCHITECTURES, TEXT_PARTS, WRAPPERS, load_model, model_config
from paged.models.wrappers import TYPES
from paged.serving.command_line.checkpoint_summary import summarize
from tests.models.edits import Tensors, assert_refused, edit_config, edit_tensors
from tests.models.families import (
    FAMILIES,
    VARIANTS,
    assert_logits_of,
    assert_same_logits,
    config_mapping,
    logits_of,
    options,
    save_checkpoint,
    tokens,
    with_pictures,
)
from tests.models.published_settings.settings import PUBLISHED, published

PROMPT = tokens(40)
# At most so much of each, where it is said; windows and chunks shorter than the prompt.
_MOST = options(
    """vocab_size=128 vocab_size_per_layer_input=128 num_hidden_layers=4 intermediate_size=96 intermediate_size_mlp=96
    moe_intermediate_size=32 shared_expert_intermediate_size=48 shared_intermediate_size=48 num_experts=8
    hidden_size_per_layer_input=16 num_global_key_value_heads=1 num_local_experts=8 n_routed_experts=8
    num_experts_per_tok=3 experts_per_token=3 top_k_experts=3 sliding_window=8 sliding_window_size=8
    moe_num_experts=8 moe_k=3 attention_chunk_size=8 floor_scale=8 n_group=4 topk_group=2 block_ff_dim=96
    mamba_num_heads=8 mamba_head_dim=16 ssm_state_size=16 mamba_d_state=16 index_topk=16
    dense_intermediate_size=80 moe_latent_size=16 expert_hidden_dim=32 num_expert_group=4 num_experts_per_token=3"""
)

# Families whose layers others have too.
_SAME_LAYERS = (
    *(
        "Arcee",
        "CohereFor",
        "Dots1",
        "Ernie4_5For",
        "ExaoneMoe",
        "Gemma3ForConditional",
        "GemmaFor",
        "Glm4v",
        "HYV3",
        "Helium",
    ),
    *("HunYuanDense", "InternVL", "Llava", "Olmoe", "Qwen2_5", "SeedOss", "SolarOpen"),
    *("DeepseekOcr2", "Exaone4_5", "GlmOcr", "KimiK25", "SmolVLM"),
)


def scaled(values: dict[str, Any], model_type: str) -> dict[str, Any]:
    """A model of the same settings that is made fast: what `_MOST` says, fewer heads in groups of the same size, the
    same head size where one is said, and as many layers as show all kinds."""
    own = {
        key: min(value, _MOST[key]) if key in _MOST and type(value) is int else value for key, value in values.items()
    }
    pattern = values.get("hybrid_override_pattern", "")
    kinds = list(pattern) or values.get("layers_block_type")
    if kinds is None:
        every_sixth = ["", "", "", "", "", "seen"] if model_type in ("bailing_hybrid", "gemma3_text") else []
        kinds = values.get("layer_types", every_sixth)
    layers = max([4, *(1 + kinds.index(kind) for kind in kinds)])
    if values.get("num_kv_shared_layers"):
        layers, own["num_kv_shared_layers"] = 2 * layers, layers
    own |= {"num_hidden_layers": layers, **({"hybrid_override_pattern": pattern[:layers]} if pattern else {})}
    for key, value in values.items():
        if isinstance(value, list) and len(value) in (values["num_hidden_layers"], len(kinds)):
            own[key] = value[:layers]
    head_dim, heads = values.get("head_dim") or DEFAULTS[model_type]["head_dim"], values.get("num_attention_heads")
    if heads is not None:
        of_kv = values.get("num_key_value_heads") or heads
        kv_heads = 1 if of_kv == 1 or heads // of_kv > 4 else 2
        own["num_attention_heads"] = heads // of_kv * kv_heads
        if "num_key_value_heads" in values:
            own["num_key_value_heads"] = kv_heads
        if "swa_num_key_value_heads" in values:
            own |= {"swa_num_key_value_heads": 2 * kv_heads, "swa_num_attention_heads": own["num_attention_heads"]}
    if model_type == "dots3_note_text":
        own |= {"swa_num_key_value_heads": 4, "swa_num_attention_heads": 4}
    if model_type == "glm5_next_text":
        own |= {"linear_num_heads": 4, "linear_head_dim": 16}
    if "linear_attn_config" in values:
        linear = values["linear_attn_config"]
        kept = {key: [one for one in linear[key] if one <= layers] for key in ("full_attn_layers", "kda_layers")}
        own["linear_attn_config"] = linear | kept | {"num_heads": 4, "head_dim": 16}
    if "sparse_attention_config" in values:
        section = dict(values["sparse_attention_config"])
        for key in ("sparse_disable_index_value", "sparse_attention_freq"):
            section[key] = section[key][:layers]
        section |= {"sparse_num_index_heads": own["num_key_value_heads"], "sparse_block_size": 8}
        own["sparse_attention_config"] = section | {"sparse_topk_blocks": 2}
    if model_type == "deepseek_v4":
        own |= {"compress_ratios": [0, 4, 128, 4], "num_attention_heads": 8, "q_lora_rank": 24, "index_topk": 3}
        own |= {"o_groups": 2, "o_lora_rank": 16}
    if "attn_layer_indices" in values:
        own["attn_layer_indices"] = [1]
    if model_type == "qwen4_exp_text":
        own |= {"ngram_vocab_size_base": 50, "split_ngram_parts": 3, "eos_token_id": 88, "indexer_budget": 8}
        own |= {"ple_embed_dim": 64, "indexer_n_heads": 16, "linear_num_value_heads": 32}
    if model_type == "rwkv7":
        own |= {"num_heads": 4, "value_dim": [64] * layers}
    if model_type == "mamba2":
        own |= {"num_heads": 8, "head_dim": 16, "state_size": 16}
    if model_type == "olmo_hybrid":
        own |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    is_derived = head_dim is None or model_type in ("cohere2", "helium")
    size = (head_dim or values["hidden_size"] // heads) if is_derived else 16
    count = own.get("num_attention_heads", 4)  # of which transformers takes multiples alone
    own["hidden_size"] = count * size if is_derived or 64 % count else 64
    if "mamba_n_heads" in values:
        of_heads = values.get("mamba_d_ssm", values["mamba_expand"] * own["hidden_size"])
        own["mamba_n_heads"], own["mamba_d_head"] = 8, of_heads // 8
    return own


def _wrapper_type(architecture: str) -> str:
    """transformers' model_type of a model that reads pictures."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if architecture == "MiniMaxM3SparseForConditionalGeneration":  # published; transformers' class has another name
        return "minimax_m3_vl"
    name = architecture.removesuffix("ForConditionalGeneration").lower().replace("_", "")
    return next(key for key in CONFIG_MAPPING if key.replace("_", "") == name)


def save_published(name: str, folder: Path) -> Any:
    """A random checkpoint of a row with config.json and names of tensors as published; transformers' model of it."""
    architecture, text_type, values = published(name)
    model_type = text_type or ARCHITECTURES[architecture].model_type
    values = scaled(values, model_type)
    tuned = {key: bool(values[key]) for key in ("attn_temperature_tuning",) if key in values}  # published as a number
    changed = {"pad_token_id": None, "initializer_range": 1.6 * values["hidden_size"] ** -0.5}  # 0.02: logits near 0
    config: Any = config_mapping()[model_type].from_dict(json.loads(json.dumps(values | tuned | changed)))
    if model_type in TEXT_PARTS:
        config = with_pictures(_wrapper_type(architecture), config.to_dict())
    theirs = save_checkpoint(config, folder)
    written = {"architectures": [architecture], "torch_dtype": "bfloat16"}
    if text_type is None:
        written |= {"model_type": model_type, **values}
    elif model_type in TEXT_PARTS:  # Qwen2-VL says all beside each other
        is_flat, sections = architecture.startswith("Qwen2"), {"vision_config": {"hidden_size": 8}}
        text = {"model_type": text_type, **values}
        written |= sections | (values if is_flat else {"text_config": text})
        written |= {"model_type": _wrapper_type(architecture), "tie_word_embeddings": values["tie_word_embeddings"]}
    else:
        written |= {"text_config": {"model_type": text_type, **values}, "vision_config": {"hidden_size": 8}}
        own = {key: values[key] for key in ("tie_word_embeddings",) if key in values}
        written |= {"model_type": text_type.partition("_")[0], **own}

        def rename(tensors: Tensors) -> None:
            for tensor in list(tensors):
                tensors[f"language_model.{tensor}"] = tensors.pop(tensor)
            tensors["vision_tower.weight"] = torch.zeros(1)

        edit_tensors(folder, rename)
    (folder / "config.json").write_text(json.dumps(written))
    return theirs


# Text parts that transformers has no class for; their own tests have the published settings.
_BY_FORMULA = {"DeepseekV41ForCausalLM": "deepseek_v41_text"}
_FIRST = {published(name)[0]: name for name in reversed(PUBLISHED)}.values()  # of each architecture


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in _FIRST and not published(name)[0].startswith(_SAME_LAYERS)
        else pytest.param(name, marks=pytest.mark.thorough)
        for name in PUBLISHED
    ],
)
def test_published_settings(name: str, tmp_path: Path) -> None:
    theirs = save_published(name, tmp_path)
    summary = summarize(tmp_path)
    assert summary["reason"] is None
    assert summary["unknown_keys"] == []
    assert summary["missing"] == ["tokenizer.json"]
    model = load_model(tmp_path, dtype=torch.float32, max_seq_len=64)
    assert_logits_of(model.forward_verify("a", PROMPT), theirs, PROMPT)


def test_published_rows_are_of_all_families() -> None:
    of_text = {family.model_type: name for name, family in ARCHITECTURES.items()} | {one: one for one in TEXT_PARTS}
    rows = [published(name)[:2] for name in PUBLISHED]
    known = {of_text[text] if text else name for name, text in rows} | {*_BY_FORMULA.values()}
    assert known == {*ARCHITECTURES, *TEXT_PARTS}
    assert {name for name, text in rows if text} >= WRAPPERS.keys() - _BY_FORMULA
    assert len(rows) >= 60


def _json(config: Any) -> dict[str, Any]:
    """Infinity as itself, not as the object that transformers writes and does not read."""
    values: dict[str, Any] = json.loads(
        config.to_json_string(use_diff=False),
        object_hook=lambda one: float(one["__float__"]) if "__float__" in one else one,
    )
    return values


def _read(values: dict[str, Any]) -> Any:
    """The configuration, or how it is refused."""
    try:
        return model_config(HfConfig(values, "config.json"))[1]
    except PagedError as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
@pytest.mark.thorough
def test_absent_and_null_keys_mean_what_they_mean_in_transformers(name: str) -> None:
    """Each key in turn left out, and null, where transformers takes that."""
    config = (FAMILIES | VARIANTS)[name]
    values = _json(config)
    values["architectures"] = [key for key, one in ARCHITECTURES.items() if one.model_type == config.model_type]
    compared = 0
    for key in values.keys() - {"architectures", "model_type"}:
        for changed in ({**values, key: None}, {one: values[one] for one in values if one != key}):
            if key == "qk_rope_head_dim":  # head_dim repeats it, and another one is refused
                changed.pop("head_dim", None)
            try:
                theirs = _json(type(config).from_dict(json.loads(json.dumps(changed))))
            except Exception:  # it refuses the value, in ways that differ by key
                continue
            assert _read(changed) == _read(theirs | {"architectures": values["architectures"]}), key
            compared += 1
    assert compared > 30


_LINEAR = {"rope_type": "linear", "factor": 2.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_BY_KIND = {"full_attention": _LINEAR, "sliding_attention": {"rope_type": "default"}}
_ROPES: list[dict[str, Any]] = [
    {"rope_theta": 777.0},
    {"rope_theta": 777.0, "rope_scaling": None},
    {"rope_theta": 777, "partial_rotary_factor": 0.5},
    *({"rope_scaling": one} for one in (_LINEAR, _YARN, _YARN | {"factor": None}, _LLAMA3)),
    {"rope_theta": 777, "rope_scaling": _LINEAR},
    {"rope_local_base_freq": 555.0, "rope_theta": 777.0, "rope_scaling": _LINEAR},
    *({"rope_parameters": one} for one in (None, {}, {"rope_type": "default"}, {"rope_theta": 777.0}, _LINEAR, _YARN)),
    {"rope_theta": 777.0, "rope_parameters": _LINEAR},
    {"rope_parameters": _LINEAR | {"rope_theta": None}},
    {"rope_theta": 777.0, "rope_scaling": _LINEAR, "rope_parameters": {"rope_theta": 555.0}},
    {"rope_parameters": {"partial_rotary_factor": 0.5}},
    {"rope_parameters": _BY_KIND},
    {"rope_theta": 777.0, "rope_parameters": _BY_KIND},
    {"rope_parameters": {"full_attention": _LINEAR, "sliding_attention": None}},
]
_ROPE_KEYS = {"rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"}


# Of Laguna and LFM3, and of dots3-note in its own form, transformers reads `rope_parameters` alone. Later models of
# MiMo-V2 have another rope_theta. Ling's original length is transformers' default, whatever the file says.
_OTHER_ROTATIONS = ("bailing_hybrid", "dots3_note", "laguna", "lfm3", "mimo_v2_flash")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in _OTHER_ROTATIONS])
@pytest.mark.thorough
def test_rotations_mean_what_transformers_makes_of_them(name: str) -> None:
    """What says nothing of some of their numbers takes the family's."""
    config = FAMILIES[name]
    plain = {key: value for key, value in _json(config).items() if key not in _ROPE_KEYS}
    plain["architectures"] = [key for key, one in ARCHITECTURES.items() if one.model_type == config.model_type]
    compared = 0
    for rope in _ROPES:
        try:
            theirs = _json(type(config).from_dict(json.loads(json.dumps(plain | rope))))
        except Exception:  # it refuses the values, in ways that differ by family
            continue
        mine, expected = _read(plain | rope), _read(theirs | {"architectures": plain["architectures"]})
        assert mine == expected or (isinstance(mine, tuple) and isinstance(expected, tuple)), rope
        compared += 1
    assert compared >= 8


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_empty_config_is_transformers_default(architecture: str) -> None:
    own = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type}
    if own["model_type"] == "glm4_moe":
        own["head_dim"] = 128  # its default is 42, of which half cannot rotate
    assert _read(own) == _read(_json(config_mapping()[own["model_type"]]()) | own)


def test_defaults_are_those_of_transformers_classes() -> None:
    """All but rotations and derived values, which the test of an empty config.json compares."""
    mapping = config_mapping()
    compared = 0
    for model_type in DEFAULTS.keys() & mapping.keys():
        config_class = mapping[model_type]
        for key, value in DEFAULTS[model_type].items():
            field = config_class.__dataclass_fields__.get(config_class.attribute_map.get(key, key))
            if field is None or value is None or key == "rope_parameters":
                continue
            assert field.default == value, (model_type, key)
            compared += 1
    assert compared > 700


@pytest.mark.parametrize("wrapper", [wrapper for wrapper in WRAPPERS if wrapper not in _BY_FORMULA])
def test_an_empty_text_config_is_transformers_default(wrapper: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # The default head size of GLM-4.5V is 42, of which half cannot rotate.
    given = {"head_dim": 128} if wrapper.startswith("Glm4vMoe") else {}
    text = CONFIG_MAPPING[_wrapper_type(wrapper)](text_config=given).text_config
    found, expected = (_read({"architectures": [wrapper], "text_config": one}) for one in (given, _json(text)))
    assert found == expected
    assert found.model_type == text.model_type


@pytest.mark.parametrize("text_type", TYPES)
def test_other_names_of_text_models(text_type: str) -> None:
    """An empty text_config is transformers' default; it does not have all of the names."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values: dict[str, Any] = {"architectures": ["NewForConditionalGeneration"]}
    head = {"head_dim": 128}  # the default of Qwen3-Omni is 73, which cannot rotate
    given: Any = _read(values | {"text_config": {"model_type": text_type, **head}})
    assert given.model_type == TYPES[text_type][0]
    if text_type in CONFIG_MAPPING:
        text = _json(CONFIG_MAPPING[text_type]()) | head
        assert given == _read(values | {"thinker_config": {"text_config": text}})


@pytest.mark.parametrize(
    ("name", "stacked"),
    [
        ("llama4", r"(.*\.experts)\.(gate_up|down)_proj"),
        ("gemma4_moe", r"(.*\.experts)\.(gate_up|down)_proj"),
        ("granite_moe_shared", r"(.*\.block_sparse_moe)\.(input|output)_linear\.weight"),
    ],
)
def test_experts_one_tensor_a_projection(name: str, stacked: str, tmp_path: Path) -> None:
    """As files are quantised: in the layout of every other family."""
    expected = logits_of(save_checkpoint(FAMILIES[name], tmp_path), PROMPT)

    def split(tensors: Tensors) -> None:
        found = [match for match in (re.fullmatch(stacked, key) for key in list(tensors)) if match]
        assert found
        for match in found:
            prefix = match[1].removesuffix(".experts") + ".experts"
            for expert, weight in enumerate(tensors.pop(match[0])):
                weight = weight.T if name == "llama4" else weight
                parts = weight.chunk(2) if match[2] in ("gate_up", "input") else [weight]
                for part, kind in zip(parts, ("gate", "up") if len(parts) == 2 else ("down",), strict=True):
                    tensors[f"{prefix}.{expert}.{kind}_proj.weight"] = part

    edit_tensors(tmp_path, split)
    assert summarize(tmp_path)["reason"] is None
    assert_same_logits(load_model(tmp_path, num_blocks=32).forward_verify("a", PROMPT), expected)
    edit_tensors(tmp_path, lambda tensors: tensors.pop(next(key for key in tensors if ".experts.1." in key)))
    assert_refused(tmp_path, r"experts\.1\.\w+\.weight: missing")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "Qwen/Qwen2.5-7B-Instruct"])
def test_yarn_that_is_switched_on_by_hand_stretches_the_longest_sequence(name: str, tmp_path: Path) -> None:
    save_published(f"{name} with YaRN", tmp_path)
    assert summarize(tmp_path)["max_seq_len"] == 4 * 32768
    assert load_model(tmp_path, num_blocks=8).config.max_seq_len == 4 * 32768
    edit_config(tmp_path, "rope_scaling")
    assert summarize(tmp_path)["max_seq_len"] == (40960 if "Qwen3" in name else 32768)


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_a_soft_cap_of_zero_is_refused(key: str, tmp_path: Path) -> None:
    """transformers divides by it: the scores are all alike, the logits all 0, or NaN."""
    save_checkpoint(FAMILIES["gemma2"], tmp_path)
    edit_config(tmp_path, **{key: 0.0})
    message = f"{key} = 0.0 is not supported: transformers divides by it; null means no cap"
    assert message in assert_refused(tmp_path, message, UnsupportedError)
    assert summarize(tmp_path)["reason"] == message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "; its keys are a Llama's: only the architecture's code differs"),
        (
            {"residual_dropout": 0.1, "attention_out_bias": False, "use_cache": True},
            "only the architecture's code differs",
        ),
        (
            {"residual_connection": "hyper", "qkv_bias": True},
            "unlike a Llama: qkv_bias = True; unknown here: residual_",
        ),
    ],
)
def test_an_unknown_architecture_is_told_by_its_keys(changed: dict[str, Any], message: str, folder: Path) -> None:
    edit_config(folder, architectures=["SomeForCausalLM"], **changed)
    assert_refused(folder, re.escape(message), UnsupportedError)


@pytest.mark.parametrize(
    ("present", "message"),
    [
        (["model-Q4_K_M.gguf", "tokenizer.json"], "GGUF, the format of llama.cpp: give the safetensors folder"),
        (
            ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"],
            "an adapter, not a model: load its base model",
        ),
        (["tokenizer.json", "tokenizer_config.json"], "only a tokenizer: give the folder of the model"),
        (["params.json", "consolidated.00.pth"], "the authors' own layout"),
    ],
)
def test_folders_that_hold_something_else(present: list[str], message: str, tmp_path: Path) -> None:
    for name in present:
        (tmp_path / name).touch()
    assert_refused(tmp_path, f"config.json: missing; this is {message}")
    with pytest.raises(CheckpointError, match=message):
        checkpoint_folder(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        summarize(tmp_path)


def test_files_in_place_of_folders(folder: Path) -> None:
    weights = (folder / "model.safetensors").rename(folder / "model.gguf")
    assert_refused(folder, "there is neither; this is GGUF")
    assert_refused(weights, "missing; this is GGUF")
    assert_refused(folder / "config.json", "missing; this is a file: give the folder")
    with pytest.raises(InvalidInputError, match=r"a file, expected a folder .*; this is GGUF"):
        checkpoint_folder(weights)
