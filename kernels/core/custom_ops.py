"""Custom ops of operations: their schemas, and their registration with PyTorch."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch.autograd.graph import increment_version

Arguments = dict[str, Any]
"""All arguments of an operation, or of its custom op, by name."""

# Namespace of the custom ops in `torch.ops`. A copy of this folder beside this one needs another name.
NAMESPACE = "paged"
# Types of annotations in a schema. Numbers may be symbols, as in `torch.library.infer_schema`.
_TYPES = {
    "torch.Tensor": "Tensor",
    "torch.Tensor | None": "Tensor?",
    "Sequence[torch.Tensor]": "Tensor[]",
    "bool": "bool",
    "float": "float",
    "float | None": "float?",
    "int": "SymInt",
    "int | None": "SymInt?",
    "str": "str",
    "str | None": "str?",
    "tuple[float, float] | None": "float[]?",
    "tuple[int, int]": "SymInt[]",
    "tuple[int, ...]": "SymInt[]",
}


def register(
    op: str, run_op: Callable[..., Any], schema: list[str], new: Any, results: str, mutates: Sequence[str]
) -> None:
    """Register a custom op that `run_op` computes. schema: its arguments. The others are those of `operation`."""
    op_names = tuple(argument_name(argument) for argument in schema)
    first_result = 1 if "out" in mutates else 0  # the op writes `out` and does not return it
    num_results = 0 if new is None else results.count("Tensor")

    def returned(value: Any) -> Any:
        tensors = _flat(value)[first_result : first_result + num_results]
        if num_results == 1:
            return tensors[0]
        return tensors

    def implementation(*args: Any, **kwargs: Any) -> Any:
        value = run_op(*args, op_names=op_names, **kwargs)
        if num_results == 0:
            return None
        return returned(value)

    def fake(*args: Any, **kwargs: Any) -> Any:
        if num_results == 0:
            return None
        return returned(new(**dict(zip(op_names, args, strict=False)) | kwargs))

    return_schema = f"({results})" if num_results else "()"
    text = f"({', '.join(schema)}) -> {return_schema}"
    custom_op = torch.library.custom_op(f"{NAMESPACE}::{op}", implementation, mutates_args=tuple(mutates), schema=text)
    custom_op.register_fake(fake)
    if mutates and not hasattr(custom_op, "_register_mutation_version_bump"):
        _count_writes(custom_op, op, op_names, mutates)


def _count_writes(custom_op: Any, op: str, op_names: Sequence[str], mutates: Sequence[str]) -> None:
    """Let an op count writes to its arguments as later PyTorch does.

    PyTorch 2.11 looks up written arguments by index, and raises IndexError if a scale is left out.
    """

    def count_and_run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(op_names, args, strict=False)) | kwargs
        for name in mutates:
            if named.get(name) is not None:
                increment_version(named[name])
        return custom_op._opoverload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that this kernel replaces its own
        custom_op._lib.impl(op, count_and_run, "ADInplaceOrView", with_keyset=True, allow_override=True)


def _flat(results: Any) -> tuple[Any, ...]:
    if not isinstance(results, tuple):
        return (results,)
    return tuple(leaf for result in results for leaf in _flat(result))


def schema_of(parameters: Iterable[Any], replaced: Mapping[str, str], mutates: Sequence[str]) -> list[str]:
    """Return the arguments of an op, those without a default first, then `out` if the op writes it."""
    arguments = []
    for parameter in parameters:
        if parameter.name == "out" and parameter.default is None:
            if "out" in mutates:
                arguments.append("Tensor out")
        elif parameter.name in replaced:
            if replaced[parameter.name]:
                arguments += replaced[parameter.name].split(", ")
        else:
            arguments.append(_argument(parameter.name, parameter.annotation, parameter.default))
    for mark, name in zip("abcdefgh", mutates, strict=False):
        index = [argument_name(argument) for argument in arguments].index(name)
        arguments[index] = arguments[index].replace("Tensor", f"Tensor({mark}!)", 1)
    return sorted(arguments, key=lambda argument: "=" in argument)


def argument_name(argument: str) -> str:
    """Return the name of an argument of a schema."""
    return argument.partition("=")[0].split()[-1]


def _argument(name: str, annotation: str, default: object) -> str:
    text = f"{_TYPES[annotation]} {name}"
    if default is inspect.Parameter.empty:
        return text
    if isinstance(default, tuple):
        default = list(default)
    return f"{text}={default!r}"


def in_fields(*optional: str, **groups: Any) -> dict[str, Any]:
    """Return conversions of dataclass arguments to the op's arguments: the op takes their fields.

    If an optional dataclass is None, all its fields are None.
    """
    field_names = {name: [field.name for field in fields(kind) if field.init] for name, kind in groups.items()}

    def encode(arguments: Arguments) -> None:
        for name in groups:
            group = arguments.pop(name, None)
            for field_name in field_names[name]:
                arguments[field_name] = None if group is None else getattr(group, field_name)

    def decode(arguments: Arguments) -> None:
        for name, kind in groups.items():
            values = {key: arguments.pop(key) for key in field_names[name] if key in arguments}
            is_none = all(value is None for value in values.values())
            arguments[name] = None if is_none else kind(**values)

    def schema(name: str, kind: Any) -> str:
        types = [_TYPES[str(field.type)] for field in fields(kind) if field.init]
        ending = "? {}=None" if name in optional else " {}"
        typed = zip(types, field_names[name], strict=True)
        return ", ".join(type_name + ending.format(field_name) for type_name, field_name in typed)

    schemas = {name: schema(name, kind) for name, kind in groups.items()}
    return {"arguments": schemas, "encode": encode, "decode": decode}
