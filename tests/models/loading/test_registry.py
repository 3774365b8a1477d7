"""Which config.json makes a model, and which is refused by name."""

import json
from pathlib import Path
from re import escape
from typing import Any

import pytest
import torch

from paged.errors import CheckpointError, InvalidInputError, UnsupportedError
from paged.models.registry import load_model
from tests.models.edits import assert_refused, edit_config
from tests.models.families import FAMILIES, assert_same_logits, logits_of, options, save_checkpoint, tokens
from tests.tolerance import assert_within

PROMPT = tokens(40)
_FREQUENCIES = {"low_freq_factor": 5.0, "high_freq_factor": 4.0}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32, **_FREQUENCIES}


def prefill(folder: Path) -> torch.Tensor:
    return load_model(folder).prefill("a", PROMPT)


def test_cache_on_a_cpu_holds_four_sequences(llama_folder: Path) -> None:
    assert load_model(llama_folder, device="cpu").kv_capacity() == 4 * 128
    assert load_model(llama_folder, device="cpu", max_seq_len=20, block_size=8).kv_capacity() == 4 * 24
    assert load_model(llama_folder, device="cpu", num_blocks=5).kv_capacity() == 5 * 16
    with pytest.raises(InvalidInputError, match="max_seq_len: 129, expected 1 to 128"):
        load_model(llama_folder, max_seq_len=129)


def test_dtype_is_the_checkpoints_unless_given(folder: Path) -> None:
    wide = load_model(folder).prefill("a", tokens(9))
    narrow = load_model(folder, dtype=torch.bfloat16)
    logits = narrow.prefill("a", tokens(9))
    assert narrow.kv_manager.k_cache(0).dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    # bfloat16 keeps 8 bits; a factor of 10 for two layers of roundings.
    assert_within(logits, wide, 10 * 2**-8 * wide.abs().max())
    edit_config(folder, "dtype", torch_dtype="float16")
    model = load_model(folder, dtype="auto", kv_cache_dtype="auto")
    assert model.dtype == model.kv_manager.k_cache(0).dtype == load_model(folder).dtype == torch.float16


@pytest.mark.parametrize("family", ["gpt_oss", "llama3_rope", "llama_biases_linear_rope"])
def test_rope_as_written_before_transformers_5(family: str, tmp_path: Path) -> None:
    save_checkpoint(FAMILIES[family], tmp_path)
    expected = prefill(tmp_path)
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    edit_config(tmp_path, "rope_parameters", rope_theta=theta, rope_scaling=rope)
    assert torch.equal(prefill(tmp_path), expected)
    rope["type"] = rope.pop("rope_type")
    edit_config(tmp_path, rope_scaling=rope)
    assert torch.equal(prefill(tmp_path), expected)
    if family != "gpt_oss":  # which must have one
        edit_config(tmp_path, rope_scaling=None)
        assert not torch.allclose(prefill(tmp_path), expected, atol=1e-3)


_LINEAR = {"rope_type": "linear", "factor": 4.0}
_GEMMA3 = {"rope_theta": 1e4, "rope_local_base_freq": 100.0, "rope_scaling": _LINEAR, "sliding_window_pattern": 2}
_SLIDING, _FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("family", "dropped", "values", "others"),
    [
        # Two bases and one scaling, a period in place of layer_types, and no word of the head, which is tied.
        ("gemma3", "rope_parameters layer_types tie_word_embeddings", _GEMMA3, {"rope_local_base_freq": 1e4}),
        ("gpt_oss", "layer_types attention_bias", {}, {"layer_types": [_FULL, _SLIDING]}),
        ("qwen3_moe", "num_local_experts", {"num_experts": 4}, {"norm_topk_prob": True}),
        # max_window_layers decides.
        ("qwen3_window_in_one_layer", "layer_types", {}, {"layer_types": [_SLIDING, _FULL]}),
    ],
)
def test_other_words_for_the_same(
    family: str, dropped: str, values: dict[str, Any], others: dict[str, Any], tmp_path: Path
) -> None:
    """As files are published or older ones were; and that other values would not be the same."""
    save_checkpoint(FAMILIES[family], tmp_path)
    expected = prefill(tmp_path)
    edit_config(tmp_path, *dropped.split(), **values)
    assert torch.equal(prefill(tmp_path), expected)
    edit_config(tmp_path, **others)
    assert not torch.allclose(prefill(tmp_path), expected, atol=1e-3)


