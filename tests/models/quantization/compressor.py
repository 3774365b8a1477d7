"""Checkpoints that compressed-tensors writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.kernels.quantization.published import in_words
from tests.models.edits import WEIGHTS, Tensors, edit_config
from tests.models.quantization.packers import STATIC


def compress(tensors: Tensors, config: dict[str, Any], folder: Path) -> Tensors:
    """Write the projections of a model and its head as a quantization_config has them, beside its other tensors, and
    complete the config.json in the folder. The weights of what is compressed, in float32, as they then are."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    model = _modules(tensors)
    apply_quantization_config(model, QuantizationConfig(**_with_order(config, None)))
    linears = {path: each for path, each in model.named_modules() if hasattr(each, "quantization_scheme")}
    groups_of = _order_columns(linears) if _has_order(config) else {}
    rounded: Tensors = {}
    largest: dict[torch.Size, float] = {}  # by sizes: gate and up share a scale of all weights, as key and value do
    for linear in linears.values():
        shape = linear.weight.shape
        largest[shape] = max(largest.get(shape, 0.0), float(linear.weight.abs().max()))
    with torch.compiler.set_stance("force_eager"):  # compiling how 4-bit floats are made takes 15 seconds
        for path, linear in linears.items():
            _calibrate(linear, largest[linear.weight.shape])
            weights = linear.quantization_scheme.weights
            rounded[f"{path}.weight"] = forward_quantize(linear, linear.weight.detach(), "weight", weights)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
    stored = model.state_dict()
    for path in linears:
        if f"{path}.weight_packed" in stored and stored[f"{path}.weight_scale"].dtype == torch.float32:
            stored[f"{path}.weight_scale"] = stored[f"{path}.weight_scale"].half()
    compressor.update_config(str(folder))
    if groups_of:
        _restore_columns(groups_of, stored, rounded)
        written = json.loads((folder / "config.json").read_text())["quantization_config"]
        edit_config(folder, quantization_config=_with_order(written, "group"))
    save_file(stored, folder / WEIGHTS)
    return rounded


def reads_order() -> bool:
    """Return whether compressed-tensors still reads columns of a group in any order; 0.20 does not."""
    from compressed_tensors.quantization import QuantizationArgs

    try:
        QuantizationArgs(num_bits=4, strategy="group", group_size=32, actorder="group")
    except ValueError:
        return False
    return True


def _has_order(config: dict[str, Any]) -> bool:
    return any(group["weights"].get("actorder") for group in config["config_groups"].values())


def _with_order(config: dict[str, Any], order: str | None) -> dict[str, Any]:
    groups = {}
    for name, group in config["config_groups"].items():
        groups[name] = group | {"weights": group["weights"] | {"actorder": order}}
    return config | {"config_groups": groups}


def _order_columns(linears: dict[str, Any]) -> Tensors:
    """Give every layer's columns to groups at random and put those of a group beside each other.

    Returns each column's group, int32 [columns], by the layer's path.
    """
    groups_of: Tensors = {}
    for path, linear in linears.items():
        num_columns = linear.weight.shape[1]
        group_of = torch.arange(num_columns, dtype=torch.int32) * linear.weight_scale.shape[1] // num_columns
        groups_of[path] = group_of[torch.randperm(num_columns)]
        linear.weight.copy_(linear.weight[:, groups_of[path].argsort(stable=True)].clone())
    return groups_of


def _restore_columns(groups_of: Tensors, stored: Tensors, rounded: Tensors) -> None:
    """Put the columns of 4-bit codes and of what they stand for back in place, and store their groups."""
    for path, group_of in groups_of.items():
        place = group_of.argsort(stable=True).argsort()
        codes = (stored[f"{path}.weight_packed"].unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
        stored[f"{path}.weight_packed"] = in_words(codes.flatten(1)[:, place], 4)
        stored[f"{path}.weight_g_idx"] = group_of
        rounded[f"{path}.weight"] = rounded[f"{path}.weight"][:, place]


def _modules(tensors: Tensors) -> nn.Module:
    """Modules that hold tensors under their names, those of projections and of the head linear layers."""
    model = nn.Module()
    for name, tensor in tensors.items():
        path, _, end = name.rpartition(".")
        *parents, last = path.split(".")
        module = model
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = module.get_submodule(parent)
        is_linear = last.endswith("_proj") or last == "lm_head"
        leaf = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False) if is_linear else nn.Module()
        leaf.register_parameter(end, nn.Parameter(tensor, requires_grad=False))
        module.add_module(last, leaf)
    return model


def _calibrate(linear: Any, largest: float) -> None:
    """Fill the scales and zero points of a layer; scales as float16 holds them.

    largest: what a scale of all weights spans.
    """
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight, scale = linear.weight.detach(), linear.weight_scale
    rows, groups = (*scale.shape, 1)[:2]
    blocks = weight.unflatten(1, (groups, -1)).unflatten(0, (rows, -1))
    total = getattr(linear, "weight_global_scale", None)
    if total is not None:
        total.copy_(generate_gparam(torch.tensor(-largest), torch.tensor(largest)))
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    found, zeros = calculate_qparams(low, high, linear.quantization_scheme.weights, total)
    scale.copy_(found.half().view_as(scale))
    linear.weight_zero_point.copy_(zeros.view_as(scale))
    for name in ("input_scale", "input_global_scale"):
        if hasattr(linear, name):
            getattr(linear, name).fill_(STATIC)
