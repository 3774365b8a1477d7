"""Settings of models as published on the Hugging Face Hub: by the Hub's id, what its config.json says.

The values are those of the files of these names, from memory and from what transformers' conversion scripts, tests and
documentation quote of them. Keys that are absent there are absent here; token ids, file names and versions are out.
Of models that read more than text it is the text_config. The factors of LongRoPE are other numbers in the same order.
"""

from typing import Any

from tests.models.families import options
from tests.models.published_settings.words import WORDS

_SHORT: dict[str, str] = options(
    """h='hidden_size' i='intermediate_size' l='num_hidden_layers' q='num_attention_heads' kv='num_key_value_heads'
    max='max_position_embeddings' eps='rms_norm_eps' theta='rope_theta' v='vocab_size' window='sliding_window'
    experts='num_local_experts' top='num_experts_per_tok' moe='moe_intermediate_size'
    shared='shared_expert_intermediate_size' d='head_dim'"""
)
# architectures, and what is said; of short names those above.
_ROWS = {
    # Llama
    "huggyllama/llama-7b": """Llama silu h=4096 i=11008 l=32 q=32 max=2048 max_sequence_length=2048 eps=1e-6 v=32000
        untied""",
    "meta-llama/Llama-2-7b-hf": """Llama silu h=4096 i=11008 l=32 q=32 kv=32 max=4096 pretraining_tp=1 eps=1e-5 untied
        no_rope_scaling v=32000""",
    "meta-llama/Meta-Llama-3-8B-Instruct": """Llama silu no_bias h=4096 i=14336 l=32 q=32 kv=8 max=8192 eps=1e-5 untied
        pretraining_tp=1 no_rope_scaling theta=500000.0 v=128256""",
    "meta-llama/Llama-3.1-8B-Instruct": """Llama silu no_bias mlp_bias=False h=4096 i=14336 l=32 q=32 kv=8 max=131072
        eps=1e-5 untied pretraining_tp=1 llama3_8 theta=500000.0 v=128256""",
    "meta-llama/Llama-3.2-1B-Instruct": """Llama silu no_bias mlp_bias=False h=2048 i=8192 l=16 q=32 kv=8 d=64 tied
        max=131072 eps=1e-5 pretraining_tp=1 llama3_32 theta=500000.0 v=128256""",
    "meta-llama/Llama-3.2-3B-Instruct": """Llama silu no_bias mlp_bias=False h=3072 i=8192 l=28 q=24 kv=8 d=128 tied
        max=131072 eps=1e-5 pretraining_tp=1 llama3_32 theta=500000.0 v=128256""",
    "meta-llama/Llama-3.3-70B-Instruct": """Llama silu no_bias mlp_bias=False h=8192 i=28672 l=80 q=64 kv=8 d=128 untied
        max=131072 eps=1e-5 pretraining_tp=1 llama3_8 theta=500000.0 v=128256""",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": """Llama silu no_bias h=2048 i=5632 l=22 q=32 kv=4 max=2048 eps=1e-5 untied
        pretraining_tp=1 no_rope_scaling theta=10000.0 v=32000""",
    "HuggingFaceTB/SmolLM2-135M-Instruct": """Llama silu no_bias mlp_bias=False h=576 i=1536 l=30 q=9 kv=3 max=8192
        eps=1e-5 is_llama_config=True rope_interleaved=False pretraining_tp=1 no_rope_scaling theta=100000 tied
        v=49152""",
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": """SmolVLM:llama silu h=960 i=2560 l=32 q=15 kv=5 d=64 max=8192
        eps=1e-5 is_llama_config=True rope_interleaved=False theta=100000 neftune_noise_alpha=0.0 pixel_shuffle_factor=4
        qk_layer_norms=False use_resampler=False transformers.js_config={'kv_cache_dtype':{'q4':'float16'}} untied
        v=49280""",
    "01-ai/Yi-1.5-9B-Chat": """Llama silu no_bias h=4096 i=11008 l=48 q=32 kv=4 max=4096 eps=1e-6 untied
        pretraining_tp=1 no_rope_scaling theta=5000000.0 v=64000""",
    "lmsys/vicuna-7b-v1.5-16k": """Llama silu h=4096 i=11008 l=32 q=32 kv=32 max=4096 max_sequence_length=16384
        pretraining_tp=1 eps=1e-5 linear_4 untied v=32000""",
    "deepseek-ai/deepseek-coder-6.7b-instruct": """Llama silu h=4096 i=11008 l=32 q=32 kv=32 max=16384 pretraining_tp=1
        eps=1e-6 linear_4 theta=100000 untied v=32256""",
    "tencent/Hy3": """HYV3 silu h=4096 i=13312 l=80 q=64 kv=8 d=128 max=262144 enable_attention_fp32_softmax=False
        enable_lm_head_fp32=True enable_moe_fp32_combine=False expert_hidden_dim=1536 first_k_dense_replace=1 moe=1536
        moe_router_enable_expert_bias=True moe_router_use_sigmoid=True num_experts=192 num_nextn_predict_layers=1
        num_shared_experts=1 output_router_logits=True qk_norm=True eps=1e-5 theta=11158840.0 route_norm=True top=8
        router_scaling_factor=2.826 untied use_grouped_mm=False v=120832""",
    "LGAI-EXAONE/K-EXAONE-236B-A23B": """ExaoneMoe silu k_exaone_layers h=6144 i=18432 l=48 q=64 kv=8 d=128 max=262144
        first_last_k_dense_replace=1 moe=2048 n_group=1 norm_topk_prob=True num_experts=128 num_nextn_predict_layers=1
        num_shared_experts=1 eps=1e-5 no_rope_scaling theta=1000000 routed_scaling_factor=2.5 scoring_func='sigmoid'
        window=128 sliding_window_pattern='LLLG' top=8 topk_group=1 topk_method='noaux_tc' untied v=153600""",
    "CohereForAI/c4ai-command-r-v01": """Cohere silu no_bias h=8192 i=22528 l=40 q=64 kv=64 layer_norm_eps=1e-5
        logit_scale=0.0625 max=8192 theta=8000000.0 use_qk_norm=False v=256000""",
    "CohereForAI/c4ai-command-r-plus": """Cohere silu no_bias h=12288 i=33792 l=64 q=96 kv=8 layer_norm_eps=1e-5
        logit_scale=0.8333333333333334 max=8192 theta=75000000.0 use_qk_norm=True v=256000""",
    "XiaomiMiMo/MiMo-V2-Flash": """MiMoV2Flash silu no_bias mimo_v2_layers h=4096 i=16384 l=48 q=64 kv=4 d=192
        add_full_attention_sink_bias=False add_swa_attention_sink_bias=True attention_chunk_size=128
        attention_value_scale=0.707 hybrid_block_size=None layernorm_epsilon=1e-5 max=262144 moe=2048 n_group=1
        n_routed_experts=256 n_shared_experts=None norm_topk_prob=True partial_rotary_factor=0.334 theta=5000000
        routed_scaling_factor=None scoring_func='sigmoid' window=128 sliding_window_size=128 swa_head_dim=192
        swa_num_attention_heads=64 swa_num_key_value_heads=8 swa_rope_theta=10000 swa_v_head_dim=128 top=8 topk_group=1
        topk_method='noaux_tc' untied v=152576 v_head_dim=128""",
    "poolside/Laguna-S-2.1": """Laguna no_bias laguna_layers h=3072 i=12288 l=48 q=48 kv=8 d=128 max=1048576
        attention_dropout=0.0 decoder_sparse_step=1 eps=1e-6 gating='per-head' mlp_only_layers=[0]
        moe_apply_router_weight_on_input=False moe=1024 moe_routed_scaling_factor=2.5 moe_router_logit_softcapping=0.0
        norm_topk_prob=True num_experts=256 router_aux_loss_coef=0.0 shared=1024 window=512 top=10 untied v=100352""",
    "microsoft/Phi-3.5-MoE-instruct": """Phimoe silu bias h=4096 i=6400 l=32 q=32 kv=8 max=131072 eps=1e-5 experts=16
        hidden_dropout=0.0 input_jitter_noise=0.01 lm_head_bias=True original_max_position_embeddings=4096
        output_router_logits=False router_aux_loss_coef=0.0 router_jitter_noise=0.01 phimoe_factors theta=10000.0
        window=131072 top=2 untied v=32064""",
    # Mistral
    "mistralai/Mistral-7B-v0.1": """Mistral silu h=4096 i=14336 l=32 q=32 kv=8 max=32768 eps=1e-5 theta=10000.0
        window=4096 untied v=32000""",
    "mistralai/Mistral-7B-Instruct-v0.3": """Mistral silu h=4096 i=14336 l=32 q=32 kv=8 max=32768 eps=1e-5
        theta=1000000.0 window=None untied v=32768""",
    "mistralai/Mistral-Nemo-Instruct-2407": """Mistral silu h=5120 i=14336 l=40 q=32 kv=8 d=128 max=131072 eps=1e-5
        theta=1000000.0 window=None untied v=131072""",
    "mistralai/Mistral-Small-24B-Instruct-2501": """Mistral silu h=5120 i=32768 l=40 q=32 kv=8 d=128 max=32768 eps=1e-5
        theta=100000000.0 window=None untied v=131072""",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": """Mistral3:mistral silu h=5120 i=32768 l=40 q=32 kv=8 d=128
        max=131072 eps=1e-5 theta=1000000000.0 window=None v=131072""",
    "mistralai/Ministral-8B-Instruct-2410": """Mistral silu h=4096 i=12288 l=36 q=32 kv=8 d=128 max=32768 eps=1e-5
        theta=100000000.0 window=32768 untied v=131072""",
    "mistralai/Ministral-8B-Instruct-2410 with layer_types": """Ministral silu h=4096 i=12288 l=36 q=32 kv=8 d=128
        max=32768 eps=1e-5 theta=100000000.0 window=32768 three_of_four_slide_last_36 untied v=131072""",
    "mistralai/Ministral-3-3B-Instruct-2512-BF16": """Mistral3:ministral3 silu h=3072 i=9216 l=26 q=32 kv=8 d=128
        max=262144 eps=1e-5 ministral3_rope window=None tied v=131072""",
    "mistralai/Ministral-3-8B-Instruct-2512-BF16": """Mistral3:ministral3 silu h=4096 i=14336 l=34 q=32 kv=8 d=128
        max=262144 eps=1e-5 ministral3_rope window=None untied v=131072""",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": """Mixtral silu h=4096 i=14336 l=32 q=32 kv=8 max=32768 experts=8 top=2
        output_router_logits=False eps=1e-5 theta=1000000.0 router_aux_loss_coef=0.02 window=None untied v=32000""",
    "mistralai/Mixtral-8x22B-Instruct-v0.1": """Mixtral silu h=6144 i=16384 l=56 q=48 kv=8 max=65536 experts=8 top=2
        output_router_logits=False eps=1e-5 theta=1000000.0 router_jitter_noise=0.0 window=None untied v=32768""",
    # Qwen
    "Qwen/Qwen2-7B-Instruct": """Qwen2 silu h=3584 i=18944 l=28 q=28 kv=4 max=32768 max_window_layers=28 eps=1e-6
        theta=1000000.0 window=131072 untied use_sliding_window=False v=152064""",
    "Qwen/Qwen2.5-0.5B-Instruct": """Qwen2 silu h=896 i=4864 l=24 q=14 kv=2 max=32768 max_window_layers=21 eps=1e-6
        theta=1000000.0 window=32768 tied use_sliding_window=False v=151936""",
    "Qwen/Qwen2.5-7B-Instruct with YaRN": """Qwen2 silu h=3584 i=18944 l=28 q=28 kv=4 max=32768 max_window_layers=28
        eps=1e-6 theta=1000000.0 window=131072 untied use_sliding_window=False v=152064 yarn_4_by_type""",
    "Qwen/Qwen2.5-7B-Instruct-1M": """Qwen2 silu h=3584 i=18944 l=28 q=28 kv=4 max=1010000 max_window_layers=28
        eps=1e-5 theta=10000000.0 window=32768 untied use_sliding_window=False v=152064 dual_chunk""",
    "Qwen/QwQ-32B": """Qwen2 silu h=5120 i=27648 l=64 q=40 kv=8 max=40960 max_window_layers=64 eps=1e-5
        theta=1000000.0 window=32768 untied use_sliding_window=False v=152064""",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": """Qwen2 silu h=1536 i=8960 l=28 q=12 kv=2 max=131072 eps=1e-6
        max_window_layers=21 theta=10000 window=4096 untied use_mrope=False use_sliding_window=False v=151936""",
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": """Qwen2Moe silu h=2048 i=5632 l=24 q=16 kv=16 max=8192 max_window_layers=21
        qwen_experts norm_topk_prob=False moe=1408 num_experts=60 top=4 shared=5632 eps=1e-6 theta=1000000.0
        window=32768 untied use_sliding_window=False v=151936""",
    "Qwen/Qwen2-57B-A14B-Instruct": """Qwen2Moe silu h=3584 i=18944 l=28 q=28 kv=4 max=32768 max_window_layers=28
        qwen_experts norm_topk_prob=False moe=2560 num_experts=64 shared=20480 eps=1e-6 theta=1000000.0
        window=65536 untied use_sliding_window=False v=151936""",
    "Qwen/Qwen3-0.6B": """Qwen3 silu no_bias h=1024 i=3072 l=28 q=16 kv=8 d=128 max=40960 max_window_layers=28 eps=1e-6
        no_rope_scaling theta=1000000 window=None tied use_sliding_window=False v=151936""",
    "Qwen/Qwen3-8B": """Qwen3 silu no_bias h=4096 i=12288 l=36 q=32 kv=8 d=128 max=40960 max_window_layers=36 eps=1e-6
        no_rope_scaling theta=1000000 window=None untied use_sliding_window=False v=151936""",
    "Qwen/Qwen3-8B with YaRN": """Qwen3 silu no_bias h=4096 i=12288 l=36 q=32 kv=8 d=128 max=40960 max_window_layers=36
        eps=1e-6 yarn_4 theta=1000000 window=None untied use_sliding_window=False v=151936""",
    "Qwen/Qwen3-30B-A3B": """Qwen3Moe silu no_bias qwen_experts h=2048 i=6144 l=48 q=32 kv=4 d=128 max=40960 eps=1e-6
        max_window_layers=48 moe=768 num_experts=128 no_rope_scaling theta=1000000.0 window=None untied
        use_sliding_window=False v=151936""",
    "Qwen/Qwen3-235B-A22B-Instruct-2507": """Qwen3Moe silu no_bias qwen_experts h=4096 i=12288 l=94 q=64 kv=4 d=128
        max=262144 eps=1e-6 max_window_layers=94 moe=1536 num_experts=128 no_rope_scaling theta=5000000 window=None
        untied use_sliding_window=False v=151936""",
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": """Qwen3Moe silu qwen_experts h=6144 i=8192 l=62 q=96 kv=8 d=128 max=262144
        eps=1e-6 max_window_layers=62 moe=2560 num_experts=160 qkv_bias=False no_rope_scaling theta=10000000 shared=0
        window=None untied use_qk_norm=True use_sliding_window=False v=151936""",
    "Qwen/Qwen2-VL-7B-Instruct": """Qwen2VL:qwen2_vl_text silu h=3584 i=18944 l=28 q=28 kv=4 max=32768 eps=1e-6
        max_window_layers=28 mrope_2 theta=1000000.0 window=32768 untied use_sliding_window=False v=152064""",
    "Qwen/Qwen2.5-VL-7B-Instruct": """Qwen2_5_VL:qwen2_5_vl_text silu h=3584 i=18944 l=28 q=28 kv=4 max=128000 eps=1e-6
        max_window_layers=28 mrope_2 theta=1000000.0 window=32768 untied use_sliding_window=False v=152064""",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": """Qwen3Next silu no_bias h=2048 i=5120 l=48 q=16 kv=2 d=256 max=262144 eps=1e-6
        theta=10000000 gated_delta linear_num_value_heads=32 partial_rotary_factor=0.25 full_attention_interval=4
        moe=512 num_experts=512 top=10 shared=512 norm_topk_prob=True decoder_sparse_step=1 mlp_only_layers=[]
        output_router_logits=False router_aux_loss_coef=0.001 no_rope_scaling use_sliding_window=False untied
        v=151936""",
    "Qwen/Qwen3.8-Flash-Next": """Qwen4Exp:qwen4_exp_text silu no_bias qwen4_exp h=2560 l=48 q=24 kv=2 d=256 max=262144
        moe=640 num_experts=512 shared=640 top=10 eos_token_id=248044 eps=1e-6 untied v=248320""",
    "Qwen/Qwen3.5-27B": """Qwen3_5:qwen3_5_text silu no_bias qwen3_5 h=5120 i=17408 l=64 q=24 kv=4 untied
        linear_num_value_heads=48""",
    "Qwen/Qwen3.5-35B-A3B": """Qwen3_5Moe:qwen3_5_moe_text silu no_bias qwen3_5 h=2048 l=40 q=16 kv=2
        linear_num_value_heads=32 moe=512 num_experts=256 top=8 shared=512 untied
        output_router_logits=False router_aux_loss_coef=0.001""",
    "Qwen/Qwen3-VL-8B-Instruct": """Qwen3VL:qwen3_vl_text silu no_bias h=4096 i=12288 l=36 q=32 kv=8 d=128 max=262144
        eps=1e-6 mrope_3 theta=5000000 untied v=151936""",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": """Qwen3VLMoe:qwen3_vl_moe_text silu no_bias h=2048 i=6144 l=48 q=32 kv=4 d=128
        decoder_sparse_step=1 max=262144 mlp_only_layers=[] moe=768 norm_topk_prob=True num_experts=128 top=8 eps=1e-6
        mrope_3 theta=5000000 untied v=151936""",
    "OpenGVLab/InternVL3-8B-hf": """InternVL:qwen2 silu h=3584 i=18944 l=28 q=28 kv=4 max=32768 max_window_layers=70
        eps=1e-6 dynamic_2 theta=1000000.0 window=None use_sliding_window=False v=151674""",
    "mistral-community/pixtral-12b": """Llava:mistral d=128 h=5120 i=14336 l=40 kv=8 max=1024000 eps=1e-5
        is_composition=True theta=1000000000.0 window=None v=131072""",
    # Gemma
    "google/gemma-2b-it": """Gemma no_bias attention_dropout=0.0 h=2048 i=16384 l=18 q=8 kv=1 d=256 max=8192 eps=1e-6
        hidden_act='gelu' hidden_activation=None no_rope_scaling theta=10000.0 v=256000""",
    "google/gemma-7b-it": """Gemma no_bias attention_dropout=0.0 h=3072 i=24576 l=28 q=16 kv=16 d=256 max=8192 eps=1e-6
        hidden_act='gelu' hidden_activation=None no_rope_scaling theta=10000.0 v=256000""",
    "google/gemma-2-2b-it": "Gemma2 gemma2 h=2304 i=9216 l=26 q=8 kv=4 d=256 query_pre_attn_scalar=256",
    "google/gemma-2-9b-it": """Gemma2 gemma2 h=3584 i=14336 l=42 q=16 kv=8 d=256 query_pre_attn_scalar=256
        sliding_window_size=4096""",
    "google/gemma-2-27b-it": """Gemma2 gemma2 h=4608 i=36864 l=46 q=32 kv=16 d=128 query_pre_attn_scalar=144
        sliding_window_size=4096""",
    "google/gemma-3-270m-it": """Gemma3 gemma3 h=640 i=2048 l=18 _sliding_window_pattern=6 five_of_six_slide_18
        use_bidirectional_attention=False""",
    "google/gemma-3-1b-it": "Gemma3 gemma3 h=1152 i=6912 l=26 sliding_window_pattern=6 cache_implementation='hybrid'",
    "google/gemma-3-4b-it": "Gemma3:gemma3_text h=2560 i=10240 l=34 linear_8 window=1024",
    "google/gemma-3-12b-it": "Gemma3:gemma3_text h=3840 i=15360 l=48 q=16 kv=8 linear_8 window=1024",
    "google/gemma-3-27b-it": """Gemma3:gemma3_text h=5376 i=21504 l=62 q=32 kv=16 d=128 query_pre_attn_scalar=168
        linear_8 window=1024""",
    "google/gemma-4-E2B-it": """Gemma4:gemma4_text gemma4 h=1536 i=6144 l=35 q=8 kv=1 max=131072 window=512 tied
        attention_k_eq_v=False enable_moe_block=False hidden_size_per_layer_input=256 num_kv_shared_layers=20
        num_global_key_value_heads=None use_double_wide_mlp=True use_bidirectional_attention=None
        four_of_five_slide_35""",
    "google/gemma-4-E4B-it": """Gemma4:gemma4_text gemma4 h=2560 i=10240 l=42 q=8 kv=2 max=131072 window=512 tied
        attention_k_eq_v=False enable_moe_block=False hidden_size_per_layer_input=256 num_kv_shared_layers=18
        num_global_key_value_heads=None use_double_wide_mlp=False use_bidirectional_attention=None
        five_of_six_slide_42""",
    "google/gemma-4-31B-it": """Gemma4:gemma4_text gemma4 h=5376 i=21504 l=60 q=32 kv=16 max=262144 window=1024 tied
        attention_k_eq_v=True enable_moe_block=False hidden_size_per_layer_input=0 num_kv_shared_layers=0
        num_global_key_value_heads=4 use_bidirectional_attention='vision' five_of_six_slide_60""",
    "google/gemma-4-26B-A4B-it": """Gemma4:gemma4_text gemma4 h=2816 i=2112 l=30 q=16 kv=8 max=262144 window=1024 tied
        attention_k_eq_v=True enable_moe_block=True moe=704 num_experts=128 top_k_experts=8 num_kv_shared_layers=0
        hidden_size_per_layer_input=0 num_global_key_value_heads=2 use_bidirectional_attention='vision'
        five_of_six_slide_30""",
    # gpt-oss, in 16 bits
    "unsloth/gpt-oss-20b-BF16": """GptOss silu bias experts_per_token=4 h=2880 i=2880 l=24 q=64 kv=8 d=64 top=4
        experts=32 initial_context_length=4096 max=131072 eps=1e-5 gpt_oss_rope theta=150000 window=128 untied
        router_aux_loss_coef=0.9 swiglu_limit=7.0 every_second_slides_24 v=201088""",
    "unsloth/gpt-oss-120b-BF16": """GptOss silu bias experts_per_token=4 h=2880 i=2880 l=36 q=64 kv=8 d=64 top=4
        experts=128 initial_context_length=4096 max=131072 eps=1e-5 gpt_oss_rope theta=150000 window=128 untied
        router_aux_loss_coef=0.9 swiglu_limit=7.0 every_second_slides_36 v=201088""",
    # GLM and MiniMax
    "zai-org/GLM-OCR": """GlmOcr:glm_ocr_text silu h=1536 i=4608 l=16 q=16 kv=8 d=128 max=131072 eps=1e-5 glm_ocr_rope
        num_nextn_predict_layers=1 untied v=59392""",
    "zai-org/glm-4-9b-chat-hf": """Glm silu bias h=4096 i=13696 l=40 q=32 kv=2 d=128 max=131072 eps=1.5625e-7
        partial_rotary_factor=0.5 theta=10000.0 untied v=151552""",
    "zai-org/GLM-4-9B-0414": """Glm4 silu bias h=4096 i=13696 l=40 q=32 kv=2 d=128 max=32768 eps=1e-5
        partial_rotary_factor=0.5 theta=10000.0 untied v=151552""",
    "zai-org/GLM-4-32B-0414": """Glm4 silu no_bias h=6144 i=23040 l=61 q=48 kv=8 d=128 max=32768 eps=1e-5
        partial_rotary_factor=0.5 theta=10000.0 untied v=151552""",
    "zai-org/GLM-4.5-Air": """Glm4Moe glm45 h=4096 i=10944 l=46 max=131072 moe=1408 n_routed_experts=128
        first_k_dense_replace=1 routed_scaling_factor=1.0 use_qk_norm=False""",
    "zai-org/GLM-4.6": """Glm4Moe glm45 h=5120 i=12288 l=92 max=202752 moe=1536 n_routed_experts=160
        first_k_dense_replace=3 routed_scaling_factor=2.5 use_qk_norm=True""",
    "zai-org/GLM-4.7-Flash": """Glm4MoeLite no_bias hidden_act='silu' attention_dropout=0.0 h=2048 i=10240 l=47 q=20
        kv=20 max=202752 moe=1536 top=4 first_k_dense_replace=1 kv_lora_rank=512 n_group=1 n_routed_experts=64
        n_shared_experts=1 norm_topk_prob=True num_nextn_predict_layers=1 partial_rotary_factor=1.0 q_lora_rank=768
        topk_group=1 qk_nope_head_dim=192 qk_rope_head_dim=64 eps=1e-5 no_rope_scaling theta=1000000
        routed_scaling_factor=1.8 topk_method='noaux_tc' untied v_head_dim=256 v=154880""",
    # DeepSeek, Kimi
    "deepseek-ai/DeepSeek-V2-Lite": """DeepseekV2 silu no_bias deepseek h=2048 i=10944 l=27 q=16 kv=16 max=163840
        moe=1408 top=6 n_group=1 n_routed_experts=64 n_shared_experts=2 norm_topk_prob=False pretraining_tp=1
        q_lora_rank=None yarn_v2_lite theta=10000 routed_scaling_factor=1.0 scoring_func='softmax' topk_group=1
        topk_method='greedy' v=102400""",
    "deepseek-ai/DeepSeek-V3": """DeepseekV3 silu no_bias deepseek h=7168 i=18432 l=61 q=128 kv=128 max=163840 moe=2048
        top=8 ep_size=1 first_k_dense_replace=3 n_group=8 n_routed_experts=256 n_shared_experts=1 norm_topk_prob=True
        num_nextn_predict_layers=1 q_lora_rank=1536 yarn_v3 theta=10000 routed_scaling_factor=2.5
        scoring_func='sigmoid' topk_group=4 topk_method='noaux_tc' v=129280""",
    "deepseek-ai/DeepSeek-V3.2-Exp": """DeepseekV32 silu no_bias deepseek h=7168 i=18432 l=61 q=128 kv=128 max=163840
        moe=2048 top=8 ep_size=1 first_k_dense_replace=3 index_head_dim=128 index_n_heads=64 index_topk=2048 n_group=8
        n_routed_experts=256 n_shared_experts=1 norm_topk_prob=True num_nextn_predict_layers=1 q_lora_rank=1536 yarn_v3
        theta=10000 routed_scaling_factor=2.5 scoring_func='sigmoid' topk_group=4 topk_method='noaux_tc' v=129280""",
    "deepseek-ai/DeepSeek-V4-Flash": """DeepseekV4 silu no_bias deepseek_v4_flash h=4096 l=43 q=64 kv=1 d=512
        max=1048576 moe=2048 top=6 compress_rope_theta=160000 hc_eps=1e-06 hc_mult=4 hc_sinkhorn_iters=20
        index_head_dim=128 index_n_heads=64 index_topk=512 n_routed_experts=256 n_shared_experts=1 norm_topk_prob=True
        num_hash_layers=3 num_nextn_predict_layers=1 o_groups=8 o_lora_rank=1024 q_lora_rank=1024 qk_rope_head_dim=64
        eps=1e-06 theta=10000 routed_scaling_factor=1.5 scoring_func='sqrtsoftplus' sliding_window=128
        swiglu_limit=10.0 topk_method='noaux_tc' untied v=129280""",
    # By the keys that transformers and vLLM read, with transformers' values.
    "dots-studio/dots3-note-prev": """Dots3Note silu no_bias dots3_layers h=5120 i=13824 l=46 q=128 kv=128 max=524288
        moe=1536 top=8 d=256 model_type='dots3_note' apply_mla_qkv_lora_rescale=True attention_gate_type='headwise'
        eps=1e-5 first_k_dense_replace=1 index_head_dim=128 index_n_heads=64 index_topk=2048 kv_lora_rank=512
        moe_layer_freq=1 moe_shared_expert_intermediate_size=1536 n_group=1 n_routed_experts=256 n_shared_experts=1
        norm_topk_prob=True num_nextn_predict_layers=1 q_lora_rank=1024 qk_nope_head_dim=128 qk_rope_head_dim=64
        theta=80000000 routed_scaling_factor=1.0 scoring_func='sigmoid' sliding_window_size=512
        swa_attention_gate_type='headwise' swa_head_dim=256 swa_kv_lora_rank=1024 swa_num_attention_heads=64
        swa_num_key_value_heads=64 swa_q_lora_rank=1024 swa_qk_nope_head_dim=192 swa_qk_rope_head_dim=64
        swa_rope_theta=50000 swa_v_head_dim=128 topk_group=1 topk_method='noaux_tc' untied use_dsa=True
        use_sliding_window=True v_head_dim=128 v=152064""",
    "zai-org/GLM-5": """GlmMoeDsa silu no_bias h=6144 i=12288 l=78 q=64 kv=64 max=202752 moe=2048 top=8 ep_size=1
        first_k_dense_replace=3 index_head_dim=128 index_n_heads=32 index_topk=2048 kv_lora_rank=512 moe_layer_freq=1
        n_group=1 n_routed_experts=256 n_shared_experts=1 norm_topk_prob=True num_nextn_predict_layers=1
        q_lora_rank=2048 qk_nope_head_dim=192 qk_rope_head_dim=64 eps=1e-5 theta=1000000 routed_scaling_factor=2.5
        scoring_func='sigmoid' topk_group=1 topk_method='noaux_tc' untied v_head_dim=256 v=154880""",
    "zai-org/GLM-5.2": """GlmMoeDsa silu no_bias h=6144 i=12288 l=78 q=64 kv=64 d=192 max=1048576 moe=2048 top=8
        ep_size=1 first_k_dense_replace=3 index_head_dim=128 index_n_heads=32 index_topk=2048 index_topk_freq=4
        index_skip_topk_offset=3 index_topk_pattern=None index_share_for_mtp_iteration=True indexer_rope_interleave=True
        glm_5_2 kv_lora_rank=512 moe_layer_freq=1 moe_router_dtype='float32' n_group=1 n_routed_experts=256
        n_shared_experts=1 norm_topk_prob=True num_nextn_predict_layers=1 pretraining_tp=1 q_lora_rank=2048
        qk_head_dim=256 qk_nope_head_dim=192 qk_rope_head_dim=64 eps=1e-5 rope_interleave=True
        routed_scaling_factor=2.5 scoring_func='sigmoid' topk_group=1 topk_method='noaux_tc' untied v_head_dim=256
        v=154880""",
    "deepseek-community/DeepSeek-OCR-2": """DeepseekOcr2:deepseek_ocr2_text silu no_bias h=1280 i=6848 l=12 q=10 kv=10
        max=8192 eps=1e-6 moe=896 top=6 n_group=1 n_routed_experts=64 n_shared_experts=2 topk_group=1
        topk_method='greedy' dense_then_sparse_12 untied v=129280""",
    "moonshotai/Kimi-K2-Instruct": """DeepseekV3 silu no_bias deepseek h=7168 i=18432 l=61 q=64 kv=64 max=131072
        moe=2048 top=8 ep_size=1 model_type='kimi_k2' n_group=1 n_routed_experts=384 n_shared_experts=1
        norm_topk_prob=True num_nextn_predict_layers=0 pretraining_tp=1 q_lora_rank=1536 yarn_k2 theta=50000.0
        routed_scaling_factor=2.827
        scoring_func='sigmoid' topk_group=1 topk_method='noaux_tc' v=163840""",
    "moonshotai/Kimi-K2.5": """KimiK25:deepseek_v3 silu no_bias deepseek h=7168 i=18432 l=61 q=64 kv=64 max=262144
        moe=2048 top=8 ep_size=1 model_type='kimi_k2' n_group=1 n_routed_experts=384 n_shared_experts=1
        norm_topk_prob=True num_nextn_predict_layers=0 pretraining_tp=1 q_lora_rank=1536 yarn_k2_64 theta=50000.0
        routed_scaling_factor=2.827 scoring_func='sigmoid' topk_group=1 topk_method='noaux_tc' v=163840""",
    "skt/A.X-K2-Light": """AXK2 silu no_bias h=2048 i=5120 l=48 q=32 kv=32 max=131072 moe=512 top=8 eps=1e-6
        first_k_dense_replace=1 gated_norm_rank=16 index_head_dim=128 index_n_heads=16 index_topk=2048 kv_lora_rank=128
        n_routed_experts=128 n_shared_experts=1 norm_topk_prob=True q_lora_rank=384 qk_nope_head_dim=64
        qk_rope_head_dim=32 routed_scaling_factor=2.5 theta=10000 untied v_head_dim=64 v=163840""",
    "tencent/Hy4-preview": """HYV4 silu no_bias h=2816 i=6912 l=34 q=32 kv=32 max=262144 moe=768 top=8 eps=1e-5
        enable_ihc=True gated_mla=True gating_type='elementwise' hc_eps=1e-6 hc_magnitude=2.0 hc_mult=4
        hy_v4_indexers index_head_dim=128 index_n_heads=16 index_topk=2048 kv_lora_rank=512 learnable_sink=True
        n_group=1 n_routed_experts=256 n_shared_experts=1 norm_topk_prob=True q_lora_rank=1536 qk_nope_head_dim=192
        qk_rope_head_dim=64 routed_scaling_factor=2.827 swiglu_limit=10.0 theta=10000 topk_group=1 untied
        v_head_dim=256 v=120832""",
    "openbmb/MiniCPM3-4B": """MiniCPM3 silu no_bias h=2560 i=6400 l=62 q=40 kv=40 max=32768 dim_model_base=256 eps=1e-5
        kv_lora_rank=256 q_lora_rank=768 qk_nope_head_dim=64 qk_rope_head_dim=32 scale_depth=1.4 scale_emb=12
        minicpm3_rope v=73448 original_max_position_embeddings=32768""",
    "mistralai/Mistral-Small-4-119B-2603": """Mistral3:mistral4 silu no_bias h=4096 i=12288 l=36 q=32 kv=32 max=1048576
        moe=2048 top=4 first_k_dense_replace=0 head_dim=128 kv_lora_rank=256 n_group=1 n_routed_experts=128
        n_shared_experts=1 norm_topk_prob=True q_lora_rank=1024 qk_head_dim=128 qk_nope_head_dim=64 qk_rope_head_dim=64
        eps=1e-6 rope_interleave=True mistral4_rope routed_scaling_factor=1.0 topk_group=1 untied v_head_dim=128
        v=131072""",
    # As transformers' class, which names the checkpoint.
    "mistralai/Mistral-Large-4-1T-A52B": """MistralLarge4:mistral_large4_text silu no_bias h=6144 i=24576 l=72 q=64
        kv=64 max=1048576 moe=6144 top=4 d=64 final_logit_softcapping=30.0 first_k_dense_replace=1 index_head_dim=128
        index_n_heads=32 index_topk=2048 kv_lora_rank=512 mistral_large4_layers n_group=1 n_routed_experts=128
        n_shared_experts=1 qk_nope_head_dim=64 qk_rope_head_dim=64 eps=1e-5 routed_scaling_factor=1.0 topk_group=1
        untied v_head_dim=128 v=204800""",
    "MiniMaxAI/MiniMax-M2": """MiniMaxM2 silu minimax h=3072 i=1536 l=62 q=48 kv=8 d=128 max=196608 experts=256 top=8
        eps=1e-6 theta=5000000 window=None untied output_router_logits=False v=200064""",
    "MiniMaxAI/MiniMax-M3": """MiniMaxM3Sparse:minimax_m3_vl_text minimax_m3_layers hidden_act='swigluoai' h=6144 i=3072
        l=60 q=64 kv=4 d=128 max=524288 experts=128 top=4 eps=1e-6 theta=5000000 attention_output_gate=False
        dense_intermediate_size=12288 n_shared_experts=1 num_mtp_modules=1 partial_rotary_factor=0.5 rotary_dim=64
        qk_norm_type='per_head' routed_scaling_factor=2.0 scoring_func='sigmoid' shared_intermediate_size=3072
        swiglu_alpha=1.702 swiglu_limit=7.0 untied use_gemma_norm=True use_qk_norm=True use_routing_bias=True
        v=200064""",
    "zai-org/GLM-4.1V-9B-Thinking": """Glm4v:glm4v_text silu bias h=4096 i=13696 l=40 q=32 kv=2 max=65536 eps=1e-5
        mrope_glm partial_rotary_factor=0.5 theta=10000.0 untied v=151552""",
    "zai-org/GLM-4.5V": """Glm4vMoe:glm4v_moe_text silu bias h=4096 i=10944 l=46 q=96 kv=8 d=128 max=65536 moe=1408
        n_routed_experts=128 n_shared_experts=1 n_group=1 topk_group=1 top=8 norm_topk_prob=True mrope_glm eps=1e-5
        first_k_dense_replace=1 routed_scaling_factor=1.0 use_qk_norm=False partial_rotary_factor=0.5 theta=10000.0
        untied v=151552""",
    "zai-org/GLM-5.3-Flash": """Glm5Next:glm5_next_text silu no_bias h=4096 i=12288 l=45 q=64 kv=64 max=1048576
        hc_eps=1e-6 hc_mult=4 hc_sinkhorn_iters=20 index_head_dim=128 index_kpool=16 index_kpool_always_select_tail=True
        index_n_heads=32 index_topk=2048 kv_lora_rank=512 linear_conv_kernel_dim=4 linear_head_dim=128
        linear_lower_bound=-5.0 linear_num_heads=64 moe=2048 n_group=1 n_routed_experts=288 n_shared_experts=1
        norm_topk_prob=True q_lora_rank=1536 qk_nope_head_dim=256 qk_rope_head_dim=0 eps=1e-5
        routed_scaling_factor=2.5 swiglu_limit=10.0 top=8 topk_group=1 untied v_head_dim=256 v=154880""",
    # Llama 4
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": """Llama4:llama4_text llama4 experts=16 interleave_moe_layer_step=1
        max=10485760 no_rope_layers=[] use_qk_norm=True scout_rope cache_implementation='hybrid'""",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": """Llama4:llama4_text llama4 experts=128 max=1048576
        interleave_moe_layer_step=2 no_rope_layers=[] use_qk_norm=False no_rope_scaling""",
    "meta-llama/Llama-Guard-4-12B": """Llama4:llama4_text llama4 experts=0 max=10485760 moe_layers=[]
        interleave_moe_layer_step=0 num_experts_per_tok=0 no_rope_layers=[] use_qk_norm=False scout_rope""",
    # Phi
    "microsoft/Phi-3-mini-4k-instruct": """Phi3 silu no_bias h=3072 i=8192 l=32 q=32 kv=32 max=4096 eps=1e-5 untied
        original_max_position_embeddings=4096 embd_pdrop=0.0 resid_pdrop=0.0 no_rope_scaling theta=10000.0 window=2047
        v=32064""",
    "microsoft/Phi-3.5-mini-instruct": """Phi3 silu no_bias h=3072 i=8192 l=32 q=32 kv=32 max=131072 eps=1e-5 untied
        original_max_position_embeddings=4096 embd_pdrop=0.0 resid_pdrop=0.0 factors_48 theta=10000.0 window=262144
        v=32064""",
    "microsoft/phi-4": """Phi3 silu no_bias h=5120 i=17920 l=40 q=40 kv=10 max=16384 eps=1e-5 untied theta=250000
        original_max_position_embeddings=16384 embd_pdrop=0.0 resid_pdrop=0.0 no_rope_scaling window=None v=100352""",
    "microsoft/Phi-4-mini-instruct": """Phi3 silu no_bias h=3072 i=8192 l=32 q=24 kv=8 max=131072 eps=1e-5 tied
        original_max_position_embeddings=4096 partial_rotary_factor=0.75 full_attn_mod=1 interpolate_factor=1
        lm_head_bias=False mlp_bias=False factors_48 theta=10000.0 window=262144 v=200064""",
    # SmolLM, OLMo
    "HuggingFaceTB/SmolLM3-3B": """SmolLM3 silu no_bias h=2048 i=11008 l=36 q=16 kv=4 max=65536 max_window_layers=28
        mlp_bias=False no_rope_layer_interval=4 smollm3_layers pretraining_tp=2 eps=1e-6 no_rope_scaling
        theta=5000000.0 window=None use_sliding_window=False v=128256""",
    "allenai/OLMo-2-1124-7B-Instruct": """Olmo2 silu no_bias h=4096 i=11008 l=32 q=32 kv=32 max=4096 eps=1e-6 untied
        no_rope_scaling theta=500000 v=100352""",
    "allenai/OLMo-2-0325-32B-Instruct": """Olmo2 silu no_bias h=5120 i=27648 l=64 q=40 kv=8 max=4096 eps=1e-6 untied
        no_rope_scaling theta=500000 v=100352""",
    "allenai/Olmo-3-7B-Instruct": """Olmo3 silu no_bias h=4096 i=11008 l=32 q=32 kv=32 max=65536 eps=1e-6 untied
        olmo3_rope theta=500000 window=4096 three_of_four_slide_32 v=100278""",
    "allenai/Olmo-3-32B-Think": """Olmo3 silu no_bias h=5120 i=27648 l=64 q=40 kv=8 max=65536 eps=1e-6 untied
        olmo3_rope theta=500000 window=4096 three_of_four_slide_64 v=100278""",
    "allenai/OLMoE-1B-7B-0924-Instruct": """Olmoe silu no_bias clip_qkv=None h=2048 i=1024 l=16 q=16 kv=16 max=4096
        norm_topk_prob=False num_experts=64 top=8 output_router_logits=False eps=1e-5 router_aux_loss_coef=0.01
        no_rope_scaling theta=10000.0 untied v=50304""",
    # ERNIE, Hunyuan, dots, Seed
    "baidu/ERNIE-4.5-0.3B-PT": """Ernie4_5 silu h=1024 i=3072 l=18 q=16 kv=2 d=128 max=131072 eps=1e-5 no_rope_scaling
        theta=500000.0 tied use_bias=False v=103424""",
    "baidu/ERNIE-4.5-21B-A3B-PT": """Ernie4_5_Moe silu h=2560 i=12288 l=28 q=20 kv=4 max=131072 eps=1e-5 moe=1536
        moe_num_experts=64 moe_k=6 moe_capacity=[64,64,64] moe_gate='topk' moe_layer_end_index=27 moe_layer_interval=1
        moe_layer_start_index=1 moe_num_shared_experts=2 moe_use_aux_free=True num_nextn_predict_layers=1
        no_rope_scaling theta=500000.0 tied use_bias=False v=103424""",
    "tencent/Hunyuan-7B-Instruct": """HunYuanDenseV1 silu no_bias attention_head_dim=128 h=4096 i=14336 l=32 q=32 kv=8
        d=128 max=32768 eps=1e-5 alpha_1000 theta=10000.0 tied use_qk_norm=True use_cla=False v=128167""",
    "tencent/Hunyuan-A13B-Instruct": """HunYuanMoEV1 silu no_bias attention_head_dim=128 a13b_layers h=4096 i=3072 l=32
        q=32 kv=8 d=128 max=32768 num_experts=64 eps=1e-5 alpha_1000 theta=10000.0 tied use_qk_norm=True use_cla=False
        use_mixed_mlp_moe=True v=128167""",
    "rednote-hilab/dots.llm1.inst": """Dots1 silu no_bias first_k_dense_replace=1 h=4096 i=10944 l=62 q=32 kv=32
        max=32768 max_window_layers=62 moe=1408 moe_layer_freq=1 n_routed_experts=128 n_shared_experts=2 top=6
        norm_topk_prob=True eps=1e-5 no_rope_scaling theta=10000000 routed_scaling_factor=2.5 window=None untied
        scoring_func='noaux_tc' use_sliding_window=False v=152064""",
    "ByteDance-Seed/Seed-OSS-36B-Instruct": """SeedOss silu bias attention_out_bias=False h=5120 i=27648 l=64 q=80 kv=8
        d=128 max=524288 mlp_bias=False eps=1e-6 plain_rope residual_dropout=0.1 theta=10000000.0 untied v=155136""",
    # EXAONE, Apertus, StarCoder, Nemotron, AFM, Helium, Solar
    "LGAI-EXAONE/EXAONE-4.0-32B": """Exaone4 silu h=5120 i=27392 l=64 q=40 kv=8 d=128 max=131072 eps=1e-5 llama3_16
        theta=1000000 window=4096 sliding_window_pattern='LLLG' three_of_four_slide_64 untied v=102400""",
    "LGAI-EXAONE/EXAONE-4.0-1.2B": """Exaone4 silu h=2048 i=4096 l=30 q=32 kv=8 d=64 max=65536 eps=1e-5 llama3_16
        theta=1000000 window=None sliding_window_pattern=None whole_30 tied v=102400""",
    "LGAI-EXAONE/EXAONE-4.5-33B": """Exaone4_5_:exaone4 silu model_type='exaone4_5_text' h=5120 i=27392 l=64 q=40 kv=8
        d=128 max=262144 eps=1e-5 llama3_16 theta=1000000 window=4096 sliding_window_pattern='LLLG'
        three_of_four_slide_64 untied v=153600""",
    "swiss-ai/Apertus-8B-Instruct-2509": """Apertus no_bias h=4096 i=21504 l=32 q=32 kv=8 max=65536 eps=1e-5 llama3_8
        hidden_act='xielu' mlp_bias=False post_norm=False qk_norm=True theta=12000000 untied v=131072""",
    "bigcode/starcoder2-7b": """Starcoder2 h=4608 i=18432 l=32 q=36 kv=4 max=16384 hidden_act='gelu_pytorch_tanh'
        embedding_dropout=0.0 residual_dropout=0.0 mlp_type='default' layer_norm_epsilon=1e-5 norm_epsilon=1e-5
        norm_type='layer_norm' scale_attn_weights=True theta=1000000 window=4096 use_bias=True v=49152""",
    "nvidia/Minitron-4B-Base": """Nemotron no_bias h=3072 i=9216 l=32 q=24 kv=8 d=128 max=4096 hidden_act='relu2'
        mlp_bias=False norm_eps=1e-5 partial_rotary_factor=0.5 theta=10000.0 untied v=256000""",
    "arcee-ai/AFM-4.5B": """Arcee no_bias h=2560 i=18432 l=36 q=20 kv=4 d=128 max=65536 hidden_act='relu2' eps=1e-5
        mlp_bias=False yarn_20 theta=10000.0 untied v=128004""",
    "kyutai/helium-1-2b": """Helium silu no_bias h=2048 i=8192 l=28 q=16 kv=8 d=128 max=4096 eps=1e-8 mlp_bias=False
        theta=20000.0 untied v=64000""",
    "upstage/Solar-Open-100B": """SolarOpen silu no_bias h=4096 i=10240 l=48 q=64 kv=8 d=128 max=131072 moe=1280 top=8
        first_k_dense_replace=0 n_group=1 n_routed_experts=128 n_shared_experts=1 norm_topk_prob=True eps=1e-5 yarn_2
        partial_rotary_factor=1.0 routed_scaling_factor=1.0 theta=1000000 topk_group=1 untied v=196608""",
    # Hybrids
    "LiquidAI/LFM2-1.2B": """Lfm2 block_auto_adjust_ff_dim=True block_dim=2048 block_ff_dim=12288
        block_ffn_dim_multiplier=1.0 block_mlp_init_scale=1.0 block_multiple_of=256 block_norm_eps=1e-5
        block_use_swiglu=True conv_L_cache=3 conv_bias=False conv_dim=2048 conv_dim_out=2048 conv_use_xavier_init=True
        full_attn_idxs=[2,5,8,10,12,14] h=2048 l=16 q=32 kv=8 num_heads=32 max=128000 norm_eps=1e-5 theta=1000000.0
        tie_embedding=True use_pos_enc=True v=65536""",
    "LiquidAI/LFM2-8B-A1B": """Lfm2Moe lfm2_8b_layers conv_L_cache=3 conv_bias=False h=2048 i=7168 l=24 q=32 kv=8
        max=128000 moe=1792 norm_eps=1e-5 norm_topk_prob=True num_dense_layers=2 num_experts=32 top=4 theta=1000000.0
        routed_scaling_factor=1.0 use_expert_bias=True v=65536""",
    "LiquidAI/LFM3-1.7B": """Lfm3 no_bias lfm3_layers conv_L_cache=7 conv_bias=False h=2048 i=7680 l=24 q=16 kv=4 d=128
        max=128000 norm_eps=1e-5 window=256 tied use_attention_gate=True use_sandwich_norm=True v=128000""",
    "ibm-fms/Bamba-9B": """Bamba silu no_bias attn_layer_indices=[9,18,27] h=4096 i=14336 l=32 q=32 kv=8 max=262144
        eps=1e-5 mamba_chunk_size=256 mamba_conv_bias=True mamba_d_conv=4 mamba_d_head=64 mamba_d_state=128
        mamba_expand=2 mamba_n_groups=1 mamba_n_heads=128 mamba_proj_bias=False mlp_bias=False num_logits_to_keep=1
        no_rope_scaling theta=10000.0 untied use_mamba_kernels=True v=128256""",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": """KimiLinear silu kimi_linear_layers h=2304 i=9216 l=27 q=32 kv=32 d=72
        first_k_dense_replace=1 kv_lora_rank=512 mla_use_nope=True model_max_length=1048576 moe=1024 moe_layer_freq=1
        moe_renormalize=True moe_router_activation_func='sigmoid' num_expert_group=1 num_experts=256
        num_experts_per_token=8 num_nextn_predict_layers=0 num_shared_experts=1 q_lora_rank=None qk_nope_head_dim=128
        qk_rope_head_dim=64 eps=1e-5 no_rope_scaling theta=10000.0 routed_scaling_factor=2.446 topk_group=1 untied
        use_grouped_topk=True v_head_dim=128 v=163840""",
    "inclusionAI/Ling-3.0-Flash": """BailingHybrid silu no_bias h=2560 i=6144 l=42 q=32 kv=32 d=128 max=262144 moe=768
        first_k_dense_replace=2 kda_lower_bound=-5.0 kda_safe_gate=True kv_lora_rank=512 layer_group_size=6 n_group=8
        norm_topk_prob=True num_experts=512 num_nextn_predict_layers=1 num_shared_experts=1 qk_nope_head_dim=128
        qk_rope_head_dim=64 eps=1e-6 no_rope_scaling theta=6000000.0 routed_scaling_factor=2.5 short_conv_kernel_size=4
        top=8 topk_group=4 untied v_head_dim=128 v=157184""",
    "ibm-granite/granite-4.0-h-micro": """GraniteMoeHybrid granite4 attention_multiplier=0.015625 h=2048 i=8192 l=40
        q=32 kv=8 logits_scaling=8 mamba_n_heads=64 experts=0 top=0 shared_intermediate_size=8192""",
    "ibm-granite/granite-4.0-h-tiny": """GraniteMoeHybrid granite4 attention_multiplier=0.0078125 h=1536 i=512 l=40
        q=12 kv=4 logits_scaling=6 mamba_n_heads=48 experts=64 top=6 shared_intermediate_size=1024""",
    "mistralai/Mamba-Codestral-7B-v0.1": """Mamba2 silu h=4096 i=8192 l=64 d=64 v=32768 chunk_size=256 conv_kernel=4
        expand=2 layer_norm_epsilon=1e-5 n_groups=8 norm_before_gate=True num_heads=128 rescale_prenorm_residual=False
        residual_in_fp32=True rms_norm=True state_size=128 time_step_floor=0.0001 time_step_init_scheme='random'
        any_time_step time_step_max=0.1 time_step_min=0.001 time_step_rank=256 time_step_scale=1.0
        untied use_bias=False use_conv_bias=True""",
    "fla-hub/rwkv7-1.5B-world": """RWKV7 h=2048 i=8192 l=24 d=64 v=65536 a_low_rank_dim=96 attn=None attn_mode='chunk'
        decay_low_rank_dim=96 fuse_cross_entropy=True fuse_norm=False gate_low_rank_dim=256 hidden_act='sqrelu'
        hidden_ratio=4.0 max=2048 norm_bias=True norm_eps=1e-5 norm_first=True num_heads=32 untied
        v_low_rank_dim=64 rwkv7_values""",
    "nvidia/Nemotron-H-8B-Base-8K": """NemotronH nemotron_h h=4096 i=21504 l=52 q=32 kv=8 attention_head_dim=128
        hybrid_override_pattern='M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-' mamba_head_dim=64 max=8192""",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": """NemotronH nemotron_h h=4480 i=15680 l=56 q=40 kv=8 d=128 mamba_head_dim=80
        hybrid_override_pattern='M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-' max=131072""",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": """NemotronH nemotron_h h=2688 i=1856 l=52 q=32 kv=2 d=128
        hybrid_override_pattern='MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME' mamba_num_heads=64
        mamba_head_dim=64 max=262144 moe=1856 moe_shared_expert_intermediate_size=3712 n_routed_experts=128 top=6
        n_shared_experts=1 n_group=1 topk_group=1 norm_topk_prob=True routed_scaling_factor=2.5""",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": """NemotronH nemotron_h h=4096 i=2688 l=88 q=32 kv=2 d=128
        nemotron_super_layers mamba_num_heads=128 mamba_head_dim=64 max=262144 moe=2688 moe_latent_size=1024
        moe_shared_expert_intermediate_size=5376 moe_shared_expert_overlap=False mtp_hybrid_override_pattern='*E'
        n_routed_experts=512 n_shared_experts=1 n_group=1 norm_topk_prob=True num_nextn_predict_layers=1
        partial_rotary_factor=1.0 theta=10000 routed_scaling_factor=5.0 top=22 topk_group=1""",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": """NemotronH nemotron_h h=8192 i=5120 l=None q=64 kv=2 d=128
        nemotron_ultra_layers mamba_num_heads=256 mamba_head_dim=64 max=262144 moe=5120 moe_latent_size=2048
        moe_shared_expert_intermediate_size=10240 moe_shared_expert_overlap=False n_routed_experts=512
        n_shared_experts=1 n_group=1 norm_topk_prob=True num_nextn_predict_layers=1 partial_rotary_factor=1.0
        theta=10000 routed_scaling_factor=5.0 top=22 topk_group=1""",
    "tiiuae/Falcon-H1-0.5B-Instruct": """FalconH1 silu no_bias h=1024 i=2048 l=36 q=8 kv=2 d=64 max=16384 eps=1e-5
        attention_in_multiplier=1.0 attention_out_multiplier=0.9375 embedding_multiplier=5.656854249492381
        key_multiplier=0.39062499999999994 lm_head_multiplier=0.0390625 mamba_chunk_size=128 mamba_conv_bias=True
        mamba_d_conv=4 mamba_d_head=64 mamba_d_ssm=1536 mamba_d_state=128 mamba_expand=2 mamba_n_groups=1
        mamba_n_heads=24 mamba_norm_before_gate=False mamba_proj_bias=False mamba_rms_norm=False mamba_use_mlp=True
        mlp_bias=False mlp_expansion_factor=8 mlp_multipliers=[0.8838834764831844,0.5859375] num_logits_to_keep=1
        projectors_bias=False no_rope_scaling theta=100000000000.0 ssm_in_multiplier=1.25
        ssm_multipliers=[0.3535533905932738,0.25,0.3535533905932738,0.5,0.3535533905932738]
        ssm_out_multiplier=0.23570226039551587 untied v=32784""",
    "allenai/Olmo-Hybrid-7B": """OlmoHybrid silu no_bias three_of_four_recur_32 h=3840 i=11008 l=32 q=30 kv=30 max=65536
        eps=1e-6 linear_allow_neg_eigval=True linear_conv_kernel_dim=4 linear_key_head_dim=96 linear_num_key_heads=30
        linear_num_value_heads=30 linear_value_head_dim=192 no_rotation untied v=100352""",
    # Granite, Command
    "ibm-granite/granite-3.1-2b-instruct": """Granite granite attention_multiplier=0.015625 h=2048 i=8192 l=40 q=32
        logits_scaling=8.0 mlp_bias=False theta=5000000.0""",
    "ibm-granite/granite-3.3-8b-instruct": """Granite granite attention_multiplier=0.0078125 h=4096 i=12800 l=40 q=32
        logits_scaling=16.0 mlp_bias=False theta=10000000.0 v=49159""",
    "ibm-granite/granite-3.1-1b-a400m-instruct": """GraniteMoe granite attention_multiplier=0.015625 h=1024 i=512 l=24
        q=16 experts=32 top=8 logits_scaling=6.0 theta=1500000.0 output_router_logits=False router_aux_loss_coef=0.0""",
    "ibm-granite/granite-3.1-3b-a800m-instruct": """GraniteMoe granite attention_multiplier=0.015625 h=1536 i=512 l=32
        q=24 experts=40 top=8 logits_scaling=6.0 theta=1500000.0 output_router_logits=False router_aux_loss_coef=0.0""",
    "ibm-research/moe-7b-1b-active-shared-experts": """GraniteMoeShared granite attention_multiplier=0.0078125 h=1536
        i=512 l=40 q=24 experts=62 top=6 shared_intermediate_size=1024 logits_scaling=6.0 theta=10000""",
    "CohereLabs/c4ai-command-r7b-12-2024": """Cohere2 cohere2 h=4096 i=14336 l=32 q=32 max=8192
        use_parallel_embedding=True""",
    "CohereLabs/c4ai-command-a-03-2025": """Cohere2 cohere2 h=12288 i=36864 l=64 q=96 max=131072
        use_parallel_embedding=False""",
}


def published(name: str) -> tuple[str, str | None, dict[str, Any]]:
    """(architecture, model_type of the text part of a model that reads more, keys and values) of a row."""
    head, _, words = _ROWS[name].partition(" ")
    architecture, _, text_type = head.partition(":")
    values = {_SHORT.get(key, key): value for key, value in options(words, WORDS).items()}
    return f"{architecture}For{'ConditionalGeneration' if text_type else 'CausalLM'}", text_type or None, values


PUBLISHED = tuple(_ROWS)
