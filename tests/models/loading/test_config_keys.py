"""A key that changes what is computed is honoured, neutral, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from paged.errors import UnsupportedError
from paged.models.families.config_keys import COMPUTATION_KEYS, refuse_unread
from paged.models.loading.hf_config import HfConfig
from paged.models.registry import ARCHITECTURES, load_model, model_config
from paged.serving.command_line import cli
from tests.models.edits import assert_refused, edit_config
from tests.models.families import FAMILIES, assert_same_logits, logits_of, save_checkpoint, tokens

PROMPT = tokens(40)
# One of every family.
NAMES = (
    *("apertus", "arcee", "cohere2", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma", "gemma2", "gemma3"),
    *("gemma4_shared_kv", "glm", "glm4", "glm4_moe", "gpt_oss", "granite", "granite_moe_shared", "helium"),
    *("hunyuan_moe", "hunyuan_v1_dense", "llama", "llama4", "minimax_m2", "ministral", "ministral3", "mistral"),
    *("mixtral", "nemotron", "olmo2", "olmo3", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("seed_oss", "smollm3", "solar_open", "starcoder2"),
)
_LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + pair for pair in range(8)]}
_NO_YARN_FACTOR = {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 32}
_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}


@pytest.mark.parametrize("name", [*FAMILIES])
def test_no_key_of_a_familys_own_is_unknown(name: str) -> None:
    """transformers writes them all; only keys of others' code are to be told of."""
    values = json.loads(FAMILIES[name].to_json_string(use_diff=False))
    families = [key for key, one in ARCHITECTURES.items() if one.model_type == values["model_type"]]
    if families:  # else the text part of a multimodal one, which has its own test
        assert model_config(HfConfig(values | {"architectures": families}, "config.json"))[1].unknown_keys == ()


def test_keys_that_nothing_reads_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """When the model is loaded and when it is inspected, with values that can change something alone."""
    save_checkpoint(FAMILIES["llama"], tmp_path)
    load_model(tmp_path)
    assert caplog.messages == []
    edit_config(tmp_path, residual_gain=0.4, my_switch=False, summary_dropout=0.1)
    load_model(tmp_path)
    (message,) = caplog.messages
    assert "config.json: nothing reads residual_gain; " in message
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert "not read          residual_gain: " in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_honoured_or_refused(name: str) -> None:
    values = json.loads(FAMILIES[name].to_json_string(use_diff=False))
    families = [name for name, one in ARCHITECTURES.items() if one.model_type == values["model_type"]]
    assert len(families) == 1
    hf = HfConfig(values | {"architectures": families}, "config.json")
    _, config = model_config(hf)
    unread = COMPUTATION_KEYS - hf.read_keys
    assert len(unread) > 100
    for key in sorted(unread):
        # No value that is neutral for any key, and null, which is for all but one.
        with pytest.raises(UnsupportedError, match=rf"config.json: {key} = 'other' is not supported"):
            refuse_unread(HfConfig({key: "other"}, "config.json"), config)
        if key != "is_causal":
            refuse_unread(HfConfig({key: None}, "config.json"), config)
    refuse_unread(HfConfig({"foo": "other", "is_causal": True}, "config.json"), config)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("mistral", {"layer_types": ["sliding_attention", "sliding_attention"], "is_causal": True}),
        ("llama", {"sliding_window": 128, "layer_types": ["full_attention"] * 2, "foo": {"bar": 1}, "clip_qkv": None}),
        ("llama", {"logits_scaling": 1.0, "query_pre_attn_scalar": 32, "no_rope_layers": [1, 1], "num_experts": 0}),
        ("llama", {"rope_parameters": _NO_YARN_FACTOR}),
        ("llama", {"rope_parameters": {"rope_type": "default", "factor": 4.0}, "rope_theta": 50.0}),
        ("qwen2", _WINDOW | {"max_window_layers": 0}),
        ("qwen2", _WINDOW | {"sliding_window": None}),
        ("qwen2", {"attention_bias": True}),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}, "rope_theta": 60.0}),
        ("gemma3", {"final_logit_softcapping": 3.0}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}}),
        ("granite", {"rope_scaling": {"type": "linear", "factor": 3.0}}),
        ("glm4_moe", {"rope_parameters": None, "rope_theta": 100.0, "partial_rotary_factor": 0.25}),
        ("olmo3", {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": _LONG_ROPE | _FACTORS}),
        ("smollm3", {"no_rope_layers": None, "layer_types": None, "no_rope_layer_interval": 1}),
        ("qwen2_moe", _WINDOW | {"max_window_layers": 1}),
    ],
)
def test_what_transformers_makes_of_it(name: str, values: dict[str, Any], tmp_path: Path) -> None:
    """Values that are neutral, and those with a meaning of their own."""
    from transformers import AutoModelForCausalLM

    save_checkpoint(FAMILIES[name], tmp_path)
    # Absent, but for the null that is meant.
    dropped = [key for key, value in values.items() if value is None and key != "sliding_window"]
    edit_config(tmp_path, *dropped, **values)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert_same_logits(load_model(tmp_path, num_blocks=32).forward_verify("a", PROMPT), logits_of(theirs, PROMPT))


def test_two_names_of_a_family_that_differ(folder: Path) -> None:
    edit_config(folder, model_type="of_ones_own")
    load_model(folder)
    edit_config(folder, model_type="mistral")
    assert_refused(folder, r"model_type 'mistral', but architectures \['LlamaForCausalLM'\]", UnsupportedError)
