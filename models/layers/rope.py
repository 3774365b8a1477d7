"""Rotary position embedding: options in config.json, frequencies of each scaling, table of cosines and sines.

To add a scaling, add a reader to `_READERS`, a branch to `rope_frequencies`, and options to
`tests/models/loading/test_rotations.py`. Two scalings are read elsewhere: "proportional" in `scaled_rope`, Hunyuan's
alpha in `models/families/dense.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.core.errors import shown
from paged.models.loading.hf_config import HfConfig

# Limit of factors for scores, queries and keys, far above any model's factors and below the range of float16.
MAX_FACTOR = 1e4
# Kinds that rotate like "default" here. "dynamic" scales only beyond max_position_embeddings, which no sequence
# exceeds. "mrope" gives a token three positions, which differ only inside pictures.
_PLAIN = ("default", "dynamic", "mrope")


@dataclass(frozen=True)
class RopeConfig:
    """Options of a rotary position embedding.

    Attributes:
        theta: base of the frequencies.
        factor: stretches positions; `kind` says which ones.
        attention_factor: factor for cosines and sines.
        fraction: rotated part of each head, from its beginning.
        interleaved: whether pairs are neighbours; otherwise a pair has one element of each half.
        kind: the scaling. "llama3" keeps pairs that turn at least high_turns times within original_max_positions,
            stretches pairs that turn at most low_turns times, and interpolates between. "yarn" (Peng et al., 2023)
            interpolates by the index of the pair. "longrope" (Ding et al., 2024) stretches each pair by its own factor:
            `short` in a model loaded for at most original_max_positions tokens, else `long`, at every position.
            "proportional" (Gemma 4, 2026) rotates only the first pairs, a fraction `rotating` of all.
        truncate: whether yarn rounds its range of pairs to integers.
        mrope_section: number of pairs that turn with the temporal, vertical and horizontal position of a token; empty
            for one position. The sections are contiguous (Qwen2-VL), or alternate with mrope_interleaved (Qwen3-VL).
    """

    theta: float = 10000.0
    factor: float = 1.0
    attention_factor: float = 1.0
    fraction: float = 1.0
    interleaved: bool = False
    kind: str = "linear"
    original_max_positions: int = 0
    low_turns: float = 0.0
    high_turns: float = 0.0
    truncate: bool = False
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    rotating: float = 1.0
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False

    @property
    def longest(self) -> int:
        """Longest sequence of a "yarn" scaling, whatever max_position_embeddings says; 0 for other kinds."""
        if self.kind != "yarn":
            return 0
        return int(self.factor * self.original_max_positions)


def rope_config(
    hf: HfConfig, *, fraction: float = 1.0, is_partial: bool = False, interleaved: bool = False
) -> RopeConfig:
    """Read `rope_parameters`, or `rope_scaling` of transformers before 5, which takes precedence.

    fraction: default for the rotated part of each head. is_partial: whether the family can rotate a part of a head.
    interleaved: as in RopeConfig.

    Raises:
        UnsupportedError: the type is not supported, or a part of each head rotates in a family that rotates whole
            heads.
        CheckpointError: a value is missing or malformed.
    """
    rope = scaled_rope(hf, rope_section(hf), hf.number("rope_theta"), fraction, is_partial)
    return replace(rope, interleaved=interleaved)


def rope_section(hf: HfConfig) -> HfConfig:
    """Return the object of a config.json that says how all layers rotate."""
    scaling = hf.section("rope_scaling")
    if scaling is not None and scaling.values:  # an empty section counts as absent
        return scaling
    return hf.section("rope_parameters") or HfConfig({}, hf.source)


def scaled_rope(
    hf: HfConfig, section: HfConfig, theta: float, fraction: float = 1.0, is_partial: bool = False
) -> RopeConfig:
    """Read the rotation from a section of config.json; it raises the errors of `rope_config`.

    hf: the object that contains the section. theta, fraction: defaults.
    """
    rotated = section.number("partial_rotary_factor", hf.number("partial_rotary_factor", fraction))
    if section.text("rope_type", "") == "proportional":
        theta, factor = section.number("rope_theta", theta), section.number("factor", 1.0)
        return RopeConfig(theta, factor, kind="proportional", rotating=min(rotated, 1.0))
    if rotated > 1.0 or (rotated != 1.0 and not is_partial):
        raise UnsupportedError(f"{hf.source}: partial_rotary_factor {rotated}, only 1.0 is supported")
    rope = replace(_scaled(hf, section, section.number("rope_theta", theta)), fraction=rotated)
    if section.values.get("mrope_section") is None:
        return rope
    pairs = tuple(map(int, section.numbers("mrope_section")))
    return replace(rope, mrope_section=pairs, mrope_interleaved=section.flag("mrope_interleaved"))


def _scaled(hf: HfConfig, section: HfConfig, theta: float) -> RopeConfig:
    kind = section.text("rope_type", section.text("type", "default"))
    if kind == "su" or (kind == "yarn" and "short_factor" in section.values):  # older names of Phi-3's scaling
        kind = "longrope"
    if kind not in _PLAIN and kind not in _READERS:
        known = ", ".join((*_PLAIN, *_READERS))
        raise UnsupportedError(f"{hf.source}: rope type {shown(kind)}, known are {known}")
    for key, value in section.values.items():
        if isinstance(value, dict):
            raise UnsupportedError(f"{section.source}: {shown(key)} = {shown(value)}, a rotation for some layers only")
    if kind in _PLAIN:
        return RopeConfig(theta)
    return _READERS[kind](hf, section, theta)


def ropes_by_window(hf: HfConfig, local_theta: float, *, is_partial: bool = False) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotations of layers without and with a window; `rope_scaling` applies to layers without one.

    Raises:
        UnsupportedError, CheckpointError: as `rope_config`; a key belongs to neither kind of layer; or yarn does not
            round its range of pairs.
    """
    absent = HfConfig({}, hf.source)
    parameters = hf.section("rope_parameters") or absent
    unwindowed = parameters.section("full_attention") or absent
    windowed = parameters.section("sliding_attention") or absent
    if unknown := sorted(parameters.values.keys() - parameters.read_keys):
        raise UnsupportedError(f"{parameters.source}: {shown(unknown[0])} is not for a known type of layer")
    scaling = hf.section("rope_scaling") or absent
    if "type" in scaling.values and "rope_type" not in scaling.values:  # transformers ignores `type` here
        raise UnsupportedError(f"{scaling.source}: type {shown(scaling.value('type'))}, expected it as rope_type")
    scaled = HfConfig({**unwindowed.values, **scaling.values}, hf.source)
    for section in (scaled, windowed):
        if section.values.get("truncate", True) is not True:  # transformers ignores `truncate` here
            raise UnsupportedError(f"{section.source}: truncate {shown(section.value('truncate'))}, expected true")
    return (
        scaled_rope(hf, scaled, hf.number("rope_theta"), is_partial=is_partial),
        scaled_rope(hf, windowed, local_theta, is_partial=is_partial),
    )


