"""A solution as a function in an operation's place, for the process of a candidate.

`write` makes a module for `paged verify --candidate`: it converts an operation's arguments to the definition's inputs,
calls the solution, and converts what it returns.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paged.bench.cards.cards import CARDS
from paged.bench.check import WrongResultError
from paged.bench.problems.arguments import Arguments
from paged.bench.traces.schema import Definition, Solution, parse_definition
from paged.bench.traces.translations import translation_of

_MODULE = """\
from paged.bench.traces.solution import Adapted

run = Adapted({definition!r}, {entry!r}, {in_place!r})
"""


def write(solution: Solution, definition: Definition, folder: Path, name: str) -> str:
    """Write a solution's sources and its module; return the "module:function" of a candidate.

    folder: where the candidate's process looks for modules. name: of the module, unique in the folder.
    """
    entry = solution.write(folder / f"{name}_sources")
    module = _MODULE.format(definition=json.dumps(definition.as_json()), entry=entry, in_place=solution.in_place)
    (folder / f"{name}.py").write_text(module)
    return f"{name}:run"


class Adapted:
    """The solution at `entry`, "module:function", with the arguments and results of the definition's operation."""

    def __init__(self, definition: str, entry: str, in_place: bool) -> None:
        self._definition = parse_definition(json.loads(definition))
        self._translation = translation_of(self._definition)
        module, _, name = entry.partition(":")
        self._function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        self._in_place = in_place
        self.__signature__: inspect.Signature = CARDS[self._translation.operation].signature

    def __call__(self, **arguments: Any) -> Any:
        """Convert the arguments, call the solution, and convert its results."""
        return self.bind(**arguments)()

    def bind(self, **arguments: Any) -> Callable[..., Any]:
        """Convert the arguments once, and return a function that calls the solution with them, for timing."""
        return partial(self._run, self._translation.inputs(self._definition, arguments))

    def _run(self, inputs: Arguments, **_: Any) -> Any:
        if self._in_place:
            outputs = self._new_outputs(inputs)
            self._function(*inputs.values(), *outputs)
        else:
            outputs = self._outputs_of(self._function(*inputs.values()))
        self._check(inputs, outputs)
        return self._translation.returned(outputs)

    def _new_outputs(self, inputs: Arguments) -> list[torch.Tensor]:
        sizes, device = self._definition.sizes(inputs), next(iter(inputs.values())).device
        outputs = []
        for spec in self._definition.outputs.values():
            shape = self._definition.shape(spec, sizes)
            outputs.append(torch.empty(shape, dtype=spec.torch_dtype, device=device))
        return outputs

    def _outputs_of(self, returned: Any) -> list[torch.Tensor]:
        names = list(self._definition.outputs)
        if isinstance(returned, dict):
            returned = [returned[name] for name in names if name in returned]
        elif isinstance(returned, torch.Tensor):
            returned = [returned]
        outputs = list(returned)
        if len(outputs) != len(names):
            raise WrongResultError(f"returned {len(outputs)} results, expected {', '.join(names)}")
        return outputs

    def _check(self, inputs: Arguments, outputs: list[torch.Tensor]) -> None:
        """Refuse an output of another shape or dtype than the definition's."""
        sizes = self._definition.sizes(inputs)
        for (name, spec), output in zip(self._definition.outputs.items(), outputs, strict=True):
            shape, dtype = self._definition.shape(spec, sizes), spec.torch_dtype
            if list(output.shape) != shape or output.dtype != dtype:
                raise WrongResultError(f"{name}: {list(output.shape)}, {output.dtype}, expected {shape}, {dtype}")
