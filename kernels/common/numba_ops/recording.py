"""What a function computes on a CPU, recorded so that it can be done again without the Python that led to it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_T = TypeVar("_T")
_RECORDING: ContextVar[Recording | None] = ContextVar("_RECORDING", default=None)
# recording(): the one that is under way in this thread or task, or None.
recording = _RECORDING.get
# Reads of values that PyTorch's dispatcher does not see.
_READS = frozenset((torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__))
# Of operations whose results, or their sizes, depend on values that are read on the host, or are drawn.
_UNSTEADY = frozenset(
    (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
)
# Those of others, as of collectives, may do more than write tensors.
_NAMESPACES = ("aten", "mkldnn")
_EMPTY = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided")
# Products, which write their results where those were without a copy: a layer has four.
_INTO: dict[Any, Any] = {torch.ops.aten.mm.default: torch.mm, torch.ops.aten.addmm.default: torch.addmm}


class Recording:
    """The loops and operations of PyTorch that a function has run, on the tensors that they had, which it keeps.

    Nothing else that the function did is done again: shapes, strides and views are what they were. is_repeatable: False
    once it has read a value of a tensor, which may be another one the next time, or done what is not known here.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        """Call a function, and record it."""
        self.is_repeatable = True
        self._calls: list[Callable[[], object]] = []
        self._is_reading = False
        token = _RECORDING.set(self)
        try:
            with _Reads(self), _Operations(self):
                run()
        finally:
            _RECORDING.reset(token)

    def add(self, call: Callable[[], object]) -> None:
        """Have this called here in every repetition; it returns something true where that must end."""
        self._calls.append(call)

    def repeat(self) -> bool:
        """Do it all again, on what the tensors hold by now; False where a call has ended it."""
        for call in self._calls:
            if call():
                break
        else:
            return True
        return False

    def read(self, call: Callable[[], _T]) -> _T:
        """Call what reads values, and record nothing of it: something that is added does the same."""
        self._is_reading = True
        try:
            return call()
        finally:
            self._is_reading = False

    def note_read(self) -> None:
        """Take in that a value was read."""
        self.is_repeatable &= self._is_reading

    def note(self, operation: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Take in an operation of PyTorch that was run."""
        name = operation._schema.name
        if self._is_reading or operation.is_view or name in _EMPTY:
            return
        if operation.namespace not in _NAMESPACES or not _UNSTEADY.isdisjoint(operation.tags):
            self.is_repeatable = False
        elif operation._schema.is_mutable:
            self.add(partial(_run, operation, args, kwargs))
        elif operation in _INTO:
            self.add(partial(_run, _INTO[operation], args, {**kwargs, "out": result}))
        elif isinstance(result, torch.Tensor):
            self.add(partial(_write, result, operation, args, kwargs))
        else:
            self.is_repeatable = False


def _run(operation: Callable[..., object], args: Any, kwargs: dict[str, Any]) -> None:
    operation(*args, **kwargs)


def _write(to: torch.Tensor, operation: Callable[..., torch.Tensor], args: Any, kwargs: dict[str, Any]) -> None:
    to.copy_(operation(*args, **kwargs))


class _Operations(TorchDispatchMode):
    def __init__(self, under_way: Recording) -> None:
        super().__init__()
        self._recording = under_way

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        self._recording.note(operation, args, kwargs or {}, result)
        return result


class _Reads(TorchFunctionMode):
    def __init__(self, under_way: Recording) -> None:
        super().__init__()
        self._recording = under_way

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _READS:
            self._recording.note_read()
        return function(*args, **(kwargs or {}))
