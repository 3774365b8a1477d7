"""A card: what verify, benchmarks, compilation, fuzzing, candidates and replays know of one operation.

A card takes an operation's arguments by name, so it also judges any function that takes them, ours or another's.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import paged
from paged.bench.bounds import first_order
from paged.bench.cards.draw import Draw
from paged.bench.check import Result, WrongResultError
from paged.bench.limits import Cost
from paged.bench.problems.arguments import HOW, Arguments, Tensors, map_tensors, num_bytes, on_cpu, without_how

if TYPE_CHECKING:
    from paged.bench.compilation.cases.case import CompileCase

SCALES = ("full", "small", "check")  # for a GPU, for a CPU, and for the comparison with the definition
Sizes = Mapping[str, Any]
Masks = dict[str, torch.Tensor | None]
"""Argument -> mask over its first dimensions, True for each entry that may be written; None for all entries.

A field has a name such as "state.conv", an item one such as "caches[0]"."""
Bounds = dict[str, torch.Tensor | None]
"""How far each element of a result may be from the expected one; None for results that must be equal."""


@dataclass(frozen=True)
class Row:
    """A row of the kernels benchmark, which `paged verify` also checks: one problem at three scales.

    sizes: name -> values for SCALES. Sizes of "check" suit a slow definition, and choose the same tiles as "full".
    variant: stands behind the operation's name. is_quick: whether `paged verify --quick` checks it. capturable: whether
    a CUDA graph can capture the call.
    """

    sizes: Mapping[str, tuple[Any, Any, Any]]
    variant: str = ""
    is_quick: bool = True
    capturable: bool = True

    def size(self, scale: str) -> Sizes:
        return {name: values[SCALES.index(scale)] for name, values in self.sizes.items()}


@dataclass(frozen=True)
class Edge:
    """A row of `paged verify` alone: problems of one option or edge. name: stands behind the operation's name."""

    name: str
    problems: Callable[[Draw], Iterator[Arguments]]
    is_quick: bool = True


def moved(card: Card, arguments: Arguments) -> Cost:
    """Return the cost of an operation that multiplies nothing: it reads arguments and writes results once each."""
    results = card.call(map_tensors(torch.clone, arguments))
    read = [value for value in without_how(arguments).values() if isinstance(value, torch.Tensor)]
    return Cost(0, num_bytes(*read, *results.values()))


