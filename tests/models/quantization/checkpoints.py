"""A tiny Llama in every format, and the same weights unpacked."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3MoeConfig

from paged.kernels.lora.batch import LoraBatch
from paged.models.layers.decoder import Linear
from paged.models.paged_lm import PagedCausalLM
from paged.models.quantization.packed_weights import PackedWeights
from paged.models.registry import load_model
from tests.models.families import tokens
from tests.models.quantization.compressor import WEIGHTS, compress
from tests.models.quantization.packers import FORMATS, rounded

# Blocks of 128 in both directions, and projections of two and three of them side by side.
CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=384,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=128,
    max_position_embeddings=64,
    initializer_range=0.1,
)
MOE_CONFIG = Qwen3MoeConfig(
    **CONFIG.to_dict() | {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
)
PROMPT = tokens(9)


@dataclass(frozen=True)
class Folders:
    """The same model packed and plain."""

    name: str
    packed: Path
    plain: Path

    def edit(self, **changes: torch.Tensor | None) -> None:
        """Replace tensors of the packed one, or take them away; "__" stands for a dot."""
        file = self.packed / WEIGHTS
        found = load_file(file)
        for key, tensor in changes.items():
            name = "model.layers.0." + key.replace("__", ".")
            found.pop(name, None)
            if tensor is not None:
                found[name] = tensor.contiguous()
        save_file(found, file)

    def configure(self, **changes: Any) -> None:
        """Change the packed one's quantization_config."""
        file = self.packed / "config.json"
        config = json.loads(file.read_text())
        config["quantization_config"] = config.get("quantization_config", {}) | changes
        file.write_text(json.dumps(config))

    def tensor(self, key: str) -> torch.Tensor:
        return load_file(self.packed / WEIGHTS)["model.layers.0." + key.replace("__", ".")]


def write(name: str, base: Path, folder: Path) -> Folders:
    """Every projection of `base` in the format, beside a model with what that stands for."""
    torch.manual_seed(zlib.crc32(name.encode()))
    folders = Folders(name, folder / "packed", folder / "plain")
    for path in (folders.packed, folders.plain):
        path.mkdir()
        shutil.copy(base / "config.json", path)
    make, plain = FORMATS[name].make, load_file(base / WEIGHTS)
    if make is None:
        plain |= compress(plain, FORMATS[name].config, folders.packed)
    else:
        packed = dict(plain)
        ends = ("_proj.weight", "lm_head.weight") if FORMATS[name].config.get("lm_head") else "_proj.weight"
        for path in [key.removesuffix("weight") for key in plain if key.endswith(ends)]:
            made, numbers = make(*packed.pop(f"{path}weight").shape)
            packed |= {path + end: tensor.contiguous() for end, tensor in made.items()}
            plain[f"{path}weight"] = numbers.float()
        save_file(packed, folders.packed / WEIGHTS)
        folders.configure(**FORMATS[name].config)
    save_file(plain, folders.plain / WEIGHTS)
    return folders


def load(folder: Path, **options: Any) -> PagedCausalLM:
    return load_model(folder, block_size=8, num_blocks=16, **options)


def packed_weights(model: PagedCausalLM) -> dict[str, PackedWeights]:
    """By the paths of their layers."""
    modules = model.network.named_modules()
    return {path.removesuffix(".packed"): module for path, module in modules if isinstance(module, PackedWeights)}


def _rounding(model: PagedCausalLM, how: str, paths: Collection[str]) -> PagedCausalLM:
    """A plain model of which the layers at `paths` round their input."""
    for path, module in model.network.named_modules():
        if isinstance(module, Linear) and path in paths:

            def forward(x: torch.Tensor, lora: LoraBatch | None = None, linear: Linear = module) -> torch.Tensor:
                return Linear.forward(linear, rounded(x, how), lora)

            module.forward = forward  # type: ignore[method-assign]
    return model


def assert_as_unpacked(folders: Folders, **options: Any) -> None:
    """The packed model's logits are those of the unpacked weights, with activations rounded as the format has it. One
    that falls on another code moves the logits by less than a tenth of what all their rounding does."""
    packed = load(folders.packed, **options)
    got = packed.prefill("a", PROMPT)
    plain = load(folders.plain, **options).prefill("a", PROMPT)
    want, budget = plain, 1e-4 * float(plain.abs().max())
    if how := FORMATS[folders.name].rounds:
        want = _rounding(load(folders.plain, **options), how, packed_weights(packed)).prefill("a", PROMPT)
        budget += 0.1 * float((want - plain).abs().max())
    error = float((got - want).abs().max())
    assert error < budget, f"largest error {error:.1e}, expected below {budget:.1e}"
