"""Settings of published models that have no family: what their config.json says beside sizes, for two small layers.

By architecture: the Hub's id, and values by the class of the configuration without `Config`. Their source is that of
`settings`.
"""

from copy import deepcopy
from typing import Any, NamedTuple


class Other(NamedTuple):
    """A published model. values: by the class of the configuration, without `Config`."""

    hub_id: str
    values: dict[str, dict[str, Any]]


_BITNET = {
    "hidden_act": "relu2",
    "tie_word_embeddings": True,
    "quantization_config": {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "offline",
    },
}
_DBRX_EXPERTS = {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0.01}
_FALCON = {
    "multi_query": True,
    "new_decoder_architecture": False,
    "parallel_attn": True,
    "bias": False,
    "alibi": False,
}
_SANTACODER = {
    "multi_query": True,
    "activation_function": "gelu_pytorch_tanh",
    "attention_softmax_in_fp32": True,
    "scale_attention_softmax_in_fp32": True,
}
_LLAMA_VISION = Other("meta-llama/Llama-3.2-11B-Vision-Instruct", {"MllamaText": {"cross_attention_layers": [1]}})
_LONGROPE = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
_PHI4 = {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 32, "rope_scaling": _LONGROPE}
_PERSIMMON = {"hidden_act": "relu2", "qk_layernorm": True, "partial_rotary_factor": 0.5}
OTHERS = {
    "BioGptForCausalLM": Other("microsoft/biogpt", {"BioGpt": {"hidden_act": "gelu", "scale_embedding": True}}),
    "BitNetForCausalLM": Other("microsoft/bitnet-b1.58-2B-4T", {"BitNet": _BITNET}),
    "BloomForCausalLM": Other(
        "bigscience/bloom-560m", {"Bloom": {"apply_residual_connection_post_layernorm": False, "slow_but_exact": False}}
    ),
    "CodeGenForCausalLM": Other("Salesforce/codegen-350M-mono", {"CodeGen": {"activation_function": "gelu_new"}}),
    "DbrxForCausalLM": Other("databricks/dbrx-instruct", {"Dbrx": {"ffn_config": _DBRX_EXPERTS}}),
    "FalconForCausalLM": Other("tiiuae/falcon-7b", {"Falcon": _FALCON}),
    "GPT2LMHeadModel": Other("openai-community/gpt2", {"GPT2": {"activation_function": "gelu_new"}}),
    "GPTBigCodeForCausalLM": Other("bigcode/starcoderbase-1b", {"GPTBigCode": _SANTACODER}),
    "GPTJForCausalLM": Other("EleutherAI/gpt-j-6b", {"GPTJ": {"activation_function": "gelu_new", "rotary_dim": 4}}),
    "GPTNeoForCausalLM": Other(
        "EleutherAI/gpt-neo-125m", {"GPTNeo": {"activation_function": "gelu_new", "window_size": 8}}
    ),
    "GPTNeoXForCausalLM": Other(
        "EleutherAI/pythia-160m",
        {"GPTNeoX": {"hidden_act": "gelu", "rotary_pct": 0.25, "use_parallel_residual": True}},
    ),
    "LongcatFlashForCausalLM": Other(
        "meituan-longcat/LongCat-Flash-Chat", {"LongcatFlash": {"zero_expert_num": 2, "routed_scaling_factor": 6.0}}
    ),
    "MllamaForCausalLM": _LLAMA_VISION,
    "MllamaForConditionalGeneration": _LLAMA_VISION,
    "MptForCausalLM": Other("mosaicml/mpt-7b", {"Mpt": {"attn_config": {"alibi": True}, "no_bias": True}}),
    "OPTForCausalLM": Other(
        "facebook/opt-125m", {"OPT": {"activation_function": "relu", "do_layer_norm_before": True}}
    ),
    "OlmoForCausalLM": Other("allenai/OLMo-1B-hf", {"Olmo": {"clip_qkv": None, "tie_word_embeddings": True}}),
    "OpenAIGPTLMHeadModel": Other("openai-community/openai-gpt", {"OpenAIGPT": {"afn": "gelu"}}),
    "PersimmonForCausalLM": Other("adept/persimmon-8b-chat", {"Persimmon": _PERSIMMON}),
    "Phi4MultimodalForCausalLM": Other("microsoft/Phi-4-multimodal-instruct", {"Phi4Multimodal": _PHI4}),
    "PhiForCausalLM": Other(
        "microsoft/phi-2", {"Phi": {"hidden_act": "gelu_new", "partial_rotary_factor": 0.4, "qk_layernorm": False}}
    ),
    "StableLmForCausalLM": Other(
        "stabilityai/stablelm-2-1_6b", {"StableLm": {"use_qkv_bias": True, "partial_rotary_factor": 0.25}}
    ),
    "XGLMForCausalLM": Other("facebook/xglm-564M", {"XGLM": {"activation_function": "gelu", "scale_embedding": True}}),
}


def published_values(config_class: str) -> dict[str, Any]:
    """Return the values of a class of configurations, named without `Config`; empty if none are known."""
    for other in OTHERS.values():
        if config_class in other.values:
            return deepcopy(other.values[config_class])
    return {}