def _original_max_positions(hf: HfConfig, section: HfConfig) -> int:
    original = section.integer("original_max_position_embeddings", hf.integer("max_position_embeddings"))
    # Some configurations have this key outside of the section. The outer value takes precedence.
    return hf.integer("original_max_position_embeddings", original)


def _linear(hf: HfConfig, section: HfConfig, theta: float) -> RopeConfig:
    return RopeConfig(theta, section.number("factor"))


def _llama3(hf: HfConfig, section: HfConfig, theta: float) -> RopeConfig:
    original = _original_max_positions(hf, section)
    factor = section.number("factor")
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if low > high:
        raise CheckpointError(f"{hf.source}: low_freq_factor {low} is above high_freq_factor {high}")
    return RopeConfig(theta, factor, kind="llama3", original_max_positions=original, low_turns=low, high_turns=high)


def _longrope(hf: HfConfig, section: HfConfig, theta: float) -> RopeConfig:
    original = _original_max_positions(hf, section)
    factor = section.number("factor", hf.integer("max_position_embeddings") / original)
    default = 1.0
    if factor > 1 and original > 1:
        default = math.sqrt(1 + math.log(factor) / math.log(original))
    magnitude = section.number("attention_factor", default)
    short, long = section.numbers("short_factor"), section.numbers("long_factor")
    return RopeConfig(theta, 1.0, magnitude, kind="longrope", original_max_positions=original, short=short, long=long)


def _yarn(hf: HfConfig, section: HfConfig, theta: float) -> RopeConfig:
    """Read yarn's options. By default cosines and sines are multiplied by 0.1 ln(factor) + 1, as in the paper."""
    original_max_positions = _original_max_positions(hf, section)
    # A null factor means the ratio of the maximum positions; an absent factor is an error.
    if "factor" in section.values and section.value("factor") is None:
        factor = hf.integer("max_position_embeddings") / original_max_positions
    else:
        factor = section.number("factor")
    mscale = section.number("mscale", 0.0, may_be_zero=True)
    mscale_all_dim = section.number("mscale_all_dim", 0.0, may_be_zero=True)
    default = yarn_magnitude(factor)
    if mscale and mscale_all_dim:
        default = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return RopeConfig(
        theta,
        factor,
        section.number("attention_factor", default),
        kind="yarn",
        original_max_positions=original_max_positions,
        # transformers treats 0 like null.
        high_turns=section.number("beta_fast", 32.0, may_be_zero=True) or 32.0,
        low_turns=section.number("beta_slow", 1.0, may_be_zero=True) or 1.0,
        truncate=section.flag("truncate", True),
    )


