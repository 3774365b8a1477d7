"""Results files for the report, checked so that every number it needs exists."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
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
    "sanitize": "Concurrency sanitizer",
    "gpu": "Steps of the run",
}
"""Whatever writes results, in the order of the page."""
_NUMBER, _TEXT, _MAYBE = (int, float), (str,), (int, float, type(None))
Schema = Any
"""Of a value its types; of a list one that holds its elements'; of an object those of its names, where "?" follows one
that may be missing and ... stands for every one."""
_ROW: Schema = {
    "name": _TEXT,
    **dict.fromkeys(
        ("median_us?", "p20_us?", "p80_us?", "bound_us?", "percent?", "gb_per_s?", "tflop_per_s?"), _NUMBER
    ),
    **dict.fromkeys(("value?", "over_chosen?", "planning_us?", "returncode?", "seconds?"), _NUMBER),
    **dict.fromkeys(("unit?", "bound_by?", "summary?"), _TEXT),
    "tile?": (str, dict),
    "peers?": {...: {"median_us": _NUMBER, "ratio": _NUMBER}},
    "absent?": {...: _TEXT},
    "goals?": [{"text": _TEXT, "value": _MAYBE, "met": (bool, type(None))}],
    "detail?": {...: _NUMBER},
}
_FILE: Schema = {"device": _TEXT, "date": _TEXT, "peers?": (dict,), "not_run?": (list,), "growth?": {...: _NUMBER}}
_FILE |= {"refused?": {...: _TEXT}, "absent?": {...: _TEXT}}
_FILE |= dict.fromkeys(("copy_gb_per_s?", "read_gb_per_s?", "matmul_tflop_per_s?"), _NUMBER)
_POSITIVE = ("ratio", "over_chosen")
# Of anything measured, in any unit: what is beyond it, or below its inverse, overflows in some ratio.
_LARGEST = 1e30
# The largest results have 200 KB; a file may be /dev/zero, and Python makes up to 30 bytes of every byte of JSON.
_MAX_BYTES = 16 << 20


class ResultsError(ValueError):
    """A file does not hold a benchmark's results, or its rows are incomplete."""


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
        found = [f"{name}: {factor:.2f} times as long." for name, factor in self.about.get("growth", {}).items()]
        found += [f"{name}: {reason}" for name, reason in self.about.get("absent", {}).items()]
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


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of all files, by benchmark.

    Raises:
        ResultsError: a file cannot be read, is no JSON, or does not hold what its benchmark writes.
    """
    runs = []
    for path in dict.fromkeys(paths):
        about = _checked(path)
        rows = about.pop("steps" if about["benchmark"] == "gpu" else "rows")
        runs.append(Run(xml_text(path.name), about["benchmark"], about, rows))
    return sorted(runs, key=lambda run: list(TITLES).index(run.benchmark))


def _checked(path: Path) -> Json:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ResultsError(f"{path}: more than {_MAX_BYTES} bytes, which no benchmark writes")
        results = _shown(json.loads(text.decode()))
    except ResultsError:
        raise
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{path}: no JSON: {error}") from error
    given = results.get("benchmark") if isinstance(results, dict) else type(results).__name__
    if not isinstance(results, dict) or not isinstance(given, str) or given not in TITLES:
        raise ResultsError(f"{path}: benchmark is {given!r}, expected one of {', '.join(TITLES)}")
    _check(results, {**_FILE, "steps" if given == "gpu" else "rows": [_ROW]}, f"{path}: ")
    return results


def _check(value: Any, schema: Schema, where: str) -> None:
    """Raise ResultsError unless `value` is as `schema` has it; `where` ends with the name of it."""
    if isinstance(schema, tuple):
        _check_kind(value, schema, where)
    elif isinstance(schema, list):
        _check_kind(value, (list,), where)
        for index, item in enumerate(value):
            _check(item, schema[0], f"{where}[{index}]")
    else:
        _check_kind(value, (dict,), where)
        for name, kind in (dict.fromkeys(value, schema[...]) if ... in schema else schema).items():
            if (own := name if ... in schema else name.removesuffix("?")) in value:
                _check(value[own], kind, f"{where}.{own}")
            elif own == name:
                raise ResultsError(f"{where}: no {name}")


def _check_kind(found: Any, kinds: tuple[type, ...], where: str) -> None:
    if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
        raise ResultsError(f"{where} is {found!r}, expected {' or '.join(kind.__name__ for kind in kinds)}")
    least = 1 / _LARGEST if where.rpartition(".")[2] in _POSITIVE else -_LARGEST
    if isinstance(found, int | float) and not least <= found <= _LARGEST:
        raise ResultsError(f"{where} is {found:.3g}, expected {least:g} to {_LARGEST:g}")


def _shown(value: Any) -> Any:
    """With all texts as a page and a terminal take them. Integers are as JSON has them, up to 4,300 digits:
    those beyond what a float holds become infinite, which no number that is looked at may be.
    """
    if isinstance(value, str):
        return xml_text(value)
    if isinstance(value, dict):
        return {xml_text(name): _shown(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if isinstance(value, int) and abs(value) > _LARGEST:
        return math.inf if value > 0 else -math.inf
    return value
