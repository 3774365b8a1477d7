"""Tiny random checkpoints of every family, as transformers saves them, beside transformers' own model."""

from ast import literal_eval
from collections import UserDict
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paged.models.paged_lm import PagedCausalLM
from paged.step.batch import UnifiedBatchItem
from tests.models.deepseek_v41 import SETTINGS, DeepseekV41
from tests.models.edits import Tensors, edit_tensors
from tests.models.kimi_k3 import KimiK3
from tests.tolerance import assert_within

VOCAB_SIZE = 128
WINDOW = 8
# The default of initializer_range, 0.02, leaves all logits near 0.
_SIZES = """hidden_size=64 intermediate_size=96 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=2
    head_dim=32 vocab_size=128 max_position_embeddings=128 initializer_range=0.1"""


def _yarn(**options: Any) -> dict[str, Any]:
    own = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    return {"rope_parameters": own | options}


def _by_layer_type(sliding_theta: float, **full: Any) -> dict[str, Any]:
    """Plain rotation in layers with a window."""
    sliding = {"rope_type": "default", "rope_theta": sliding_theta}
    return {"rope_parameters": {"sliding_attention": sliding, "full_attention": full}}


# Of the 16 wavelengths from 6.3 to 35,000 positions, two fall below 32 / 4, two between, the rest beyond 32 / 1.
_LLAMA3_FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "original_max_position_embeddings": 32, **_LLAMA3_FACTORS}
# Of the 6 pairs that 12 of a head's 16 elements make.
_LONG_FACTORS = {"short_factor": [1 + 0.1 * pair for pair in range(6)], "long_factor": [1.0 + 2 * i for i in range(6)]}
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, **_LONG_FACTORS}
_LONG_8 = _LONG | {"partial_rotary_factor": 1.0, "short_factor": [1.1] * 8, "long_factor": [2.0] * 8}
_OTHER_MULTIPLIERS = {"residual_multiplier": 0.3, "logits_scaling": 8.0}
_SLIDING, _FULL = "sliding_attention", "full_attention"
# Words of the tables below that stand for several options, or for long ones.
_WORDS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "latent": {
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "num_key_value_heads": 4,
        "head_dim": 16,
    },
    # Fewer keys than the prompts have; of 16 heads, all products of a key and a query are negative once in 65,536.
    # Layers that rotate and that do not, each with latents for a later layer, and layers that choose for others.
    "shared_latents": {
        "no_rope_layers": [1, 0, 1, 0, 1],
        "kv_source_layers": [0, 1, 0, 1, 4],
        "indexer_types": ["full", "shared", "full", "shared", "full"],
        **_yarn(attention_factor=1.0),
    },
    # Layers with a window have other sizes.
    "two_latents": {
        "layer_types": ["indexed_attention", _SLIDING, _SLIDING],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "per_layer_config": {
            layer: {
                "num_attention_heads": 6,
                "num_key_value_heads": 6,
                "q_lora_rank": 32,
                "kv_lora_rank": 48,
                "qk_nope_head_dim": 20,
                "qk_rope_head_dim": 32,
                "head_dim": 52,
                "v_head_dim": 16,
            }
            for layer in (1, 2)
        },
    },
    "indexer": {"index_topk": 5, "index_head_dim": 32, "index_n_heads": 16},
    # Twenty entries of 2 positions, of which a query attends to three, and ten of 4 positions.
    "deepseek_v4_layers": {
        "layer_types": [_SLIDING, "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    # Of up to 5 blocks of 8 positions, each query and KV head chooses two, its own included.
    "block_indexer": {
        "index_n_heads": 2,
        "index_head_dim": 24,
        "index_block_size": 8,
        "index_topk_blocks": 2,
        "layer_types": [_FULL, "minimax_m3_sparse"],
    },
    # Pools of 4 positions; of up to 10, a query sees two and its own. All 16 products are negative once in 65,536.
    "mean_indexer": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    # Tables of 53 rows and more; the separator occurs in prompts.
    "ngrams": {
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 3,
        "eos_token_id": 88,
    },
    "half_rotates": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "yarn_mla": _yarn(mscale=0.7, mscale_all_dim=1.2),
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "window": {"sliding_window": WINDOW},
    "window_first": {"sliding_window": WINDOW, "layer_types": [_SLIDING, _FULL]},
    "window_last": {"sliding_window": WINDOW, "layer_types": [_FULL, _SLIDING]},
    "window_from_1": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "whole": {"layer_types": [_FULL, _FULL]},
    "experts": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "local_experts": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "routed_experts": {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    "multipliers": {"embedding_multiplier": 6.0, "attention_multiplier": 0.25, **_OTHER_MULTIPLIERS},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    "llama3_rope": {"rope_parameters": _LLAMA3},
    "quarter_llama3_rope": {"rope_parameters": _LLAMA3 | {"partial_rotary_factor": 0.25}},
    "yarn": _yarn(),
    "yarn_1e6": _yarn(rope_theta=1e6),
    "yarn_gpt_oss": _yarn(rope_theta=150000.0, truncate=False),
    "yarn_ministral3": _yarn(llama_4_scaling_beta=0.5, original_max_position_embeddings=8),
    "yarn_mistral4": _yarn(
        llama_4_scaling_beta=0.5, original_max_position_embeddings=8, mscale=0.7, mscale_all_dim=1.2
    ),
    "yarn_beta_0.1": _yarn(llama_4_scaling_beta=0.1),
    "gemma3_rope": _by_layer_type(100.0, rope_type="linear", rope_theta=1e4, factor=4.0),
    "gemma4_rope": _by_layer_type(100.0, rope_type="proportional", rope_theta=1e4, partial_rotary_factor=0.25),
    "kimi_k3": {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 2,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "gate_lower_bound": -5.0,
            "head_dim": 16,
            "kda_layers": [1, 3],
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "mla_use_output_gate": True,
        "routed_expert_hidden_size": 32,
    },
    "lfm3_rope": _by_layer_type(100.0, rope_type="proportional", rope_theta=1e4, partial_rotary_factor=0.5),
    "laguna_rope": _by_layer_type(100.0, **_yarn(partial_rotary_factor=0.5)["rope_parameters"]),
    "olmo3_rope": _by_layer_type(500.0, **_yarn()["rope_parameters"]),
    "long_rope": {"rope_parameters": _LONG},
    "phimoe_rope": {
        "rope_parameters": _LONG_8 | {"original_max_position_embeddings": 128, "short_mscale": 1.2, "long_mscale": 1.2}
    },
    "long_rope_8": {"rope_parameters": _LONG_8},
    "mrope": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 3, 3]}},
    "half_mrope": {
        "rope_parameters": {
            "rope_theta": 1e4,
            "rope_type": "default",
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.5,
        }
    },
    "alpha_rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 100.0}},
    "gated_delta": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", _FULL],
    },
    "mamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
    },
    "linear_first": {"layer_types": ["linear_attention", _FULL]},
    "nemotron_mamba": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "head_dim": 16},
    "no_rotation": {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
    "short_conv": {"layer_types": ["conv", _FULL], "norm_eps": 1e-5, "tie_word_embeddings": False},
    "five_layers": {"num_hidden_layers": 5, "layer_types": [_SLIDING, *(_SLIDING, _FULL) * 2]},
}


