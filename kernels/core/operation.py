"""`@operation` turns a function that checks arguments into a public operation.

The decorated function has the operation's signature. It checks the arguments, chooses an implementation, and returns
`run`, a function with the same parameters that only computes:

    x = operation(x, weight)                  # check and compute: operation.bind(x, weight)(x, weight)
    run = operation.bind(x, weight)           # check once, for all tensors of these shapes, strides and dtypes
    x = run(x, weight)                        # compute; `Bound` does this for the layers of a model
    x = torch.ops.paged.operation(x, weight)  # the custom op, the one node that torch.compile sees

The custom op has the operation's arguments with three differences. Arguments without a default come first. Tensors that
the operation writes and returns are only written. An operation that may write to `out` has a second op,
`<operation>_out`.

The op of attention takes no plan and makes its own, which costs one more launch a layer. A plan holds the schedule of
one step, so a graph that captured it would run later steps with the lengths of the first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from .checks import refuse_gradients
from .custom_ops import NAMESPACE, Arguments, argument_name, register, schema_of
from .device import backend, forward_backend
from .errors import InvalidInputError

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Run = Callable[..., R]
"""Computes an operation, for the arguments that it was bound for, or for others with the same layouts."""

# Arguments that hold a step's lengths and offsets, and keep the calls that are bound for the step.
_STEPS = ("plan", "batch")
# Most layouts that a `Bound` keeps, more than the steps of a model have. At this limit it drops all of them.
_MOST_LAYOUTS = 256


class Call(NamedTuple):
    """A call that a `Watch` sees. mutates: names of arguments, or of their fields, that the call writes."""

    operation: str
    signature: inspect.Signature
    mutates: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Watch = Callable[[Call, Callable[[], Any]], Any]
"""Takes a call and the function that makes it; returns the function's result."""
_watch: Watch | None = None


def watch_calls(watch: Watch | None) -> Watch | None:
    """Let `watch` make all calls of operations in this process; None ends that. Return the previous watch.

    Without a watch, calls of a `Bound` take no extra time.
    """
    global _watch
    before, _watch = _watch, watch
    Bound.__call__ = Bound.run if watch is None else Bound.run_watched  # type: ignore[method-assign]
    return before


def current_watch() -> Watch | None:
    """Return the watch that makes the calls of this process, or None."""
    return _watch


def are_calls_watched() -> bool:
    """Return whether calls are watched. Graphs and recordings of steps would hide calls from the watch."""
    return _watch is not None


class Operation(Protocol[P, R_co]):
    """A public function with `bind`."""

    __name__: str
    step: str | None
    """Keyword of the step's `AttentionPlan` or batch; None for an operation without either."""

    def __hash__(self) -> int: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> Callable[P, R_co]:
        """Check the arguments and return a function that computes without checks.

        Call it with tensors of the same shapes, strides, dtypes and addresses modulo 16. The same arguments must be
        None, and arguments that are not tensors must be equal; of an operation with a plan, in the calls of a step.
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
    step: str | None = None,
) -> Callable[[Callable[P, Run[R]]], Operation[P, R]]:
    """Declare an operation; see the module.

    Args:
        new: makes empty tensors like the results from the op's arguments by name; None if the op only writes.
        results: the results in the op's schema.
        mutates: the op's arguments that it writes.
        arguments: replacements of arguments in the op's schema; "" removes one.
        encode, decode: convert the arguments by name to the op's, and back.
        finish: makes the return value from the arguments by name and the op's results; None returns the results.
        step: keyword of the step's plan, which `run` depends on. The decorated function then returns `bind_step`, a
            function with the same parameters that takes checked arguments and returns `run` for their step.
    """
    replaced = dict(arguments or {})

    def declare(bind: Callable[P, Run[R]]) -> Operation[P, R]:
        name = bind.__name__
        signature = inspect.signature(bind)
        parameters = signature.parameters
        parameter_names = tuple(parameters)
        has_out = "out" in parameter_names and new is not None

        def trace(*args: Any, **kwargs: Any) -> Any:
            """Call the custom op."""
            named = dict(zip(parameter_names, args, strict=False)) | kwargs
            op_arguments = {key: value for key, value in named.items() if replaced.get(key) != ""}
            if encode is not None:
                encode(op_arguments)
            out = None
            if has_out:
                out = op_arguments.pop("out", None)
            if out is None:
                op_results = getattr(getattr(torch.ops, NAMESPACE), name)(**op_arguments)
            else:
                # Pass by position: Dynamo refuses a strided tensor whose keyword is `out`.
                required = [op_arguments.pop(key) for key in required_names]
                returned = getattr(getattr(torch.ops, NAMESPACE), f"{name}_out")(*required, out, **op_arguments)
                op_results = out
                if returned is not None:
                    op_results = out, returned
            if finish is None:
                return op_results
            return finish(named, op_results)

        def check(*args: Any, **kwargs: Any) -> Any:
            """Return `bind_step`, or `run` of an operation without a step."""
            refuse_gradients(name, *args, *kwargs.values())
            return bind(*args, **kwargs)

        def bind_one_call(*args: Any, **kwargs: Any) -> Any:
            """Return `run` for one call, which no step keeps."""
            checked = check(*args, **kwargs)
            if step is None:
                return checked
            return checked(*args, **kwargs)

        @functools.wraps(bind)
        def check_and_bind(*args: Any, **kwargs: Any) -> Any:
            checked = check(*args, **kwargs)
            if step is None:
                return checked

            def run_step(*args: Any, **kwargs: Any) -> Any:
                """Compute in the step of the call's plan, which keeps `run`; a call without a plan keeps nothing."""
                plan = kwargs.get(step)
                if plan is None:
                    return checked(*args, **kwargs)(*args, **kwargs)
                runs = plan.runs.setdefault(run_step, {})
                if name not in runs:
                    runs[name] = checked(*args, **kwargs)
                return runs[name](*args, **kwargs)

            return run_step

        @functools.wraps(bind)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Do not use `is_compiling`, which is true in all threads while one thread compiles. An op that runs in
            # another thread would then call itself.
            if torch.compiler.is_dynamo_compiling():
                return trace(*args, **kwargs)
            if _watch is not None:
                watched = Call(name, signature, tuple(mutates), args, kwargs)
                return _watch(watched, lambda: bind_one_call(*args, **kwargs)(*args, **kwargs))
            return bind_one_call(*args, **kwargs)(*args, **kwargs)

        def run_op(*args: Any, op_names: Sequence[str], **kwargs: Any) -> Any:
            """Compute the custom op."""
            named = dict(zip(op_names, args, strict=False)) | kwargs
            if decode is not None:
                decode(named)
            return call(**named)

        register(name, run_op, schema_of(parameters.values(), replaced, mutates), new, results, mutates)
        if has_out:
            schema = schema_of(parameters.values(), replaced, (*mutates, "out"))
            required_names = [argument_name(argument) for argument in schema if "=" not in argument][:-1]
            register(f"{name}_out", run_op, schema, new, results.partition(", ")[2], (*mutates, "out"))
        public: Any = call
        public.bind = check_and_bind
        public.check = None if step is None else check
        public.step = next((key for key in _STEPS if key in parameters), None)
        return_type = signature.return_annotation.removeprefix("Run[").removesuffix("]")
        public.__signature__ = signature.replace(return_annotation=return_type)
        return public  # type: ignore[no-any-return]

    return declare


