"""Words of the rows in `settings` that stand for several keys of a config.json."""

from itertools import cycle, islice
from typing import Any

from tests.models.families import options

_SLIDING, _FULL = "sliding_attention", "full_attention"


def _rope(kind: str, factor: float, original: int | None = None, **others: Any) -> dict[str, Any]:
    at = {} if original is None else {"original_max_position_embeddings": original}
    return {"rope_scaling": {"rope_type": kind, "factor": factor, **at, **others}}


def _llama3(factor: float, low: float = 1.0, high: float = 4.0) -> dict[str, Any]:
    return _rope("llama3", factor, 8192, low_freq_factor=low, high_freq_factor=high)


def _factors(count: int) -> dict[str, Any]:
    lists = {"short_factor": [1 + 0.05 * i for i in range(count)], "long_factor": [1 + 0.8 * i for i in range(count)]}
    return {"rope_scaling": {"type": "longrope", **lists}}


def _per_layer(key: str, count: int, *values: Any) -> dict[str, Any]:
    return {key: list(islice(cycle(values), count))}


def _mamba_and_experts(count: int, attention: tuple[int, ...]) -> list[str]:
    """Mamba and experts in turns, and attention in the layers of these indices."""
    kinds = cycle(("mamba", "moe"))
    return ["attention" if layer in attention else next(kinds) for layer in range(count)]


def _mla_yarn(factor: float, mscale: float, beta_fast: float) -> dict[str, Any]:
    own = {"beta_fast": beta_fast, "beta_slow": type(beta_fast)(1), "mscale": mscale, "mscale_all_dim": mscale}
    return {"rope_scaling": {"factor": factor, "original_max_position_embeddings": 4096, "type": "yarn", **own}}