def options(words: str, known: dict[str, dict[str, Any]] = _WORDS) -> dict[str, Any]:
    """What `key=value key=value`, or words for several, stand for."""
    found: dict[str, Any] = {}
    for word in words.split():
        key, is_one, value = word.partition("=")
        found |= {key: literal_eval(value)} if is_one else known[word]
    return deepcopy(found)


class Families(UserDict[str, str]):
    """transformers' configurations by name, made when they are asked for: importing transformers takes seconds.

    Each is given as that of transformers without `Config`, and the options in which it differs from `_SIZES`.
    """

    def __getitem__(self, name: str) -> Any:
        import transformers

        config, _, words = self.data[name].partition(" ")
        if config == "Rwkv7":
            config_class = config_mapping()["rwkv7"]
        else:
            config_class = getattr(transformers, f"{config}Config")
        values = options(_SIZES) | options(words)
        if isinstance(getattr(config_class, "head_dim", None), property):  # follows from other sizes
            del values["head_dim"]
        if not hasattr(config_class, "num_attention_heads") and "num_attention_heads" not in config_class.attribute_map:
            for key in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
                del values[key]  # there is no attention
        return config_class(**values)


# These run in all ways that there are.
FAMILIES = Families(
    apertus="Apertus llama3_rope head_dim=16 pad_token_id=0",
    arcee="Arcee biases head_dim=16",
    axk2="""AXK2 latent indexer routed_experts n_shared_experts=1 mlp_layer_types=['dense','sparse'] gated_norm_rank=4
        n_group=4 topk_group=2 pad_token_id=0""",
    bailing_hybrid="""BailingHybrid latent local_experts q_lora_rank=None head_dim=24 layer_group_size=2 n_group=4
        topk_group=2 num_local_experts=8 num_experts_per_tok=3 moe_intermediate_size=32 first_k_dense_replace=1
        pad_token_id=0""",
    bamba="Bamba mamba attn_layer_indices=[1] mlp_bias=True pad_token_id=0",
    cohere="Cohere use_qk_norm=True head_dim=16 pad_token_id=0",
    cohere2="Cohere2 head_dim=16 window_first",
    deepseek_v2="""DeepseekV2 latent routed_experts n_group=4 topk_group=2 topk_method='group_limited_greedy' yarn_mla
        n_shared_experts=2 first_k_dense_replace=1 routed_scaling_factor=2.0""",
    deepseek_v3="""DeepseekV3 latent routed_experts n_group=4 topk_group=2 n_shared_experts=1 first_k_dense_replace=1
        yarn_mla""",
    deepseek_v32="""DeepseekV32 latent indexer routed_experts n_group=4 topk_group=2 n_shared_experts=1
        first_k_dense_replace=1 yarn_mla""",
    deepseek_v4="""DeepseekV4 deepseek_v4_layers routed_experts yarn num_hidden_layers=3 num_key_value_heads=1
        q_lora_rank=24 qk_rope_head_dim=16 index_n_heads=16 index_head_dim=32 index_topk=3 sliding_window=8 o_groups=2
        o_lora_rank=16 hc_mult=3 hc_sinkhorn_iters=4 num_hash_layers=1""",
    dots1="""Dots1 routed_experts window n_group=4 topk_group=2 n_shared_experts=2 norm_topk_prob=True
        routed_scaling_factor=2.5 first_k_dense_replace=1 max_window_layers=1""",
    dots3_note="""Dots3NoteText latent indexer routed_experts window two_latents n_group=4 topk_group=2
        num_hidden_layers=3 routed_scaling_factor=1.5 attention_bias=True pad_token_id=0
        shared_experts_intermediate_size=48""",
    ernie4_5="Ernie4_5 use_bias=True pad_token_id=0",
    ernie4_5_moe="""Ernie4_5_Moe head_dim=16 moe_num_experts=8 moe_k=3 moe_intermediate_size=32 pad_token_id=0
        moe_num_shared_experts=2""",
    exaone4="Exaone4 head_dim=16 window_first",
    exaone_moe="""ExaoneMoe head_dim=16 window_first experts num_experts=8 num_experts_per_tok=3 n_group=4 topk_group=2
        pad_token_id=0""",
    falcon_h1="""FalconH1 mamba mamba_d_ssm=128 mamba_rms_norm=True lm_head_multiplier=0.5 embedding_multiplier=2.0
        mlp_multipliers=[0.7,1.3] key_multiplier=0.6 attention_out_multiplier=0.8 attention_in_multiplier=1.2
        ssm_multipliers=[0.9,1.1,0.8,1.2,0.7] ssm_in_multiplier=1.25 ssm_out_multiplier=0.7 pad_token_id=0""",
    gemma="Gemma attention_bias=True hidden_act='gelu'",
    gemma2="Gemma2 window query_pre_attn_scalar=48 attn_logit_softcapping=2.0 final_logit_softcapping=3.0",
    gemma3="Gemma3Text window_first gemma3_rope query_pre_attn_scalar=48",
    gemma4_moe="""Gemma4Text window_first gemma4_rope num_experts=4 moe_intermediate_size=32 top_k_experts=2
        enable_moe_block=True global_head_dim=64 num_global_key_value_heads=1 attention_k_eq_v=True
        final_logit_softcapping=3.0 hidden_size_per_layer_input=0 use_bidirectional_attention="vision" """,
    gemma4_shared_kv="""Gemma4Text window five_layers gemma4_rope head_dim=16 global_head_dim=24 num_kv_shared_layers=2
        use_double_wide_mlp=True hidden_size_per_layer_input=24 vocab_size_per_layer_input=136""",
    glm="Glm pad_token_id=0",
    glm4="Glm4 pad_token_id=0",
    glm4_moe="""Glm4Moe routed_experts n_group=4 topk_group=2 routed_scaling_factor=2.5 n_shared_experts=2
        first_k_dense_replace=1 use_qk_norm=True attention_bias=True""",
    glm4_moe_lite="""Glm4MoeLite latent routed_experts n_shared_experts=1 norm_topk_prob=True
        mlp_layer_types=['dense','sparse'] rms_norm_eps=1e-5 pad_token_id=0""",
    glm_moe_dsa="""GlmMoeDsa latent indexer routed_experts n_shared_experts=1 mlp_layer_types=['dense','sparse']
        indexer_types=['full','shared'] rms_norm_eps=1e-5""",
    gpt_oss="GptOss local_experts window yarn_gpt_oss",
    granite="Granite multipliers",
    granite_hybrid="GraniteMoeHybrid mamba linear_first multipliers num_local_experts=0 shared_intermediate_size=96",
    granite_moe_hybrid="""GraniteMoeHybrid mamba linear_first multipliers local_experts shared_intermediate_size=48
        position_embedding_type='rope'""",
    granite_moe_shared="GraniteMoeShared multipliers local_experts shared_intermediate_size=48",
    helium="Helium head_dim=16 biases pad_token_id=0",
    hunyuan_moe="HunYuanMoEV1 alpha_rope num_experts=4 moe_topk=[2,3] attention_bias=True pad_token_id=0",
    hunyuan_v1_dense="HunYuanDenseV1 tied pad_token_id=0",
    hy_v3="HYV3 head_dim=16 experts num_experts=8 num_experts_per_tok=3 num_shared_experts=2",
    hy_v4="""HYV4 latent indexer routed_experts n_shared_experts=1 mlp_layer_types=['dense','sparse'] hc_mult=3
        indexer_types=['full','shared'] pad_token_id=0""",
    kimi_linear="""KimiLinear latent linear_first local_experts q_lora_rank=None linear_head_dim=16 linear_num_heads=4
        num_local_experts=8 num_experts_per_tok=3 moe_intermediate_size=32 n_group=4 topk_group=2 pad_token_id=0""",
    kimi_k3="""KimiLinear latent local_experts kimi_k3 num_hidden_layers=3 num_local_experts=8 num_experts_per_tok=3
        moe_intermediate_size=32 hidden_act='situ' tie_word_embeddings=False first_k_dense_replace=1 pad_token_id=0""",
    laguna="""Laguna head_dim=16 window_last experts num_experts=8 num_experts_per_tok=3
        shared_expert_intermediate_size=48 num_attention_heads_per_layer=[4,6] moe_routed_scaling_factor=2.5
        laguna_rope""",
    lfm2="Lfm2 short_conv block_auto_adjust_ff_dim=False pad_token_id=0",
    lfm2_moe="Lfm2Moe short_conv experts num_dense_layers=1 pad_token_id=0",
    lfm3="""Lfm3 window lfm3_rope num_hidden_layers=3 layer_types=['conv','full_attention','sliding_attention']
        tie_word_embeddings=False pad_token_id=0""",
    llama="Llama",
    llama3_rope="Llama llama3_rope",
    llama4="Llama4Text pad_token_id=0 num_local_experts=4 no_rope_layers=[1,0] floor_scale=8 attn_scale=0.5",
    llama_biases_linear_rope="Llama biases linear_rope hidden_act='gelu'",
    llama_tied="Llama tied",
    minicpm3="""MiniCPM3 latent scale_emb=3 scale_depth=0.9 dim_model_base=32 tied long_rope_8
        original_max_position_embeddings=128""",
    mamba2="""Mamba2 num_heads=8 head_dim=16 state_size=16 n_groups=2 conv_kernel=4 pad_token_id=0""",
    mimo_v2_flash="""MiMoV2Flash head_dim=24 v_head_dim=16 window_last routed_experts n_group=4 topk_group=2
        num_attention_heads=8 attention_bias=True mlp_layer_types=['dense','sparse']""",
    minimax_m2="MiniMaxM2 num_local_experts=8 num_experts_per_tok=3 rotary_dim=16",
    minimax_m3="""MiniMaxM3VLText num_local_experts=8 num_experts_per_tok=3 head_dim=32 block_indexer half_rotates
        mlp_layer_types=['dense','sparse'] dense_intermediate_size=80 shared_intermediate_size=48 pad_token_id=0""",
    ministral="Ministral window_first",
    ministral3="Ministral3 yarn_ministral3",
    mistral="Mistral window",
    mistral4="""Mistral4 latent routed_experts n_shared_experts=1 num_experts_per_tok=3 norm_topk_prob=True
        first_k_dense_replace=1 routed_scaling_factor=1.5 yarn_mistral4 head_dim=40 pad_token_id=0
        n_group=4 topk_group=2""",
    mixtral="Mixtral local_experts",
    nemotron="Nemotron head_dim=16 attention_bias=True mlp_bias=True",
    nemotron_h="""NemotronH nemotron_mamba layers_block_type=['linear_attention','moe','full_attention','mlp']
        pad_token_id=0 n_routed_experts=8 num_experts_per_tok=3 n_group=4 topk_group=2 moe_intermediate_size=32
        moe_shared_expert_intermediate_size=48 routed_scaling_factor=2.5 moe_latent_size=32""",
    olmo2="Olmo2",
    olmo3="Olmo3 window_first olmo3_rope",
    olmo_hybrid="OlmoHybrid gated_delta pad_token_id=0 linear_value_head_dim=32 linear_num_key_heads=2",
    olmoe="Olmoe head_dim=16 num_experts=4 num_experts_per_tok=2 norm_topk_prob=True pad_token_id=0",
    phi3="Phi3 head_dim=16 pad_token_id=0 long_rope original_max_position_embeddings=128",
    phimoe="""Phimoe head_dim=16 local_experts num_local_experts=8 attention_bias=True lm_head_bias=True
        router_jitter_noise=0.2 phimoe_rope""",
    qwen2="Qwen2",
    qwen2_moe="Qwen2Moe experts shared_expert_intermediate_size=48 norm_topk_prob=True",
    qwen2_yarn_window_in_one_layer="Qwen2 window_from_1 tied yarn_1e6",
    qwen3="Qwen3 attention_bias=True",
    qwen3_5="Qwen3_5Text gated_delta",
    qwen3_5_moe="Qwen3_5MoeText gated_delta experts shared_expert_intermediate_size=48",
    qwen3_moe="Qwen3Moe experts norm_topk_prob=False",
    qwen3_moe_every_second_layer="Qwen3Moe experts decoder_sparse_step=2",
    qwen3_moe_normalised="Qwen3Moe experts norm_topk_prob=True",
    qwen3_moe_with_dense_layer="Qwen3Moe experts mlp_only_layers=[0] hidden_act='gelu_pytorch_tanh'",
    qwen3_next="Qwen3Next gated_delta experts shared_expert_intermediate_size=48",
    qwen3_window_in_one_layer="Qwen3 window_from_1 tied",
    qwen4_exp="""Qwen4ExpText gated_delta experts shared_expert_intermediate_size=48 mean_indexer ngrams hc_count=3
        hc_lowrank=12 half_rotates output_gate_type='sigmoid' layer_types=['linear_attention','indexed_attention']""",
    rwkv7="""Rwkv7 num_hidden_layers=3 head_dim=16 decay_low_rank_dim=8 gate_low_rank_dim=12 a_low_rank_dim=8
        v_low_rank_dim=6 max_position_embeddings=2048 pad_token_id=0""",
    seed_oss="SeedOss attention_out_bias=True mlp_bias=True pad_token_id=0",
    smollm3="SmolLM3 pad_token_id=0 no_rope_layer_interval=2",
    solar_open="SolarOpen routed_experts n_group=4 topk_group=2 n_shared_experts=1",
    starcoder2="Starcoder2 window head_dim=16",
)
# Families that transformers has a class for; the truth of the others is a formula, see kimi_k3.py and rwkv7.py.
OF_TRANSFORMERS = [name for name in FAMILIES if name not in ("kimi_k3", "rwkv7")]
# Latents whose rows fit records of published sizes.
RECORDS = Families(
    deepseek_v3="""DeepseekV3 latent routed_experts num_experts_per_tok=8 n_group=1 topk_group=1 n_shared_experts=1
        first_k_dense_replace=1 yarn_mla kv_lora_rank=512 qk_rope_head_dim=64 head_dim=64""",
    deepseek_v32="""DeepseekV32 latent indexer routed_experts n_group=4 topk_group=2 n_shared_experts=1
        first_k_dense_replace=1 yarn_mla kv_lora_rank=512 qk_rope_head_dim=64 head_dim=64 index_head_dim=64""",
)
# Families without K/V.
WITHOUT_ATTENTION = ("mamba2", "rwkv7")
# Other options of families, for which one way is enough.
VARIANTS = Families(
    ernie4_5_moe_in_one_layer="""Ernie4_5_Moe head_dim=16 untied moe_num_experts=4 moe_k=2 moe_intermediate_size=32
        moe_num_shared_experts=0 moe_layer_start_index=0 moe_layer_end_index=0 pad_token_id=0""",
    exaone4_without_windows="Exaone4 whole head_dim=16 tied sliding_window=None",
    starcoder2_without_biases="Starcoder2 untied head_dim=16 use_bias=False hidden_act='relu2'",
    gemma4_one_head_size="Gemma4Text untied global_head_dim=32 hidden_size_per_layer_input=0 attention_bias=True",
    deepseek_v2_lite="""DeepseekV2 latent routed_experts q_lora_rank=None first_k_dense_replace=0 n_shared_experts=2
        attention_bias=True""",
    deepseek_v3_halves="""DeepseekV3 latent routed_experts rope_interleave=False q_lora_rank=None norm_topk_prob=False
        n_group=1 topk_group=1 first_k_dense_replace=1 tied""",
    cohere_without_norm="Cohere untied attention_bias=True head_dim=16 pad_token_id=0 logit_scale=0.5",
    cohere2_biases_untied="""Cohere2 window_last untied llama3_rope head_dim=16 attention_bias=True logit_scale=0.5
        sliding_window=4096""",
    gemma2_without_soft_caps="""Gemma2 window_last untied attention_bias=True attn_logit_softcapping=None
        final_logit_softcapping=None""",
    glm4_moe_in_every_layer="Glm4Moe routed_experts first_k_dense_replace=0 norm_topk_prob=False n_shared_experts=1",
    glm_without_biases_tied="Glm tied quarter_llama3_rope pad_token_id=0 attention_bias=False",
    glm4_without_biases="Glm4 quarter_llama3_rope pad_token_id=0 attention_bias=False",
    granite_biases_tied="Granite multipliers biases tied",
    granite_moe="GraniteMoe multipliers local_experts",
    granite_moe_shared_biases_tied="""GraniteMoeShared multipliers tied llama3_rope num_local_experts=6
        num_experts_per_tok=3 shared_intermediate_size=32 hidden_act='gelu' attention_bias=True""",
    laguna_gates_elements="""Laguna head_dim=16 window_first experts num_experts=8 shared_expert_intermediate_size=24
        gating='per-element' attention_bias=True mlp_layer_types=['sparse','dense']""",
    llama4_dense_layer="""Llama4Text llama3_rope pad_token_id=0 intermediate_size_mlp=80 attention_chunk_size=8
        num_local_experts=4 interleave_moe_layer_step=2 no_rope_layer_interval=2 use_qk_norm=False
        attn_temperature_tuning=False attention_bias=True""",
    bailing_hybrid_unbounded="""BailingHybrid latent local_experts num_local_experts=8 num_experts_per_tok=3
        q_lora_rank=None head_dim=16 layer_group_size=2 moe_intermediate_size=32 n_group=1 topk_group=1
        first_k_dense_replace=0 kda_safe_gate=False short_conv_kernel_size=3 pad_token_id=0""",
    bamba_biases_tied="""Bamba mamba attn_layer_indices=[0] tied time_step_limit=[0.9,1.6] mamba_proj_bias=True
        mamba_conv_bias=False attention_bias=True pad_token_id=0""",
    falcon_h1_without_norm="""FalconH1 mamba mamba_d_ssm=None mlp_bias=True tied time_step_limit=[0.9,1.6]
        mamba_conv_bias=False pad_token_id=0""",
    falcon_h1_gate_first="""FalconH1 mamba mamba_d_ssm=128 mamba_rms_norm=True mamba_norm_before_gate=False
        pad_token_id=0""",
    granite_hybrid_attention_only="""GraniteMoeHybrid whole num_local_experts=0 shared_intermediate_size=96 tied
        attention_bias=True mamba_n_heads=8""",
    granite_hybrid_biases="""GraniteMoeHybrid mamba linear_first local_experts shared_intermediate_size=48
        mamba_proj_bias=True mamba_conv_bias=False time_step_limit=[0.9,1.6] attention_bias=True""",
    nemotron_h_attention_last="""NemotronH nemotron_mamba pad_token_id=0 mlp_bias=True use_bias=True use_conv_bias=False
        layers_block_type=['mlp','linear_attention','linear_attention','full_attention']""",
    lfm2_adjusted="""Lfm2 short_conv tied conv_bias=True conv_L_cache=4 block_multiple_of=32 intermediate_size=120
        block_ffn_dim_multiplier=1.3 pad_token_id=0""",
    lfm2_moe_without_bias="""Lfm2Moe short_conv experts num_dense_layers=0 use_expert_bias=False norm_topk_prob=False
        routed_scaling_factor=2.0 conv_bias=True pad_token_id=0""",
    kimi_linear_latent_queries="""KimiLinear latent linear_first local_experts linear_head_dim=32 linear_num_heads=2
        num_local_experts=8 num_experts_per_tok=3 moe_intermediate_size=32 attention_bias=True n_shared_experts=2
        norm_topk_prob=False pad_token_id=0""",
    lfm3_plain="""Lfm3 short_conv conv_bias=True conv_L_cache=5 use_sandwich_norm=False use_attention_gate=False
        attention_bias=True lfm3_rope pad_token_id=0""",
    olmo_hybrid_without_rotation="""OlmoHybrid num_hidden_layers=3 num_key_value_heads=4 no_rotation
        linear_allow_neg_eigval=False linear_num_value_heads=8 tied pad_token_id=0""",
    minimax_m2_rotates_all="MiniMaxM2 local_experts",
    ministral_whole_tied="Ministral window whole tied yarn hidden_act='gelu_pytorch_tanh'",
    ministral3_window="Ministral3 window yarn_beta_0.1",
    olmo2_biases_tied="Olmo2 tied attention_bias=True",
    olmo3_whole="Olmo3 whole attention_bias=True",
    phi3_window="Phi3 window tied head_dim=16 pad_token_id=0",
    qwen2_moe_windows_dense_layer="""Qwen2Moe experts window shared_expert_intermediate_size=64 mlp_only_layers=[1]
        use_sliding_window=True qkv_bias=False""",
    smollm3_window="SmolLM3 window biases untied pad_token_id=0 no_rope_layers=[0,1] use_sliding_window=True",
)
# Text parts of models that read pictures, by transformers' name of these.
PARTS = Families(
    deepseek_ocr2="""DeepseekOcr2Text routed_experts n_shared_experts=2 mlp_layer_types=['dense','sparse']
        routed_scaling_factor=1.5 n_group=4 topk_group=2 topk_method='group_limited_greedy'""",
    glm4v="Glm4vText half_mrope head_dim=16 pad_token_id=0",
    glm5_next="""Glm5NextText latent routed_experts qk_rope_head_dim=0 linear_head_dim=16 linear_num_heads=4
        index_topk=16 index_kpool=4 index_head_dim=16 index_n_heads=16 n_group=4 topk_group=2 hc_mult=3
        hc_sinkhorn_iters=4 layer_types=['linear_attention','indexed_attention'] mlp_layer_types=['dense','sparse']
        pad_token_id=0""",
    glm_ocr="GlmOcrText half_mrope head_dim=16 pad_token_id=0",
    glm4v_moe="Glm4vMoeText half_mrope head_dim=16 routed_experts n_group=4 topk_group=2",
    internvl="Qwen3",
    llava="Mistral window",
    mistral3="""Mistral4 latent routed_experts n_shared_experts=1 num_experts_per_tok=3 norm_topk_prob=True
        yarn_mistral4 head_dim=40 pad_token_id=0""",
    mistral_large4="""MistralLarge4Text latent routed_experts indexer shared_latents q_lora_rank=None head_dim=16
        num_hidden_layers=5 n_group=4 topk_group=2 num_experts_per_tok=3 routed_scaling_factor=1.5
        final_logit_softcapping=3.0""",
    qwen2_vl="Qwen2VLText mrope head_dim=16",
    qwen3_5="Qwen3_5Text gated_delta",
    qwen3_5_moe="Qwen3_5MoeText gated_delta experts shared_expert_intermediate_size=48",
    qwen2_5_vl="Qwen2_5_VLText mrope head_dim=16 window_from_1",
    qwen3_vl="Qwen3VLText mrope head_dim=16 attention_bias=True",
    qwen3_vl_moe="Qwen3VLMoeText mrope head_dim=16 experts moe_intermediate_size=48",
)
VISION = """depth=1 embed_dim=32 hidden_size=32 intermediate_size=32 num_heads=2 num_attention_heads=2 image_size=28
    num_hidden_layers=1 patch_size=14 deepstack_visual_indexes=[0]"""