def like_the_first(x: torch.Tensor, **_: object) -> torch.Tensor:
    """Return a new contiguous tensor of the shape, dtype and device of x."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def by_definition(definition: Callable[..., Any], dtype: torch.dtype, num_rounded: int = 1, **checked: Any) -> Run[Any]:
    """Return a function with an operation's parameters that computes its definition in float32.

    num_rounded: results, the first ones, that are rounded to `dtype`.
    checked: options as the operation has checked them.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        results = definition(*args, **kwargs | checked, compute=torch.float32)
        if isinstance(results, torch.Tensor):
            return results.to(dtype)
        rounded = [result.to(dtype) for result in results[:num_rounded]]
        return (*rounded, *results[num_rounded:])

    return run


class Bound(Generic[P, R]):
    """An operation bound once for many calls, such as the same call in all layers of a model.

    Calls may differ in the number of tokens. The operation is bound once for each layout of the argument `by`; all
    other arguments must follow its layout, see `Operation.bind`. No tensor of a call is kept.

    An operation with an `AttentionPlan` or a batch is bound once a step, because block tables change their strides
    between steps; the plan or batch keeps the bound calls. An operation that was declared with a step is still checked
    once for each layout.

    Raises:
        InvalidInputError: the operation takes a block table without a plan or batch.
    """

    def __init__(self, operation: Operation[P, R], by: int = 0) -> None:
        self.operation, self.by, self.step = operation, by, operation.step
        if self.step is None and "block_table" in inspect.signature(operation).parameters:
            raise InvalidInputError(
                f"operation: {operation.__name__} takes a block table, which changes from step to step, expected a "
                "plan or a batch beside it"
            )
        self._runs: dict[object, Callable[P, R]] = {}

    def run(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute. This is `__call__` unless calls are watched."""
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
            run = runs[key] = self._bind(key, *args, **kwargs)
        return run(*args, **kwargs)

    def _bind(self, key: object, *args: P.args, **kwargs: P.kwargs) -> Callable[P, R]:
        operation: Any = self.operation
        if self.step is None or operation.check is None:
            return operation.bind(*args, **kwargs)  # type: ignore[no-any-return]
        bind_step: Any = self._runs.get(key)
        if bind_step is None:
            if len(self._runs) >= _MOST_LAYOUTS:
                self._runs.clear()
            bind_step = self._runs[key] = operation.check(*args, **kwargs)
        return bind_step(*args, **kwargs)  # type: ignore[no-any-return]

    def run_watched(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute as a plain call, so that a `Watch` sees it."""
        return self.operation(*args, **kwargs)

    __call__ = run


@functools.lru_cache(256)
def bound_for(operation: Any, *_kind: Hashable) -> Bound[..., Any]:
    """Return a shared `Bound` for layers of other libraries, which cannot hold one themselves."""
    return Bound(operation)


def layout(*tensors: torch.Tensor | None) -> tuple[Hashable, ...]:
    """Return the properties of each tensor that `Operation.bind` requires to stay the same."""
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors)
