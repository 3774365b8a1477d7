"""A recorded call beside the reference: as it was recorded, and made again by each backend of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from paged.bench.check import Result, WrongResultError
from paged.bench.operations import Arguments, Definition, Tensors
from paged.bench.verification.candidate import NotTakenError, definition_of
from paged.errors import CheckpointError
from paged.kernels.common.compat import HAS_TRITON, interpreting
from paged.kernels.common.device import has_numba
from paged.tools.printable import one_line
from paged.tools.recorder import RecordedCall, read_call


@dataclass
class Replay:
    """One row: the call as it was recorded (backend ""), or made again by a backend.

    by: who makes the call, for the row's name; by default the backend. definition, arguments: of the call, for a
    diagnosis.
    """

    path: Path
    device: torch.device
    backend: str
    by: str = ""

    def __post_init__(self) -> None:
        self.call = read_call(self.path, self.device)
        self.definition: Definition = definition_of(self.call.operation)
        self.arguments: Arguments = self.call.arguments
        try:
            self.definition.signature.bind(**self.arguments)
        except TypeError as error:
            raise CheckpointError(f"{self.path}: no call of {self.call.operation}: {error}") from error

    @property
    def name(self) -> str:
        if self.backend:
            return f"{self.call.operation} by {self.by or self.backend}"
        return f"{self.call.operation} as recorded"

    def results(self, *_: Any) -> Iterator[Result]:
        """Yield the results beside the reference's.

        Raises:
            NotTakenError: the call raised when it was recorded, so that no result was.
            WrongResultError: the file's result is none of the operation.
        """
        definition, arguments = self.definition, self.arguments
        if not self.backend and self.call.about["error"]:
            raise NotTakenError(f"it raised {one_line(self.call.about['error'])}")
        want, judgement = self.want(), definition.judge(arguments)
        if self.backend:
            with mock.patch.dict(os.environ, {"PAGED_BACKEND": self.backend}):
                got = definition.call(arguments)
        else:
            got = self._recorded()
        yield from definition.beside(got, want, judgement).values()

    def _recorded(self) -> Tensors:
        """Return the results that the file has."""
        try:
            results = self.definition.results({**self.arguments, **self.call.written}, self.call.returned)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise WrongResultError(f"what was recorded is no result: {type(error).__name__}: {error}") from error
        for name, result in results.items():
            if not isinstance(result, torch.Tensor):
                raise WrongResultError(f"what was recorded as {name} is no tensor")
        return results

    def want(self) -> Tensors:
        """Return the reference's results.

        The operation checks the arguments first, on the CPU: a reference follows whatever ids and sizes a file has.
        """
        with mock.patch.dict(os.environ, {"PAGED_BACKEND": "torch"}):
            self.definition.call(read_call(self.path, torch.device("cpu")).arguments, self.definition.own)
        return self.definition.want(self.arguments)


def backends(device: torch.device) -> list[str]:
    """Return the backends that can run on a device in this process, what models run there first."""
    if device.type == "cuda":
        return ["triton", "torch"]
    names = []
    if interpreting() and HAS_TRITON:
        names.append("triton")
    if has_numba():
        names.append("numba")
    return [*names, "torch"]


def about(call: RecordedCall) -> str:
    """Return where and when a call was recorded, on one line."""
    versions = ", ".join(f"{name} {number}" for name, number in call.about["versions"].items())
    text = f"recorded {call.about['date']} on {call.about['device']} with {versions}"
    if call.about["git"]:
        commit, _, _ = call.about["git"].partition("\n")
        text += f", commit {commit[:12]}"
    return one_line(text)
