"""Declaration of operations: each is one function that checks its arguments.

`@operation` makes three things of a function: the public function, `<function>.bind`, and `torch.ops.paged.<function>`.

The function has the operation's signature. It checks the arguments, chooses how to compute, and returns `run`, a
function with the same parameters that computes and checks nothing. A plain call is `bind(...)(...)`. For calls that
differ only in the values of their tensors, bind once and call the result; `Bound` does so for a model's layers.

A graph that Dynamo traces holds one node, the custom op. `is_dynamo_compiling` tells the cases apart, not
`is_compiling`: that one is true in all threads while one compiles, and an op that runs meanwhile would call itself.
An op has the operation's arguments with these differences. Arguments without a default come first. Tensors that are
written and returned are only written. An operation that may write to `out` is two ops, one of them `<operation>_out`.
An op takes no plan but makes its own, one more launch a layer: a plan holds the schedule of one step, so a (captured)
graph that kept it would run later steps with the lengths of the first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch

from paged.kernels.common.checks import refuse_gradients
from paged.kernels.common.device import backend, forward_backend

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Arguments = dict[str, Any]
"""An operation's arguments, all of them, or its op's, by name."""
Run = Callable[..., R]
"""Computes an operation, with its parameters, for the arguments that it was bound for and for others like them."""

# What annotations are in a schema. As in `torch.library.infer_schema`, numbers may be symbols.
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
# Layouts that a `Bound` keeps: more than a model's steps have. Where there are more all are dropped.
_MOST_LAYOUTS = 256


class Operation(Protocol[P, R_co]):
    """A public function with `bind`."""

    __name__: str

    def __hash__(self) -> int: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> Callable[P, R_co]:
        """Check the arguments and return a function that computes without checks.

        Call it with tensors of the same shapes, strides, dtypes and addresses modulo 16. The same tensors must be None,
        and all other arguments the same.
        """


def operation(
    new: Callable[..., Any] | None = None,
    *,
    results: str = "Tensor",
    mutates: Sequence[str] = (),
    arguments: Mapping[str, str] | None = None,
    encode: Callable[[Arguments], None] | None = None,
    decode: Callable[[Arguments], None] | None = None,
    finish: Callable[[Arguments, Any], Any] | None = None,
) -> Callable[[Callable[P, Run[R]]], Operation[P, R]]:
    """Declare an operation; see the module.

    Args:
        new: makes tensors like the results from the op's arguments by name; None if the op only writes.
        results: the results in the op's schema.
        mutates: the op's arguments that it writes to.
        arguments: replacements of arguments in the op's schema; "" removes one.
        encode, decode: change the arguments by name to the op's, and back.
        finish: makes the return value from the arguments by name and the op's results; None returns the results.
    """
    replaced = dict(arguments or {})

    def declare(bind: Callable[P, Run[R]]) -> Operation[P, R]:
        name, signature = bind.__name__, inspect.signature(bind)
        parameters = signature.parameters
        names = tuple(parameters)

        def traced(*args: Any, **kwargs: Any) -> Any:
            named = dict(zip(names, args, strict=False)) | kwargs
            op_arguments = {key: value for key, value in named.items() if replaced.get(key) != ""}
            if encode is not None:
                encode(op_arguments)
            out = op_arguments.pop("out", None) if has_out else None
            if out is None:
                results = getattr(torch.ops.paged, name)(**op_arguments)
            else:
                # By place: Dynamo refuses a strided tensor whose name is `out`.
                required = [op_arguments.pop(key) for key in required_names]
                others = getattr(torch.ops.paged, f"{name}_out")(*required, out, **op_arguments)
                results = out if others is None else (out, others)
            return results if finish is None else finish(named, results)

        @functools.wraps(bind)
        def bound(*args: Any, **kwargs: Any) -> Any:
            refuse_gradients(name, *args, *kwargs.values())
            return bind(*args, **kwargs)

        @functools.wraps(bind)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return traced(*args, **kwargs)
            return bound(*args, **kwargs)(*args, **kwargs)

        def run(*args: Any, op_names: Sequence[str], **kwargs: Any) -> Any:
            named = dict(zip(op_names, args, strict=False)) | kwargs
            if decode is not None:
                decode(named)
            return call(**named)

        has_out = "out" in names and new is not None
        _register(name, run, _schema(parameters.values(), replaced, mutates), new, results, mutates)
        if has_out:
            schema = _schema(parameters.values(), replaced, (*mutates, "out"))
            required_names = [_name(argument) for argument in schema if "=" not in argument][:-1]
            _register(f"{name}_out", run, schema, new, results.partition(", ")[2], (*mutates, "out"))
        public: Any = call
        public.bind = bound
        returned = signature.return_annotation.removeprefix("Run[").removesuffix("]")
        public.__signature__ = signature.replace(return_annotation=returned)
        return public  # type: ignore[no-any-return]

    return declare


def _register(
    op: str, run: Callable[..., Any], schema: list[str], new: Any, results: str, mutates: Sequence[str]
) -> None:
    op_names = tuple(_name(each) for each in schema)
    writes_out, num_results = "out" in mutates, results.count("Tensor") if new is not None else 0

    def implementation(*args: Any, **kwargs: Any) -> Any:
        found = _flat(run(*args, op_names=op_names, **kwargs))[1 if writes_out else 0 :][:num_results]
        return None if not num_results else found[0] if num_results == 1 else found

    def fake(*args: Any, **kwargs: Any) -> Any:
        if not num_results:
            return None
        found = _flat(new(**dict(zip(op_names, args, strict=False)) | kwargs))[1 if writes_out else 0 :]
        return found[0] if num_results == 1 else found

    returned = f"({results})" if num_results else "()"
    text = f"({', '.join(schema)}) -> {returned}"
    torch.library.custom_op(f"paged::{op}", implementation, mutates_args=tuple(mutates), schema=text).register_fake(
        fake
    )


def _flat(results: Any) -> tuple[Any, ...]:
    if not isinstance(results, tuple):
        return (results,)
    return tuple(leaf for each in results for leaf in _flat(each))


def _schema(parameters: Iterable[Any], replaced: Mapping[str, str], mutates: Sequence[str]) -> list[str]:
    """Return the arguments of an op, those without defaults first; `out` if the op writes it."""
    found = []
    for parameter in parameters:
        if parameter.name == "out" and parameter.default is None:
            found += ["Tensor out"] if "out" in mutates else []
        elif parameter.name in replaced:
            found += filter(None, replaced[parameter.name].split(", "))
        else:
            found.append(_argument(parameter.name, parameter.annotation, parameter.default))
    for mark, name in zip("abcdefgh", mutates, strict=False):
        at = next(at for at, each in enumerate(found) if _name(each) == name)
        found[at] = found[at].replace("Tensor", f"Tensor({mark}!)", 1)
    return sorted(found, key=lambda each: "=" in each)


def _name(argument: str) -> str:
    return argument.partition("=")[0].split()[-1]


def _argument(name: str, annotation: str, default: object) -> str:
    text = f"{_TYPES[annotation]} {name}"
    if default is inspect.Parameter.empty:
        return text
    return f"{text}={list(default) if isinstance(default, tuple) else repr(default)}"


def in_fields(*optional: str, **groups: Any) -> dict[str, Any]:
    """Return keywords of `operation` for dataclass arguments: the op takes their fields.

    If an argument is optional, None makes all its fields None.
    """
    names = {name: [field.name for field in fields(kind) if field.init] for name, kind in groups.items()}

    def encode(given: Arguments) -> None:
        for name in groups:
            group = given.pop(name, None)
            for each in names[name]:
                given[each] = None if group is None else getattr(group, each)

    def decode(given: Arguments) -> None:
        for name, kind in groups.items():
            values = {each: given.pop(each) for each in names[name] if each in given}
            given[name] = kind(**values) if any(value is not None for value in values.values()) else None

    def text(name: str, kind: Any) -> str:
        types = [_TYPES[str(field.type)] for field in fields(kind) if field.init]
        ending = "? {}=None" if name in optional else " {}"
        return ", ".join(each + ending.format(field) for each, field in zip(types, names[name], strict=True))

    return {"arguments": {name: text(name, kind) for name, kind in groups.items()}, "encode": encode, "decode": decode}


def like_the_first(x: torch.Tensor, **_: object) -> torch.Tensor:
    """Return a new contiguous tensor of the shape, dtype and device of x."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class Bound(Generic[P, R]):
    """An operation bound once for many calls of one kind, as the layers of a model make them.

    Calls may differ in the number of tokens. It binds once for each layout of the argument at `by`, which all others
    follow; see `Operation.bind`. It keeps no tensor of a call.

    step: keyword of the step's `AttentionPlan` or batch. The operation is then bound once a step, and the step keeps
    the bound calls. `paged_attention` needs none: it keeps with a plan what it makes of it.
    """

    def __init__(self, operation: Operation[P, R], by: int = 0, step: str | None = None) -> None:
        self.operation, self.by, self.step = operation, by, step
        self._runs: dict[object, Callable[P, R]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return self.operation(*args, **kwargs)
        x: Any = args[self.by]
        runs = self._runs
        if self.step is not None:
            step: Any = kwargs[self.step]
            runs = step.runs.setdefault(self, {})
        key = x.shape, x.stride(), x.dtype, x.data_ptr() % 16, forward_backend() or backend()
        run = runs.get(key)
        if run is None:
            if len(runs) >= _MOST_LAYOUTS:
                runs.clear()
            run = runs[key] = self.operation.bind(*args, **kwargs)
        return run(*args, **kwargs)


@functools.lru_cache(256)
def bound_for(operation: Any, *_kind: Hashable) -> Bound[..., Any]:
    """Return the `Bound` of all calls of a kind, for layers of other libraries, which hold none."""
    return Bound(operation)


def layout(*tensors: torch.Tensor | None) -> tuple[Hashable, ...]:
    """Return the properties that `Operation.bind` requires to be the same, for each tensor."""
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors)
