"""HY-V4 (Tencent, 2026): chosen latents with sinks and gates, over several residual streams that do not mix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paged.models.families.deepseek import indexed_latents, sharing_choices
from paged.models.families.hyper_streams import StreamsLayer, StreamsNorm, streams_config
from paged.models.families.network import family
from paged.models.layers.decoder_config import CONV_ACTIVATIONS
from paged.models.layers.rope import rope_config
from paged.models.loading.hf_config import HfConfig

# Names of published files and of transformers 5 -> names here. transformers also writes the gate of an MLP as
# `linear_gate`, and the module `hc_pre` before the connection in place of behind it.
_RENAMES = {
    r"\.hc_pre\.": ".",
    r"\.(?:hc_attn_layer\.hc_|attn_hc\.)": ".hc_attn_",
    r"\.(?:hc_mlp_layer\.hc_|ffn_hc\.)": ".hc_ffn_",
    r"\.hc_head\.hc_(?:head_)?": ".hc_head_",
    r"\.linear_gate\.": ".gate_proj.",
    r"\.self_attn\.gate_proj\.": ".self_attn.g_proj.",
    r"\.learnable_sink_param$": ".sinks",
}


def _hy_v4(hf: HfConfig) -> dict[str, Any]:
    """HY-V4: an indexer in the first layer and every fourth from the second on; the others attend to its choice."""
    hf.choice("hidden_act", *CONV_ACTIVATIONS)
    hf.choice("swiglu_limit", 10.0)
    # Keys of the authors' code in vLLM; transformers has these options built in.
    for key in ("enable_ihc", "gated_mla", "learnable_sink"):
        hf.choice(key, True)
    hf.choice("gating_type", "elementwise")
    hf.value("learnable_sink_init")  # of training
    # transformers ignores the key: every head has a key of its own.
    hf.value("num_key_value_heads")
    read_keys, hf = hf.read_keys, hf.overridden({"num_key_value_heads": None})
    hf.read_keys = read_keys

    interleaved = hf.flag("rope_interleave")
    fields = indexed_latents(hf, interleaved=interleaved, rotates_last=True, eps=hf.number("rms_norm_eps"))
    experts: list[Any] = []
    for moe in fields["moe"]:
        if moe is not None:
            moe = replace(moe, activation="silu_10")
        experts.append(moe)
    return fields | {
        "latent": sharing_choices(hf, fields["latent"]),
        "rope": rope_config(hf, interleaved=interleaved),
        "head_gate": "sigmoid",
        "head_gate_size": fields["latent"].v_head_dim,
        "sinks": True,
        "moe": tuple(experts),
        "streams": streams_config(hf, magnitude=hf.number("hc_magnitude"), has_head=True),
    }


# Name in `architectures` of config.json -> family.
HY_V4 = {"HYV4ForCausalLM": family("hy_v4", _hy_v4, _RENAMES, StreamsLayer, StreamsNorm)}
