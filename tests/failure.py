"""An exception at any line or bytecode of some of our code, as Ctrl-C or a lack of memory brings it."""

import sys
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch


@cache
def _folder(filename: str) -> Path:
    return Path(filename).resolve().parent


class Failure:
    """Raises `error` before the line, or the bytecode, that code of these folders comes to after `count` others."""

    def __init__(
        self, count: int, folders: Collection[Path], error: BaseException, *, event: str = "line", skip: str = ""
    ) -> None:
        """skip: a file's name that is left out."""
        self.count, self.error, self.is_raised = count, error, False
        self.path: list[str] = []  # the functions that it was raised in
        self._folders, self._event, self._skip = folders, event, skip

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        filename = frame.f_code.co_filename
        if _folder(filename) not in self._folders or (self._skip and filename.endswith(self._skip)):
            return None
        frame.f_trace_opcodes = self._event == "opcode"
        return self._come

    def _come(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == self._event:
            self.count -= 1
            if self.count < 0:
                self.is_raised = True
                caller: FrameType | None = frame
                while caller is not None:
                    self.path.append(caller.f_code.co_name)
                    caller = caller.f_back
                raise self.error
        return self._come

    def hits(self, call: Callable[[], object]) -> bool:
        """Whether the call got so far; it must then raise the error, and nothing else ever.

        Where a `with` statement ends there is a line before the context's `__exit__`, which the error keeps from
        running. Python runs no signal handler there, so what `torch.no_grad` has left is set right.
        """
        before, has_gradients = sys.gettrace(), torch.is_grad_enabled()
        sys.settrace(self._enter)
        try:
            call()
        except BaseException as error:
            sys.settrace(before)
            if error is not self.error:
                raise
        finally:
            sys.settrace(before)
            torch.set_grad_enabled(has_gradients)
        return self.is_raised
