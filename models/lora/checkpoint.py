"""Read a low-rank adapter saved by PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.core.errors import shown
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.weights import FLOATING, StoredTensors, check_dtype, open_tensors, plain, read_header
from paged.models.parallel.share import Section, cut

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
TARGET_MODULES = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
)
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")

# Settings that are read here or do not affect the computation. Any other setting is refused.
_KNOWN_SETTINGS = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "megatron_core", "qalora_group_size", "ensure_weight_tying", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
# The other initialisations (pissa, olora, corda, loftq, ...) change the base weights too.
_INITIAL_WEIGHTS = (True, False, None, "gaussian", "eva", "orthogonal")
# Limit above any adapter's scale; 16-bit floats end here.
_MAX_SCALE = 65504.0


@dataclass(frozen=True)
class LowRank:
    """Change of one projection, scale * b @ a: a [rank, in_features], b [out_features, rank], on the CPU."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def part(self, dim: int, sections: Sequence[Section]) -> LowRank:
        """Return one rank's part: rows if `dim` is 0, else columns."""
        if dim == 0:
            return replace(self, b=cut(self.b, sections, 0))
        return replace(self, a=cut(self.a, sections, 1))


def adapter_files(folder: Path) -> tuple[Mapping[str, Any], StoredTensors]:
    """Return an adapter's settings, and its tensors from the header of their file.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    return HfConfig.read(folder, CONFIG_FILE).values, read_header(folder / WEIGHTS_FILE)


def read_adapter(folder: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, LowRank]:
    """Return the projections that an adapter changes, by their names in the base checkpoint.

    The scale is lora_alpha / r, with rsLoRA lora_alpha / sqrt(r) (Kalajdzievski, 2023).

    Args:
        folder: as PEFT's `save_pretrained` writes it.
        shapes: (out_features, in_features) of every adaptable projection, by name.

    Raises:
        CheckpointError: a file or tensor is missing, malformed or unexpected, a shape or rank contradicts the
            configuration, or a scale is too large. Values of tensors are not read here.
        UnsupportedError: a setting, or a module that the adapter changes, is not supported.
    """
    hf = HfConfig.read(folder, CONFIG_FILE)
    _check_settings(hf)
    rank_of = _by_module(hf, "rank_pattern", HfConfig.integer, hf.integer("r"))
    read_alpha = partial(HfConfig.number, may_be_zero=True)
    alpha_of = _by_module(hf, "alpha_pattern", read_alpha, read_alpha(hf, "lora_alpha"))
    takes_root = hf.flag("use_rslora")
    file = folder / WEIGHTS_FILE
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled and not file.exists():
        raise CheckpointError(f"{file}: missing; {plain(pickled[0])} is pickled, so it is not loaded")
    stored = read_header(file)
    kinds_of: dict[str, set[str]] = {}
    for key, tensor in sorted(stored.items()):
        match = _KEY.fullmatch(key)
        if match is None:
            raise CheckpointError(f"{plain(key)}: unexpected tensor in {file}")
        name, which = match[1], match[2]
        _check_module(name, key, shapes, file)
        check_dtype(key, tensor, FLOATING)
        rank, (out_features, in_features) = rank_of(name), shapes[name]
        expected = [out_features, rank]
        if which == "A":
            expected = [rank, in_features]
        if tensor.shape != expected:
            shape = shown(tensor.shape)
            raise CheckpointError(f"{name}.lora_{which}: shape {shape} in {file}, expected {expected} for rank {rank}")
        kinds_of.setdefault(name, set()).add(which)
    if missing := _promised(hf, shapes) - kinds_of.keys():
        raise CheckpointError(f"{min(missing)}: no tensors in {file}, though target_modules names it")
    if not kinds_of:
        raise CheckpointError(f"{file}: holds no tensors")
    for name, kinds in kinds_of.items():
        if absent := {"A", "B"} - kinds:
            raise CheckpointError(f"{name}: no lora_{min(absent)} in {file}")
    with open_tensors(file, next(iter(stored.values())).stamp) as tensors:
        pairs = {}
        for name in kinds_of:
            a = tensors.get_tensor(f"base_model.model.{name}.lora_A.weight")
            b = tensors.get_tensor(f"base_model.model.{name}.lora_B.weight")
            pairs[name] = a, b
    changes = {}
    for name, (a, b) in pairs.items():
        rank, alpha = rank_of(name), alpha_of(name)
        divisor = rank
        if takes_root:
            divisor = math.sqrt(rank)
        scale = alpha / divisor
        if scale > _MAX_SCALE:
            raise CheckpointError(
                f"{hf.source}: lora_alpha {alpha} for rank {rank}, expected a scale of at most {_MAX_SCALE}"
            )
        changes[name] = LowRank(a, b, scale)
    return changes


def _check_settings(hf: HfConfig) -> None:
    hf.text("peft_type")
    hf.choice("peft_type", "LORA")
    hf.choice("bias", "none")
    initial = hf.value("init_lora_weights")
    if initial not in _INITIAL_WEIGHTS:
        raise UnsupportedError(f"{hf.source}: init_lora_weights {shown(initial)}, which changes the base weights too")
    for key, value in hf.values.items():
        if value and key not in _KNOWN_SETTINGS:
            raise UnsupportedError(f"{hf.source}: {plain(key)} = {shown(value)} is not supported")
    for target in _targets(hf):
        if target.rpartition(".")[2] not in TARGET_MODULES:
            raise UnsupportedError(
                f"{hf.source}: target_modules {shown(target)}, known are {', '.join(TARGET_MODULES)}"
            )


def _targets(hf: HfConfig) -> list[str]:
    """Return the names of target_modules; empty if it is a pattern or absent."""
    if isinstance(hf.value("target_modules"), str):
        return []
    return hf.items("target_modules", str)


def _check_module(name: str, key: str, shapes: Mapping[str, Sequence[int]], file: Path) -> None:
    if name in shapes:
        return
    is_special = ".experts." in name or ".linear_attn." in name
    if is_special or name.rpartition(".")[2] not in TARGET_MODULES:
        raise UnsupportedError(f"{plain(key)}: in {file}; adapters of {plain(name)} are not supported")
    raise CheckpointError(f"{plain(key)}: unexpected tensor in {file}, the model has no {plain(name)}")


def _promised(hf: HfConfig, shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """Return the modules that a plain list of targets names; empty for patterns and narrowed lists."""
    if hf.value("exclude_modules") or hf.value("layers_to_transform") is not None:
        return set()
    targets = set(_targets(hf))
    return {name for name in shapes if not targets.isdisjoint(_suffixes(name))}


def _suffixes(name: str) -> set[str]:
    """Return all suffixes by which a setting can refer to a module: `a.b.c`, `b.c` and `c` for `a.b.c`."""
    parts = name.split(".")
    return {".".join(parts[first:]) for first in range(len(parts))}


def _by_module(
    hf: HfConfig, key: str, read: Callable[[HfConfig, str], float], default: float
) -> Callable[[str], float]:
    """Return a setting's value for a module, or the default.

    Patterns are not supported. If several names match, the first counts, as in PEFT.

    Raises:
        CheckpointError, UnsupportedError: as `read_adapter`.
    """
    section = hf.section(key) or HfConfig({}, hf.source)
    values: dict[str, float] = {}
    for name in section.values:
        if not re.fullmatch(r"[\w.]+", name):
            raise UnsupportedError(f"{hf.source}: {key} {shown(name)}, known are names of modules")
        values[name] = read(section, name)

    def value_of(module: str) -> float:
        suffixes = _suffixes(module)
        for name, value in values.items():
            if name in suffixes:
                return value
        return default

    return value_of
