"""Write a quantised copy of a checkpoint, in compressed-tensors' form, one layer at a time."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paged.errors import InvalidInputError, UnsupportedError
from paged.kernels.core.errors import shown
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.weights import FLOATING, StoredTensors, Track, read_headers, read_tensor, untracked
from paged.models.network_loader import meta_network, text_tensors, with_stored_layout
from paged.models.quantization.read import as_stored, read_config
from paged.models.quantization.rounding import GROUPS, nearest_codes
from paged.models.registry import model_config

FORMATS = ("int4", "int8", "fp8")
_LAYER = re.compile(r"(.*\blayers\.\d+)\.")
# Files that are copied beside the weights; none of them can be run.
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_NOT_COPIED = ("config.json", "model.safetensors.index.json", "hf_quant_config.json")
_STORED = {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}
_STACKED = ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")
_HEAD = "lm_head.weight"
_DTYPES = {"int4": torch.int8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def quantize_checkpoint(
    source: Path, out: Path, form: str, *, group_size: int | None = None, head: bool = False, track: Track = untracked
) -> dict[str, int]:
    """Write a checkpoint whose projections are rounded to the nearest code; embeddings and routers stay plain.

    int4 has groups of `group_size` columns and plain activations ("pack-quantized"). int8 and fp8 (e4m3) have a scale
    for each row and round activations for each token ("int-quantized", "float-quantized"). Each file holds one layer,
    and memory never holds more than one layer. Returns the bytes of tensors before and after.

    Args:
        source: a folder with plain weights that this package runs.
        out: a folder that does not exist yet, or is empty. After an error it does not exist.
        group_size: None for 128, or for 64 or 32 if the larger size does not divide the columns of every projection.
        head: also round the LM head, in int4 to int8. A tied head is written beside the embedding.
        track: iterates over the files and may show progress.

    Raises:
        InvalidInputError: form, group size or `out` is not valid.
        UnsupportedError: the weights are quantised already, the architecture is not supported, or the head has another
            name than `lm_head`.
        CheckpointError: the folder is malformed, or the columns of a projection are no multiple of the group size.
    """
    if form not in FORMATS:
        raise InvalidInputError(f"format: {shown(form)}, expected one of {FORMATS}")
    if group_size is not None and (group_size < 32 or group_size % 32):
        raise InvalidInputError(f"group_size: {group_size}, expected a multiple of 32")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidInputError(f"out: {out} exists, expected a folder that is empty or does not exist")
    hf, stored = read_config(source), read_headers(source)
    if hf.values.get("quantization_config") is not None:
        raise UnsupportedError(f"{hf.source}: has a quantization_config, expected plain weights")
    if group_size is None:
        group_size = _group_size(stored)
    config = _config(form, group_size)
    projections = _projections(HfConfig({**hf.values, "quantization_config": config}, hf.source), stored)
    if not projections:
        raise UnsupportedError(f"{hf.source}: no projection is stored as a tensor of its own, so none can be quantised")
    packed = dict.fromkeys(projections, form)
    values = dict(hf.values)
    if head:
        stored = _with_head(stored, hf.source)
        values["tie_word_embeddings"] = False
        packed[_HEAD] = "int8" if form == "int4" else form
        if form == "int4":
            config["config_groups"]["group_1"] = _group("int8", 0, "re:.*lm_head")
            config["format"] = "mixed-precision"
    config["ignore"] = _plain_modules(stored, packed)
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True)
    try:
        sizes = _write_tensors(stored, packed, partial, group_size, track)
        for file in source.iterdir():
            if file.suffix in _COPIED and file.name not in _NOT_COPIED and file.is_file():
                shutil.copyfile(file, partial / file.name)
        _write_json(partial / "config.json", {**values, "quantization_config": config})
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return sizes


def _with_head(stored: StoredTensors, source: str) -> StoredTensors:
    """Return the tensors with a separate LM head; a tied head is a copy of the embedding."""
    for name in (_HEAD, "model.embed_tokens.weight"):
        if name in stored:
            return {**stored, _HEAD: stored[name]}
    raise UnsupportedError(f"{source}: no tensor {_HEAD} or model.embed_tokens.weight, so head cannot be True")


def _group_size(stored: StoredTensors) -> int:
    """Return the largest group size that divides the columns of all layers' projections, else the largest size."""
    common = 0
    for name, tensor in stored.items():
        if _LAYER.match(name) and len(tensor.shape) == 2:
            common = math.gcd(common, tensor.shape[-1])
    for size in GROUPS:
        if common % size == 0:
            return size
    return GROUPS[0]


