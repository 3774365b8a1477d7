"""Record CPU computations, and repeat them without the Python code that launched them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .step_memory import StepMemory

_T = TypeVar("_T")
_RECORDING: ContextVar[Recording | None] = ContextVar("_RECORDING", default=None)
# recording(): the active recording of this thread or task, or None.
recording = _RECORDING.get
# Functions that read values without PyTorch's dispatcher.
_READS = frozenset((torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__))
# Operations that are random, or whose results or sizes depend on values read on the host.
_UNSTEADY = frozenset(
    (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
)
# Namespaces of operations that only write tensors. Operations of others, such as collectives, may do more.
_NAMESPACES = ("aten", "mkldnn", "onednn")
_EMPTY = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided")
# Operations that can write into their earlier results without a copy: products, and the rotations and residuals of
# transformers' modules. This halves the time of a call, see limits.md.
_INTO: dict[Any, Any] = {
    torch.ops.aten.add.Tensor: torch.add,
    torch.ops.aten.addmm.default: torch.addmm,
    torch.ops.aten.cat.default: torch.cat,
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.mul.Tensor: torch.mul,
    torch.ops.aten.neg.default: torch.neg,
}


class Recording:
    """The numba kernels and PyTorch operations that a function has run, with their tensors.

    Only these are repeated: shapes, strides and views are fixed. Tensors that the function makes lie in `memory`. When
    it drops one, later tensors take its place, also in repetitions.

    obstacle: the first operation that cannot be repeated, because it reads a tensor's value or is unknown; "" if all
    can.
    """

    def __init__(self, run: Callable[[], None], memory: StepMemory) -> None:
        """Call a function and record it."""
        self.obstacle = ""
        self._memory = memory
        self._calls: list[Callable[[], object]] = []
        self._is_reading = False
        token = _RECORDING.set(self)
        try:
            with _Reads(self), _Operations(self):
                run()
        finally:
            _RECORDING.reset(token)

    def add(self, call: Callable[[], object]) -> None:
        """Add a call to every repetition. If it returns True, the repetition ends."""
        self._calls.append(call)

    @property
    def last(self) -> Callable[[], object] | None:
        """The call that was added last."""
        return self._calls[-1] if self._calls else None

    def repeat(self) -> bool:
        """Repeat all calls with the tensors' current values. Return False if a call ended the repetition."""
        for call in self._calls:
            if call():
                break
        else:
            return True
        return False

    def lasting(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that lie outside of the recordings' memory."""
        return [tensor for tensor in tensors if not self._memory.holds(tensor)]

    def read(self, call: Callable[[], _T]) -> _T:
        """Call a function that reads values, without recording it, because an added call does the same."""
        self._is_reading = True
        try:
            return call()
        finally:
            self._is_reading = False

    def note_read(self, operation: str) -> None:
        """Note that an operation read a value."""
        if not self._is_reading:
            self._stop_at(operation)

    def note(self, operation: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Note a PyTorch operation that was run."""
        name = operation._schema.name
        if self._is_reading or operation.is_view:
            return
        if name in _EMPTY:
            self._move(result)
            return
        results = _as_tuple(result)
        if operation.namespace not in _NAMESPACES or _is_unsteady(operation, args):
            self._stop_at(name)
        elif operation._schema.is_mutable:
            self._add(_run, operation, args, kwargs)
        elif operation in _INTO:
            self._move(result)
            self._add(_run, _INTO[operation], args, {**kwargs, "out": result})
        elif all(isinstance(tensor, torch.Tensor) for tensor in results):
            for tensor in results:
                self._move(tensor)
            self._add(_write, results, operation, args, kwargs)
        else:
            self._stop_at(name)

    def _add(self, call: Callable[..., None], *args: Any) -> None:
        """Add a call with tensors that do not keep their place in the recordings' memory."""

        def unowned(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self._memory.unowned(value)
            return value

        self.add(partial(call, *tree_map(unowned, args)))

    def _move(self, tensor: torch.Tensor) -> None:
        """Let a new tensor lie in the recordings' memory."""
        if tensor.is_cpu and not tensor.is_mkldnn:
            old = tensor.untyped_storage()
            storage = self._memory.take(old.nbytes())
            storage.copy_(old)
            tensor.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _stop_at(self, operation: str) -> None:
        self.obstacle = self.obstacle or operation


def _is_unsteady(operation: Any, args: Any) -> bool:
    if operation is torch.ops.aten.index.Tensor:  # with a mask, the result's size depends on values
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return not _UNSTEADY.isdisjoint(operation.tags)


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _run(operation: Callable[..., object], args: Any, kwargs: dict[str, Any]) -> None:
    operation(*args, **kwargs)


def _write(to: tuple[torch.Tensor, ...], operation: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    for old, new in zip(to, _as_tuple(operation(*args, **kwargs)), strict=True):
        old.copy_(new)


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
            self._recording.note_read(f"Tensor.{function.__name__}")
        return function(*args, **(kwargs or {}))
