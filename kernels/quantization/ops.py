"""Linear layers with packed weights as custom ops."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from paged.kernels.common.custom_ops import define, ops, writes_only
from paged.kernels.quantization.weight import QuantizedWeight

__all__ = ["fields_of", "ops"]

_FIELDS = tuple(field.name for field in dataclasses.fields(QuantizedWeight))
_ARGUMENTS = (
    "Tensor x, Tensor values, Tensor scale, SymInt in_features, Tensor? zero_point, Tensor? tensor_scale, "
    "bool quantizes_input, Tensor? input_scale, Tensor? input_order, {}Tensor? bias=None"
)
_MODULE = "paged.kernels.quantization.quantized_linear"


def fields_of(weight: QuantizedWeight) -> tuple[Any, ...]:
    """The weight as the op's arguments."""
    return tuple(getattr(weight, name) for name in _FIELDS)


def _as_weight(arguments: dict[str, Any]) -> None:
    arguments["weight"] = QuantizedWeight(**{name: arguments.pop(name) for name in _FIELDS})


@define("quantized_linear", _MODULE, _ARGUMENTS.format(""), "Tensor", prepare=_as_weight)
def _quantized_linear(x: torch.Tensor, values: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], values.shape[0])


define("quantized_linear_out", _MODULE, _ARGUMENTS.format("Tensor(a!) out, "), mutates=("out",), prepare=_as_weight)(
    writes_only
)
