"""Random adapters as PEFT saves them, and the checkpoint of a base model into which one was merged."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.families import options


@dataclass(frozen=True)
class Adapter:
    """What `save` writes: one rank and alpha for all targets of all layers, but for settings that say otherwise."""

    targets: Sequence[str]
    rank: int = 4
    alpha: float = 8
    rslora: bool = False
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def save(self, folder: Path, base: Path, **settings: Any) -> Path:
        """`settings` go into adapter_config.json as they are."""
        generator = torch.Generator().manual_seed(self.seed)
        tensors = {}
        for name, weight in sorted(load_file(base / "model.safetensors").items()):
            module = name.removesuffix(".weight")
            if module != name and module.rpartition(".")[2] in self.targets:  # stacked experts are no modules
                prefix = f"base_model.model.{module}"
                out_features, in_features = weight.shape
                for which, shape in (("A", (self.rank, in_features)), ("B", (out_features, self.rank))):
                    tensors[f"{prefix}.lora_{which}.weight"] = torch.randn(shape, generator=generator) / 8
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        config = options(
            """peft_type='LORA' bias='none' lora_dropout=0.1 init_lora_weights=True rank_pattern={} use_dora=False
            modules_to_save=None"""
        )
        config |= {"r": self.rank, "lora_alpha": self.alpha, "use_rslora": self.rslora}
        config |= {"target_modules": list(self.targets)}
        (folder / "adapter_config.json").write_text(json.dumps(config | settings))
        return folder

    def merge(self, folder: Path, base: Path, merged: Path) -> Path:
        """The base checkpoint with scale * B A, in float64, added to its weights."""
        shutil.copytree(base, merged)
        weights, tensors = load_file(base / "model.safetensors"), load_file(folder / "adapter_model.safetensors")
        for name, weight in weights.items():
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{prefix}.lora_A.weight" in tensors:
                a, b = (tensors[f"{prefix}.lora_{which}.weight"].double() for which in "AB")
                weights[name] = (weight.double() + self.scale * (b @ a)).to(weight.dtype)
        save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
        return merged
