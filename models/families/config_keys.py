"""Keys of config.json that change what a decoder computes, with their neutral values, and keys without effect.

A key of `_WITHOUT_EFFECT` loads with any value. Another known key loads with its neutral value, or where a family reads
it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from paged.errors import UnsupportedError
from paged.kernels.core.errors import shown
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import ACTIVATIONS, by_window, for_kind
from paged.models.loading.hf_config import HfConfig

# Switches of decoders in transformers 5.23, and of well-known models with their own code. A switch is off if it is
# null, false, 0 or empty. Keys that do not affect logits are left out: `_INERT` matches them.
_SWITCHES = (
    # Biases.
    *("attention_bias", "attention_out_bias", "use_attention_bias", "use_bias"),
    *("bias", "add_bias_linear", "lm_head_bias", "norm_bias", "decoder_bias"),
    # Visibility of tokens.
    *("use_bidirectional_attention", "prefix_lm", "is_encoder_decoder", "add_cross_attention", "attention_chunk_size"),
    *("use_sliding_window", "sliding_window_pattern", "interleaved_sliding_window"),
    *("attention_window_size", "window_size", "local_attention", "global_attn_every_n_layers", "attention_types"),
    *("index_topk", "index_n_heads", "index_head_dim", "num_kv_shared_layers"),
    # Positions and rotation.
    *("alibi", "use_alibi", "rope_local_base_freq", "layer_rope_theta", "compress_rope_theta"),
    *("rotary_value", "use_mem_rope", "mrope_section", "use_mrope"),
    *("use_learned_position_embeddings", "learned_pos_emb", "use_dynamic_ntk", "use_logn_attn", "nope_layer_interval"),
    *("no_rope_layer_interval", "attn_temperature_tuning", "log_scaling_n_floor"),
    # Norms, the residual stream and caps.
    *("use_sandwich_norm", "gated_norm_rank", "use_post_norm"),
    *("use_parallel_residual", "parallel_attn", "apply_residual_connection_post_layernorm", "rescale_every"),
    *("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "gate_soft_cap"),
    *("mlp_gate_softcap", "mlp_up_softcap", "moe_router_logit_softcapping", "router_logit_softcapping"),
    *("clip_qkv", "swiglu_limit", "swiglu_alpha", "activation_sparsity_pattern", "use_attention_gate"),
    # Other kinds of heads and layers.
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "multi_query", "attention_k_eq_v"),
    *("swa_head_dim", "swa_num_attention_heads", "swa_num_key_value_heads", "num_attention_heads_per_layer"),
    *("global_head_dim", "num_global_key_value_heads", "hidden_size_per_layer_input", "laurel_rank"),
    *("altup_num_inputs", "per_layer_config", "block_configs", "block_types", "attn_layer_period", "mamba_d_ssm"),
    *("full_attn_idxs", "attn_layer_indices", "linear_num_key_heads", "linear_num_value_heads"),
    # Experts.
    *("n_shared_experts", "num_shared_experts"),
    *("moe_num_shared_experts", "shared_expert_intermediate_size", "shared_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size", "first_k_dense_replace"),
    *("num_dense_layers", "mlp_only_layers", "moe_layers", "moe_latent_size", "zero_expert_num", "use_expert_bias"),
    *("is_moe", "enable_moe_block", "use_double_wide_mlp", "moe_apply_router_weight_on_input"),
    *("moe_normalize_expert_weights",),
    # Packed weights.
    *("quantization", "compression_config"),
    # Multipliers whose neutral value is not 1.
    *("scale_embedding", "rescale_embeddings", "scale_depth", "dim_model_base", "mup_enabled", "mlp_multipliers"),
    *("normalize_embedding", "embedding_normalization", "attention_multiplier"),
)
# Keys that are neutral if null or 1.
_FACTORS = (
    *("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "lm_head_multiplier"),
    *("key_multiplier", "attention_in_multiplier", "attention_out_multiplier", "logits_mup_width_multiplier"),
    *("scale_emb", "embedding_scale", "residual_scale", "attention_value_scale", "partial_rotary_factor", "rotary_pct"),
    *("routed_scaling_factor", "moe_routed_scaling_factor", "router_scaling_factor", "route_scale"),
    *("n_group", "topk_group", "decoder_sparse_step", "moe_layer_freq", "moe_layer_interval"),
    *("expert_layer_period", "interleave_moe_layer_step", "mlp_alpha_factor", "mlp_beta_factor"),
    *("full_attn_alpha_factor", "full_attn_beta_factor"),
)


def _is_interleaved(config: DecoderConfig) -> bool:
    """Return whether every layer that rotates does so in neighbouring pairs."""
    return all(layer.rope.interleaved for layer in config.attention if layer.rope is not None)


def _of_experts(field: str) -> Callable[[DecoderConfig], Any]:
    """Return a function that reads the field of all layers' experts; None if no layer has experts, or they differ."""

    def read(config: DecoderConfig) -> Any:
        values = {getattr(moe, field) for moe in config.moe if moe is not None}
        if len(values) == 1:
            return values.pop()
        return None

    return read