def _plain_modules(stored: StoredTensors, packed: Mapping[str, str]) -> list[str]:
    """Return the modules that readers of the checkpoint must treat as plain; lm_head is listed even if it is tied."""
    plain = {"lm_head"}
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        if len(tensor.shape) == 2 and "embed" not in module.rpartition(".")[2]:
            plain.add(module)
    for name in packed:
        plain.discard(name.removesuffix(".weight"))
    return sorted(plain)


def round_weight(weight: torch.Tensor, form: str, group_size: int = 0) -> dict[str, torch.Tensor]:
    """Round weights [rows, columns] to the nearest codes; return the tensors by compressed-tensors' names.

    Scales have the dtype of the weights and are rounded before codes are chosen. group_size: columns that share a
    scale, for int4 only.
    """
    codes, scale = nearest_codes(weight, form, group_size)
    flat = codes.to(_DTYPES[form])
    if form != "int4":
        return {"weight": flat, "weight_scale": scale}
    nibbles = (flat + 8).to(torch.uint8)
    words = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).contiguous().view(torch.int32)
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def _config(form: str, group_size: int) -> dict[str, Any]:
    """Return a quantization_config as llm-compressor writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": _STORED[form],
        "quantization_status": "compressed",
        "config_groups": {"group_0": _group(form, group_size, "Linear")},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _group(form: str, group_size: int, target: str) -> dict[str, Any]:
    kind = {"num_bits": 8, "type": "int", "symmetric": True}
    scales: dict[str, Any] = {"strategy": "channel"}
    inputs: dict[str, Any] | None = None
    if form == "fp8":
        kind["type"] = "float"
    if form == "int4":
        kind["num_bits"] = 4
        scales = {"strategy": "group", "group_size": group_size}
    else:
        inputs = {**kind, "strategy": "token", "dynamic": True}
    return {
        "targets": [target],
        "format": _STORED[form],
        "weights": {**kind, **scales, "dynamic": False, "observer": "minmax"},
        "input_activations": inputs,
        "output_activations": None,
    }


def _projections(hf: HfConfig, stored: StoredTensors) -> set[str]:
    """Return the stored weights that a network with this quantization_config reads packed."""
    network_class, config = model_config(hf)
    named = text_tensors(network_class, config, stored)
    config = with_stored_layout(config, named)
    stacked = frozenset(name for name in named if name.endswith(_STACKED))
    quantization = as_stored(config.quantization, {})
    assert quantization is not None
    config = replace(config, quantization=replace(quantization, plain=stacked))
    destinations = meta_network(network_class, config, config.dtype).destinations()
    ends = ".weight_scale"
    packed = {f"{name.removesuffix(ends)}.weight" for name in destinations if name.endswith(ends)}
    return {tensor.name for name, tensor in named.items() if name in packed and tensor.dtype in FLOATING}


def _write_tensors(
    stored: StoredTensors, packed: Mapping[str, str], folder: Path, group_size: int, track: Track
) -> dict[str, int]:
    """Write a file for each layer, one for each other tensor, and their index. packed: formats of weights by name."""
    parts: dict[str, list[str]] = {}
    for name in sorted(stored):
        part_name = name
        layer = _LAYER.match(name)
        if layer is not None:
            part_name = layer[1]
        parts.setdefault(part_name, []).append(name)
    places: dict[str, str] = {}
    sizes = {"before": 0, "after": 0}
    numbered: Iterable[tuple[int, list[str]]] = track(
        list(enumerate(parts.values(), 1)), desc="quantising", unit="file"
    )
    for number, names in numbered:
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            tensor = read_tensor(stored, name)
            sizes["before"] += tensor.nbytes
            path = name.removesuffix("weight")
            if name in packed:
                rounded = round_weight(tensor, packed[name], group_size)
                for end, part in rounded.items():
                    tensors[path + end] = part
            else:
                tensors[name] = tensor
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        sizes["after"] += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": sizes["after"]}, "weight_map": places}
    _write_json(folder / "model.safetensors.index.json", index)
    return sizes


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
