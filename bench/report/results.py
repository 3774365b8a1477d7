"""Results files for the report."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paged.printable import xml_text

Json = dict[str, Any]

TITLES = {
    "attention": "Paged attention",
    "moe": "Experts",
    "kernels": "Kernels",
    "cache": "Cache, time on the host",
    "engine": "Engine",
    "tune_attention": "Tiles of attention",
    "verify": "Kernels against float64",
    "sanitize": "Concurrency sanitizer",
    "gpu": "Steps of the run",
}
"""Whatever writes results, in the order of the page."""
# The largest results have 200 KB; a file may be /dev/zero, and Python makes up to 30 bytes of every byte of JSON.
_MAX_BYTES = 16 << 20


class ResultsError(ValueError):
    """A file does not hold a benchmark's results."""


@dataclass(frozen=True)
class Run:
    """One results file. about: everything except its rows."""

    file: str
    benchmark: str
    about: Json
    rows: list[Json]

    @cached_property
    def ratios(self) -> dict[str, float]:
        """Whoever has a time in at least one row, and the geometric mean of its ratios."""
        found: dict[str, list[float]] = {}
        for row in self.rows:
            for name, peer in row.get("peers", {}).items():
                found.setdefault(name, []).append(peer["ratio"])
        return {name: statistics.geometric_mean(ratios) for name, ratios in found.items()}

    @property
    def judged(self) -> list[bool]:
        """Every goal that something could be compared with: met or not."""
        return [goal["met"] for row in self.rows for goal in row.get("goals", []) if goal["met"] is not None]

    @property
    def versions(self) -> str:
        """Of everything that took part."""
        named = {name: self.about[name] for name in ("python", "torch", "triton") if self.about.get(name)}
        return ", ".join(f"{name} {version}" for name, version in (named | self.about.get("peers", {})).items())

    @property
    def notes(self) -> list[str]:
        """Notes that are in no table: missing cases, and remarks on the whole run."""
        found = [f"{name}: {reason}" for name, reason in self.about.get("absent", {}).items()]
        if not_run := self.about.get("not_run", []):
            found.append(f"Not run: {', '.join(map(str, not_run))}.")
        return found

    @property
    def faults(self) -> dict[str, str]:
        """What was refused its row, and peers that were wrong or failed, with the reason."""
        return dict(self.about.get("refused", {})) | {
            f"{row['name']}, {peer}": reason
            for row in self.rows
            for peer, reason in row.get("absent", {}).items()
            if is_fault(reason)
        }


def is_fault(reason: str) -> bool:
    """A peer that took part and was wrong or failed, unlike one that is not there or cannot take the case."""
    return reason.startswith(("wrong", "failed"))


def read(path: Path) -> Run:
    """The run of a file.

    Raises:
        ResultsError: it cannot be read, is no JSON, or no benchmark's results.
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
    benchmark = about.get("benchmark") if isinstance(about, dict) else type(about).__name__
    rows = "steps" if benchmark == "gpu" else "rows"
    if not isinstance(about, dict) or benchmark not in list(TITLES) or rows not in about:
        raise ResultsError(f"{path}: {rows} of benchmark {benchmark!r}, expected one of {', '.join(TITLES)}")
    return Run(xml_text(path.name), benchmark, about, about.pop(rows))


def _shown(value: Any) -> Any:
    """With all texts as a page and a terminal take them."""
    if isinstance(value, str):
        return xml_text(value)
    if isinstance(value, dict):
        return {xml_text(name): _shown(item) for name, item in value.items()}
    return [_shown(item) for item in value] if isinstance(value, list) else value