# Key that only repeats a property of the configuration -> the property. Such keys often serve the authors' own code. A
# value that is false, 0 or empty is neutral too.
_STATED: dict[str, Callable[[DecoderConfig], Any]] = {
    **dict.fromkeys(
        ("use_qk_norm", "qk_norm", "qk_layernorm", "qk_ln"), lambda config: config.attention[0].qk_norm is not None
    ),
    **dict.fromkeys(("qkv_bias", "use_qkv_bias"), lambda config: config.attention[0].qkv_bias),
    "mlp_bias": lambda config: config.mlp_bias,
    "sliding_window_size": lambda config: next(filter(None, config.windows), None),
    **dict.fromkeys(("rope_interleave", "rope_interleaved"), _is_interleaved),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _of_experts("num_experts")
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"),
        _of_experts("top_k"),
    ),
    "norm_topk_prob": _of_experts("renormalize"),
}


def _says(stated: Callable[[DecoderConfig], Any], value: Any, config: DecoderConfig) -> bool:
    return not value or (type(value) is type(stated(config)) and value == stated(config))


# Key -> whether a value other than null agrees with the configuration.
_NEUTRAL: dict[str, Callable[[Any, DecoderConfig], bool]] = {
    **dict.fromkeys(_SWITCHES, lambda value, _: not value),
    **{key: partial(_says, stated) for key, stated in _STATED.items()},
    **dict.fromkeys(_FACTORS, lambda value, _: value is not True and value == 1),
    **dict.fromkeys(
        ("v_head_dim", "qk_head_dim", "attention_head_dim", "kv_channels", "rotary_dim", "query_pre_attn_scalar"),
        lambda value, config: value == config.head_dim,
    ),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim"), lambda value, config: value == config.hidden_size),
    "num_kv_heads": lambda value, config: value == config.num_kv_heads,
    **dict.fromkeys(
        ("hidden_act", "hidden_activation", "activation_function", "ffn_act_fn"),
        lambda value, config: isinstance(value, str) and ACTIVATIONS.get(value) == config.activation,
    ),
    "position_embedding_type": lambda value, config: (
        value in ("rope", "rotary") or (value == "rope_gptj" and _is_interleaved(config))
    ),
    **dict.fromkeys(("scoring_func", "score_function", "expert_selection_fn"), lambda value, _: value == "softmax"),
    "topk_method": lambda value, _: value == "greedy",
    # A floor for the sum of routing weights has no effect if it is this small.
    "moe_norm_min": lambda value, _: type(value) in (int, float) and value <= 1e-12,
    # The smallest time step of all published models.
    **dict.fromkeys(("time_step_min", "mamba_dt_min"), lambda value, _: value == 0.001),
    **dict.fromkeys(("use_rope", "use_rotary", "scale_attn_weights", "is_causal"), lambda value, _: value is True),
    # Lists are neutral if they are empty, or if the entry for each layer agrees with the configuration.
    "layer_types": lambda value, config: (
        value in ([], list(by_window(config.windows, "full_attention", "sliding_attention")))
    ),
    "mlp_layer_types": lambda value, config: value in ([], list(for_kind(config.moe, None, "dense", "sparse"))),
    "layers_block_type": lambda value, config: value in ([], ["attention"] * config.num_layers),
    "no_rope_layers": lambda value, config: value in ([], [1] * config.num_layers),
    "sliding_window": lambda value, config: type(value) is int and value >= config.max_position_embeddings,
}
COMPUTATION_KEYS = frozenset(_NEUTRAL)
# Names of keys that do not affect logits: keys of training, other outputs, token ids and files.
_INERT = re.compile(
    r"_.*|.*(_dropout|_pdrop|dropout_p|dropout|_token_id|_token_index|_loss_coef|jitter_noise|initializer\w*)"
    r"|architectures|auto_map|cache_implementation|id2label|label2id|model_max_length|output_\w+|pretraining_tp"
    r"|problem_type|return_dict|task_specific_params|tokenizer_class|torch_dtype|transformers_version|use_cache"
    r"|[\w.]+_config"
)

