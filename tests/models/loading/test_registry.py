"""Which config.json makes a model, and which is refused by name."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paged.errors import CheckpointError, InvalidInputError, PagedError, UnsupportedError
from paged.models.registry import load_model
from tests.models.families import FAMILIES, assert_same_logits, save_checkpoint, tokens


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "copy"))


def edit_config(folder: Path, *dropped: str, **values: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in config.items() if key not in dropped}))


def test_what_a_model_says_of_itself(llama_folder: Path) -> None:
    model = load_model(llama_folder)
    config = model.config
    assert (config.hidden_size, config.num_layers, config.vocab_size, config.max_seq_len) == (64, 2, 128, 128)
    assert (config.num_kv_heads, config.head_dim, model.num_attention_heads) == (2, 32, 4)
    assert (model.model_type, model.dtype) == ("llama", torch.float32)
    # Embedding and head; then a layer's q and o, k and v, MLP, two norms; then the final norm.
    layer = 2 * 128 * 64 + 2 * 64 * 64 + 3 * 96 * 64 + 2 * 64
    assert model.num_parameters() == 2 * 128 * 64 + 2 * layer + 64


def test_cache_on_a_cpu_holds_four_sequences(llama_folder: Path) -> None:
    assert load_model(llama_folder, device="cpu").kv_capacity() == 4 * 128
    assert load_model(llama_folder, device="cpu", max_seq_len=20, block_size=8).kv_capacity() == 4 * 24
    assert load_model(llama_folder, device="cpu", num_blocks=5).kv_capacity() == 5 * 16


@pytest.mark.usefixtures("_fast")
def test_dtype_is_the_checkpoints_unless_given(folder: Path) -> None:
    wide = load_model(folder).prefill("a", tokens(9))
    narrow = load_model(folder, dtype=torch.bfloat16)
    logits = narrow.prefill("a", tokens(9))
    assert narrow.kv_manager.k_cache(0).dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    # bfloat16 keeps 8 bits; a factor of 10 for two layers of roundings.
    assert float((logits - wide).abs().max() / wide.abs().max()) < 10 * 2**-8
    edit_config(folder, "dtype", torch_dtype="float16")
    assert load_model(folder).dtype == torch.float16


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize("family", ["gpt_oss", "llama3_rope", "llama_biases_linear_rope"])
def test_rope_as_written_before_transformers_5(family: str, tmp_path: Path) -> None:
    save_checkpoint(FAMILIES[family], tmp_path)
    expected = load_model(tmp_path).prefill("a", tokens(40))
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    edit_config(tmp_path, "rope_parameters", rope_theta=theta, rope_scaling=rope)
    assert torch.equal(load_model(tmp_path).prefill("a", tokens(40)), expected)
    rope["type"] = rope.pop("rope_type")
    edit_config(tmp_path, rope_scaling=rope)
    assert torch.equal(load_model(tmp_path).prefill("a", tokens(40)), expected)
    edit_config(tmp_path, rope_scaling=None)
    assert not torch.allclose(load_model(tmp_path).prefill("a", tokens(40)), expected, atol=1e-3)


@pytest.mark.usefixtures("_fast")
def test_gemma3_as_published(tmp_path: Path) -> None:
    """Two bases and one scaling, a period in place of layer_types, and no word of the head, which is tied."""
    save_checkpoint(FAMILIES["gemma3"], tmp_path)
    expected = load_model(tmp_path).prefill("a", tokens(40))
    edit_config(
        tmp_path,
        *("rope_parameters", "layer_types", "tie_word_embeddings"),
        rope_theta=10000.0,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        sliding_window_pattern=2,
    )
    assert torch.equal(load_model(tmp_path).prefill("a", tokens(40)), expected)
    edit_config(tmp_path, rope_local_base_freq=10000.0)
    assert not torch.allclose(load_model(tmp_path).prefill("a", tokens(40)), expected, atol=1e-3)


@pytest.mark.usefixtures("_fast")
def test_gpt_oss_without_layer_types(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["gpt_oss"], tmp_path)
    expected = load_model(tmp_path).prefill("a", tokens(40))
    edit_config(tmp_path, "layer_types", "attention_bias")
    assert torch.equal(load_model(tmp_path).prefill("a", tokens(40)), expected)
    edit_config(tmp_path, layer_types=["full_attention", "sliding_attention"])
    assert not torch.allclose(load_model(tmp_path).prefill("a", tokens(40)), expected, atol=1e-3)


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen2"])
def test_bfloat16_is_as_close_as_in_transformers(family: str, tmp_path: Path) -> None:
    """Both are compared with float32; weights of norms that bfloat16 cannot hold next to 1 keep their bits."""
    theirs = save_checkpoint(deepcopy(FAMILIES[family]), tmp_path)
    with torch.no_grad():
        if family == "gemma3":
            for name, parameter in theirs.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.copy_(torch.randn(parameter.shape) / 512)
        theirs.bfloat16().save_pretrained(tmp_path)
        wide, narrow = (
            AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager")(
                torch.tensor([tokens(40)])
            )
            .logits[0]
            .float()
            for dtype in (torch.float32, torch.bfloat16)
        )
    model = load_model(tmp_path)
    assert model.dtype == torch.bfloat16
    ours = model.forward_verify("a", tokens(40)).cpu()
    error, their_error = (float((logits - wide).norm() / wide.norm()) for logits in (ours, narrow))
    assert error < 1.25 * their_error
    if family == "gemma3":
        stored = theirs.model.layers[1].self_attn.k_norm.weight.bfloat16()
        held = model.network.layers[1].self_attn.k_norm.weight.cpu()
        assert torch.equal(held, 1 + stored.float())
        assert not torch.equal(held, held.bfloat16().float())


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize(
    "values",
    [
        {"beta_fast": 4.0, "beta_slow": 2.0},
        {"beta_fast": 2.0, "beta_slow": 4.0},  # in reverse, which is computed all the same
        {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
        {"original_max_position_embeddings": 4},  # all pairs lie beyond both ends
        {"truncate": None},
        {"truncate": False},
        {"attention_factor": 0.5},
        {"mscale": 2.0, "mscale_all_dim": 0.5},
        {},
    ],
)
def test_options_of_yarn(values: dict[str, Any], tmp_path: Path) -> None:
    config = deepcopy(FAMILIES["qwen2"])
    config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, **values}
    theirs = save_checkpoint(config, tmp_path)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens(40)])).logits[0, -1]
    assert_same_logits(load_model(tmp_path).prefill("a", tokens(40)), expected)


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize("values", [{"rope_parameters": {}}, {"rope_parameters": None}, {"rope_scaling": {}}])
def test_a_rotation_that_says_nothing(values: dict[str, Any], tmp_path: Path) -> None:
    """Parameters that are empty are those of a plain rotation, and none at all those of the family."""
    save_checkpoint(FAMILIES["gpt_oss"], tmp_path)
    edit_config(tmp_path, "rope_parameters")
    edit_config(tmp_path, **values)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens(40)])).logits[0, -1]
    assert_same_logits(load_model(tmp_path).prefill("a", tokens(40)), expected)


@pytest.mark.usefixtures("_fast")
def test_layer_types_say_which_layers_have_a_window(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["qwen3_window_in_one_layer"], tmp_path)
    expected = load_model(tmp_path).prefill("a", tokens(40))
    # What older files do without: max_window_layers decides.
    edit_config(tmp_path, "layer_types")
    assert torch.equal(load_model(tmp_path).prefill("a", tokens(40)), expected)
    edit_config(tmp_path, layer_types=["sliding_attention", "full_attention"])
    assert not torch.allclose(load_model(tmp_path).prefill("a", tokens(40)), expected, atol=1e-3)
    edit_config(tmp_path, layer_types=["sliding_attention", "linear_attention"])
    with pytest.raises(
        UnsupportedError, match="layer type 'linear_attention', known are full_attention, sliding_attention"
    ):
        load_model(tmp_path)
    edit_config(tmp_path, layer_types=["full_attention"])
    with pytest.raises(CheckpointError, match="1 layer_types for 2 layers"):
        load_model(tmp_path)


def test_number_of_experts_as_published(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["qwen3_moe"], tmp_path)
    edit_config(tmp_path, "num_local_experts", num_experts=4)
    load_model(tmp_path)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            UnsupportedError,
            r"\['GPT2LMHeadModel'\], known are .*LlamaForCausalLM, ",
        ),
        ({"architectures": None}, UnsupportedError, r"architectures \[\], known are .*LlamaForCausalLM"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, UnsupportedError, "Gemma3ForConditionalGeneration"),
        ({"hidden_act": "relu"}, UnsupportedError, "activation 'relu', known are silu, swish, gelu"),
        ({"quantization_config": {"bits": 4}}, CheckpointError, "quant_method is missing"),
        ({"quantization_config": {"quant_method": "aqlm"}}, UnsupportedError, "quant_method = 'aqlm' is not supported"),
        ({"dtype": "float8_e4m3fn"}, UnsupportedError, "dtype 'float8_e4m3fn', known are float32, float16, bfloat16"),
        (
            {"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4, "factor": 4.0}},
            UnsupportedError,
            "rope type 'ntk', known are default, dynamic, mrope, linear, llama3, longrope, yarn",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, UnsupportedError, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_type": "linear"}}, CheckpointError, "factor is missing"),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            CheckpointError,
            "low_freq_factor 4.0 is not below high_freq_factor 4.0",
        ),
        ({"hidden_size": None}, CheckpointError, "hidden_size is missing, expected a positive integer"),
        ({"hidden_size": "64"}, CheckpointError, "hidden_size = '64', expected a positive integer"),
        ({"num_hidden_layers": 0}, CheckpointError, "num_hidden_layers = 0"),
        ({"num_hidden_layers": True}, CheckpointError, "num_hidden_layers = True"),
        ({"num_key_value_heads": 3}, CheckpointError, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"tie_word_embeddings": 1}, CheckpointError, "tie_word_embeddings = 1, expected true or false"),
        ({"head_dim": 16}, CheckpointError, r"q_proj.weight: shape|k_proj.weight: shape|o_proj.weight: shape"),
    ],
)
def test_configurations_that_are_refused(
    folder: Path, values: dict[str, Any], error: type[PagedError], message: str
) -> None:
    load_model(folder)
    edit_config(folder, **values)
    with pytest.raises(error, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("family", "values", "error", "message"),
    [
        (
            "gemma3",
            {"attn_logit_softcapping": 50.0},
            UnsupportedError,
            "attn_logit_softcapping = 50.0 is not supported",
        ),
        ("gemma3", {"num_kv_shared_layers": 1}, UnsupportedError, "num_kv_shared_layers = 1 is not supported"),
        (
            "gemma4_moe",
            {"use_bidirectional_attention": "all"},
            UnsupportedError,
            "use_bidirectional_attention 'all', only vision is known",
        ),
        ("gemma4_moe", {"top_k_experts": 5}, CheckpointError, "top_k_experts = 5, expected at most 4"),
        (
            "gemma4_moe",
            {"per_layer_config": {"1": {"taste": 1}}},
            UnsupportedError,
            "per_layer_config: 'taste', known are",
        ),
        ("gemma4_shared_kv", {"num_kv_shared_layers": 3}, CheckpointError, "no layer has keys and values for layer 2"),
        ("gemma4_shared_kv", {"num_kv_shared_layers": 5}, CheckpointError, "= 5, expected at most 4"),
        (
            "gemma4_shared_kv",
            {"per_layer_config": {"4": {"head_dim": 24}}},
            CheckpointError,
            "layer 4 reads K/V of layer 2, whose KV heads, sizes and window are",
        ),
        ("gemma4_shared_kv", {"vocab_size_per_layer_input": 127}, CheckpointError, "input 127, expected at least 128"),
        ("glm4_moe", {"topk_group": 5}, CheckpointError, "5 of 4 groups of 8 experts"),
        ("glm4_moe", {"num_experts_per_tok": 5}, CheckpointError, "num_experts_per_tok = 5, expected at most 4"),
        ("minimax_m2", {"scoring_func": "softmax"}, UnsupportedError, "scoring_func 'softmax', only sigmoid is known"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 1.5}}, UnsupportedError, "partial_rotary_factor 1.5"),
        ("smollm3", {"no_rope_layers": [1]}, CheckpointError, r"no_rope_layers \[1\], expected 0 or 1 for 2 layers"),
        (
            "gemma3",
            {"use_bidirectional_attention": True},
            UnsupportedError,
            "use_bidirectional_attention = True is not",
        ),
        ("gemma3", {"hidden_activation": "relu"}, UnsupportedError, "activation 'relu', known are"),
        ("gemma3", {"layer_types": ["full_attention"]}, CheckpointError, "1 layer_types for 2 layers"),
        ("gpt_oss", {"swiglu_limit": 5.0}, UnsupportedError, "swiglu_limit 5.0, only 7.0 is known"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, UnsupportedError, "swiglu_alpha 1.0, only 1.702 is known"),
        ("gpt_oss", {"num_local_experts": None}, CheckpointError, "num_local_experts is missing"),
        ("qwen2", {"use_sliding_window": 1}, CheckpointError, "use_sliding_window = 1, expected true or false"),
    ],
)
def test_options_of_families_that_are_refused(
    family: str, values: dict[str, Any], error: type[PagedError], message: str, tmp_path: Path
) -> None:
    save_checkpoint(FAMILIES[family], tmp_path)
    load_model(tmp_path)
    edit_config(tmp_path, **values)
    with pytest.raises(error, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_malformed_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config.json: (unreadable|holds a list)"):
        load_model(folder)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: missing"):
        load_model(tmp_path / "nowhere")


def test_sizes_within_bounds(llama_folder: Path) -> None:
    load_model(llama_folder, max_seq_len=128)
    for wrong in (0, 129):
        with pytest.raises(InvalidInputError, match=f"max_seq_len: {wrong}, expected 1 to 128"):
            load_model(llama_folder, max_seq_len=wrong)
    with pytest.raises(InvalidInputError, match="block_size: 0"):
        load_model(llama_folder, block_size=0)