_SAM = """hidden_size=32 output_channels=16 num_hidden_layers=1 num_attention_heads=2 image_size=64
    global_attn_indexes=[0] downsample_channels=[16,64] mlp_dim=32"""
# Blocks of 128 in both directions, and projections of two and three of them side by side.
_WIDE = "hidden_size=256 intermediate_size=384 num_hidden_layers=1 head_dim=64"
PACKABLE = Families(
    llama=f"Llama {_WIDE}",
    wide=f"Llama {_WIDE} intermediate_size=1024",
    experts=f"Qwen3Moe {_WIDE} experts moe_intermediate_size=128",
    hybrid=f"""Qwen3Next {_WIDE} num_hidden_layers=2 gated_delta linear_key_head_dim=64 linear_value_head_dim=64 experts
        mlp_only_layers=[0,1]""",
    delta=f"""KimiLinear {_WIDE} num_hidden_layers=2 linear_first mlp_layer_types=['dense','dense'] q_lora_rank=None
        linear_head_dim=32 linear_num_heads=8 kv_lora_rank=128 qk_nope_head_dim=64 qk_rope_head_dim=64 v_head_dim=64
        num_key_value_heads=4 pad_token_id=0""",
    experts_without_gates=f"""NemotronH {_WIDE} nemotron_mamba layers_block_type=['moe','full_attention'] pad_token_id=0
        moe_intermediate_size=128 moe_shared_expert_intermediate_size=128""",
)