_MINISTRAL3 = options(
    """beta_fast=32.0 beta_slow=1.0 factor=16.0 llama_4_scaling_beta=0.1 mscale=1.0 mscale_all_dim=1.0
    original_max_position_embeddings=16384 rope_theta=1000000.0 rope_type='yarn' type='yarn'"""
)
_GEMMA4 = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}
_LAGUNA_YARN = options(
    """rope_type='yarn' rope_theta=500000.0 factor=128.0 original_max_position_embeddings=8192 beta_slow=1.0
    beta_fast=32.0 attention_factor=1.4852030263919618 partial_rotary_factor=0.5"""
)
_GPT_OSS = _rope("yarn", 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False)
_OLMO3 = _rope("yarn", 8.0, 8192, attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0)
WORDS: dict[str, dict[str, Any]] = {
    "minimax_m3_layers": {
        "moe_layer_freq": [0] * 3 + [1] * 57,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 128,
            "sparse_disable_index_value": [0] * 3 + [1] * 57,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0] * 3 + [1] * 57,
        },
    },
    "no_rope_scaling": {"rope_scaling": None},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "bias": {"attention_bias": True},
    "no_bias": {"attention_bias": False},
    "silu": {"hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True},
    "llama3_8": _llama3(8.0),
    "llama3_32": _llama3(32.0),
    "llama3_16": _llama3(16.0),
    "mrope_2": {"rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}},
    "mrope_3": {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}},
    "mrope_glm": {"rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"}},
    "glm_ocr_rope": {
        "rope_parameters": {
            "mrope_section": [16, 24, 24],
            "partial_rotary_factor": 1.0,
            "rope_theta": 10000,
            "rope_type": "default",
        }
    },
    "gated_delta": {
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_value_head_dim": 128,
    },
    "qwen3_5": {
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "vocab_size": 248320,
    },
    "qwen4_exp": {
        "full_attention_interval": 4,
        "hc_count": 4,
        "hc_lowrank": 320,
        "heads_per_ngram": 8,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 128,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "make_ngram_vocab_size_divisible_by": 128,
        "ngram_size": 3,
        "ngram_vocab_size_base": 20_000_000,
        "norm_topk_prob": True,
        "output_gate_type": "sigmoid",
        "ple_conv_kernel_size": 4,
        "ple_embed_dim": 2560,
        "ple_layer_ids": [2],
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "seed": 1234,
        "split_ngram_parts": 128,
        **_per_layer("layer_types", 48, *["linear_attention"] * 3, _FULL),
    },
    "alpha_1000": {
        "rope_scaling": {
            "alpha": 1000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
            "type": "dynamic",
        }
    },
    "dynamic_2": {"rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}},
    "plain_rope": {"rope_scaling": {"rope_type": "default"}},
    "yarn_20": _rope("yarn", 20.0, 4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0),
    "yarn_2": _rope("yarn", 2.0, 65536),
    "scout_rope": _llama3(16.0, 1.0, 1.0),
    "linear_4": {"rope_scaling": {"factor": 4.0, "type": "linear"}},
    "linear_8": _rope("linear", 8.0),
    "yarn_4": _rope("yarn", 4.0, 32768),
    "yarn_4_by_type": {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    "qwen_experts": options(
        """decoder_sparse_step=1 mlp_only_layers=[] norm_topk_prob=True num_experts_per_tok=8
        output_router_logits=False router_aux_loss_coef=0.001"""
    ),
    "factors_48": _factors(48),
    "phimoe_factors": {
        "rope_scaling": _factors(64)["rope_scaling"]
        | {
            "long_mscale": 1.243163121016122,
            "short_mscale": 1.243163121016122,
            "original_max_position_embeddings": 4096,
        }
    },
    "glm_5_2": {
        "indexer_types": [*["full"] * 3, *[*["shared"] * 3, "full"] * 18, *["shared"] * 3],
        "mlp_layer_types": [*["dense"] * 3, *["sparse"] * 75],
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    },
    "hy_v4_indexers": {"indexer_types": ["full", *["full", *["shared"] * 3] * 8, "full"]},
    "ministral3_rope": {"rope_parameters": _MINISTRAL3},
    "gpt_oss_rope": _GPT_OSS,
    "olmo3_rope": _OLMO3,
    "gemma2": options(
        """attention_bias=False attention_dropout=0.0 attn_logit_softcapping=50.0 rope_theta=10000.0
        cache_implementation='hybrid' final_logit_softcapping=30.0 hidden_act='gelu_pytorch_tanh'
        hidden_activation='gelu_pytorch_tanh' max_position_embeddings=8192 rms_norm_eps=1e-06
        initializer_range=0.02 sliding_window=4096 use_cache=True vocab_size=256000"""
    ),
    "gemma3": options(
        """attention_bias=False attention_dropout=0.0 attn_logit_softcapping=None final_logit_softcapping=None
        head_dim=256 hidden_activation='gelu_pytorch_tanh' max_position_embeddings=32768 num_attention_heads=4
        num_key_value_heads=1 query_pre_attn_scalar=256 rms_norm_eps=1e-06 rope_local_base_freq=10000
        rope_scaling=None rope_theta=1000000 sliding_window=512 vocab_size=262144"""
    ),
    "gemma4": options(
        """attention_bias=False attention_dropout=0.0 final_logit_softcapping=30.0 head_dim=256 global_head_dim=512
        hidden_activation='gelu_pytorch_tanh' rms_norm_eps=1e-06 vocab_size=262144
        vocab_size_per_layer_input=262144"""
    )
    | {"rope_parameters": _GEMMA4},
    "glm45": options(
        """attention_bias=True attention_dropout=0.0 head_dim=128 hidden_act='silu' n_group=1 topk_group=1
        n_shared_experts=1 norm_topk_prob=True num_attention_heads=96 num_experts_per_tok=8 num_key_value_heads=8
        num_nextn_predict_layers=1 rms_norm_eps=1e-05 partial_rotary_factor=0.5 rope_scaling=None
        rope_theta=1000000 tie_word_embeddings=False vocab_size=151552"""
    ),
    "deepseek": options(
        """aux_loss_alpha=0.001 first_k_dense_replace=1 kv_lora_rank=512 moe_layer_freq=1 qk_nope_head_dim=128
        qk_rope_head_dim=64 rms_norm_eps=1e-06 seq_aux=True tie_word_embeddings=False v_head_dim=128"""
    ),
    "deepseek_v4_flash": {
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],  # the last is the multi-token layer's
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "minicpm3_rope": _factors(16),
    "mistral4_rope": {
        "rope_parameters": _MINISTRAL3
        | options(
            """factor=128.0 max_position_embeddings=1048576 original_max_position_embeddings=8192
            partial_rotary_factor=0.5 rope_theta=10000.0"""
        )
    },
    "mistral_large4_layers": {
        "indexer_types": ["full"] * 72,
        "kv_source_layers": list(range(72)),
        "layer_types": ["indexed_attention"] * 72,
        "mlp_layer_types": ["dense"] + ["sparse"] * 71,
        "no_rope_layers": [1, 1, 1, 0] * 18,
        "rope_parameters": options(
            """attention_factor=1.0 beta_fast=32.0 beta_slow=1.0 factor=2048.0 original_max_position_embeddings=512
            rope_theta=10000.0 rope_type='yarn'"""
        ),
    },
    "dots3_layers": {"layer_types": [_FULL if layer < 2 or layer % 4 == 1 else _SLIDING for layer in range(46)]},
    "yarn_v2_lite": _mla_yarn(40, 0.707, 32),
    "yarn_v3": _mla_yarn(40, 1.0, 32),
    "yarn_k2": _mla_yarn(32.0, 1.0, 1.0),
    "yarn_k2_64": _mla_yarn(64.0, 1.0, 1.0),
    "granite": options(
        """attention_bias=False attention_dropout=0.1 embedding_multiplier=12.0 hidden_act='silu'
        residual_multiplier=0.22 rms_norm_eps=1e-05 rope_scaling=None tie_word_embeddings=True
        max_position_embeddings=131072 num_key_value_heads=8 vocab_size=49155"""
    ),
    "granite4": options(
        """attention_bias=False attention_dropout=0.0 embedding_multiplier=12 hidden_act='silu' init_method='mup'
        mamba_chunk_size=256 mamba_conv_bias=True mamba_d_conv=4 mamba_d_head=64 mamba_d_state=128 mamba_expand=2
        mamba_n_groups=1 mamba_proj_bias=False max_position_embeddings=131072 normalization_function='rmsnorm'
        output_router_logits=False position_embedding_type='nope' residual_multiplier=0.22 rms_norm_eps=1e-05
        rope_scaling=None rope_theta=10000 router_aux_loss_coef=0.01 tie_word_embeddings=True vocab_size=100352"""
    )
    | {"layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)]},
    "lfm2_8b_layers": {
        "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)]
    },
    "kimi_linear_layers": {
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "head_dim": 128,
            "kda_layers": [layer for layer in range(1, 27) if layer % 4],
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        }
    },
    "lfm3_layers": {
        "layer_types": ["conv", *("conv", _FULL, "conv", _SLIDING) * 5, "conv", _FULL, "conv"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    },
    "nemotron_h": options(
        """attention_bias=False attention_dropout=0.0 chunk_size=128 conv_kernel=4 expand=2 hidden_dropout=0.0
        initializer_range=0.02 layer_norm_epsilon=1e-05 mamba_hidden_act='silu' mamba_num_heads=128
        mamba_proj_bias=False mlp_bias=False mlp_hidden_act='relu2' n_groups=8 num_logits_to_keep=1
        rescale_prenorm_residual=True residual_in_fp32=False rms_norm_eps=1e-05 sliding_window=None ssm_state_size=128
        tie_word_embeddings=False time_step_floor=0.0001 time_step_max=0.1 time_step_min=0.001 time_step_rank=256
        use_bias=False use_cache=True use_conv_bias=True use_mamba_kernels=True vocab_size=131072"""
    )
    | {"time_step_limit": [0.0, float("inf")]},
    "rwkv7_values": {"value_dim": [2048] * 24},
    "any_time_step": {"time_step_limit": [0.0, float("inf")]},
    "nemotron_super_layers": {
        "hybrid_override_pattern": "MEMEMEM*" + "EMEMEMEM*" * 2 + "EMEMEMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME"
    },
    "nemotron_ultra_layers": {
        "layers_block_type": _mamba_and_experts(108, attention=(7, 14, 23, 32, 39, 48, 57, 64, 73, 82, 89, 98)),
        "mtp_layers_block_type": ["attention", "moe"],
    },
    "no_rotation": {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
    "three_of_four_recur_32": {
        "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(32)]
    },
    "cohere2": options(
        """attention_bias=False attention_dropout=0.0 cache_implementation='hybrid' head_dim=128 hidden_act='silu'
        layer_norm_eps=1e-05 layer_switch=4 logit_scale=0.25 rope_scaling=None num_key_value_heads=8
        order_of_interleaved_layers='local_attn_first' rope_theta=50000 position_embedding_type='rope_gptj'
        rotary_pct=1.0 sliding_window=4096 sliding_window_pattern=4 use_embedding_sharing=True
        use_gated_activation=True use_parallel_block=True use_qk_norm=False vocab_size=256000"""
    ),
    "llama4": options(
        """attention_bias=False attention_chunk_size=8192 attention_dropout=0.0 attn_scale=0.1
        attn_temperature_tuning=4 floor_scale=8192 for_llm_compressor=False head_dim=128 hidden_act='silu'
        hidden_size=5120 intermediate_size=8192 intermediate_size_mlp=16384 num_attention_heads=40
        num_experts_per_tok=1 num_hidden_layers=48 num_key_value_heads=8 output_router_logits=False
        rms_norm_eps=1e-05 rope_theta=500000.0 router_jitter_noise=0.0 use_cache=True vocab_size=202048
        tie_word_embeddings=False"""
    ),
    "minimax": options(
        """attention_dropout=0.0 layernorm_full_attention_beta=1.0 layernorm_mlp_beta=1.0 mlp_intermediate_size=8192
        mtp_transformer_layers=1 num_mtp_modules=3 postnorm=False qk_norm_type='per_layer' rotary_dim=64
        scoring_func='sigmoid' shared_moe_mode='sigmoid' shared_intermediate_size=0 use_mtp=True use_qk_norm=True
        use_routing_bias=True router_aux_loss_coef=0.001 router_jitter_noise=0.0"""
    )
    | {"attn_type_list": [1] * 62},
    "dual_chunk": {
        "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 0}
    },
    "a13b_layers": _per_layer("moe_topk", 32, 8)
    | _per_layer("moe_intermediate_size", 32, 3072)
    | _per_layer("num_shared_expert", 32, 1),
    "k_exaone_layers": _per_layer("layer_types", 48, *(_SLIDING,) * 3, _FULL) | {"is_moe_layer": [False, *[True] * 47]},
    "mimo_v2_layers": {
        "hybrid_layer_pattern": [int(layer > 0 and layer % 6 != 5) for layer in range(48)],
        "moe_layer_freq": [0, *[1] * 47],
    },
    "laguna_layers": _per_layer("layer_types", 48, _FULL, *(_SLIDING,) * 3)
    | _per_layer("num_attention_heads_per_layer", 48, 48, 72, 72, 72)
    | {
        "gating_types": ["per_head"] * 48,
        "mlp_layer_types": ["dense", *["sparse"] * 47],
        "rope_parameters": {_FULL: _LAGUNA_YARN, _SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
    },
    "dense_then_sparse_12": {"mlp_layer_types": ["dense"] + ["sparse"] * 11},
    "whole_30": _per_layer("layer_types", 30, _FULL),
    "smollm3_layers": _per_layer("layer_types", 36, _FULL) | _per_layer("no_rope_layers", 36, 1, 1, 1, 0),
    "every_second_slides_24": _per_layer("layer_types", 24, _SLIDING, _FULL),
    "every_second_slides_36": _per_layer("layer_types", 36, _SLIDING, _FULL),
    "three_of_four_slide_32": _per_layer("layer_types", 32, *(_SLIDING,) * 3, _FULL),
    "three_of_four_slide_64": _per_layer("layer_types", 64, *(_SLIDING,) * 3, _FULL),
    "three_of_four_slide_last_36": _per_layer("layer_types", 36, _FULL, *(_SLIDING,) * 3),
    "four_of_five_slide_35": _per_layer("layer_types", 35, *(_SLIDING,) * 4, _FULL),
    "five_of_six_slide_18": _per_layer("layer_types", 18, *(_SLIDING,) * 5, _FULL),
    "five_of_six_slide_30": _per_layer("layer_types", 30, *(_SLIDING,) * 5, _FULL),
    "five_of_six_slide_42": _per_layer("layer_types", 42, *(_SLIDING,) * 5, _FULL),
    "five_of_six_slide_60": _per_layer("layer_types", 60, *(_SLIDING,) * 5, _FULL),
}
