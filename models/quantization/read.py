"""Read the quantization_config of a checkpoint; one reader for each `quant_method`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.core.errors import shown
from paged.kernels.quantization.packing import E2M1_GROUPS, FP8_BLOCK, NVFP4_GROUP
from paged.models.loading.checkpoint_files import is_there
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.weights import FLOATING, Destination, StoredTensors, read_tensor
from paged.models.quantization.layouts import (
    WIDENED_BLOCK,
    Awq,
    EightBit,
    Fp4,
    Gptq,
    Layout,
    PackQuantized,
    Quantization,
    Rule,
    Widened,
)
from paged.models.quantization.name_patterns import NamePattern, check_cost

_MODELOPT_FILE = "hf_quant_config.json"
_SCALES = (".scales", ".weight_scale")
_HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}
# Smallest group of integer codes, in columns; every group size must be a multiple.
_GROUP_UNIT = 32
_ALL = NamePattern("")
_PLAIN_HEAD: Rule = NamePattern(r"lm_head\Z"), None
# Scale -> its tensor names: first in vLLM and ModelOpt, then in transformers, then in DeepSeek-V4.
_SCALE_NAMES = {
    "scale_name": ("weight_scale", "weight_scale_inv", "scale"),
    "input_scale_name": ("input_scale", "activation_scale"),
}
_GPTQ_VERSIONS = {"gptq": 1, "gptq_v2": 2}


def read_config(folder: Path) -> HfConfig:
    """Read config.json, with the quantization_config that older versions of ModelOpt write beside it.

    Raises:
        CheckpointError: a file is missing, or not a JSON object.
    """
    hf = HfConfig.read(folder)
    if hf.values.get("quantization_config") is not None or not is_there(folder / _MODELOPT_FILE):
        return hf
    values = HfConfig.read(folder, _MODELOPT_FILE).values
    return HfConfig({**hf.values, "quantization_config": {**values, "quant_method": "modelopt"}}, hf.source)


def read_quantization(hf: HfConfig) -> Quantization | None:
    """Read the format of packed weights from a config.json; None if they are plain.

    Raises:
        UnsupportedError: a format, or an option of it, is not supported.
        CheckpointError: a value is malformed.
    """
    section = hf.section("quantization_config")
    if section is None:
        return None
    method = section.choice("quant_method", *_READERS)
    if method is None:
        section.text("quant_method")
    rules = _READERS[method](section)
    check_cost([pattern for pattern, _ in rules], section.source)
    if not rules:
        return None
    return Quantization(tuple(rules))


def as_stored(quantization: Quantization | None, stored: StoredTensors) -> Quantization | None:
    """Adapt the quantisation to the stored tensors.

    Group scales get the file's dtype if all scales have the same, else float32. Scales of 8-bit codes get the names in
    the file, and its dtype if that has 8 bits.
    Weights stored as floating point are plain.
    """
    if quantization is None:
        return None
    scale_dtypes: set[str] = set()
    dtypes_of_ends: dict[str, set[str]] = {}
    plain: set[str] = set()
    for name, tensor in stored.items():
        dtypes_of_ends.setdefault(name.rpartition(".")[2], set()).add(tensor.dtype)
        if name.endswith(_SCALES):
            scale_dtypes.add(tensor.dtype)
        if tensor.dtype in FLOATING:
            plain.add(name.removesuffix(".weight"))
    dtype = None
    if len(scale_dtypes) == 1:
        dtype = _HALVES.get(scale_dtypes.pop())

    def layout_of(layout: Layout) -> Layout:
        if dtype is not None:
            layout = replace(layout, scale_dtype=dtype)
        if not isinstance(layout, EightBit):
            return layout
        scale_names: dict[str, Any] = {}
        for key, names in _SCALE_NAMES.items():
            for name in names:
                if name in dtypes_of_ends:
                    scale_names[key] = name
        layout = replace(layout, **scale_names)
        if dtypes_of_ends.get(layout.scale_name) == {"F8_E8M0"}:
            layout = replace(layout, scale_code=torch.float8_e8m0fnu)
        return layout

    rules: list[Rule] = []
    for pattern, layout in quantization.rules:
        if layout is not None:
            layout = layout_of(layout)
        rules.append((pattern, layout))
    return Quantization(tuple(rules), frozenset(plain))


def without_zero_biases(stored: StoredTensors, destinations: Mapping[str, Destination]) -> StoredTensors:
    """Return the stored tensors without the zero biases that GPTQ files hold for projections without a bias.

    Raises:
        CheckpointError: a file became unreadable.
    """
    kept = dict(stored)
    for name in stored.keys() - destinations.keys():
        is_beside_codes = name.endswith(".bias") and f"{name.removesuffix('bias')}qweight" in destinations
        if is_beside_codes and not read_tensor(stored, name).any():
            del kept[name]
    return kept


def _read_awq(hf: HfConfig) -> list[Rule]:
    hf.choice("bits", 4)
    hf.choice("version", "gemm")
    hf.choice("backend", "autoawq", "auto")
    hf.choice("zero_point", True)
    layout = Awq(group_size=_group_size(hf))
    return [_PLAIN_HEAD, *_unconverted(hf, "modules_to_not_convert"), (_ALL, layout)]


def _read_gptq(hf: HfConfig) -> list[Rule]:
    num_bits = hf.choice("bits", 4, 8)
    if num_bits is None:
        raise CheckpointError(f"{hf.source}: bits is missing, expected 4 or 8")
    hf.choice("is_marlin_format", False)
    hf.choice("pack_dtype", "int32")
    form = hf.choice("checkpoint_format", *_GPTQ_VERSIONS) or hf.choice("format", *_GPTQ_VERSIONS)
    layout = Gptq(
        form=f"int{num_bits}",
        group_size=_group_size(hf),
        has_zero_points=not hf.flag("sym"),
        has_order=hf.flag("desc_act"),
        version=_GPTQ_VERSIONS.get(form, 1),
    )
    # In GPTQModel, patterns after "-:" name plain modules; other patterns change options of some modules.
    rules: list[Rule] = []
    changed = hf.section("dynamic") or HfConfig({}, hf.source)
    for name in changed.values:
        if not name.startswith("-:"):
            raise UnsupportedError(
                f"{hf.source}: dynamic has {name!r}, known are patterns of plain modules, such as '-:...'"
            )
        rules.append((_pattern(name[2:], hf, "dynamic"), None))
    if not hf.flag("lm_head"):
        rules.append(_PLAIN_HEAD)
    return [*rules, (_ALL, layout)]


def _read_fp8(hf: HfConfig) -> list[Rule]:
    """Read e4m3 in blocks of 128 x 128 as in DeepSeek-V3 or of 32 x 32, or with one scale per projection."""
    hf.choice("fmt", "e4m3", "float8_e4m3fn")
    block = hf.value("weight_block_size")
    if block not in (None, [FP8_BLOCK, FP8_BLOCK], [WIDENED_BLOCK, WIDENED_BLOCK]):
        raise UnsupportedError(
            f"{hf.source}: weight_block_size = {shown(block)} is not supported, known are [128, 128] and [32, 32]"
        )
    layout: EightBit
    if block:
        # Activation scales are dynamic, one per 128 or 32 values of a token.
        hf.choice("activation_scheme", "dynamic")
    if block == [WIDENED_BLOCK, WIDENED_BLOCK]:
        layout = Widened(scale_name="weight_scale_inv")
    elif block:
        layout = EightBit(form="e4m3", group_size=FP8_BLOCK, scale_name="weight_scale_inv", quantizes_input=True)
    else:
        is_static = hf.choice("activation_scheme", "dynamic", "static") == "static"
        layout = EightBit(form="e4m3", one_scale=True, quantizes_input=True, has_input_scale=is_static)
    plain = _unconverted(hf, "modules_to_not_convert") + _unconverted(hf, "ignored_layers")
    return [_PLAIN_HEAD, *plain, (_ALL, layout)]


def _read_modelopt(hf: HfConfig) -> list[Rule]:
    """Read ModelOpt (NVIDIA): NVFP4, or e4m3 with one scale per projection. An 8-bit KV cache alone has no rules."""
    layout: Layout
    method, hf = hf.value("quant_method"), hf.section("quantization") or hf
    hf.choice("kv_cache_quant_algo", "FP8", "none")
    form = hf.choice("quant_algo", "NVFP4", "FP8")
    if form is None and method != "modelopt_fp4":
        return []
    if form == "FP8":
        layout = EightBit(form="e4m3", one_scale=True, quantizes_input=True, has_input_scale=True)
    else:
        hf.choice("group_size", NVFP4_GROUP)
        names: dict[str, Any] = {"weight": "weight", "global_scale": "weight_scale_2", "ignored": "input_scale"}
        layout = Fp4(form="nvfp4", group_size=NVFP4_GROUP, **names)
    # A name means the module and all modules below it; an asterisk matches any characters.
    rules: list[Rule] = []
    for key in ("ignore", "exclude_modules"):
        for name in hf.items(key, str):
            anything = ".*".join(map(re.escape, name.split("*")))
            rules.append((_pattern(rf"{anything}(?:\.|\Z)", hf, key), None))
    return [*rules, (_ALL, layout)]


def _read_compressed_tensors(hf: HfConfig) -> list[Rule]:
    """Read groups of modules with formats for weights and activations, as llm-compressor writes them.

    There are no rules if only the KV cache is quantised.
    """
    for key in ("sparsity_config", "transform_config"):
        section = hf.section(key)
        if section is not None and section.values and section.values.get("format") != "dense":
            raise UnsupportedError(f"{hf.source}: {key} = {shown(section.values)} is not supported")
    cache = hf.section("kv_cache_scheme")
    if cache is not None:
        cache.choice("type", "float")
    layouts: dict[str, Layout] = {}
    groups = hf.section("config_groups") or HfConfig({}, hf.source)
    for key in groups.values:
        group = groups.section(key) or HfConfig({}, groups.source)
        weights = group.section("weights")
        if weights is not None:
            layout = _group_layout(group, weights, group.value("format") or hf.value("format"))
            layouts |= dict.fromkeys(group.items("targets", str), layout)
    if not layouts and cache is None:
        raise UnsupportedError(f"{hf.source}: config_groups without weights, and no kv_cache_scheme")
    if not layouts:
        return []

    # The class "Linear" means all projections. If another class is named instead, it means all projections too, and
    # the file shows which of them are packed.
    classes = [name for name in layouts if name.isidentifier() and name[0].isupper()]
    if "Linear" in classes:
        classes = ["Linear"]
    if len({layouts[name] for name in classes}) > 1:
        raise UnsupportedError(f"{hf.source}: targets {shown(classes)} packed in several ways, supported is one")

    def named(name: str) -> NamePattern:
        """Return a pattern for a regular expression after "re:", for the class of all projections, or for a name."""
        if name.startswith("re:"):
            return _pattern(name[3:], hf, "targets or ignore")
        if name == "Linear" or name in classes:
            return _ALL
        return _pattern(rf"{re.escape(name)}\Z", hf, "targets or ignore")

    rules: list[Rule] = [(named(name), None) for name in hf.items("ignore", str)]
    for name in sorted(layouts, key=_precedence):
        rules.append((named(name), layouts[name]))
    return rules


def _precedence(target: str) -> int:
    """Return the rank of a target of compressed-tensors: names first, then patterns, then classes."""
    if target.startswith("re:"):
        return 1
    if "." in target:
        return 0
    return 2


def _group_layout(group: HfConfig, weights: HfConfig, form: Any) -> Layout:
    """Return the format of a group of compressed-tensors."""
    group.choice("output_activations")
    kind = weights.choice("type", "float", "int") or "int"
    num_bits = weights.choice("num_bits", 4, 8)
    if form == "pack-quantized" and kind == "int":
        return _packed_integers(group, weights)
    if form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized") and kind == "float" and num_bits == 4:
        return _packed_floats(group.section("input_activations"), weights, form[:5])
    if form in (f"{kind}-quantized", "naive-quantized") and num_bits == 8:
        return _eight_bits(group.section("input_activations"), weights, kind)
    raise UnsupportedError(f"{group.source}: format = {shown(form)} with {shown(num_bits)} bits of type {kind}")


def _packed_integers(group: HfConfig, weights: HfConfig) -> Layout:
    group.choice("input_activations")
    strategy = weights.choice("strategy", "group", "channel")
    order = weights.choice("actorder", "group", "dynamic", "weight", "static", True, False)
    group_size = 0
    if strategy != "channel":
        group_size = _group_size(weights)
    return PackQuantized(
        form=f"int{weights.integer('num_bits')}",
        group_size=group_size,
        has_zero_points=not weights.flag("symmetric", True),
        has_order=order in ("group", "dynamic", True),
    )


def _packed_floats(inputs: HfConfig | None, weights: HfConfig, form: str) -> Layout:
    """Return the format of 4-bit floats. form: "nvfp4" or "mxfp4"."""
    ignored = None
    if inputs is not None:
        inputs.choice("num_bits", 4)
        inputs.choice("type", "float")
        ignored = "input_global_scale"
    size = E2M1_GROUPS[form]
    weights.choice("group_size", size)
    if form == "mxfp4":
        return Fp4(form=form, group_size=size)
    return Fp4(form=form, group_size=size, global_scale="weight_global_scale", ignored=ignored)


def _eight_bits(inputs: HfConfig | None, weights: HfConfig, kind: str) -> Layout:
    """Return the format of 8-bit codes. kind: "float" or "int"."""
    weights.choice("symmetric", True)
    form, strategies = "int8", ["tensor", "channel"]
    if kind == "float":
        form = "e4m3"
        strategies.append("block")
    strategy = weights.choice("strategy", *strategies)
    is_in_blocks = strategy == "block"
    group_size = 0
    if is_in_blocks:
        group_size = FP8_BLOCK
    block = weights.value("block_structure")
    if is_in_blocks and block not in ([FP8_BLOCK, FP8_BLOCK], f"{FP8_BLOCK}x{FP8_BLOCK}"):
        raise UnsupportedError(f"{weights.source}: block_structure = {shown(block)}, known is [128, 128]")
    is_static = False
    if inputs is not None:
        is_static = _reads_static_scale(inputs, kind, is_in_blocks=is_in_blocks)
    if strategy is None:
        raise CheckpointError(f"{weights.source}: strategy is missing, expected tensor, channel or block")
    return EightBit(
        form=form,
        group_size=group_size,
        one_scale=strategy == "tensor",
        quantizes_input=inputs is not None,
        has_input_scale=is_static,
    )


def _reads_static_scale(inputs: HfConfig, kind: str, *, is_in_blocks: bool) -> bool:
    """Check how activations are rounded; return whether their scale is stored. Otherwise each token has one."""
    inputs.choice("num_bits", 8)
    inputs.choice("type", kind)
    inputs.choice("symmetric", True)
    is_static = not inputs.flag("dynamic")
    strategy = "token"
    if is_static:
        strategy = "tensor"
    elif is_in_blocks:
        strategy = "group"
    inputs.choice("strategy", strategy)
    if is_in_blocks:
        inputs.choice("dynamic", True)
        inputs.choice("group_size", FP8_BLOCK)
    return is_static


def _pattern(expression: str, hf: HfConfig, key: str, *, is_module: bool = False) -> NamePattern:
    """Check and return a regular expression of a configuration.

    Raises:
        CheckpointError: the expression is malformed or too long.
        UnsupportedError: matching it may take long.
    """
    pattern = NamePattern(expression, is_module)
    pattern.check(f"{hf.source}: {key}")
    return pattern


def _unconverted(hf: HfConfig, key: str) -> list[Rule]:
    """Return rules for the plain modules that a configuration names in transformers' way."""
    rules: list[Rule] = []
    for name in hf.items(key, str):
        if name:
            rules.append((_pattern(name, hf, key, is_module=True), None))
    return rules


def _group_size(hf: HfConfig) -> int:
    """Return the number of columns that share a scale, 0 for all.

    Raises:
        UnsupportedError: the number is not a multiple of 32.
        CheckpointError: the number is missing or malformed.
    """
    size = hf.integer("group_size", minimum=-1)
    if size == 0:
        raise CheckpointError(f"{hf.source}: group_size = 0, expected -1 or a positive integer")
    if size > 0 and size % _GROUP_UNIT:
        raise UnsupportedError(f"{hf.source}: group_size = {size} is not supported, known are multiples of 32")
    return max(size, 0)


# Readers raise UnsupportedError for an unknown option, and CheckpointError for a malformed value.
_READERS: dict[str, Callable[[HfConfig], list[Rule]]] = {
    "awq": _read_awq,
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
    "gptq": _read_gptq,
    "modelopt": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
}
