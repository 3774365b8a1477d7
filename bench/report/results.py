"""Results files for the report."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paged.bench.limits import is_fault
from paged.tools.printable import xml_text

Json = dict[str, Any]

TITLES = {
    "attention": "Paged attention",
    "moe": "Experts",
    "kernels": "Kernels",
    "cache": "Cache, time on the host",
    "engine": "Engine",
    "tune_attention": "Tiles of attention",
    "tune_moe": "Tiles of experts",
    "verify": "Kernels against float64",
    "sanitize": "Concurrency sanitizer",
    "gpu": "Steps of the run",
}
"""Benchmark -> title, in the order of the page."""
# Limit of a result file, far above the largest. It bounds the memory for parsing, because Python takes up to 30 bytes
# per byte of JSON.
_MAX_BYTES = 16 << 20


class ResultsError(ValueError):
    """A file does not hold a benchmark's results."""


@dataclass(frozen=True)
class Run:
    """One results file. about: everything in the file except the rows."""

    file: str
    benchmark: str
    about: Json
    rows: list[Json]

    @cached_property
    def ratios(self) -> dict[str, float]:
        """Geometric mean of the ratios of each peer that was timed."""
        ratios: dict[str, list[float]] = {}
        for row in self.rows:
            for name, peer in row.get("peers", {}).items():
                ratios.setdefault(name, []).append(peer["ratio"])
        return {name: statistics.geometric_mean(ratios[name]) for name in ratios}

    @property
    def judged(self) -> list[bool]:
        """Whether each goal is met, without goals that could not be compared."""
        verdicts = []
        for row in self.rows:
            for goal in row.get("goals", []):
                if goal["met"] is not None:
                    verdicts.append(goal["met"])
        return verdicts

    @property
    def versions(self) -> str:
        """Versions of Python, packages and peers."""
        versions = {name: self.about.get(name) for name in ("python", "torch", "triton")}
        versions |= self.about.get("peers", {})
        return ", ".join(f"{name} {version}" for name, version in versions.items() if version)

    @property
    def notes(self) -> list[str]:
        """Notes that no table shows: missing cases, and remarks on the whole run."""
        notes = [f"{name}: {reason}" for name, reason in self.about.get("absent", {}).items()]
        not_run = self.about.get("not_run", [])
        if not_run:
            notes.append(f"Not run: {', '.join(map(str, not_run))}.")
        return notes

    @property
    def faults(self) -> dict[str, str]:
        """Reasons of refused cases, and of peers that were wrong or failed."""
        faults = dict(self.about.get("refused", {}))
        for row in self.rows:
            for peer, reason in row.get("absent", {}).items():
                if is_fault(reason):
                    faults[f"{row['name']}, {peer}"] = reason
        return faults


def read(path: Path) -> Run:
    """Read the run of a file.

    Raises:
        ResultsError: the file cannot be read, is no JSON, or holds no benchmark's results.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ResultsError(f"{path}: more than {_MAX_BYTES} bytes, which no benchmark writes")
        about = _shown(json.loads(text.decode()))
    except ResultsError:
        raise
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{path}: no JSON: {error}") from error
    benchmark: Any = type(about).__name__
    rows = "rows"
    if isinstance(about, dict):
        benchmark = about.get("benchmark")
    if benchmark == "gpu":
        rows = "steps"
    if not isinstance(about, dict) or benchmark not in list(TITLES) or rows not in about:
        raise ResultsError(f"{path}: {rows} of benchmark {benchmark!r}, expected one of {', '.join(TITLES)}")
    return Run(xml_text(path.name), benchmark, about, about.pop(rows))


def _shown(value: Any) -> Any:
    """Return the value with texts that are safe in a page and a terminal."""
    if isinstance(value, str):
        return xml_text(value)
    if isinstance(value, dict):
        return {xml_text(name): _shown(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return value
