"""Workloads of a trace set as calls of operations, with the functions that may take the operations' places."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from paged.bench.traces.schema import Definition, Solution, TraceSet, Workload, read_set
from paged.bench.traces.solution import write
from paged.bench.traces.translations import translation_of
from paged.errors import InvalidInputError, PagedError
from paged.tools.recorder import write_call

REFERENCE = "its reference"


@dataclass(frozen=True)
class TraceCall:
    """A workload.

    name: of the definition, with the workload's id. operation, path: of its recorded call. candidates: name ->
    "module:function". refused: name of a solution -> why it is not called; under "", why the workload itself is not.
    """

    name: str
    operation: str = ""
    path: Path = Path()
    candidates: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def functions(self) -> list[str]:
        """Names of all solutions, and of the reference."""
        return [*self.candidates, *self.refused]

    def label(self, name: str) -> str:
        """Return the name of the call by a function; of the workload itself for ""."""
        if not name:
            return self.name
        return f"{self.name} by {name}"


@contextmanager
def calls_of(path: Path, only: str = "") -> Iterator[Iterator[TraceCall]]:
    """Read a trace set and yield its workloads as calls, whose files exist while the context is open.

    path: folder of the set, or a file of workloads in it. only: part of the definitions' names.

    Raises:
        InvalidInputError: there is no such set, or no workload of such a definition.
    """
    traces = read_set(path)
    workloads = [workload for workload in traces.workloads if only in workload.definition]
    if not workloads:
        raise InvalidInputError(f"{path}: no workload of a definition whose name contains {only!r}")
    with tempfile.TemporaryDirectory(prefix="paged-trace-") as name:
        sys.path.append(name)  # the process of a candidate looks for modules where this one does
        try:
            yield _calls(traces, workloads, Path(name))
        finally:
            sys.path.remove(name)


def _calls(traces: TraceSet, workloads: list[Workload], folder: Path) -> Iterator[TraceCall]:
    for number, workload in enumerate(workloads):
        name = f"{workload.definition} {workload.uuid[:8]}"
        try:
            call = _call(traces, workload, folder, number)
        except PagedError as error:
            call = TraceCall(name, refused={"": str(error)})
        yield call
    for solution in traces.solutions:
        if solution.definition not in traces.definitions:
            yield TraceCall(solution.definition, refused={solution.name: f"no definition {solution.definition}"})


def _call(traces: TraceSet, workload: Workload, folder: Path, number: int) -> TraceCall:
    definition = traces.definitions.get(workload.definition)
    if definition is None:
        raise InvalidInputError(f"no definition {workload.definition}")
    translation = translation_of(definition)
    torch.manual_seed(0)
    arguments = translation.arguments(definition, workload.read(definition, torch.device("cpu")))
    call = TraceCall(
        f"{definition.name} {workload.uuid[:8]}", translation.operation, folder / f"call-{number}.safetensors"
    )
    write_call(call.path, translation.operation, arguments)
    solutions = [_reference(definition)]
    solutions += [solution for solution in traces.solutions if solution.definition == definition.name]
    for solution in solutions:
        refusal = solution.refusal
        if refusal is not None:
            call.refused[solution.name] = refusal
            continue
        module = f"paged_trace_{number}_{len(call.candidates)}"
        call.candidates[solution.name] = write(solution, definition, folder, module)
    return call


def _reference(definition: Definition) -> Solution:
    return Solution(REFERENCE, definition.name, "python", "main.py::run", False, {"main.py": definition.reference})