# Keys of published models that no family reads, because transformers ignores them too. They control initialisation,
# training, kernels or generation. Others give sizes that follow from other keys, or sizes of absent layers.
_WITHOUT_EFFECT = frozenset(
    """attn_type_list aux_loss_alpha block_dim block_ffn_dim_multiplier block_mlp_init_scale block_multiple_of
    block_norm_eps block_use_swiglu chunk_size conv_dim conv_dim_out conv_use_xavier_init diversity_penalty
    dtype ep_size expand full_attn_mod head_dim init_method initial_context_length intermediate_size
    interpolate_factor is_composition is_decoder layer_norm_epsilon layer_switch layernorm_full_attention_beta
    layernorm_linear_attention_beta layernorm_mlp_beta length_penalty linear_a_log_max linear_a_log_min
    linear_dt_init_floor linear_dt_max linear_dt_min mamba_chunk_size mamba_conv_bias mamba_d_conv
    mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads mamba_ssm_cache_dtype mamba_use_mlp
    max_length max_sequence_length max_window_layers mlp_expansion_factor mlp_intermediate_size mlp_type
    moe_capacity moe_gate moe_intermediate_size moe_shared_expert_overlap moe_use_aux_free
    mtp_hybrid_override_pattern mtp_layers_block_type mtp_num_hidden_layers mtp_transformer_layers name_or_path
    norm_type normalization_function num_beam_groups num_beams num_heads num_logits_to_keep num_mtp_modules
    num_nextn_predict_layers num_return_sequences num_shared_expert order_of_interleaved_layers
    original_max_position_embeddings pixel_shuffle_factor repetition_penalty rescale_prenorm_residual rms_norm_eps
    rope_parameters rope_theta seq_aux shared_moe_mode temperature time_step_floor time_step_init_scheme
    time_step_limit time_step_max time_step_rank time_step_scale top_k top_p typical_p unsloth_fixed unsloth_version
    use_embedding_sharing use_gated_activation use_mamba_kernels use_mixed_mlp_moe use_mtp
    use_parallel_block use_parallel_embedding use_pos_enc""".split()
)


def refuse_unread(hf: HfConfig, config: DecoderConfig) -> None:
    """Raise if a key that the family did not read would change the computation.

    hf: the config.json, after the family has read it as `config`.

    Raises:
        UnsupportedError: the value of an unread key is not neutral.
    """
    for key in unread_keys(hf, config):
        raise UnsupportedError(f"{hf.source}: {key} = {shown(hf.values[key])} is not supported for this architecture")


def unread_keys(hf: HfConfig, config: DecoderConfig) -> list[str]:
    """Return the unread keys whose values would change the computation; hf: see `refuse_unread`."""
    keys = sorted(hf.values.keys() & COMPUTATION_KEYS - hf.read_keys)
    return [key for key in keys if not _is_neutral(key, hf.values[key], config, hf)]


def unknown_keys(hf: HfConfig) -> list[str]:
    """Return the keys that this package does not know and that may matter to the architecture; hf: see `refuse_unread`.

    A key whose value is null, false, 0 or empty does not matter.
    """
    unknown = hf.values.keys() - COMPUTATION_KEYS - hf.read_keys - _WITHOUT_EFFECT
    return sorted(key for key in unknown if hf.values[key] and not _INERT.fullmatch(key))


def _is_neutral(key: str, value: Any, config: DecoderConfig, hf: HfConfig) -> bool:
    if value is None:
        return key != "is_causal"  # transformers reads null as false
    is_off = key == "sliding_window" and hf.values.get("use_sliding_window") is False
    return is_off or bool(_NEUTRAL[key](value, config))
