"""compressed-tensors, as llm-compressor writes it: groups of modules, with types of their weights and activations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from paged.errors import CheckpointError, InvalidInputError, UnsupportedError
from paged.kernels.common.scalars import shown
from paged.kernels.quantization.repack import from_compressed_tensors
from paged.kernels.quantization.weight import FP8_BLOCK, QuantizedWeight
from paged.models.loading.hf_config import HfConfig
from paged.models.quantization.eight_bit import EightBit
from paged.models.quantization.four_bit_floats import Mxfp4, Nvfp4
from paged.models.quantization.layout import Layout, Stored, Tensors
from paged.models.quantization.quantization import Quantization, group_size, pattern

_ONE_BY_ONE = {"float": "float-quantized", "int": "int-quantized"}


@dataclass(frozen=True, kw_only=True)
class PackQuantized(Layout):
    """See `from_compressed_tensors`."""

    @property
    def num_bits(self) -> int:
        return 4 if self.form == "int4" else 8

    def stored(self, rows: int, columns: int) -> dict[str, Stored]:
        groups, per_word = self.num_groups(columns), 32 // self.num_bits
        found = {
            "weight_packed": Stored((rows, -(-columns // per_word)), torch.int32, 0),
            "weight_scale": Stored((rows, groups), torch.float32, 0),
            "weight_shape": Stored((2,), torch.int64),
        }
        if self.has_zero_points:
            found["weight_zero_point"] = Stored((-(-rows // per_word), groups), torch.int32, 0, per_word)
        if self.has_order:
            found["weight_g_idx"] = Stored((columns,), torch.int32)
        return found

    def pack(self, tensors: Tensors, columns: int) -> QuantizedWeight:
        if tensors["weight_shape"][1] != columns:
            raise InvalidInputError(f"weight_shape: {tensors['weight_shape'].tolist()}, expected {columns} columns")
        return from_compressed_tensors(
            tensors["weight_packed"],
            tensors["weight_scale"],
            columns,
            num_bits=self.num_bits,
            weight_zero_point=tensors.get("weight_zero_point"),
            weight_g_idx=tensors.get("weight_g_idx"),
        )


def read_compressed_tensors(hf: HfConfig) -> Quantization | None:
    """hf: the quantization_config. None where it concerns the KV cache alone.

    Raises:
        UnsupportedError: an option is not known here.
        CheckpointError: a value is malformed.
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
        group = groups.section(key)
        if group is None or group.section("weights") is None:
            continue
        layout = _layout(group, group.value("format") or hf.value("format"))
        layouts |= dict.fromkeys(group.items("targets", str), layout)
    if not layouts:
        if cache is None:
            raise UnsupportedError(f"{hf.source}: config_groups without weights, and no kv_cache_scheme")
        return None
    plain = [(_pattern(name, hf), None) for name in hf.items("ignore", str)]
    # Names count before patterns, and those before classes.
    ordered = sorted(layouts, key=lambda name: 1 if name.startswith("re:") else 0 if "." in name else 2)
    return Quantization((*plain, *((_pattern(name, hf), layouts[name]) for name in ordered)))


def _pattern(name: str, hf: HfConfig) -> re.Pattern[str]:
    """A regular expression behind "re:", the class of all projections, or a name."""
    if name == "Linear":
        return re.compile("")
    return pattern(name[3:] if name.startswith("re:") else rf"{re.escape(name)}\Z", hf, "targets or ignore")


def _layout(group: HfConfig, form: Any) -> Layout:
    """How the modules of a group are stored.

    Raises:
        UnsupportedError: as above.
    """
    weights, inputs = group.section("weights"), group.section("input_activations")
    assert weights is not None  # as the caller has seen
    group.choice("output_activations")
    kind, num_bits = weights.choice("type", "float", "int"), weights.choice("num_bits", 4, 8)
    if form == "pack-quantized" and kind == "int":
        return _packed(group, weights)
    if form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized") and kind == "float" and num_bits == 4:
        if inputs is not None:
            inputs.choice("num_bits", 4)
            inputs.choice("type", "float")
        if form == "mxfp4-pack-quantized":
            return Mxfp4()
        ignored = None if inputs is None else "input_global_scale"
        return Nvfp4(weight="weight_packed", global_scale="weight_global_scale", ignored=ignored)
    if form not in (_ONE_BY_ONE.get(str(kind)), "naive-quantized") or num_bits != 8:
        raise UnsupportedError(f"{group.source}: format = {shown(form)} with {shown(num_bits)} bits of type {kind}")
    return _one_by_one(weights, inputs, "e4m3" if kind == "float" else "int8")


def _packed(group: HfConfig, weights: HfConfig) -> PackQuantized:
    group.choice("input_activations")
    strategy = weights.choice("strategy", "group", "channel")
    order = weights.choice("actorder", "group", "dynamic", "weight", "static", True, False)
    return PackQuantized(
        form=f"int{weights.integer('num_bits')}",
        group_size=0 if strategy == "channel" else group_size(weights),
        has_zero_points=not weights.flag("symmetric", True),
        has_order=order in ("group", "dynamic", True),
    )


def _one_by_one(weights: HfConfig, inputs: HfConfig | None, form: str) -> EightBit:
    weights.choice("symmetric", True)
    strategy = weights.choice("strategy", "tensor", "channel", *(("block",) if form == "e4m3" else ()))
    block = weights.value("block_structure")
    if strategy == "block" and block not in ([FP8_BLOCK, FP8_BLOCK], f"{FP8_BLOCK}x{FP8_BLOCK}"):
        raise UnsupportedError(f"{weights.source}: block_structure = {shown(block)}, known is [128, 128]")
    is_static = False
    if inputs is not None:
        inputs.choice("num_bits", 8)
        inputs.choice("type", "float" if form == "e4m3" else "int")
        inputs.choice("symmetric", True)
        is_static = not inputs.flag("dynamic")
        known = ("tensor",) if is_static else ("group",) if strategy == "block" else ("token",)
        inputs.choice("strategy", *known)
        if strategy == "block":
            inputs.choice("dynamic", True)
            inputs.choice("group_size", FP8_BLOCK)
    if strategy is None:
        raise CheckpointError(f"{weights.source}: strategy is missing, expected tensor, channel or block")
    return EightBit(
        form=form,
        group_size=FP8_BLOCK if strategy == "block" else 0,
        one_scale=strategy == "tensor",
        quantizes_input=inputs is not None,
        has_input_scale=is_static,
    )
