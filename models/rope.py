"""Rotary position embedding: the frequencies of each known scaling, and the table of cosines and sines."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.models.hf_config import HfConfig


@dataclass(frozen=True)
class Llama3Scaling:
    """Wavelengths below original_max_positions / high_freq_factor stay, those above / low_freq_factor are stretched."""

    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class RopeConfig:
    """theta: base of the frequencies; factor: how far positions are stretched, everywhere or as llama3 says."""

    theta: float = 10000.0
    factor: float = 1.0
    llama3: Llama3Scaling | None = None


def rope_config(hf: HfConfig) -> RopeConfig:
    """Reads `rope_parameters`, or `rope_theta` and `rope_scaling` as written before transformers 5.

    Raises:
        UnsupportedError: the type is another than default, linear or llama3, or only a part of each head rotates.
        CheckpointError: a value is missing or malformed.
    """
    values = hf.section("rope_parameters") or hf.section("rope_scaling") or HfConfig({}, hf.source)
    theta = values.number("rope_theta", hf.number("rope_theta", 10000.0))
    kind = values.text("rope_type", values.text("type", "default"))
    rotated = values.number("partial_rotary_factor", hf.number("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise UnsupportedError(f"{hf.source}: partial_rotary_factor {rotated}, only 1.0 is known")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, values.number("factor"))
    if kind == "llama3":
        low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
        if low >= high:
            raise CheckpointError(f"{hf.source}: low_freq_factor {low} is not below high_freq_factor {high}")
        scaling = Llama3Scaling(low, high, values.integer("original_max_position_embeddings"))
        return RopeConfig(theta, values.number("factor"), scaling)
    raise UnsupportedError(f"{hf.source}: rope type {kind!r}, known are default, linear, llama3")


def rope_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians a position of each pair, float32 [head_dim / 2]: theta^(-2i / head_dim), scaled."""
    inv_freq = config.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if config.llama3 is None:
        return inv_freq / config.factor
    scaling = config.llama3
    # Full turns within the original context decide: at least high_freq_factor keep their frequency, at most
    # low_freq_factor are stretched in full, linear in between.
    turns = scaling.original_max_positions * inv_freq / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * inv_freq + (1 - kept) * inv_freq / config.factor


def rope_table(config: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> torch.Tensor:
    """float32 [max_positions, head_dim]: cosines of the head_dim / 2 angles, then their sines."""
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, rope_frequencies(config, head_dim).to(device))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
