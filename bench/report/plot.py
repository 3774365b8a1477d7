"""Panels of points and lines: where everything stands in a box, which the page's template draws as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 380, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 350, 10, 190
# Intervals between ticks of a logarithmic axis, whose labels of up to 6 letters take 40 pixels.
_MOST_INTERVALS = 6
Point = tuple[float, float, str]
"""x, y, and what the point says when pointed at."""


@dataclass(frozen=True)
class Series:
    """colour: of the page's variables. marker: a letter of Unicode; none where points are not shown. dashes: of the
    line through the points as SVG takes them; None without a line."""

    label: str
    colour: str
    points: Sequence[Point]
    marker: str = ""
    dashes: str | None = ""


@dataclass(frozen=True)
class Panel:
    """x_base, y_base: of a logarithmic axis; 0 for one of percents from 0 on."""

    title: str
    x_label: str
    series: Sequence[Series]
    x_base: int = 10
    y_base: int = 10

    def drawn(self) -> dict[str, Any]:
        """Ticks as (position, text), and each series with its path and marks.

        Raises:
            ValueError, ArithmeticError: a number has no place on an axis, as 0 has none on a logarithmic one.
        """
        shown = [series for series in self.series if series.points]
        points = [point for series in shown for point in series.points]
        x_place, x_ticks = _axis([x for x, _, _ in points], self.x_base, _LEFT, _RIGHT)
        y_place, y_ticks = _axis([y for _, y, _ in points], self.y_base, _BOTTOM, _TOP)
        lines = []
        for series in shown:
            marks = [(x_place(x), y_place(y), tip) for x, y, tip in series.points]
            path = "" if series.dashes is None else "M" + " ".join(f"{x} {y}" for x, y, _ in marks)
            lines.append({"series": series, "path": path, "marks": marks if series.marker else []})
        return {"x_ticks": x_ticks, "y_ticks": y_ticks, "lines": lines}


def _axis(
    values: Sequence[float], base: int, start: int, end: int
) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """Where a value stands between `start` and `end`, and ticks there."""

    def place(value: float) -> float:
        scaled = math.log(value, base) if base else value
        return round(start + (end - start) * (scaled - low) / (high - low), 1)

    low, high, ticks = 0.0, 100.0, []
    if base:
        exponents = [math.log(value, base) for value in values]
        low = math.floor(min(exponents) + 1e-9)
        high = max(math.ceil(max(exponents) - 1e-9), low + 1)
        step = -(-int(high - low) // _MOST_INTERVALS)
        ticks = [float(base) ** power for power in range(int(low), int(high) + 1, step)]
    else:
        high *= 2 ** max(0, math.ceil(math.log2(max(*values, 100) / 100)))
        low = min(0.0, *values)
        ticks = [high * quarter / 4 for quarter in range(5)]
    return place, [(place(tick), _short(tick, base)) for tick in ticks]


def _short(value: float, base: int) -> str:
    """Counts, whose axes have a base of 4, in multiples of 1,024."""
    return f"{value / 1024:g}k" if base == 4 and 1024 <= value < 1 << 20 else f"{value:,.6g}"


def legend(panels: Sequence[Panel]) -> Iterator[Series]:
    """Each label once."""
    found = {series.label: series for panel in panels for series in panel.series if series.points}
    yield from found.values()
