"""Results files as the report reads them: checked, so that what follows can count on every number it needs."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from paged.printable import xml_text

Json = dict[str, Any]

_NUMBER, _TEXT, _MAYBE = (int, float), (str,), (int, float, type(None))
_TIMES = dict.fromkeys(("median_us", "p20_us", "p80_us"), _NUMBER)
_SPEED = {**_TIMES, **dict.fromkeys(("bound_us", "percent", "gb_per_s", "tflop_per_s"), _NUMBER), "bound_by": _TEXT}
_BATCH = {"kind": _TEXT, "batch": _TEXT, "groups": [[(int,)]], "heads": (list,)}
Schema = Any
"""Of a value its types; of a list one that holds its elements'; of an object those of its names, where "?" follows one
that may be missing and ... stands for every one."""
SCHEMAS: dict[str, Schema] = {
    "attention": {"name": _TEXT, **_SPEED, **_BATCH, "block_size": _NUMBER},
    "moe": {"name": _TEXT, **_SPEED, "model": _TEXT, "routing": _TEXT, "tokens": _NUMBER},
    "kernels": {"name": _TEXT, **_SPEED},
    "cache": {"name": _TEXT, **_TIMES},
    "engine": {"name": _TEXT, "value": _NUMBER, "unit": _TEXT},
    "tune_attention": {"name": _TEXT, **_SPEED, "tile": (str, dict)},
    "gpu": {"name": _TEXT, "returncode": _NUMBER, "seconds": _NUMBER, "summary": _TEXT},
}
"""What every row must hold, by what writes it; of "gpu", every step."""
_ROW_OPTIONS: Schema = {
    "peers?": {...: {"median_us": _NUMBER, "ratio": _NUMBER}},
    "absent?": {...: _TEXT},
    "goals?": [{"text": _TEXT, "value": _MAYBE, "met": (bool, type(None)), "reached?": _MAYBE}],
    "detail?": {...: _NUMBER},
    **dict.fromkeys(("per_sequence_bound_us?", "planning_us?", "host_us?"), _MAYBE),
}
_FILE: Schema = {"device": _TEXT, "date": _TEXT, "peers?": (dict,), "not_run?": (list,), "growth?": {...: _NUMBER}}
_FILE |= {"refused?": {...: _TEXT}, "absent?": {...: _TEXT}}
_POSITIVE = ("median_us", "ratio", "bound_us", "gb_per_s", "tokens")
# Of anything measured, in any unit: what is beyond it, or below its inverse, overflows in some ratio.
_LARGEST = 1e30
# The largest results have 200 KB; a file may be /dev/zero, and Python makes up to 30 bytes of every byte of JSON.
_MAX_BYTES = 16 << 20
_CEILINGS = ("copy_gb_per_s", "read_gb_per_s", "matmul_tflop_per_s")


class ResultsError(ValueError):
    """A file does not hold a benchmark's results, or only a part of what its rows must hold."""