@dataclass(frozen=True)
class Case:
    """One checkpoint in both worlds."""

    theirs: Any
    ours: PagedCausalLM

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """transformers' logits after every token, [n, V]."""
        return logits_of(self.theirs, tokens)


def logits_of(theirs: Any, tokens: list[int]) -> torch.Tensor:
    """Those of transformers' model after every token, [n, V]."""
    with torch.no_grad():
        logits: torch.Tensor = theirs(torch.tensor([tokens])).logits[0]
    return logits


def forward(model: PagedCausalLM, chunks: dict[Any, list[int]]) -> list[torch.Tensor | None]:
    """The next tokens of sequences in one batch; their last logits."""
    lengths = {handle.cache_id: handle.num_tokens for handle in model.kv_manager.handles()}
    items = [UnifiedBatchItem(name, ids, pos_offset=lengths.get(name, 0)) for name, ids in chunks.items()]
    return model.unified_forward(items)


def config_mapping() -> Any:
    """transformers' classes of configurations by model_type, and those of tests beside them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    import tests.models.rwkv7  # noqa: F401  registers its own

    return CONFIG_MAPPING


def with_pictures(name: str, text: dict[str, Any]) -> Any:
    """The configuration of a model of `PARTS`, around that of its text part."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    vision = options(VISION) | ({"model_type": "clip_vision_model"} if name == "llava" else {})
    if name == "deepseek_ocr2":
        vision = {"sam_config": options(_SAM), "encoder_config": options(f"{_SIZES} num_hidden_layers=1")}
    return CONFIG_MAPPING[name](text_config=text, vision_config=vision)


