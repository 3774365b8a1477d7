"""Reads a low-rank adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.models.hf_config import HfConfig
from paged.models.weights import check_floating, open_tensors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")

# Settings that are read here, or that say nothing about what the adapter computes. Any other that is set would.
_KNOWN_SETTINGS = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "megatron_core", "qalora_group_size", "ensure_weight_tying", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
# The other ways to begin training (pissa, olora, corda, loftq, ...) change the base weights too.
_INITIAL_WEIGHTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LowRank:
    """What a projection gains: scale * b @ a, with a [rank, in_features] and b [out_features, rank], on the CPU."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def read_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]]) -> dict[str, LowRank]:
    """The projections that an adapter changes, by their names in the base checkpoint.

    The scale is lora_alpha / r, with rsLoRA lora_alpha / sqrt(r) (Kalajdzievski, 2023).

    Args:
        folder: as `save_pretrained` of PEFT leaves it.
        shapes: (out_features, in_features) of every projection that can be adapted, by name.

    Raises:
        CheckpointError: a file or tensor is missing, malformed, unexpected, misshapen or of another rank than the
            configuration says.
        UnsupportedError: a setting, or a module that the adapter changes, is not known here.
    """
    hf = HfConfig.read(folder, CONFIG_FILE)
    _check_settings(hf)
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        raise CheckpointError(f"{file}: missing" + (f"; {pickled[0]} is pickled, and never loaded" if pickled else ""))
    found: dict[str, dict[str, torch.Tensor]] = {}
    with open_tensors(file) as tensors:
        for key in sorted(tensors.keys()):
            match = _KEY.fullmatch(key)
            if match is None:
                raise CheckpointError(f"{key}: unexpected tensor in {file}")
            _check_module(match[1], key, shapes, file)
            check_floating(key, tensors, file)
            found.setdefault(match[1], {})[match[2]] = tensors.get_tensor(key)
    if missing := _promised(hf, shapes) - found.keys():
        raise CheckpointError(f"{min(missing)}: no tensors in {file}, though target_modules names it")
    if not found:
        raise CheckpointError(f"{file}: holds no tensors")
    return {name: _low_rank(name, pair, shapes[name], hf, file) for name, pair in found.items()}


def _check_settings(hf: HfConfig) -> None:
    if hf.text("peft_type") != "LORA":
        raise UnsupportedError(f"{hf.source}: peft_type {hf.text('peft_type')!r}, known is 'LORA'")
    if hf.text("bias", "none") != "none":
        raise UnsupportedError(f"{hf.source}: bias {hf.text('bias')!r}, known is 'none'")
    initial = hf.values.get("init_lora_weights")
    if initial not in _INITIAL_WEIGHTS:
        raise UnsupportedError(f"{hf.source}: init_lora_weights {initial!r}, which changes the base weights too")
    for key, value in hf.values.items():
        if value and key not in _KNOWN_SETTINGS:
            raise UnsupportedError(f"{hf.source}: {key} = {value!r} is not supported")
    targets = hf.values.get("target_modules")
    for target in targets if isinstance(targets, list) else ():
        if str(target).rpartition(".")[2] not in TARGET_MODULES:
            raise UnsupportedError(f"{hf.source}: target_modules {target!r}, known are {', '.join(TARGET_MODULES)}")


def _check_module(name: str, key: str, shapes: Mapping[str, tuple[int, int]], file: Path) -> None:
    if name in shapes:
        return
    if ".experts." in name or name.rpartition(".")[2] not in TARGET_MODULES:
        raise UnsupportedError(f"{key}: in {file}; adapters of {name} are not supported")
    raise CheckpointError(f"{key}: unexpected tensor in {file}, the model has no {name}")


def _promised(hf: HfConfig, shapes: Mapping[str, tuple[int, int]]) -> set[str]:
    """The modules a plain list of targets names; patterns, and lists that other settings narrow, promise nothing."""
    targets = hf.values.get("target_modules")
    narrowed = hf.values.get("exclude_modules") or hf.values.get("layers_to_transform") is not None
    if not isinstance(targets, list) or narrowed:
        return set()
    return {name for name in shapes if any(_is_named(name, str(target)) for target in targets)}


def _is_named(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith(f".{suffix}")


def _low_rank(name: str, pair: Mapping[str, torch.Tensor], shape: tuple[int, int], hf: HfConfig, file: Path) -> LowRank:
    rank = _of_module(name, hf, "rank_pattern", hf.integer("r"))
    alpha = _of_module(name, hf, "alpha_pattern", hf.number("lora_alpha"))
    for which, expected in (("A", [int(rank), shape[1]]), ("B", [shape[0], int(rank)])):
        if which not in pair:
            raise CheckpointError(f"{name}: no lora_{which} in {file}")
        if list(pair[which].shape) != expected:
            given = list(pair[which].shape)
            raise CheckpointError(f"{name}.lora_{which}: shape {given} in {file}, expected {expected} for rank {rank}")
    scale = alpha / (math.sqrt(rank) if hf.flag("use_rslora") else rank)
    return LowRank(pair["A"], pair["B"], scale)


def _of_module(name: str, hf: HfConfig, key: str, default: float) -> float:
    """The value a module's own name has in rank_pattern or alpha_pattern; patterns proper are not run."""
    section: Any = hf.section(key) or HfConfig({}, hf.source)
    for suffix in section.values:
        if not re.fullmatch(r"[\w.]+", suffix):
            raise UnsupportedError(f"{hf.source}: {key} {suffix!r}, known are names of modules")
        if _is_named(name, suffix):
            return float(section.number(suffix)) if key == "alpha_pattern" else int(section.integer(suffix))
    return default
