"""Rotary position embedding: the frequencies of each known scaling, and the table of cosines and sines."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.models.hf_config import HfConfig

_KINDS = ("default", "linear", "llama3", "yarn")


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


def rope_config(hf: HfConfig, *, theta: float = 10000.0, layer_type: str | None = None) -> RopeConfig:
    """Reads `rope_parameters`, or `rope_theta` and `rope_scaling` as written before transformers 5.

    theta: where none is given. layer_type: a section of `rope_parameters`, for families whose layers differ.

    Raises:
        UnsupportedError: the type is another than default, linear, llama3 or yarn, or only a part of each head rotates.
        CheckpointError: a value is missing or malformed.
    """
    section = hf.section("rope_parameters") or hf.section("rope_scaling")
    if section is not None and layer_type is not None and layer_type in section.values:
        section = section.section(layer_type)
    given = {key: value for key, value in section.values.items() if value is not None} if section else {}
    values = HfConfig({**hf.values, **given}, hf.source)
    theta, kind = values.number("rope_theta", theta), values.text("rope_type", values.text("type", "default"))
    rotated = values.number("partial_rotary_factor", 1.0)
    if rotated != 1.0:
        raise UnsupportedError(f"{hf.source}: partial_rotary_factor {rotated}, only 1.0 is known")
    if kind not in _KINDS:
        raise UnsupportedError(f"{hf.source}: rope type {kind!r}, known are {', '.join(_KINDS)}")
    if kind == "default":
        return RopeConfig(theta)
    factor = values.number("factor")
    if kind == "linear":
        return RopeConfig(theta, factor)
    if kind == "yarn":
        return RopeConfig(theta, factor, *_yarn(values, factor))
    low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
    if low >= high:
        raise CheckpointError(f"{hf.source}: low_freq_factor {low} is not below high_freq_factor {high}")
    return RopeConfig(theta, factor, Llama3Scaling(low, high, values.integer("original_max_position_embeddings")))


def _yarn(values: HfConfig, factor: float) -> tuple[YarnScaling, float]:
    """The scaling, and the factor of cosines and sines: 0.1 ln(factor) + 1 in the paper, which configs can replace."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    scaling = YarnScaling(
        beta_fast=values.number("beta_fast", 32.0),
        beta_slow=values.number("beta_slow", 1.0),
        original_max_positions=values.integer(
            "original_max_position_embeddings", values.integer("max_position_embeddings")
        ),
        truncate=values.flag("truncate", True),
    )
    if values.values.get("mscale") and values.values.get("mscale_all_dim"):
        default = magnitude(values.number("mscale")) / magnitude(values.number("mscale_all_dim"))
    else:
        default = magnitude(1.0)
    return scaling, values.number("attention_factor", default)


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
    return 1 - ((index - first) / max(last - first, 0.001)).clamp(0.0, 1.0)


def rope_table(config: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> torch.Tensor:
    """float32 [max_positions, head_dim]: cosines of the head_dim / 2 angles, then their sines."""
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, rope_frequencies(config, head_dim).to(device))
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * config.attention_factor
