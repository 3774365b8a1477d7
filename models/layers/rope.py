"""Rotary position embedding: the frequencies of each known scaling, and the table of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.common.scalars import shown
from paged.models.loading.hf_config import HfConfig

_KINDS = ("default", "linear", "llama3", "yarn")
# Of scores, and of queries and keys: far beyond any model's, and 16-bit floats end at 65,504.
MAX_FACTOR = 1e4


@dataclass(frozen=True)
class Llama3Scaling:
    """Wavelengths below original_max_positions / high_freq_factor stay, those above / low_freq_factor are stretched."""

    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """Pairs that turn over beta_fast times within original_max_positions stay, those below beta_slow are stretched.

    truncate: the two ends of what lies between are whole pairs.
    """

    beta_fast: float
    beta_slow: float
    original_max_positions: int
    truncate: bool


@dataclass(frozen=True)
class RopeConfig:
    """theta: base of the frequencies; factor: how far positions are stretched, everywhere or as `scaling` says.

    attention_factor: multiplies cosines and sines.
    """

    theta: float = 10000.0
    factor: float = 1.0
    scaling: Llama3Scaling | YarnScaling | None = None
    attention_factor: float = 1.0


def rope_config(hf: HfConfig, *, theta: float = 10000.0, default: Mapping[str, Any] | None = None) -> RopeConfig:
    """Reads `rope_parameters`, or `rope_scaling` as written before transformers 5, which counts where both are given.

    theta: where none is given, neither there nor as `rope_theta`. default: what stands in where neither is there.

    Raises:
        UnsupportedError: the type is another than default, linear, llama3 or yarn, or only a part of each head rotates.
        CheckpointError: a value is missing or malformed.
    """
    parameters, scaling = hf.section("rope_parameters"), hf.section("rope_scaling")
    # Empty parameters are parameters, those of a plain rotation; an empty scaling is none.
    given = scaling if scaling is not None and scaling.values else parameters
    if given is None:
        given = HfConfig({} if default is None else default, hf.source)
    return scaled_rope(hf, given, hf.number("rope_theta", theta))


def scaled_rope(hf: HfConfig, section: HfConfig, theta: float) -> RopeConfig:
    """The rotation that a section of config.json says; else as `rope_config`.

    hf: what stands around the section. theta: where the section has none.
    """
    theta, kind = section.number("rope_theta", theta), section.text("rope_type", section.text("type", "default"))
    rotated = section.number("partial_rotary_factor", hf.number("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise UnsupportedError(f"{hf.source}: partial_rotary_factor {rotated}, only 1.0 is known")
    if kind not in _KINDS:
        raise UnsupportedError(f"{hf.source}: rope type {shown(kind)}, known are {', '.join(_KINDS)}")
    for key, value in section.values.items():
        if isinstance(value, dict):
            raise UnsupportedError(f"{section.source}: {shown(key)} = {shown(value)}, a rotation of some layers alone")
    if kind == "default":
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
    factor, low, high = (section.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise CheckpointError(f"{hf.source}: low_freq_factor {low} is not below high_freq_factor {high}")
    return RopeConfig(theta, factor, Llama3Scaling(low, high, original))


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


def check_rope(config: RopeConfig, head_dim: int, max_positions: int, source: str) -> None:
    """See that every angle can be computed, and that no position makes anything but finite numbers.

    Raises:
        CheckpointError: the values do not make sense together, or are beyond any model's.
    """
    try:
        last = rope_frequencies(config, head_dim) * max_positions
    except (ArithmeticError, ValueError) as error:  # the logarithms of yarn
        raise CheckpointError(f"{source}: no rotation can be computed from {config} ({error})") from error
    if not last.isfinite().all() or config.attention_factor > MAX_FACTOR:
        raise CheckpointError(f"{source}: {config} turns queries and keys into no finite numbers")


def rope_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians a position of each pair, float32 [head_dim / 2]: theta^(-2i / head_dim), scaled."""
    inv_freq = config.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if config.scaling is None:
        return inv_freq / config.factor
    if isinstance(config.scaling, Llama3Scaling):
        kept = _kept_by_llama3(config.scaling, inv_freq)
    else:
        kept = _kept_by_yarn(config.scaling, config.theta, head_dim)
    return kept * inv_freq + (1 - kept) * inv_freq / config.factor


def _kept_by_llama3(scaling: Llama3Scaling, inv_freq: torch.Tensor) -> torch.Tensor:
    """Full turns within the original context decide: at least high_freq_factor keep their frequency, at most
    low_freq_factor are stretched in full, linear in between."""
    turns = scaling.original_max_positions * inv_freq / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return kept.clamp(0.0, 1.0)


def _kept_by_yarn(scaling: YarnScaling, theta: float, head_dim: int) -> torch.Tensor:
    """As llama3, but linear in the pair's index between those that turn beta_fast and beta_slow times (Peng et al.,
    2023, section 3.2)."""

    def pair(turns: float) -> float:
        return head_dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    index = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    # Ends in reverse, as beyond either end of the head or with beta_fast below beta_slow, are divided by all the same:
    # the models are run so by everybody.
    return 1 - ((index - first) / (last - first or 0.001)).clamp(0.0, 1.0)


def rope_table(config: RopeConfig | None, head_dim: int, max_positions: int, device: torch.device) -> torch.Tensor:
    """float32 [max_positions, rotary_dim]: cosines of rotary_dim / 2 angles, then their sines. None rotates nothing."""
    if config is None:
        return torch.empty(max_positions, 0, dtype=torch.float32, device=device)
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, rope_frequencies(config, head_dim).to(device))
    table = torch.empty(max_positions, head_dim, dtype=torch.float32, device=device)
    torch.cos(angles, out=table[:, : head_dim // 2])
    torch.sin(angles, out=table[:, head_dim // 2 :])
    return table.mul_(config.attention_factor)