@dataclass(frozen=True)
class Card:
    """One operation.

    name: of the public function.
    draw: returns the arguments of a random problem, from sizes by name.
    expected: returns the results by the definition, in float64 or as whole numbers, from arguments on the CPU.
    results: returns the tensors that a call returned or wrote, from its arguments and what it returned.
    errors: returns first-order errors of results by name, see `bounds`; by default of one rounding. Whole numbers, and
    results without an error, must be equal.
    writes: returns masks of what a call may write besides `out`.
    cost: returns bytes and operations of a call; by default `moved`.
    rows, edges: rows of the tables.
    odd: name of a size -> values, of which fuzzing draws any combination. The last values make a sound small problem.
    compiled: returns the cases of ahead-of-time compilation.
    function: the operation itself; by default the public one.
    """

    name: str
    draw: Callable[..., Arguments]
    expected: Callable[[Arguments], Tensors]
    results: Callable[[Arguments, Any], Tensors]
    errors: Callable[[Card, Arguments, Tensors], Tensors] = first_order.rounded_once
    writes: Callable[[Arguments], Masks] = lambda _: {}
    cost: Callable[[Card, Arguments], Cost] = moved
    rows: tuple[Row, ...] = ()
    edges: tuple[Edge, ...] = ()
    odd: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    compiled: Callable[[], list[CompileCase]] = list
    function: Callable[..., Any] | None = None

    @property
    def operation(self) -> Callable[..., Any]:
        """The operation, as `paged` has it now."""
        if self.function is not None:
            return self.function
        public: Callable[..., Any] = getattr(paged, self.name)
        return public

    @property
    def own(self) -> Callable[..., Any]:
        """The operation itself, even if `paged` has another function in its place."""
        if self.function is not None:
            return self.function
        function: Callable[..., Any] = getattr(importlib.import_module(paged._MODULE_OF[self.name]), self.name)
        return function

    @property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.own)

    def by_name(self, *positional: Any, **named: Any) -> Arguments:
        """Return the arguments of a call by name."""
        return dict(self.signature.bind(*positional, **named).arguments)

    def problem(self, row: Row, scale: str, device: torch.device, dtype: torch.dtype) -> Arguments:
        """Return the arguments of a row's problem at one of SCALES."""
        return self.draw(Draw(device, dtype), **row.size(scale))

    def want(self, arguments: Arguments) -> Tensors:
        """Return the expected results; the arguments do not change."""
        return self.expected(on_cpu(arguments))

    def call(self, arguments: Arguments, function: Callable[..., Any] | None = None) -> Tensors:
        """Call a function, by default the operation, and return its results; the call may write to the arguments."""
        return self.results(arguments, (function or self.operation)(**arguments))

    def bounds(self, arguments: Arguments, want: Tensors) -> Bounds:
        """Return the bound of every expected result: twice the first-order error. See docs/bounds.md."""
        limits: Bounds = dict.fromkeys(want)
        for name, error in self.errors(self, on_cpu(arguments), want).items():
            if name in want:
                limits[name] = 2 * error
        return limits

    def check(self, arguments: Arguments) -> dict[str, Result]:
        """Compute the expected results and their bounds, then run the operation."""
        want = self.want(arguments)
        limits = self.bounds(arguments, want)
        return self.beside(arguments, self.call(arguments), want, limits)

    def beside(self, arguments: Arguments, got: Tensors, want: Tensors, limits: Bounds) -> dict[str, Result]:
        """Return each result beside the expected result of the same name.

        A function in the operation's place that takes no `return_lse` cannot be asked for the log-sum-exp.

        Raises:
            WrongResultError: a result is missing.
        """
        missing = want.keys() - got.keys()
        if "return_lse" in self.signature.parameters:
            is_taken = "return_lse" in inspect.signature(self.operation).parameters
            if not is_taken or not arguments.get("return_lse"):
                missing.discard("lse")
        if missing:
            raise WrongResultError(f"returned no {', '.join(sorted(missing))}")
        return {name: Result(tensor, want[name], limits[name], name) for name, tensor in got.items()}

    def written(self, arguments: Arguments) -> Masks:
        """Return masks of what a call may write; nothing else may change by a bit."""
        masks = self.writes(arguments)
        if arguments.get("out") is not None:
            masks["out"] = None
        return masks

    def row_name(self, row: Row) -> str:
        if row.variant:
            return f"{self.name}.{row.variant}"
        return self.name

    def edge_name(self, edge: Edge) -> str:
        if edge.name:
            return f"{self.name}: {edge.name}"
        return self.name


def needed(card: Card, arguments: Arguments) -> list[str]:
    """Return the names of arguments that a function must take: they decide the result and differ from defaults."""
    names = []
    for name, value in arguments.items():
        default = card.signature.parameters[name].default
        if name == "softmax_scale" and default is None and value is not None:
            default = arguments["q"].shape[2] ** -0.5
            if math.isclose(value, default, rel_tol=1e-6):
                value = default
        if name not in HOW and (isinstance(value, torch.Tensor) or value != default):
            names.append(name)
    return names


def same(value: Any) -> tuple[Any, Any, Any]:
    """Return one size for all scales."""
    return (value, value, value)


def named(*names: str) -> Callable[[Arguments, Any], Tensors]:
    """Return a function that names the tensors which an operation returns, one or several."""

    def results(_: Arguments, returned: Any) -> Tensors:
        if isinstance(returned, torch.Tensor):
            returned = (returned,)
        if not isinstance(returned, tuple | list):
            raise WrongResultError(f"returned {type(returned).__name__}, expected tensors: {', '.join(names)}")
        return {name: tensor for name, tensor in zip(names, returned, strict=False) if tensor is not None}

    return results


def defined(definition: Callable[..., Any], *names: str) -> Callable[[Arguments], Tensors]:
    """Return a function that calls a definition with the operation's arguments, and names its results."""
    name_results = named(*names)
    return lambda arguments: name_results(arguments, definition(**without_how(arguments)))


def whole(*names: str) -> Callable[[Arguments], Masks]:
    """Return masks of arguments that may be written everywhere."""
    return lambda _: dict.fromkeys(names)
