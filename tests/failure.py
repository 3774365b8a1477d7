"""An exception at any line of some of our code, as a lack of memory brings it."""

import dis
import sys
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

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