@pytest.mark.parametrize("family", ["apertus", "gemma3", "gpt_oss", "hunyuan_moe", "nemotron", "qwen2"])
def test_bfloat16_is_as_close_as_in_transformers(family: str, tmp_path: Path) -> None:
    """Both are compared with float32; weights of norms that bfloat16 cannot hold next to 1 keep their bits."""
    from transformers import AutoModelForCausalLM

    theirs = save_checkpoint(FAMILIES[family], tmp_path)
    if family == "gemma3":
        for name, parameter in theirs.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data = torch.randn(parameter.shape) / 512
    theirs.bfloat16().save_pretrained(tmp_path)
    wide, narrow = (
        logits_of(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager"), PROMPT)
        for dtype in (torch.float32, torch.bfloat16)
    )
    model = load_model(tmp_path)
    assert model.dtype == torch.bfloat16
    ours = model.forward_verify("a", PROMPT).cpu()
    error, their_error = (float((logits.float() - wide).norm() / wide.norm()) for logits in (ours, narrow))
    assert error < 1.25 * their_error
    if family == "gemma3":
        stored = theirs.model.layers[1].self_attn.k_norm.weight.bfloat16()
        held = model.network.layers[1].self_attn.k_norm.weight.cpu()
        assert torch.equal(held, 1 + stored.float())
        assert not torch.equal(held, held.bfloat16().float())


@pytest.mark.parametrize(
    "values",
    [
        {"beta_fast": 4.0, "beta_slow": 2.0},
        {"beta_fast": 2.0, "beta_slow": 4.0},  # in reverse, which is computed all the same
        {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
        {"original_max_position_embeddings": 4},  # all pairs lie beyond both ends
        {"truncate": None},
        {"truncate": False},
        {"mscale": 2.0, "mscale_all_dim": 0.5},
        {},
    ],
)
def test_options_of_yarn(values: dict[str, Any], tmp_path: Path) -> None:
    config = FAMILIES["qwen2"]
    config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, **values}
    expected = logits_of(save_checkpoint(config, tmp_path), PROMPT)
    assert_same_logits(prefill(tmp_path), expected[-1])


NOT_SUPPORTED = {
    "ernie4_5_moe": "use_bias=True",
    "gemma3": "attn_logit_softcapping=50.0 num_kv_shared_layers=1 use_bidirectional_attention=True",
    "gpt_oss": "n_shared_experts=1",
    "llama": "is_causal=False sliding_window=16 clip_qkv=0.5 logits_scaling=2.0 query_pre_attn_scalar=16",
    "llama_tied": "is_causal=None no_rope_layers=[1,0]",
    "mistral": "attention_bias=True layer_types=['sliding_attention','full_attention']",
    "mixtral": "scoring_func='sigmoid'",
    "qwen2": "mlp_bias=True",
    "qwen3": "n_routed_experts=4",
}
ROPES = "known are default, dynamic, mrope, linear, llama3, longrope, yarn"
UNSUPPORTED, WRONG = UnsupportedError, CheckpointError


@pytest.mark.parametrize(
    ("family", "values", "error", "message"),
    [
        *(
            (family, {key: value}, UNSUPPORTED, escape(f"{key} = {value!r} is not supported"))
            for family, words in NOT_SUPPORTED.items()
            for key, value in options(words).items()
        ),
        (
            "llama",
            {"architectures": ["GPT2LMHeadModel"]},
            UNSUPPORTED,
            r"^[^;]*: architectures \['GPT2LMHeadModel'\] are unknown; ",
        ),
        (
            "llama",
            {"architectures": ["MiniCPMV"], "auto_map": {"AutoModelForCausalLM": "modeling_minicpmv.MiniCPMV"}},
            UNSUPPORTED,
            r"architectures \['MiniCPMV'\] are unknown; their code is in the checkpoint, and trust_remote_code=True",
        ),
        (
            "mimo_v2_flash",
            {"architectures": ["MiMoV2ForCausalLM"], "attention_projection_layout": "fused_qkv"},
            UNSUPPORTED,
            "attention_projection_layout = 'fused_qkv' is not supported, known are split",
        ),
        ("llama", {"architectures": ["Gemma3ForConditionalGeneration"]}, UNSUPPORTED, "Gemma3ForConditionalGeneration"),
        (
            "llama",
            {"hidden_act": "relu"},
            UNSUPPORTED,
            "hidden_act = 'relu' is not supported, known are silu, swish, ",
        ),
        ("llama", {"quantization_config": {"bits": 4}}, WRONG, "quant_method is missing"),
        ("llama", {"quantization_config": {"quant_method": "aqlm"}}, UNSUPPORTED, "quant_method = 'aqlm' is not supp"),
        ("llama", {"dtype": "float8_e4m3fn"}, UNSUPPORTED, "dtype 'float8_e4m3fn', known are float32, float16, bfl"),
        ("llama", {"rope_parameters": _LINEAR | {"rope_type": "ntk"}}, UNSUPPORTED, f"rope type 'ntk', {ROPES}"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, UNSUPPORTED, "partial_rotary_factor 0.5"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, WRONG, "factor is missing"),
        ("llama", {"rope_parameters": LLAMA3_ROPE}, WRONG, "low_freq_factor 5.0 is above high_freq_factor 4.0"),
        ("llama", {"hidden_size": None}, WRONG, "hidden_size is missing, expected a positive integer"),
        ("llama", {"num_hidden_layers": True}, WRONG, "num_hidden_layers = True"),
        ("llama", {"num_key_value_heads": 3}, WRONG, "attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ("llama", {"tie_word_embeddings": 1}, WRONG, "tie_word_embeddings = 1, expected true or false"),
        ("llama", {"head_dim": 16}, WRONG, r"[qko]_proj.weight: shape"),
        ("gemma3", {"layer_types": ["full_attention"]}, WRONG, "1 layer_types for 2 layers"),
        (
            "gemma4_moe",
            {"use_bidirectional_attention": "all"},
            UNSUPPORTED,
            "ention = 'all' is not supported, known are v",
        ),
        ("gemma4_moe", {"top_k_experts": 5}, WRONG, "top_k_experts = 5, expected at most 4"),
        ("gemma4_moe", {"per_layer_config": {"1": {"taste": 1}}}, UNSUPPORTED, "per_layer_config: 'taste', known are"),
        ("gemma4_shared_kv", {"num_kv_shared_layers": 3}, WRONG, "no layer has keys and values for layer 2"),
        (
            "gemma4_shared_kv",
            {"per_layer_config": {"4": {"head_dim": 24}}},
            WRONG,
            "layer 4 reads K/V of layer 2, whose",
        ),
        ("gemma4_shared_kv", {"vocab_size_per_layer_input": 127}, WRONG, "input 127, expected at least 128"),
        ("glm4_moe", {"topk_group": 5}, WRONG, "5 of 4 groups of 8 experts"),
        ("gpt_oss", {"swiglu_limit": 5.0}, UNSUPPORTED, "swiglu_limit = 5.0 is not supported, known are 7.0"),
        ("hunyuan_moe", {"moe_topk": [2]}, WRONG, "1 entries in moe_topk for 2 layers"),
        (
            "minimax_m2",
            {"scoring_func": "softmax"},
            UNSUPPORTED,
            "func = 'softmax' is not supp.*, known are sig",
        ),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 1.5}}, UNSUPPORTED, "partial_rotary_factor 1.5"),
        (
            "nemotron_h",
            {"mlp_hidden_act": "gelu_pytorch_tanh"},
            UNSUPPORTED,
            "mlp_hidden_act = 'gelu_pytorch_tanh' is not supported, known are relu2",
        ),
        ("qwen3_5", {"linear_num_value_heads": 3}, WRONG, "num_value_heads 3 is not a multiple of linear_num_key_hea"),
        ("deepseek_v32", {"index_head_dim": 8}, WRONG, "index_head_dim 8 is less than qk_rope_head_dim"),
        ("hunyuan_moe", {"head_dim": 2}, WRONG, "head_dim 2 with alpha"),
        ("olmo3", {"layer_types": [_FULL, "none"]}, UNSUPPORTED, "type 'none', known are full_attention, sliding_"),
        ("smollm3", {"no_rope_layers": [1]}, WRONG, r"no_rope_layers \[1\], expected 0 or 1 for 2 layers"),
    ],
)
def test_configurations_that_are_refused(
    family: str, values: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    save_checkpoint(FAMILIES[family], tmp_path)
    load_model(tmp_path)
    edit_config(tmp_path, **values)
    assert_refused(tmp_path, message, error)


def test_malformed_and_missing_config(folder: Path) -> None:
    for content in (b"{", b"[]", b"\xff"):
        (folder / "config.json").write_bytes(content)
        assert_refused(folder, r"config.json: (unreadable|holds a list)")
    assert_refused(folder / "nowhere", r"config.json: missing")
