"""Arguments of a call by name: copies on another device, those that decide its results, masks of ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

Arguments = dict[str, Any]
Tensors = dict[str, torch.Tensor]
"""Results by name. A call may give fewer results than expected, for example without return_lse."""
HOW = "plan prefix_plan shared_prefix_len max_seqlen_q deterministic return_lse out aligned ticket".split()
"""Arguments that choose how to compute, and do not change the result."""


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return the value with each tensor replaced by the function's result, in lists, tuples and dataclasses too."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for field in dataclasses.fields(value):
            if field.init:
                changed[field.name] = map_tensors(function, getattr(value, field.name))
        return dataclasses.replace(value, **changed)
    return value


def dtype_of(arguments: Arguments) -> torch.dtype:
    """Return the dtype of the first floating-point argument, which decides the dtype of the result."""
    for value in arguments.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.dtype
    return torch.float32


def on_cpu(arguments: Arguments) -> Arguments:
    """Return the arguments with their tensors on the CPU."""
    moved: Arguments = map_tensors(torch.Tensor.cpu, arguments)
    return moved


def without_how(arguments: Arguments) -> Arguments:
    """Return the arguments that decide the results."""
    return {name: value for name, value in arguments.items() if name not in HOW}


def num_bytes(*tensors: torch.Tensor | None) -> int:
    """Return the bytes of tensors, each counted once."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def marked(size: int, ids: torch.Tensor) -> torch.Tensor:
    """Return a mask over `size` entries, True for the ids that are not negative."""
    ids = ids.flatten().long()
    mask = torch.zeros(size, dtype=torch.bool, device=ids.device)
    mask[ids[ids >= 0]] = True
    return mask