@dataclass(frozen=True)
class Run:
    """One file. about: all but its rows. label: its device, and more where that does not tell it from another run."""

    file: str
    benchmark: str
    about: Json
    rows: list[Json]
    label: str

    @property
    def ceilings(self) -> tuple[float, float] | None:
        """GB/s and TFLOP/s that the device was measured to reach."""
        found = [float(value) for name in _CEILINGS if is_number(value := self.about.get(name))]
        if len(found) < len(_CEILINGS) or not all(1 / _LARGEST <= value <= _LARGEST for value in found):
            return None
        copy, read, matmul = found
        return max(copy, read), matmul

    @cached_property
    def peers(self) -> list[str]:
        """Whoever has a time in at least one row."""
        return list(dict.fromkeys(name for row in self.rows for name in row.get("peers", {})))

    def geometric_mean(self, peer: str) -> float:
        """Of the peer's ratios, over the rows that have one."""
        return statistics.geometric_mean(
            row["peers"][peer]["ratio"] for row in self.rows if peer in row.get("peers", {})
        )

    @cached_property
    def chosen_us(self) -> dict[str, float]:
        """Of every case the mean time of the chooser's tile, which is timed first and last."""
        times: dict[str, list[float]] = {}
        for row in self.rows:
            if isinstance(row.get("tile"), str):
                times.setdefault(row["name"], []).append(row["median_us"])
        return {name: statistics.mean(found) for name, found in times.items()}

    @property
    def judged(self) -> list[bool]:
        """Every goal that something could be compared with: met or not."""
        return [goal["met"] for row in self.rows for goal in row.get("goals", []) if goal["met"] is not None]

    @property
    def faults(self) -> dict[str, str]:
        """What was refused its row, and peers that were wrong or failed, with the reason."""
        return dict(self.about.get("refused", {})) | {
            f"{row['name']}, {peer}": reason
            for row in self.rows
            for peer, reason in row.get("absent", {}).items()
            if is_fault(reason)
        }


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value of a field that no schema names is one that can be drawn."""
    return isinstance(value, _NUMBER) and not isinstance(value, bool) and math.isfinite(value)


def is_fault(reason: str) -> bool:
    """A peer that took part and was wrong or failed, unlike one that is not there or cannot take the case."""
    return reason.startswith(("wrong", "failed"))


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of all files, by benchmark.

    Raises:
        ResultsError: a file cannot be read, is no JSON, or does not hold what its benchmark writes.
    """
    paths = list(dict.fromkeys(paths))
    found = [_checked(path) for path in paths]
    runs = [
        Run(
            file=xml_text(path.name),
            benchmark=results["benchmark"],
            about={name: value for name, value in results.items() if name not in ("rows", "steps")},
            rows=results["steps" if results["benchmark"] == "gpu" else "rows"],
            label=label,
        )
        for path, results, label in zip(paths, found, _labels(paths, found), strict=True)
    ]
    return sorted(runs, key=lambda run: list(SCHEMAS).index(run.benchmark))


def _labels(paths: Sequence[Path], found: Sequence[Json]) -> list[str]:
    """Device, with the day, the whole date or the file's path where it takes that to tell a benchmark's runs apart."""
    choices = [
        [device, f"{device}, {date[:10]}", f"{device}, {date}", f"{device}, {xml_text(path)}"]
        for path, device, date in ((path, run["device"], run["date"]) for path, run in zip(paths, found, strict=True))
    ]
    labels = []
    for run, own in zip(found, choices, strict=True):
        others = [other for other, their in zip(choices, found, strict=True) if their["benchmark"] == run["benchmark"]]
        counts = [Counter(column) for column in zip(*others, strict=True)]
        labels.append(next((label for label, count in zip(own, counts, strict=True) if count[label] == 1), own[-1]))
    return labels


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
    if not isinstance(results, dict) or not isinstance(given, str) or given not in SCHEMAS:
        raise ResultsError(f"{path}: benchmark is {given!r}, expected one of {', '.join(SCHEMAS)}")
    rows = "steps" if given == "gpu" else "rows"
    _check(results, {**_FILE, rows: [SCHEMAS[given] | _ROW_OPTIONS]}, f"{path}: ")
    for index, row in enumerate(results[rows]):
        for goal in row.get("goals", []):
            if (goal["value"] is None) != (goal["met"] is None):
                raise ResultsError(f"{path}: {rows}[{index}].goals: only one of value and met is null")
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
        for name, item in value.items() if ... in schema else ():
            _check(item, schema[...], f"{where}.{name}")
        for name, kind in schema.items() if ... not in schema else ():
            if (own := name.removesuffix("?")) in value:
                _check(value[own], kind, f"{where}.{own}")
            elif own == name:
                raise ResultsError(f"{where}: no {name}, expected {_expected(kind)}")


def _expected(schema: Schema) -> str:
    kinds = schema if isinstance(schema, tuple) else (type(schema),)
    return " or ".join(kind.__name__ for kind in kinds)


def _check_kind(found: Any, kinds: tuple[type, ...], where: str) -> None:
    if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
        raise ResultsError(f"{where} is {found!r}, expected {_expected(kinds)}")
    least = 1 / _LARGEST if where.rpartition(".")[2] in _POSITIVE else -_LARGEST
    if isinstance(found, int | float) and not least <= found <= _LARGEST:
        raise ResultsError(f"{where} is {found:.3g}, expected {least:g} to {_LARGEST:g}")


def _shown(value: Any) -> Any:
    """With all texts as a page, a chart and a terminal take them. Integers are as JSON has them, up to 4,300 digits:
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
