"""Another's function in an operation's place: it is called with what it takes of the operation's arguments."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from paged.bench.check import TOLERANCE, WrongResultError
from paged.bench.operations import DEFINITIONS, HOW, Arguments, Definition, dtype_of
from paged.errors import InvalidInputError, PagedError


class NotTakenError(PagedError):
    """A check does not apply: the candidate takes no such argument, or the machine has too little memory."""


class Candidate:
    """A function beside an operation's definition; `arguments` are those of the last call by name.

    Raises:
        InvalidInputError: no function is there, it lacks an argument that every call has, or no operation has the name.
    """

    def __init__(self, operation: str, path: str) -> None:
        """path: "module:function"; the module is also looked for in the current folder."""
        self.definition = definition_of(operation)
        module_name, _, attribute = path.partition(":")
        if "" not in sys.path:
            sys.path.append("")
        try:
            function = getattr(importlib.import_module(module_name), attribute)
            parameters = inspect.signature(function).parameters.values()
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise InvalidInputError(f"--candidate {path}: {error}, expected MODULE:FUNCTION") from error
        self.path, self.function = path, function
        self.arguments: Arguments = {}
        self._takes_all = False
        self._names = set()
        for parameter in parameters:
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                self._takes_all = True
            elif parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
                self._names.add(parameter.name)
        for name, argument in self.definition.signature.parameters.items():
            is_needed = argument.default is argument.empty and name not in HOW
            if is_needed and not self._takes_all and name not in self._names:
                raise InvalidInputError(
                    f"--candidate {path}: takes no {name} by name, expected arguments of {operation}"
                    f"({', '.join(self.definition.signature.parameters)})"
                )

    def __call__(self, *positional: Any, **named: Any) -> Any:
        """Call the function as the operation.

        Raises:
            NotTakenError: the call needs an argument that the function does not take.
            WrongResultError: the result has another shape than `out`, or a narrower dtype than the arguments.
        """
        self.arguments = self.definition.by_name(*positional, **named)
        taken = {}
        for name, value in self.arguments.items():
            if self._takes_all or name in self._names:
                taken[name] = value
            elif name in needed(self.definition, self.arguments):
                raise NotTakenError(f"{self.path} takes no {name}")
        result = self.function(**taken)
        values = [result]
        if isinstance(result, tuple | list) and result:
            values = list(result)
        _check_dtype(values[0], dtype_of(self.arguments))
        out = self.arguments.get("out")
        if out is None or self.definition.name == "add_lora":
            return result
        _copy(values[0], out)
        return (out, *values[1:])

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let `paged` have the function under the operation's name."""
        with mock.patch(f"paged.{self.definition.name}", self):
            yield


def definition_of(operation: str) -> Definition:
    """Return an operation's definition.

    Raises:
        InvalidInputError: there is no such operation.
    """
    if operation not in DEFINITIONS:
        raise InvalidInputError(f"--op {operation}: no operation; there are {', '.join(DEFINITIONS)}")
    return DEFINITIONS[operation]


def is_of(operation: str, check_name: str) -> bool:
    """Return whether a check of this name is one of the operation."""
    suffix = check_name.removeprefix(operation)
    return suffix != check_name and (not suffix or suffix[0] in ".:")


def needed(definition: Definition, arguments: Arguments) -> list[str]:
    """Return the names of arguments that a function must take: those that decide the result and are no defaults."""
    names = []
    for name, value in arguments.items():
        default = definition.signature.parameters[name].default
        if name == "softmax_scale" and default is None and value is not None:
            default = arguments["q"].shape[2] ** -0.5
            if math.isclose(value, default, rel_tol=1e-6):
                value = default
        if name not in HOW and (isinstance(value, torch.Tensor) or value != default):
            names.append(name)
    return names


def _check_dtype(result: Any, expected: torch.dtype) -> None:
    """Refuse a result that is narrower than expected: it would be judged by the budget of its own dtype."""
    if isinstance(result, torch.Tensor) and TOLERANCE.get(result.dtype, 0) > TOLERANCE.get(expected, 1):
        raise WrongResultError(f"dtype {result.dtype}, expected {expected}")


def _copy(result: Any, out: torch.Tensor) -> None:
    """Write a result to `out`, which the function may not have taken."""
    shape: Any = type(result).__name__
    if isinstance(result, torch.Tensor):
        shape = list(result.shape)
    if shape != list(out.shape):
        raise WrongResultError(f"shape {shape}, expected {list(out.shape)}")
    if result is not out:
        out.copy_(result)
