"""Read a decoder's configuration from a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as fields_of
from typing import Any

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.core.checks import MAX_HEAD_DIM
from paged.kernels.core.errors import shown
from paged.models.layers.attention_config import AttentionConfig
from paged.models.layers.config import DecoderConfig, MoeConfig, NormConfig
from paged.models.layers.rope import MAX_FACTOR, check_rope, rope_config
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.load_options import DTYPES
from paged.models.quantization.read import read_quantization

# Gated activations: name in config.json -> name in `silu_and_mul` and `fused_moe`.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
# Activations of MLPs without a gate: name in config.json -> name in `PlainMlp`.
PLAIN_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2", "xielu": "xielu"}
# Names of SiLU, the only activation after the convolution of a recurrent layer.
CONV_ACTIVATIONS = ("silu", "swish")
_RENAMED_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
# Limits of layers and of positions, far above any published model; the deepest has 126 layers.
_MAX_LAYERS = 10_000
_MAX_POSITIONS = 1 << 24
_MAX_HEAD_DIM = 4096
# Longest sequence of a model without attention if its file has none: the longest that Codestral Mamba was tested with.
# The state sets no limit. This one bounds the tables of a sequence's blocks.
STATE_POSITIONS = 1 << 18


def decoder_config(hf: HfConfig, **fields: Any) -> DecoderConfig:
    """Read a DecoderConfig, with its AttentionConfig and NormConfig, from config.json.

    `_FIELDS` reads the fields that the family does not give.

    Args:
        hf: config.json.
        fields: fields that the family gives. A field of AttentionConfig, `moe`, `recurrent`, `ngrams`, `attends` and
            `intermediate_size` take a tuple with an entry per layer, or one value for all layers.

    Raises:
        CheckpointError: a value is missing, malformed or larger than in any model, or values contradict each other.
        UnsupportedError: the activation, dtype, rope type or quantisation is not supported.
    """
    num_layers = count_layers(hf)
    values = dict(fields)
    for name, read in _FIELDS.items():
        if name not in fields:
            values[name] = read(hf)
    values.setdefault("v_head_dim", values["head_dim"])
    values.setdefault("moe", None)
    values.setdefault("recurrent", None)
    values.setdefault("ngrams", None)
    if "attends" not in fields:
        recurrent = _per_layer(values["recurrent"], num_layers)
        values["attends"] = for_kind(recurrent, None, value=True, otherwise=False)
    longest: int = values["max_position_embeddings"]
    for rope in _per_layer(values["rope"], 1):
        if rope is not None:
            longest = max(longest, rope.longest)
    values["max_position_embeddings"] = min(longest, _MAX_POSITIONS)
    norms = NormConfig(**_taken(values, NormConfig))
    layers: dict[str, tuple[Any, ...]] = {}
    for name, value in _taken(values, AttentionConfig).items():
        layers[name] = _per_layer(value, num_layers)
    attention = []
    for index in range(num_layers):
        fields_of_layer = {name: values_of_layers[index] for name, values_of_layers in layers.items()}
        attention.append(AttentionConfig(**fields_of_layer))
    for name in ("moe", "recurrent", "ngrams", "attends", "intermediate_size"):
        values[name] = _per_layer(values[name], num_layers)
    config = DecoderConfig(attention=tuple(attention), norms=norms, **values)
    for layer in set(attention):
        _check_attention(layer, config.max_position_embeddings, hf)
    for index, source in enumerate(config.cache_layers):
        expected, kind = attention[index].cache_kind, attention[source].cache_kind
        if kind != expected:
            raise CheckpointError(
                f"{hf.source}: layer {index} reads K/V of layer {source}, whose KV heads, sizes and window are {kind}, "
                f"expected {expected}"
            )
    return config


def _taken(values: dict[str, Any], kind: type[AttentionConfig | NormConfig]) -> dict[str, Any]:
    """Remove the fields of `kind` from `values` and return them."""
    taken: dict[str, Any] = {}
    for field in fields_of(kind):
        if field.name in values:
            taken[field.name] = values.pop(field.name)
    return taken


def _per_layer(value: Any, num_layers: int) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value
    return (value,) * num_layers


def _check_attention(layer: AttentionConfig, max_positions: int, hf: HfConfig) -> None:
    """Raise CheckpointError unless the sizes are consistent."""
    if layer.num_heads % layer.num_kv_heads:
        raise CheckpointError(
            f"{hf.source}: num_attention_heads {layer.num_heads} is not a multiple of num_key_value_heads "
            f"{layer.num_kv_heads}"
        )
    if layer.softmax_scale > MAX_FACTOR:
        raise CheckpointError(f"{hf.source}: scores times {layer.softmax_scale:.3g}, expected at most {MAX_FACTOR}")
    if layer.rope is not None:
        check_rope(layer.rope, layer.rotated_dim, max_positions, hf.source)


def moe_config(
    hf: HfConfig,
    *,
    size_key: str = "intermediate_size",
    count_key: str = "num_experts",
    top_k_key: str = "num_experts_per_tok",
    **fields: Any,
) -> MoeConfig:
    """Read the sizes of a mixture of experts; a family gives the other fields of MoeConfig.

    Args:
        size_key: key of an expert's intermediate size.
        count_key: key of the number of experts; transformers 5 writes `num_local_experts` beside it.
        top_k_key: key of the number of experts that a token takes.

    Raises:
        CheckpointError: a size is missing or malformed, top_k is above the number of experts, or the groups are
            invalid.
    """
    local_key = "num_local_experts"
    if hf.values.get(local_key) is None:
        local_key = count_key
    if hf.values.get(count_key) is None:
        count_key = local_key
    num_experts, published = hf.integer(local_key), hf.integer(count_key)
    if num_experts != published:
        raise CheckpointError(f"{hf.source}: num_local_experts {num_experts}, but {count_key} {published}")
    groups, topk_groups = fields.get("num_expert_groups", 1), fields.get("topk_groups", 1)
    if num_experts % groups or topk_groups > groups:
        raise CheckpointError(f"{hf.source}: {topk_groups} of {groups} groups of {num_experts} experts")
    top_k = hf.integer(top_k_key, maximum=num_experts // groups * topk_groups)
    return MoeConfig(num_experts=num_experts, top_k=top_k, intermediate_size=hf.integer(size_key), **fields)


def count_layers(hf: HfConfig) -> int:
    """Read `num_hidden_layers`.

    Raises:
        CheckpointError: it is missing, malformed or larger than in any model.
    """
    return hf.integer("num_hidden_layers", maximum=_MAX_LAYERS)


def weights_dtype(hf: HfConfig, default: str = "float32") -> torch.dtype:
    """Read the dtype of the weights as published.

    Raises:
        UnsupportedError: the dtype is not supported.
    """
    dtype = hf.text("dtype", hf.text("torch_dtype", default)).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedError(f"{hf.source}: dtype {shown(dtype)}, known are {', '.join(DTYPES)}")
    return DTYPES[dtype]


def layer_windows(
    hf: HfConfig, window: int | None, is_sliding: Callable[[int], bool], kind: str = "sliding_attention"
) -> tuple[int | None, ...]:
    """Return each layer's window by `layer_types`, or by is_sliding if the key is absent.

    kind: the layer type with a window.

    Raises:
        CheckpointError: layer_types has another length, or a layer needs a window but there is no sliding_window.
        UnsupportedError: a layer type is not supported.
    """
    num_layers, kinds = count_layers(hf), hf.items("layer_types", str)
    if not kinds:
        for layer in range(num_layers):
            kinds.append(kind if is_sliding(layer) else "full_attention")
    if len(kinds) != num_layers:
        raise CheckpointError(f"{hf.source}: {len(kinds)} layer_types for {num_layers} layers")
    if unknown := set(kinds) - {"full_attention", kind}:
        raise UnsupportedError(f"{hf.source}: layer type {shown(min(unknown))}, known are full_attention, {kind}")
    if window is None and kind in kinds:
        raise CheckpointError(f"{hf.source}: layer_types has {kind}, but there is no sliding_window")
    return for_kind(kinds, kind, window)


def periodic_windows(hf: HfConfig, period: int) -> tuple[int | None, ...]:
    """Return `layer_windows` with a window in all layers except every `period`-th."""
    return layer_windows(hf, hf.optional_integer("sliding_window"), lambda layer: (layer + 1) % period != 0)


def by_window(windows: Sequence[int | None], unwindowed: Any, windowed: Any) -> tuple[Any, ...]:
    """Return a value for each layer: `windowed` if the layer has a window, else `unwindowed`."""
    return for_kind(windows, None, unwindowed, otherwise=windowed)


def for_kind(kinds: Sequence[Any], kind: Any, value: Any, otherwise: Any = None) -> tuple[Any, ...]:
    """Return a value for each layer: `value` if the layer is of the kind, else `otherwise`."""
    return tuple(value if layer_kind == kind else otherwise for layer_kind in kinds)


def layer_kinds(
    hf: HfConfig, known: Sequence[str], default: Callable[[int], str], key: str = "layer_types"
) -> tuple[str, ...]:
    """Return the kind of each layer by `key`. If the key is absent, `default` maps a layer's index to its kind.

    Releases of transformers before 5 write "mamba" and "attention" for "linear_attention" and "full_attention".

    Raises:
        CheckpointError: there are not as many kinds as layers.
        UnsupportedError: a kind is not in `known`.
    """
    num_layers = count_layers(hf)
    kinds = hf.items(key, str) or list(map(default, range(num_layers)))
    kinds = [_RENAMED_KINDS.get(kind, kind) for kind in kinds]
    if len(kinds) != num_layers:
        raise CheckpointError(f"{hf.source}: {len(kinds)} {key} for {num_layers} layers")
    if unknown := set(kinds) - {*known}:
        raise UnsupportedError(f"{hf.source}: layer type {shown(min(unknown))}, known are {', '.join(known)}")
    return tuple(kinds)


def own_values(hf: HfConfig, index: int, known: Sequence[str]) -> dict[str, Any]:
    """Return a layer's own values of `known` keys in transformers' `per_layer_config`; empty without the key.

    Raises:
        UnsupportedError: the layer has a value of another key.
    """
    layers = hf.section("per_layer_config")
    values: dict[str, Any] = {}
    if layers is not None:
        for key in layers.values:
            section = None
            if key.isdecimal() and int(key) == index:  # transformers pads layer numbers with zeros
                section = layers.section(key)
            if section is not None:
                values = dict(section.values)
    if unknown := values.keys() - set(known):
        raise UnsupportedError(f"{hf.source}: per_layer_config: {shown(min(unknown))}, known are {', '.join(known)}")
    return values


def without_attention(num_heads: int, head_dim: int) -> dict[str, Any]:
    """Return fields of `decoder_config` for a model whose layers all keep a state. Heads are those of the state."""
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "softmax_scale": 1.0,
        "rope": None,
        "qkv_bias": False,
        "o_bias": False,
    }


def rotating_layers(hf: HfConfig) -> list[int]:
    """Return 1 for each layer that rotates queries and keys, 0 for the others.

    The key is `no_rope_layers`. Without it, every `no_rope_layer_interval`-th layer does not rotate.

    Raises:
        CheckpointError: there are fewer entries than layers, or an entry is neither 0 nor 1.
    """
    num_layers, interval = count_layers(hf), hf.integer("no_rope_layer_interval")
    rotates = hf.items("no_rope_layers", int)
    if not rotates:
        rotates = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if len(rotates) < num_layers or not set(rotates) <= {0, 1}:
        raise CheckpointError(f"{hf.source}: no_rope_layers {shown(rotates)}, expected 0 or 1 for {num_layers} layers")
    return rotates[:num_layers]


def read_head_dim(hf: HfConfig) -> int:
    """Read the head size.

    Raises:
        CheckpointError, UnsupportedError: it is malformed, odd or not supported.
    """
    default = hf.integer("hidden_size") // hf.integer("num_attention_heads")
    head_dim = hf.integer("head_dim", default, maximum=_MAX_HEAD_DIM)
    if head_dim < 2 or head_dim % 2:
        raise CheckpointError(f"{hf.source}: head_dim {head_dim}, expected an even number: rotation takes pairs")
    if head_dim > MAX_HEAD_DIM:
        raise UnsupportedError(f"{hf.source}: head_dim {head_dim}, known are 2 to {MAX_HEAD_DIM}")
    return head_dim


# Field of `DecoderConfig` -> how it is read if the family does not give it. Fields without an entry take their
# defaults. All biases follow `attention_bias`.
_FIELDS: Mapping[str, Callable[[HfConfig], Any]] = {
    "hidden_size": lambda hf: hf.integer("hidden_size"),
    "intermediate_size": lambda hf: hf.integer("intermediate_size"),
    "vocab_size": lambda hf: hf.integer("vocab_size"),
    "model_type": lambda hf: hf.text("model_type"),
    "max_position_embeddings": lambda hf: hf.integer("max_position_embeddings", maximum=_MAX_POSITIONS),
    "activation": lambda hf: ACTIVATIONS[hf.choice("hidden_act", *ACTIVATIONS)],
    "tie_word_embeddings": lambda hf: hf.flag("tie_word_embeddings"),
    "dtype": weights_dtype,
    "quantization": read_quantization,
    # Attention.
    "num_heads": lambda hf: hf.integer("num_attention_heads"),
    "num_kv_heads": lambda hf: hf.integer("num_key_value_heads", hf.integer("num_attention_heads")),
    "head_dim": read_head_dim,
    "rope": rope_config,
    "softmax_scale": lambda hf: read_head_dim(hf) ** -0.5,
    "qkv_bias": lambda hf: hf.flag("attention_bias"),
    "o_bias": lambda hf: hf.flag("attention_bias"),
    # Norms.
    "eps": lambda hf: hf.number("rms_norm_eps", may_be_zero=True),
}
