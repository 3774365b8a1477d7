"""An exception at any line of some of our code, or at any allocation, as a lack of memory brings it."""

import dis
import sys
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import paged

# Classes that begin and end a call of the cache: a call that is final has nothing to fail.
CACHE_GUARD = ("CacheGuard", "HeldInterrupts", "Listeners")


@cache
def _folder(filename: str) -> Path:
    return Path(filename).resolve().parent


def _ends_of_with(code: CodeType) -> frozenset[int]:
    """Offsets where a `with` statement calls the context's `__exit__`: nothing is allocated before it, so nothing
    fails there, and Python runs no signal handler.
    """
    steps = list(dis.get_instructions(code))
    offsets = set[int]()
    for i, step in enumerate(steps):
        is_call = [(after.opname, after.argval) for after in steps[i : i + 3]] == [("LOAD_CONST", None)] * 3
        if step.opname == "PUSH_EXC_INFO" or (is_call and steps[i + 3].opname in ("PRECALL", "CALL")):
            offsets |= {step.offset, steps[i - 1].offset if steps[i - 1].opname == "SWAP" else step.offset}
    return frozenset(offsets)


@cache
def _places(code: CodeType) -> frozenset[int]:
    """Offsets where a line begins that may fail.

    Python also traces jumps back within a line, as in a comprehension: from 3.12 on, no handler sees an error there.
    """
    return frozenset(offset for offset, _ in dis.findlinestarts(code)) - _ends_of_with(code)


class Failure:
    """Raises `error` before the line that code of these folders comes to after `count` others."""

    def __init__(
        self, count: int, folders: Collection[Path], error: BaseException, *, skip: Collection[str] = ()
    ) -> None:
        """skip: classes whose methods are left out."""
        self.count, self.error, self.is_raised = count, error, False
        self.path: list[str] = []  # the functions that it was raised in
        self._folders, self._skip = folders, skip

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        filename = frame.f_code.co_filename
        if _folder(filename) not in self._folders or frame.f_code.co_qualname.partition(".")[0] in self._skip:
            return None
        return self._come

    def _come(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and frame.f_lasti in _places(frame.f_code):
            self.count -= 1
            if self.count < 0:
                self.is_raised = True
                caller: FrameType | None = frame
                while caller is not None:
                    self.path.append(caller.f_code.co_name)
                    caller = caller.f_back
                self.fail()
        return self._come

    def fail(self) -> None:
        """Raise the error."""
        raise self.error

    def hits(self, call: Callable[[], object]) -> bool:
        """Whether the call got so far; it must then raise the error, and nothing else ever."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        except BaseException as error:
            sys.settrace(before)
            if error is not self.error:
                raise
        finally:
            sys.settrace(before)
            # An error in the last line before gradients are on again leaves them off, in PyTorch's `no_grad` too.
            torch.set_grad_enabled(True)
        return self.is_raised


# Functions that take memory without an operation of PyTorch.
_NUMPY = ("arange", "array", "asarray", "concatenate", "cumsum", "diff", "empty", "fromiter", "full", "ones", "repeat")
_NUMPY += ("searchsorted", "split", "stack", "unique", "where", "zeros")
_FUNCTIONS: dict[Any, tuple[str, ...]] = {
    np: _NUMPY,
    torch: ("from_numpy",),
    torch.Tensor: ("numpy", "tolist"),
}
_ROOT = Path(paged.__file__).resolve().parent.parent
_KERNELS = _ROOT / "kernels"


class FailedAllocation(TorchDispatchMode):
    """A context in which the allocation after `count` others fails once: an operation of PyTorch, or NumPy's of ours.

    It counts on from one block to the next. lines: for each allocation, the line of our code that asks for it, kernels
    left out; noted while none fails.
    """

    def __init__(self, count: int | None = None) -> None:
        super().__init__()
        self.is_raised = False
        self.lines: list[tuple[str, int]] = []
        self._count = count
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Any:
        for owner, names in _FUNCTIONS.items():
            for name in names:
                original = getattr(owner, name)
                self._originals.append((owner, name, original))
                setattr(owner, name, self._failing(original))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._come(sys._getframe(1))
        return func(*args, **(kwargs or {}))

    def _failing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            caller = sys._getframe(1)
            if _is_below(caller.f_code.co_filename, _ROOT):
                self._come(caller)
            return original(*args, **options)

        return call

    def _come(self, frame: FrameType | None) -> None:
        if self._count is None:
            while frame is not None and not _is_caller(frame.f_code.co_filename):
                frame = frame.f_back
            assert frame is not None
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            return
        self._count -= 1
        if self._count == -1:
            self.is_raised = True
            raise MemoryError("an allocation failed")


@cache
def _is_below(filename: str, folder: Path) -> bool:
    return Path(filename).is_relative_to(folder)


@cache
def _is_caller(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_ROOT) and not path.is_relative_to(_KERNELS) and path != Path(__file__)