def save_family(name: str, folder: Path) -> Any:
    """A random model of a family by its name, saved as `save_checkpoint` does.

    DeepSeek-V4.1 has settings of its own, and no configuration of transformers.
    """
    if name == "deepseek_v41":
        by_formula = DeepseekV41(SETTINGS)
        by_formula.save_pretrained(folder)
        return by_formula
    return save_checkpoint((PARTS | FAMILIES | VARIANTS)[name], folder)


def save_checkpoint(config: Any, folder: Path, **save_options: Any) -> Any:
    """A random model of a configuration, saved by transformers. Norms and biases are random too, not ones and zeros."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Mistral4ForCausalLM

    from tests.models.rwkv7 import Rwkv7

    torch.manual_seed(0)
    if config.model_type == "rwkv7" or getattr(config, "attn_res_block_size", None) is not None:
        by_formula = Rwkv7(config) if config.model_type == "rwkv7" else KimiK3(config)
        by_formula.save_pretrained(folder)
        return by_formula
    if config.model_type in ("glm5_next_text", "mistral_large4_text"):  # transformers has them only as parts
        config = with_pictures(config.model_type.removesuffix("_text"), config.to_dict())
    AutoModelForCausalLM.register(Mistral4ForCausalLM.config_class, Mistral4ForCausalLM, exist_ok=True)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").eval()
    randomize_vectors(model)
    model.save_pretrained(folder, **save_options)
    if config.model_type == "olmo_hybrid":
        edit_tensors(folder, partial(split_convolutions, config))
    return model


@torch.no_grad()
def randomize_vectors(model: Any) -> None:
    """Draw the norms, biases and buffers of a model."""
    for name, parameter in model.named_parameters():
        if name.endswith("forget_gate.A_log"):  # so that a state outlives several tokens
            parameter.uniform_(-3, 0)
        elif parameter.dim() == 1 or name.endswith("bias"):
            parameter.uniform_(0.5, 1.5)
        elif ".index_kpool_" in name:
            parameter.normal_()
        elif name.endswith(".ple.conv1d.weight"):  # begins at 0
            parameter.normal_(0, 0.3)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.uniform_(0.1, 0.4)
        elif name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
        elif name.endswith("rotary_emb.alpha"):
            buffer.uniform_(-0.5, 0.5)
        elif name.endswith("tid2eid"):  # different experts for each token id
            buffer.copy_(torch.rand(len(buffer), model.config.n_routed_experts).argsort(-1)[:, : buffer.shape[1]])


def split_convolutions(config: Any, tensors: Tensors) -> None:
    """As published; transformers 5.23 saves three tensors of the same size, whatever the sizes of q, k and v."""
    keys, values = (
        heads * size
        for heads, size in (
            (config.linear_num_key_heads, config.linear_key_head_dim),
            (config.linear_num_value_heads, config.linear_value_head_dim),
        )
    )
    for prefix in {name.removesuffix("q_conv1d.weight") for name in tensors if name.endswith("q_conv1d.weight")}:
        names = [f"{prefix}{one}_conv1d.weight" for one in "qkv"]
        whole = torch.cat([tensors[name] for name in names])
        parts = whole.split([keys, keys, values])
        tensors.update({name: part.clone() for name, part in zip(names, parts, strict=True)})


def tokens(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def assert_same_logits(actual: torch.Tensor | None, expected: torch.Tensor) -> None:
    """Equal within 1e-4 of the largest logit: float32 rounding through two layers gives below 1e-5."""
    assert actual is not None
    assert actual.dtype == torch.float32
    assert_within(actual, expected, 1e-4 * expected.abs().max())


def assert_logits_of(actual: torch.Tensor, theirs: Any, tokens: list[int], rows: slice = slice(None)) -> None:
    """Logits of the tokens at `rows`, within 24 times the error of transformers' own forward in float32.

    That error is measured against its forward in float64: 1e-6 to 1e-5 of the largest logit, and 1e-4 in latent
    attention, whose scores of 40 and more for random weights magnify the rounding. Ours is up to 8 times as large: in
    gated delta nets, and in latent attention by MKL's oldest kernels.
    """
    rounded = logits_of(theirs, tokens)
    exact = logits_of(as_float64(theirs), tokens)
    assert actual.dtype == torch.float32
    assert_within(actual, exact[rows], 24 * (rounded - exact).abs().max() + 1e-5 * exact.abs().max())


def as_float64(theirs: Any) -> Any:
    """transformers' model in float64, for which it has no grouped products of experts."""
    exact = deepcopy(theirs).double()
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")
    return exact
