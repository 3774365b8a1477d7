"""What an emulated device saw: hazards, waits of the host, launches, and the kernels that were compiled."""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_ROOM = str(Path(__file__).resolve().parent)
_ROOT = str(Path(__file__).resolve().parents[3])
# Wraps functions of Triton's interpreter, so it stands between a kernel and its accesses.
_COMPAT = os.path.join(_ROOT, "kernels", "common", "compat.py")


class HazardError(Exception):
    """Hazards were found; no AssertionError, so that a test that is expected to fail is not expected to fail by it."""


@dataclass(frozen=True)
class Hazard:
    """What a GPU may do wrong, or may not do at all. kind: its name in docs/emulated-device.md."""

    kind: str
    text: str
    place: str


@dataclass(frozen=True)
class Synchronisation:
    """The host waits for the device: by what, and where."""

    what: str
    place: str


@dataclass(frozen=True)
class Launch:
    """A Triton kernel given to a stream, or to a graph that is being captured."""

    kernel: str
    grid: tuple[int, int, int]
    place: str


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled variant: what is fixed of each argument ("D": divisible by 16, "1": equal to 1, the value of a
    constexpr), and the compiler's options."""

    name: str
    device: int
    arguments: Mapping[str, str]
    options: str
    place: str

    def differs_from(self, other: CompiledKernel) -> dict[str, tuple[str, str]]:
        """What is fixed otherwise in the two, by argument: there, and here."""
        theirs, ours = (
            {**each.arguments, "options": each.options, "device": str(each.device)} for each in (other, self)
        )
        return {name: (theirs[name], value) for name, value in ours.items() if theirs.get(name) != value}


class Mark(NamedTuple):
    """A moment, to ask for what came after it: how much there was of each."""

    synchronisations: int
    launches: int
    compiled: int


@dataclass
class Report:
    """Everything since the beginning, in order. num_replays: of graphs."""

    hazards: list[Hazard] = field(default_factory=list)
    synchronisations: list[Synchronisation] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    compiled: list[CompiledKernel] = field(default_factory=list)
    num_replays: int = 0

    def hazard(self, kind: str, text: str, where: str | None = None) -> None:
        """Note a hazard, once for each place and text."""
        found = Hazard(kind, text, where or place())
        if found not in self.hazards:
            self.hazards.append(found)

    def check(self) -> None:
        """Raise HazardError if there is one."""
        if self.hazards:
            raise HazardError("\n".join(f"{one.place}: {one.kind}: {one.text}" for one in self.hazards))

    def mark(self) -> Mark:
        """This moment."""
        return Mark(len(self.synchronisations), len(self.launches), len(self.compiled))

    def compiled_after(self, mark: Mark) -> list[CompiledKernel]:
        """The variants of kernels that a GPU would have compiled since, while its caller waits."""
        return self.compiled[mark.compiled :]

    def synchronised_after(self, mark: Mark) -> Counter[Synchronisation]:
        """How often the host has waited since, by what and where."""
        return Counter(self.synchronisations[mark.synchronisations :])

    def nearest(self, kernel: CompiledKernel) -> dict[str, tuple[str, str]] | None:
        """What tells a variant from the one compiled before it that is most like it; None for a kernel's first."""
        before = self.compiled[: self.compiled.index(kernel)]
        differences = [kernel.differs_from(other) for other in before if other.name == kernel.name]
        return min(differences, key=len, default=None)


def place() -> str:
    """file:line of the innermost caller that belongs neither to this instrument nor to a library or what wraps one."""
    frame = sys._getframe(1)
    while frame is not None:
        if (name := _source(frame.f_code.co_filename)) is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


@functools.cache
def _source(file: str) -> str | None:
    if not file.startswith(_ROOT) or "site-packages" in file:
        return None
    path = os.path.realpath(file)
    return None if os.path.dirname(path) == _ROOM or path == _COMPAT else os.path.relpath(path, _ROOT)
