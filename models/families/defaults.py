"""Values for keys that a config.json omits, by family, as in transformers 5.23.

They are copied, because a checkpoint must mean the same where transformers is not installed. Every key may be absent:
transformers 4 omits from a text_config all values that equal the default, such as the vocabulary's size of
llava-hf/llava-1.5-7b-hf.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
)
_LLAMA_4K = (32_000, 4096, 11_008, 32, 32, None, None)
_MISTRAL = (32_000, 4096, 14_336, 32, 32, 8, None, 131_072)
_OLMO = (50_304, 4096, 11_008, 32, 32, None, None, 2048, 1e-5)
_QWEN = (151_936, 4096, 22_016, 32, 32, 32)
_QWEN_VL = (152_064, 8192, 29_568, 80, 64, 8, None, 32_768, 1e-5, 1e6)
_HUNYUAN = (290_943, 4096, 11_008, 32, 32, None, None, 2048, 1e-5, 1e4)
_GLM = (151_552, 4096, 13_696, 40, 32, 2, 128, 131_072, 1.5625e-7, 1e4)
# model_type -> values of _KEYS. If the number of KV heads is None, there are as many as query heads. If head_dim is
# None, it is hidden size / heads.
_VALUES: Mapping[str, tuple[float | None, ...]] = {
    "apertus": (131_072, 4096, 14_336, 32, 32, None, None, 65_536, 1e-5, 1.2e7),
    "arcee": (32_000, 2560, 18_432, 32, 32, None, None, 4096, 1e-5, 1e4),
    "axk2": (163_840, 2048, 5120, 48, 32, 32, None, 131_072, 1e-6, 1e4),
    "bamba": (128_000, 4096, 14_336, 32, 32, 8, None, 262_144, 1e-5, 1e4),
    "bailing_hybrid": (157_184, 2560, 6144, 42, 32, 32, 128, 262_144, 1e-6, 6e6),
    "cohere": (256_000, 8192, 22_528, 40, 64, None, None, 8192, None, 5e5),
    "cohere2": (256_000, 8192, 22_528, 40, 64, None, None, 8192, None, 1e4),
    "deepseek_ocr2_text": (102_400, 4096, 11_008, 32, 32, None, None, 2048, 1e-6, 1e4),
    "deepseek_v2": (102_400, 4096, 11_008, 32, 32, None, None, 2048, 1e-6, 1e4),
    "deepseek_v3": (129_280, 7168, 18_432, 61, 128, 128, None, 4096, 1e-6, 1e4),
    "deepseek_v32": (129_280, 7168, 18_432, 61, 128, 128, None, 163_840, 1e-6, 1e4),
    "deepseek_v4": (129_280, 4096, None, 43, 64, 1, 512, 1_048_576, 1e-6, 1e4),
    "dots3_note_text": (152_064, 5120, 13_824, 46, 128, 128, 256, 524_288, 1e-5, 8e7),
    "dots1": (152_064, 4608, 10_944, 62, 32, 32, None, 2048, 1e-6, 1e4),
    "ernie4_5": (103_424, 1024, 3072, 18, 16, 2, 128, 131_072, 1e-5, 5e5),
    "ernie4_5_moe": (103_424, 2560, 12_288, 28, 20, 4, None, 131_072, 1e-5, 5e5),
    "exaone4": (102_400, 4096, 16_384, 32, 32, 32, None, 2048, 1e-5, 1e4),
    "exaone_moe": (102_400, 4096, 16_384, 32, 32, 32, None, 2048, 1e-5, 1e4),
    "falcon_h1": (128_000, 4096, 14_336, 32, 32, 8, None, 8192, 1e-5, 1e4),
    "gemma": (256_000, 3072, 24_576, 28, 16, 16, 256, 8192, 1e-6, 1e4),
    "gemma2": (256_000, 2304, 9216, 26, 8, 4, 256, 8192, 1e-6, 1e4),
    "gemma3_text": (262_208, 2304, 9216, 26, 8, 4, 256, 131_072, 1e-6, 1e6),
    "gemma4_text": (262_144, 2304, 9216, 30, 8, 4, 256, 131_072, 1e-6, 1e4),
    "glm": _GLM,
    "glm4": _GLM,
    "glm4_moe_lite": (154_880, 2048, 10_240, 47, 20, 20, None, 202_752, 1e-5, 1e4),
    "glm_moe_dsa": (154_880, 6144, 12_288, 78, 64, 64, None, 202_752, 1e-5, 1e4),
    "glm4_moe": (151_552, 4096, 10_944, 46, 96, 8, None, 131_072, 1e-5, 1e4),
    "glm4v_moe_text": (151_424, 4096, 10_944, 46, 96, 8, None, 65_536, 1e-5, 1e4),
    "glm4v_text": (151_552, 4096, 13_696, 40, 32, 2, None, 32_768, 1e-5, 1e4),
    "glm5_next_text": (154_880, 4096, 12_288, 45, 64, 64, None, 1_048_576, 1e-5, 1e4),
    "glm_ocr_text": (59_392, 1024, 4096, 16, 16, 8, None, 131_072, 1e-5, 1e4),
    "gpt_oss": (201_088, 2880, 2880, 36, 64, 8, 64, 131_072, 1e-5, 150_000.0),
    "granite": (*_LLAMA_4K, 2048, 1e-6, 1e4),
    "granitemoe": (*_LLAMA_4K, 2048, 1e-6, 1e4),
    "granitemoehybrid": (*_LLAMA_4K, 2048, 1e-6, 1e4),
    "granitemoeshared": (*_LLAMA_4K, 2048, 1e-6, 1e4),
    "helium": (48_000, 2560, 7040, 24, 20, 20, 128, 4096, 1e-8, 1e5),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "hy_v3": (120_832, 4096, 13_312, 80, 64, 8, 128, 131_072, 1e-5, 11_158_840.0),
    "kimi_linear": (163_840, 2304, 9216, 27, 32, 32, None, 1_048_576, 1e-5, 1e4),
    "laguna": (100_352, 2048, 8192, 40, 48, 8, 128, 131_072, 1e-6, 5e5),
    "lfm2": (65_536, 2560, 12_288, 32, 32, 8, None, 128_000, None, 1e6),
    "lfm2_moe": (65_536, 2048, 7168, 32, 32, 8, None, 128_000, None, 1e6),
    "lfm3": (128_000, 2048, 7680, 24, 16, 4, 128, 128_000, None, 1e6),
    "llama": (*_LLAMA_4K, 2048, 1e-6, 1e4),
    "llama4_text": (202_048, 5120, 8192, 48, 40, 8, 128, 131_072, 1e-5, 5e5),
    "mamba2": (32_768, 4096, None, 64, None, None, 64, None, None, None),
    "mimo_v2_flash": (152_576, 4096, 16_384, 48, 64, 4, 192, 131_072, 1e-5, 5e6),
    "minimax_m2": (200_064, 3072, 1536, 62, 48, 8, 128, 196_608, 1e-6, 5e6),
    "hy_v4": (120_832, 2816, 6912, 34, 32, None, None, 262_144, 1e-5, 1e4),
    "minimax_m3_vl_text": (200_064, 6144, 3072, 60, 64, 4, 128, 524_288, 1e-6, 5e6),
    "minicpm3": (73_448, 2560, 6400, 62, 40, 40, None, 32_768, 1e-5, 1e4),
    "ministral": (*_MISTRAL, 1e-6, 1e4),
    "ministral3": (131_072, 4096, 14_336, 34, 32, 8, 128, 262_144, 1e-5, 1e4),
    "mistral": (*_MISTRAL, 1e-6, 1e4),
    "mistral4": (131_072, 4096, 12_288, 36, 32, 32, None, 1_048_576, 1e-6, 1e4),
    "mistral_large4_text": (204_800, 6144, 24_576, 72, 64, 64, 64, 1_048_576, 1e-5, 1e4),
    "mixtral": (*_MISTRAL, 1e-5, 1e6),
    "nemotron": (256_000, 6144, 24_576, 32, 48, None, None, 4096, None, 1e4),
    "nemotron_h": (131_072, 4096, 21_504, None, 32, 8, 128, 4096, None, 1e4),
    "olmo2": (*_OLMO, 1e4),
    "olmo3": (*_OLMO, 5e5),
    "olmo_hybrid": (100_352, 3840, 11_008, 32, 30, None, None, 65_536, 1e-6, 1e4),
    "olmoe": (50_304, 2048, 2048, 16, 16, None, None, 4096, 1e-5, 1e4),
    "phi3": (32_064, 3072, 8192, 32, 32, None, None, 4096, 1e-5, 1e4),
    "phimoe": (32_064, 4096, 6400, 32, 32, 8, None, 131_072, 1e-5, 1e6),
    "qwen2": (*_QWEN, None, 32_768, 1e-6, 1e4),
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen2_moe": (151_936, 2048, 5632, 24, 16, 16, None, 32_768, 1e-6, 1e4),
    "qwen2_vl_text": _QWEN_VL,
    "qwen3": (*_QWEN, 128, 32_768, 1e-6, 1e4),
    "qwen3_5_moe_text": (248_320, 2048, None, 40, 16, 2, 256, 32_768, 1e-6, 1e4),
    "qwen3_5_text": (248_320, 4096, 12_288, 32, 16, 4, 256, 32_768, 1e-6, 1e4),
    "qwen3_moe": (151_936, 2048, 6144, 24, 32, 4, None, 32_768, 1e-6, 1e4),
    "qwen3_next": (151_936, 2048, 5632, 48, 16, 2, 256, 32_768, 1e-6, 1e4),
    "qwen3_vl_moe_text": (151_936, 2048, 5632, 24, 16, 16, None, 128_000, 1e-6, 5e5),
    "qwen3_vl_text": (151_936, 4096, 22_016, 32, 32, 32, 128, 128_000, 1e-6, 5e5),
    "qwen4_exp_text": (248_320, 2048, None, 40, 16, 2, 256, 32_768, 1e-6, 1e4),
    "rwkv7": (32_000, 2048, None, 24, None, None, 64, 2048, None, None),
    "seed_oss": (155_136, 4096, 27_648, 64, 80, 8, 128, 524_288, 1e-6, 1e4),
    "smollm3": (128_256, 2048, 11_008, 36, 16, 4, None, 32_768, 1e-6, 2e6),
    "solar_open": (196_608, 4096, None, 48, 64, 8, 128, 131_072, 1e-5, 1e6),
    "starcoder2": (49_152, 3072, 12_288, 30, 24, 2, None, 4096, None, 1e4),
}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_MINISTRAL3_ROPE = {
    "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_MISTRAL4_ROPE = {
    **_MINISTRAL3_ROPE, "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
_MISTRAL_LARGE4_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 2048.0, "original_max_position_embeddings": 512,
    "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0,
}  # fmt: skip
_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_LFM3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
}
_LAGUNA_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
_GRANITE = dict.fromkeys("attention_multiplier embedding_multiplier residual_multiplier logits_scaling".split(), 1.0)
_GRANITE_MOE = {**_GRANITE, "num_experts": 8, "num_experts_per_tok": 2}
_HALF_ROTATES = {"attention_bias": True, "partial_rotary_factor": 0.5}
_APERTUS_ROPE = {
    "rope_type": "llama3", "rope_theta": 1.2e7, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
_GROUPS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
_GLM4_MOE = {
    **_GROUPS, "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_routed_experts": 128, "n_shared_experts": 1,
    "norm_topk_prob": True, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "rope_interleave": True,
}  # fmt: skip
_KIMI = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True,
}  # fmt: skip
_DEEPSEEK_V3 = {
    **_LATENT, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1, "n_group": 8,
    "topk_group": 4, "routed_scaling_factor": 2.5, "moe_intermediate_size": 2048, "norm_topk_prob": True,
    "num_experts_per_tok": 8,
}  # fmt: skip
_GATED_DELTA = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "full_attention_interval": 4, "partial_rotary_factor": 0.25,
}  # fmt: skip
_GATED_DELTA_MOE = {
    **_GATED_DELTA, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4,
    "mamba_expand": 2,
}  # fmt: skip
_QWEN_WINDOW = {"sliding_window": 4096, "max_window_layers": 28}
# model_type -> other keys whose default is not null, false or empty.
_OTHERS: Mapping[str, Mapping[str, Any]] = {
    "apertus": {"hidden_act": "xielu", "rope_parameters": _APERTUS_ROPE},
    "arcee": {"hidden_act": "relu2"},
    "axk2": {
        "kv_lora_rank": 128, "q_lora_rank": 384, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
        "first_k_dense_replace": 1, "n_routed_experts": 128, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 512, "norm_topk_prob": True, "num_experts_per_tok": 8, "index_topk": 2048,
        "index_head_dim": 128, "index_n_heads": 16, "gated_norm_rank": 16,
    },
    "bailing_hybrid": {
        **_KIMI, "n_group": 8, "topk_group": 4, "n_routed_experts": 512, "moe_intermediate_size": 768,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 2, "num_nextn_predict_layers": 1,
        "short_conv_kernel_size": 4, "layer_group_size": 6, "kda_safe_gate": True, "kda_lower_bound": -5.0,
    },
    "bamba": _MAMBA,
    "cohere": {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True},
    "cohere2": {
        "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True, "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "deepseek_ocr2_text": {
        "first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2, "topk_method": "greedy",
        "routed_scaling_factor": 1.0, "moe_intermediate_size": 1407,
    },
    "deepseek_v2": {
        **_LATENT, "first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2, "topk_method": "greedy",
        "routed_scaling_factor": 1.0, "moe_intermediate_size": 1407,
    },
    "deepseek_v3": {**_DEEPSEEK_V3, "num_mtp_layers": 1},
    "deepseek_v32": {**_DEEPSEEK_V3, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
    "deepseek_v4": {
        "moe_intermediate_size": 2048, "q_lora_rank": 1024, "num_experts_per_tok": 6, "n_routed_experts": 256,
        "n_shared_experts": 1, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
        "compress_rope_theta": 160_000.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0,
        "sliding_window": 128, "o_groups": 8, "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128,
        "index_topk": 512, "num_nextn_predict_layers": 1, "num_hash_layers": 3,
    },
    "dots1": {
        **_GROUPS, "moe_intermediate_size": 1408, "first_k_dense_replace": 0, "sliding_window": 4096,
        "max_window_layers": 62,
    },
    "dots3_note_text": {
        **_GROUPS, "q_lora_rank": 1024, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True, "moe_intermediate_size": 1536,
        "shared_experts_intermediate_size": 1536, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
    },
    "ernie4_5": {"tie_word_embeddings": True},
    "ernie4_5_moe": {
        "tie_word_embeddings": True, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
    },
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "exaone_moe": {
        **_GROUPS, "sliding_window": 4096, "sliding_window_pattern": 4, "first_k_dense_replace": 1,
        "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8, "num_shared_experts": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
    "falcon_h1": {
        **_MAMBA, "mamba_d_ssm": 1024, "lm_head_multiplier": 1.0, "key_multiplier": 1.0, "embedding_multiplier": 1.0,
        "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0, "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
    },
    "gemma": {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "gemma2": {
        **_GEMMA, "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **_GEMMA, "query_pre_attn_scalar": 256, "rope_local_base_freq": 1e4, "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gemma4_text": {
        **_GEMMA, "sliding_window": 512, "rope_parameters": _GEMMA4_ROPE, "global_head_dim": 512,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
    },
    "glm": _HALF_ROTATES,
    "glm4": _HALF_ROTATES,
    "glm4_moe_lite": {
        **_LATENT, **_GROUPS, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64,
        "n_shared_experts": 1, "num_experts_per_tok": 4, "norm_topk_prob": True, "routed_scaling_factor": 1.8,
        "moe_intermediate_size": 1536, "first_k_dense_replace": 1,
    },
    "glm_moe_dsa": {
        **_DEEPSEEK_V3, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1,
        "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32,
    },
    "glm4_moe": {**_GLM4_MOE, "num_nextn_predict_layers": 1},
    "glm4v_moe_text": {**_GLM4_MOE, "attention_bias": True},
    "glm5_next_text": {
        **_DEEPSEEK_V3, "q_lora_rank": 1536, "qk_rope_head_dim": 0, "qk_nope_head_dim": 256, "v_head_dim": 256,
        "n_routed_experts": 288, "n_group": 1, "topk_group": 1, "index_topk": 2048, "index_head_dim": 128,
        "index_n_heads": 32, "index_kpool": 16, "index_kpool_always_select_tail": True, "swiglu_limit": 10.0,
        "linear_head_dim": 128, "linear_num_heads": 64, "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0,
        "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20,
    },
    "gpt_oss": {
        "num_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True,
        "rope_parameters": _GPT_OSS_ROPE,
    },
    "granite": _GRANITE,
    "granitemoe": _GRANITE_MOE,
    "granitemoehybrid": {**_GRANITE_MOE, **_MAMBA, "shared_intermediate_size": 1024},
    "granitemoeshared": _GRANITE_MOE,
    "hunyuan_v1_moe": {"num_experts": 1, "moe_topk": 1},
    "hy_v3": {
        "first_k_dense_replace": 1, "moe_intermediate_size": 1536, "num_experts": 192, "num_experts_per_tok": 8,
        "num_shared_experts": 1, "router_scaling_factor": 2.826,
    },
    "hy_v4": {
        **_LATENT, "qk_nope_head_dim": 192, "v_head_dim": 256, "rope_interleave": False, "first_k_dense_replace": 1,
        "n_routed_experts": 256, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts_per_tok": 8, "index_topk": 2048,
        "index_head_dim": 128, "index_n_heads": 16, "index_topk_freq": 4, "hc_mult": 4, "hc_magnitude": 2.0,
        "hc_eps": 1e-6, "swiglu_limit": 10.0,
    },
    "kimi_linear": {
        **_KIMI, "n_routed_experts": 256, "moe_intermediate_size": 1024, "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4,
    },
    "laguna": {
        "sliding_window": 512, "rope_parameters": _LAGUNA_ROPE, "moe_intermediate_size": 512, "num_experts": 256,
        "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512, "moe_routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1, "gating": True,
    },
    "lfm2": {
        "norm_eps": 1e-5, "tie_word_embeddings": True, "conv_L_cache": 3, "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
    },
    "lfm2_moe": {
        "norm_eps": 1e-5, "tie_word_embeddings": True, "conv_L_cache": 3, "moe_intermediate_size": 1792,
        "num_dense_layers": 2, "num_experts_per_tok": 4, "num_experts": 32, "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    "lfm3": {
        "norm_eps": 1e-5, "tie_word_embeddings": True, "conv_L_cache": 7, "sliding_window": 256,
        "use_sandwich_norm": True, "use_attention_gate": True, "rope_parameters": _LFM3_ROPE,
    },
    "llama4_text": {
        "intermediate_size_mlp": 16_384, "num_experts": 16, "num_experts_per_tok": 1, "use_qk_norm": True,
        "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
        "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
    },
    "mimo_v2_flash": {
        **_GROUPS, "v_head_dim": 128, "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "n_routed_experts": 256,
        "norm_topk_prob": True, "first_k_dense_replace": 1, "sliding_window": 129, "attention_value_scale": 0.707,
        "partial_rotary_factor": 0.334,
    },
    "minimax_m2": {"num_experts": 256, "num_experts_per_tok": 8},
    "minimax_m3_vl_text": {
        "num_experts": 128, "num_experts_per_tok": 4, "dense_intermediate_size": 12_288,
        "shared_intermediate_size": 3072, "routed_scaling_factor": 2.0, "index_n_heads": 4, "index_head_dim": 128,
        "index_block_size": 128, "index_topk_blocks": 16, "index_local_blocks": 1,
    },
    "minicpm3": {
        "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_emb": 12,
        "scale_depth": 1.4, "dim_model_base": 256, "tie_word_embeddings": True,
    },
    "mamba2": {
        "num_heads": 128, "state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2, "layer_norm_epsilon": 1e-5,
    },
    "ministral": {"sliding_window": 4096},
    "ministral3": {"rope_parameters": _MINISTRAL3_ROPE},
    "mistral": {"sliding_window": 4096},
    "mistral4": {
        **_LATENT, **_GROUPS, "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 4, "norm_topk_prob": True,
        "moe_intermediate_size": 2048, "first_k_dense_replace": 0, "rope_parameters": _MISTRAL4_ROPE,
    },
    "mistral_large4_text": {
        **_GROUPS, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_experts_per_tok": 4, "norm_topk_prob": True, "moe_intermediate_size": 6144, "first_k_dense_replace": 1,
        "no_rope_layer_interval": 4, "final_logit_softcapping": 30.0, "rope_parameters": _MISTRAL_LARGE4_ROPE,
    },
    "mixtral": {"num_experts": 8, "num_experts_per_tok": 2},
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "nemotron_h": {
        "layer_norm_epsilon": 1e-5, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
        "conv_kernel": 4, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "n_group": 1, "topk_group": 1,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
    },
    "olmo3": {"sliding_window": 4096},
    "olmo_hybrid": {"linear_conv_kernel_dim": 4},
    "olmoe": {"num_experts": 64, "num_experts_per_tok": 8},
    "phi3": {"original_max_position_embeddings": 4096},
    "phimoe": {"num_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01},
    "qwen2": _QWEN_WINDOW,
    "qwen2_5_vl_text": {"sliding_window": 4096, "max_window_layers": 80},
    "qwen2_moe": {
        **_QWEN_WINDOW, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "qkv_bias": True,
        "num_experts": 60, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
    },
    "qwen2_vl_text": {"sliding_window": 4096, "max_window_layers": 80},
    "qwen3": _QWEN_WINDOW,
    "qwen3_5_moe_text": {**_GATED_DELTA_MOE, "num_experts": 256, "num_experts_per_tok": 8},
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_next": {**_GATED_DELTA_MOE, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
    "qwen3_moe": {
        "sliding_window": 4096, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "qwen3_vl_moe_text": {
        "moe_intermediate_size": 1408, "decoder_sparse_step": 1, "num_experts": 60, "num_experts_per_tok": 4,
    },
    "qwen4_exp_text": {
        **_GATED_DELTA_MOE, "partial_rotary_factor": 1.0, "num_experts": 512, "num_experts_per_tok": 10,
        "norm_topk_prob": True, "hc_count": 4, "hc_lowrank": 320, "ple_conv_kernel_size": 4, "ngram_size": 3,
        "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000, "make_ngram_vocab_size_divisible_by": 128,
        "seed": 1234, "split_ngram_parts": 512,
    },
    "rwkv7": {
        "hidden_act": "sqrelu", "norm_eps": 1e-5, "decay_low_rank_dim": 64, "gate_low_rank_dim": 128,
        "a_low_rank_dim": 64, "v_low_rank_dim": 16,
    },
    "seed_oss": {"attention_bias": True},
    "smollm3": {"no_rope_layer_interval": 4, "tie_word_embeddings": True},
    "solar_open": {
        **_GROUPS, "moe_intermediate_size": 1280, "num_experts_per_tok": 8, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True,
    },
    "starcoder2": {
        "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "use_bias": True, "tie_word_embeddings": True,
    },
}  # fmt: skip


def _defaults(name: str) -> Mapping[str, Any]:
    common = dict(zip(_KEYS, _VALUES[name], strict=True))
    return {**common, "hidden_act": "silu", **_OTHERS.get(name, {})}


DEFAULTS: Mapping[str, Mapping[str, Any]] = {name: _defaults(name) for name in _VALUES}
