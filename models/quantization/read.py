"""The quantization_config of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from paged.models.loading.hf_config import HfConfig
from paged.models.loading.weights import Slot, StoredTensors, read_tensor
from paged.models.quantization.awq import read_awq
from paged.models.quantization.compressed_tensors import read_compressed_tensors
from paged.models.quantization.fp8 import read_fp8
from paged.models.quantization.gptq import read_gptq
from paged.models.quantization.modelopt import read_modelopt
from paged.models.quantization.quantization import Quantization

_READERS: dict[str, Callable[[HfConfig], Quantization | None]] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
}
_SCALES = (".scales", ".weight_scale")
_HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}


def read_quantization(hf: HfConfig) -> Quantization | None:
    """How the weights of a config.json are packed; None where they are plain.

    Raises:
        UnsupportedError: a way to pack them, or an option of it, is not known here.
        CheckpointError: a value is malformed.
    """
    section = hf.section("quantization_config")
    if section is None:
        return None
    method = section.choice("quant_method", *_READERS)
    if method is None:
        section.text("quant_method")
    return _READERS[method](section)


def as_stored(quantization: Quantization | None, stored: StoredTensors) -> Quantization | None:
    """The same, with scales of groups in the type that all of the file are of, or in float32."""
    dtypes = {tensor.dtype for name, tensor in stored.items() if name.endswith(_SCALES)}
    dtype = _HALVES.get(dtypes.pop()) if len(dtypes) == 1 else None
    return quantization if quantization is None or dtype is None else quantization.with_scales(dtype)


def without_zero_biases(stored: StoredTensors, slots: Mapping[str, Slot]) -> StoredTensors:
    """What is stored, less biases that GPTQ files hold for projections without one, if they are 0.

    Raises:
        CheckpointError: a file became unreadable.
    """
    extra = {
        name
        for name in stored.keys() - slots.keys()
        if name.endswith(".bias")
        and f"{name.removesuffix('bias')}qweight" in slots
        and not read_tensor(stored, name).any()
    }
    return {name: tensor for name, tensor in stored.items() if name not in extra}
