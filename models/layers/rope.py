"""Rotary position embedding: the frequencies of each known scaling, and the table of cosines and sines."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from paged.errors import CheckpointError

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
class LongropeScaling:
    """Each pair is stretched by a factor of its own (Ding et al., 2024): by `short` in a model that is loaded for
    sequences of at most original_max_positions tokens, else by `long`, at every position."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_positions: int


@dataclass(frozen=True)
class ProportionalScaling:
    """The first part of the pairs rotates, and the others stay (Gemma 4, 2026)."""

    rotating: float


@dataclass(frozen=True)
class RopeConfig:
    """theta: base of the frequencies; factor: how far positions are stretched, everywhere or as `scaling` says.

    attention_factor: multiplies cosines and sines. fraction: the part of each head, its beginning, that rotates.
    interleaved: pairs are neighbours, not one of each half.
    """

    theta: float = 10000.0
    factor: float = 1.0
    scaling: Llama3Scaling | YarnScaling | LongropeScaling | ProportionalScaling | None = None
    attention_factor: float = 1.0
    fraction: float = 1.0
    interleaved: bool = False


def check_rope(config: RopeConfig, head_dim: int, max_positions: int, source: str) -> None:
    """See that every angle can be computed, and that no position makes anything but finite numbers.

    Raises:
        CheckpointError: the values do not make sense together, or are beyond any model's.
    """
    try:
        last = rope_frequencies(config, head_dim, max_positions) * max_positions
    except (ArithmeticError, ValueError, RuntimeError) as error:  # the logarithms of yarn, the lists of longrope
        raise CheckpointError(f"{source}: no rotation can be computed from {config} ({error})") from error
    if rotary_dim(config, head_dim) % 2:
        raise CheckpointError(f"{source}: {config} rotates an odd part of {head_dim} dimensions")
    if not last.isfinite().all() or config.attention_factor > MAX_FACTOR:
        raise CheckpointError(f"{source}: {config} turns queries and keys into no finite numbers")


def rotary_dim(config: RopeConfig, head_dim: int) -> int:
    """How many elements of a head rotate."""
    return int(head_dim * config.fraction)


def rope_frequencies(config: RopeConfig, head_dim: int, max_positions: int) -> torch.Tensor:
    """Radians a position of each pair, float32 [rotary_dim / 2]: theta^(-2i / rotary_dim), scaled."""
    dim = rotary_dim(config, head_dim)
    inv_freq = config.theta ** -(torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if config.scaling is None:
        return inv_freq / config.factor
    if isinstance(config.scaling, ProportionalScaling):
        inv_freq[int(config.scaling.rotating * dim // 2) :] = 0.0
        return inv_freq / config.factor
    if isinstance(config.scaling, LongropeScaling):
        is_long = max_positions > config.scaling.original_max_positions
        return inv_freq / torch.tensor(config.scaling.long if is_long else config.scaling.short, device="cpu")
    if isinstance(config.scaling, Llama3Scaling):
        kept = _kept_by_llama3(config.scaling, inv_freq)
    else:
        kept = _kept_by_yarn(config.scaling, config.theta, dim)
    return kept * inv_freq + (1 - kept) * inv_freq / config.factor


def _kept_by_llama3(scaling: Llama3Scaling, inv_freq: torch.Tensor) -> torch.Tensor:
    """Full turns within the original context decide: at least high_freq_factor keep their frequency, at most
    low_freq_factor are stretched in full, linear in between."""
    turns = scaling.original_max_positions * inv_freq / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return kept.clamp(0.0, 1.0)


def _kept_by_yarn(scaling: YarnScaling, theta: float, dim: int) -> torch.Tensor:
    """As llama3, but linear in the pair's index between those that turn beta_fast and beta_slow times (Peng et al.,
    2023, section 3.2)."""

    def pair(turns: float) -> float:
        return dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    index = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    # Ends in reverse, as beyond either end of the pairs or with beta_fast below beta_slow, are divided by all the same:
    # the models are run so by everybody.
    return 1 - ((index - first) / (last - first or 0.001)).clamp(0.0, 1.0)


def rope_table(config: RopeConfig | None, head_dim: int, max_positions: int, device: torch.device) -> torch.Tensor:
    """float32 [max_positions, rotary_dim]: cosines of rotary_dim / 2 angles, then their sines. None rotates nothing."""
    if config is None:
        return torch.empty(max_positions, 0, dtype=torch.float32, device=device)
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, rope_frequencies(config, head_dim, max_positions).to(device))
    table = torch.empty(max_positions, 2 * angles.shape[1], dtype=torch.float32, device=device)
    torch.cos(angles, out=table[:, : angles.shape[1]])
    torch.sin(angles, out=table[:, angles.shape[1] :])
    return table.mul_(config.attention_factor)
