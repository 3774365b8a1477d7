"""A recorded call beside the reference: as it was recorded, and repeated by each backend of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from paged.bench.cards.card import Card
from paged.bench.cards.cards import card_of
from paged.bench.check import Result, WrongResultError
from paged.bench.problems.arguments import Arguments, Tensors
from paged.bench.verification.candidate import NotTakenError
from paged.errors import CheckpointError
from paged.kernels.core.compat import HAS_TRITON, interpreting
from paged.kernels.core.device import has_numba
from paged.tools.printable import one_line
from paged.tools.recorder import RecordedCall, read_call


@dataclass
class Replay:
    """One row: the call as it was recorded (backend ""), or repeated by a backend.

    by: name of the caller in the row's name; by default the backend. label: the call's name there; by default its
    operation. card, arguments: the call's, for a diagnosis.
    """

    path: Path
    device: torch.device
    backend: str
    by: str = ""
    label: str = ""

    def __post_init__(self) -> None:
        self.call = read_call(self.path, self.device)
        self.card: Card = card_of(self.call.operation)
        self.arguments: Arguments = self.call.arguments
        try:
            self.card.signature.bind(**self.arguments)
        except TypeError as error:
            raise CheckpointError(f"{self.path}: no call of {self.call.operation}: {error}") from error

    @property
    def name(self) -> str:
        label = self.label or self.call.operation
        if self.backend:
            return f"{label} by {self.by or self.backend}"
        return f"{label} as recorded"

    def results(self, *_: Any) -> Iterator[Result]:
        """Yield the results beside the reference's.

        Raises:
            NotTakenError: the recorded call raised, so it has no result.
            WrongResultError: the file's result cannot be a result of the operation.
        """
        card, arguments = self.card, self.arguments
        if not self.backend and self.call.about["error"]:
            raise NotTakenError(f"it raised {one_line(self.call.about['error'])}")
        want = self.want()
        bounds = card.bounds(arguments, want)
        if self.backend:
            with mock.patch.dict(os.environ, {"PAGED_BACKEND": self.backend}):
                got = card.call(arguments)
        else:
            got = self._recorded()
        yield from card.beside(arguments, got, want, bounds).values()

    def _recorded(self) -> Tensors:
        """Return the results in the file."""
        try:
            results = self.card.results({**self.arguments, **self.call.written}, self.call.returned)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise WrongResultError(f"what was recorded is no result: {type(error).__name__}: {error}") from error
        for name, result in results.items():
            if not isinstance(result, torch.Tensor):
                raise WrongResultError(f"what was recorded as {name} is no tensor")
        return results

    def want(self) -> Tensors:
        """Return the reference's results.

        The operation checks the arguments first, on the CPU, because a reference follows any ids and sizes in a file.
        """
        with mock.patch.dict(os.environ, {"PAGED_BACKEND": "torch"}):
            self.card.call(read_call(self.path, torch.device("cpu")).arguments, self.card.own)
        return self.card.want(self.arguments)


def backends(device: torch.device) -> list[str]:
    """Return the backends that can run on a device in this process; the first is the models' backend."""
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
