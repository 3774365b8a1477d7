"""Reads rotations from a checkpoint's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.common.scalars import shown
from paged.models.layers.rope import Llama3Scaling, LongropeScaling, ProportionalScaling, RopeConfig, YarnScaling
from paged.models.loading.hf_config import HfConfig

# Dynamic scaling begins beyond max_position_embeddings, where no sequence goes; the three positions that mrope gives a
# token differ in pictures alone.
_PLAIN = ("default", "dynamic", "mrope")
_KINDS = (*_PLAIN, "linear", "llama3", "longrope", "yarn")


def rope_config(
    hf: HfConfig,
    *,
    theta: float = 10000.0,
    default: Mapping[str, Any] | None = None,
    fraction: float | None = None,
    interleaved: bool = False,
) -> RopeConfig:
    """Reads `rope_parameters`, or `rope_scaling` as written before transformers 5, which counts where both are given.

    theta: where none is given, neither there nor as `rope_theta`. default: what stands in where neither is there.
    fraction: the rotated part of each head where config.json says nothing of it; None for a family that rotates all.
    interleaved: as in RopeConfig.

    Raises:
        UnsupportedError: the type is not known here, or a part of each head rotates in a family that rotates all.
        CheckpointError: a value is missing or malformed.
    """
    parameters, scaling = hf.section("rope_parameters"), hf.section("rope_scaling")
    # Empty parameters are parameters, those of a plain rotation; an empty scaling is none.
    given = scaling if scaling is not None and scaling.values else parameters
    if given is None:
        given = HfConfig({} if default is None else default, hf.source)
    rope = scaled_rope(hf, given, hf.number("rope_theta", theta), fraction)
    return replace(rope, interleaved=interleaved)


def scaled_rope(hf: HfConfig, section: HfConfig, theta: float, fraction: float | None = None) -> RopeConfig:
    """The rotation that a section of config.json says; else as `rope_config`.

    hf: what stands around the section. theta, fraction: where the section has none.
    """
    rotated = section.number("partial_rotary_factor", hf.number("partial_rotary_factor", fraction or 1.0))
    if section.text("rope_type", "") == "proportional":
        factor = section.number("factor", 1.0)
        return RopeConfig(section.number("rope_theta", theta), factor, ProportionalScaling(min(rotated, 1.0)))
    if rotated > 1.0 or (fraction is None and rotated != 1.0):
        raise UnsupportedError(f"{hf.source}: partial_rotary_factor {rotated}, only 1.0 is known")
    return replace(_scaled(hf, section, section.number("rope_theta", theta)), fraction=rotated)


def _scaled(hf: HfConfig, section: HfConfig, theta: float) -> RopeConfig:
    kind = section.text("rope_type", section.text("type", "default"))
    kind = "longrope" if kind == "su" else kind  # as Phi-3 was first published
    if kind not in _KINDS:
        raise UnsupportedError(f"{hf.source}: rope type {shown(kind)}, known are {', '.join(_KINDS)}")
    for key, value in section.values.items():
        if isinstance(value, dict):
            raise UnsupportedError(f"{section.source}: {shown(key)} = {shown(value)}, a rotation of some layers alone")
    if kind in _PLAIN:
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, section.number("factor"))
    original = section.integer("original_max_position_embeddings", hf.integer("max_position_embeddings"))
    # Some configurations have it beside the section, and there it counts for more.
    original = hf.integer("original_max_position_embeddings", original)
    if kind == "yarn":
        # null stands for what the positions are stretched by; absent, the type is not known to be meant.
        is_null = "factor" in section.values and section.value("factor") is None
        factor = hf.integer("max_position_embeddings") / original if is_null else section.number("factor")
        return RopeConfig(theta, factor, *_yarn(section, factor, original))
    if kind == "longrope":
        factor = section.number("factor", hf.integer("max_position_embeddings") / original)
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
        scaling = LongropeScaling(section.numbers("short_factor"), section.numbers("long_factor"), original)
        return RopeConfig(theta, 1.0, scaling, section.number("attention_factor", default))
    factor, low, high = (section.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise CheckpointError(f"{hf.source}: low_freq_factor {low} is not below high_freq_factor {high}")
    return RopeConfig(theta, factor, Llama3Scaling(low, high, original))


def ropes_by_kind(hf: HfConfig, theta: float, local_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that see everything, and of those with a window; scalings as published before transformers 5 are the
    first ones' alone.

    Raises:
        UnsupportedError, CheckpointError: as `rope_config`, or something is said for neither kind.
    """
    parameters = hf.section("rope_parameters") or HfConfig({}, hf.source)
    whole, local = (
        parameters.section(kind) or HfConfig({}, hf.source) for kind in ("full_attention", "sliding_attention")
    )
    if unknown := sorted(parameters.values.keys() - parameters.read_keys):
        raise UnsupportedError(f"{parameters.source}: {shown(unknown[0])} is not said for a type of layers")
    scaling = hf.section("rope_scaling") or HfConfig({}, hf.source)
    if "type" in scaling.values and "rope_type" not in scaling.values:  # which transformers leaves unread here alone
        raise UnsupportedError(f"{scaling.source}: type {shown(scaling.value('type'))}, expected it as rope_type")
    whole = HfConfig({**whole.values, **scaling.values}, hf.source)
    return scaled_rope(hf, whole, theta), scaled_rope(hf, local, local_theta)


def _yarn(section: HfConfig, factor: float, original_max_positions: int) -> tuple[YarnScaling, float]:
    """The scaling, and the factor of cosines and sines: 0.1 ln(factor) + 1 in the paper, which configs can replace."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    scaling = YarnScaling(
        # 0 is null in transformers.
        beta_fast=section.number("beta_fast", 32.0, may_be_zero=True) or 32.0,
        beta_slow=section.number("beta_slow", 1.0, may_be_zero=True) or 1.0,
        original_max_positions=original_max_positions,
        truncate=section.flag("truncate", "truncate" not in section.values),  # null is false in transformers
    )
    weights = [section.number(key, 0.0, may_be_zero=True) for key in ("mscale", "mscale_all_dim")]
    default = magnitude(weights[0]) / magnitude(weights[1]) if all(weights) else magnitude(1.0)
    return scaling, section.number("attention_factor", default)