_READERS: dict[str, Callable[[HfConfig, HfConfig, float], RopeConfig]] = {
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
"""Name of a scaling in config.json -> reader of its options. A reader takes the file, RoPE's section, and theta."""


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return yarn's factor for queries or keys, 0.1 weight ln(factor) + 1 (Peng et al., 2023, section 3.4)."""
    if factor <= 1:
        return 1.0
    return 0.1 * weight * math.log(factor) + 1.0


def check_rope(config: RopeConfig, head_dim: int, max_positions: int, source: str) -> None:
    """Check that all angles can be computed, and that cosines and sines are finite.

    Raises:
        CheckpointError: values contradict each other or are larger than in any model.
    """
    try:
        last = rope_frequencies(config, head_dim, max_positions) * max_positions
    except (ArithmeticError, ValueError, RuntimeError) as error:  # from yarn's logarithms or longrope's lists
        raise CheckpointError(f"{source}: no rotation can be computed from {config} ({error})") from error
    if rotary_dim(config, head_dim) % 2:
        raise CheckpointError(f"{source}: {config} rotates an odd number of {head_dim} dimensions")
    if not last.isfinite().all() or config.attention_factor > MAX_FACTOR:
        raise CheckpointError(f"{source}: {config} gives cosines or sines that are not finite")


def rotary_dim(config: RopeConfig, head_dim: int) -> int:
    """Return the number of rotated elements of a head."""
    return int(head_dim * config.fraction)


def rope_frequencies(config: RopeConfig, head_dim: int, max_positions: int) -> torch.Tensor:
    """Return radians per position of each pair, float32 [rotary_dim / 2]: theta^(-2i / rotary_dim), scaled.

    Raises:
        UnsupportedError: the kind has no formula here.
    """
    dim = rotary_dim(config, head_dim)
    inv_freq = config.theta ** -(torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if config.kind == "linear":
        return inv_freq / config.factor
    if config.kind == "proportional":
        inv_freq[int(config.rotating * dim // 2) :] = 0.0
        return inv_freq / config.factor
    if config.kind == "longrope":
        factors = config.short
        if max_positions > config.original_max_positions:
            factors = config.long
        return inv_freq / torch.tensor(factors, device="cpu")
    if config.kind == "llama3":
        turns = config.original_max_positions * inv_freq / (2 * math.pi)
        # If both thresholds are equal (Llama 4 Scout), pairs beyond them keep their frequency.
        width = config.high_turns - config.low_turns or torch.finfo(torch.float32).tiny
        kept = ((turns - config.low_turns) / width).clamp(0.0, 1.0)
    elif config.kind == "yarn":
        kept = _kept_by_yarn(config, dim)
    else:
        raise UnsupportedError(f"kind: {shown(config.kind)}, expected a rotation that `rope_frequencies` computes")
    return kept * inv_freq + (1 - kept) * inv_freq / config.factor


def _kept_by_yarn(config: RopeConfig, dim: int) -> torch.Tensor:
    """Return the unscaled share of each pair's frequency (Peng et al., 2023, section 3.2)."""

    def pair_of(turns: float) -> float:
        """Return the pair that makes this many turns over the original positions."""
        return dim * math.log(config.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    first, last = pair_of(config.high_turns), pair_of(config.low_turns)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    index = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    # `last` may be less than `first`: if both lie beyond the pairs, or if beta_fast is below beta_slow. Divide in this
    # case too, as all known implementations do.
    return 1 - ((index - first) / (last - first or 0.001)).clamp(0.0, 1.0)


def rope_axes(config: RopeConfig) -> torch.Tensor:
    """Return the axis of each column of `rope_table`, int64 [2 * sum(mrope_section)].

    Axis 0 is temporal, 1 vertical, 2 horizontal.
    """
    axes = torch.arange(3).repeat_interleave(torch.tensor(config.mrope_section))
    if config.mrope_interleaved:
        axes = torch.zeros_like(axes)
        for axis in (1, 2):
            axes[axis : 3 * config.mrope_section[axis] : 3] = axis
    return axes.repeat(2)


def rope_table(config: RopeConfig | None, head_dim: int, max_positions: int, device: torch.device) -> torch.Tensor:
    """Return cosines, then sines, float32 [max_positions, rotary_dim].

    The table of None has no columns, so it rotates nothing.
    """
    if config is None:
        return torch.empty(max_positions, 0, dtype=torch.float32, device=device)
    frequencies = rope_frequencies(config, head_dim, max_positions)
    table = torch.empty(max_positions, 2 * len(frequencies), dtype=torch.float32, device=device)
    fill_rope_table(table, frequencies, config.attention_factor)
    return table


def fill_rope_table(table: torch.Tensor, frequencies: torch.Tensor, attention_factor: float) -> None:
    """Write cosines, then sines, times the factor. table: float32 [positions, 2 * pairs]. frequencies: [pairs]."""
    positions = torch.arange(len(table), dtype=torch.float32, device=table.device)
    angles = torch.outer(positions, frequencies.to(table.device))
    torch.cos(angles, out=table[:, : len(frequencies)])
    torch.sin(angles, out=table[:, len(frequencies) :])
    table.mul_(attention_factor)
