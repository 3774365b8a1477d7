"""gpt-oss (OpenAI, 2025): attention with sinks, windows in every second layer, and experts with biases."""

from __future__ import annotations

from paged.models.families.llama import Llama
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import decoder_config, layer_windows, moe_config, weights_dtype
from paged.models.layers.rope_config import rope_config
from paged.models.loading.hf_config import HfConfig

# What the clamped SwiGLU of `fused_moe`, and weights of the chosen experts that sum to 1, have built in.
_BUILT_IN = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "hidden_act": "silu", "norm_topk_prob": True}
# Where config.json says nothing about the rotation, as in transformers.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOss(Llama):
    """Beginning with the first, every second layer has a window."""

    model_type = "gpt_oss"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        for key, known in _BUILT_IN.items():
            hf.choice(key, known)
        packing = hf.section("quantization_config")
        is_mxfp4 = packing is not None and packing.text("quant_method", "") == "mxfp4"
        moe = moe_config(
            hf,
            # Softmax over the chosen logits is that over all of them, divided by its sum over the chosen.
            renormalize=True,
            bias=True,
            interleaved=True,
            stacked=True,
            transposed=True,
            router_name="router",
            is_mxfp4=is_mxfp4,
        )
        has_bias = hf.flag("attention_bias", True)
        return decoder_config(
            hf,
            **({"quantization": None} if is_mxfp4 else {}),
            window=layer_windows(hf, hf.optional_integer("sliding_window", 128), lambda layer: layer % 2 == 0),
            rope=rope_config(hf, theta=150000.0, default=_YARN),
            qkv_bias=has_bias,
            o_bias=has_bias,
            sinks=True,
            activation="swiglu_oai",
            # The published config.json names none, and of all types bfloat16 holds unpacked MXFP4 exactly.
            dtype=weights_dtype(hf, "bfloat16"),
            moe=moe,
        )
