"""Which charts over a quantity a report has: the roofline, decode latency over the context, experts over the tokens."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from paged.bench.report.plot import Panel, Series, legend
from paged.bench.report.results import Json, Run
from paged.printable import xml_text


@dataclass(frozen=True)
class System:
    """Whose times. colour: of COLOURS; systems of one colour differ in marker and line."""

    label: str
    colour: str
    marker: str
    dashes: str = ""


OURS = System("ours", "ours", "●")
_SYSTEMS = {
    "vllm": System("vLLM", "vllm", "■"),
    "vllm-cpu": System("vLLM's CPU engine", "vllm", "■", "6 3"),
    "sdpa_cudnn": System("torch cuDNN", "torch", "▲"),
    "sdpa_flash": System("torch flash", "torch", "▼", "6 3"),
    "sdpa_math": System("torch math", "torch", "◆", "2 3"),
    "flex": System("torch flex", "torch", "◀", "6 3 2 3"),
    "torch_grouped_mm": System("torch grouped", "torch", "▶"),
    "transformers": System("transformers", "transformers", "✚"),
    "transformers_eager": System("transformers eager", "transformers", "⬟", "6 3"),
    "transformers_batched_mm": System("transformers batched", "transformers", "⬢", "2 3"),
    "flashinfer": System("FlashInfer", "flashinfer", "✖"),
}
# Light and dark. The hues are Okabe and Ito's (https://jfly.uni-koeln.de/color/), which colour-blind readers tell
# apart, their yellow and pink darkened for lines on white.
COLOURS = {
    "ours": ("#0072b2", "#56b4e9"),
    "vllm": ("#d55e00", "#ff8c42"),
    "torch": ("#009e73", "#34c79a"),
    "transformers": ("#aa4499", "#dd88cf"),
    "flashinfer": ("#c79100", "#f0c44c"),
    "ink": ("#1f2328", "#e6e8eb"),
    "muted": ("#656d76", "#9aa4af"),
    "grid": ("#e4e7eb", "#30363d"),
}
_LIMIT = System("limit", "muted", "", "2 3")
# Benchmark -> its rows' name, their markers outside of the cache and in it.
_ROOFLINE = {"attention": ("attention", "●○"), "moe": ("experts", "■□"), "kernels": ("other kernels", "▲△")}
Quantity = Callable[[Json], float]


@dataclass(frozen=True)
class Chart:
    """section: the benchmark that it is of, or "roofline". panels: as `Panel.drawn` gives them, with their `panel`;
    none where the title says why the chart is left out."""

    section: str
    title: str
    panels: Sequence[Json] = ()
    legend: Sequence[Series] = ()


def system(name: str) -> System:
    """The system of a peer's name in a row; an unknown one is drawn muted, under that name."""
    return _SYSTEMS.get(name, System(name, "muted", "★"))


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Every chart that these runs have rows for, and a sentence for each that cannot be drawn."""
    found = []
    for section, name, draw in _drawn(runs):
        try:
            title, panels = draw()
            drawn = [{"panel": panel, **panel.drawn()} for panel in panels]
            found += [Chart(section, title, drawn, list(legend(panels)))] if panels else []
        except (ValueError, ArithmeticError, LookupError) as error:
            # Numbers that no axis takes, or a batch without lengths, do not take the page with them.
            found.append(Chart(section, xml_text(f"{name} is left out: it cannot be drawn ({error}).")))
    return found


def _drawn(runs: Sequence[Run]) -> Iterator[tuple[str, str, Callable[[], tuple[str, list[Panel]]]]]:
    """Section, name and what draws it."""
    yield "roofline", "Roofline", partial(_roofline, [run for run in runs if run.benchmark in _ROOFLINE])
    for run in runs:
        if run.benchmark == "attention":
            yield "attention", f"Decode latency, {run.label}", partial(_decode_latency, run)
        if run.benchmark == "moe":
            models: dict[str, list[Json]] = {}
            for row in run.rows:
                parts = [part for part in row["name"].split(".") if part != row["routing"] and not part.isdigit()]
                models.setdefault(".".join(parts), []).append(row)
            for model, rows in models.items():
                yield "moe", f"{model}, {run.label}", partial(_experts, model, rows, run)


def _roofline(runs: Sequence[Run]) -> tuple[str, list[Panel]]:
    """Every row that has matrix products, under the ceilings measured in its run; a panel a device."""
    rows = [(run, row) for run in runs if run.ceilings for row in run.rows if row["tflop_per_s"] > 0]
    panels = []
    for device in dict.fromkeys(run.about["device"] for run, _ in rows):
        own = [
            (run, row, 1e3 * row["tflop_per_s"] / row["gb_per_s"]) for run, row in rows if run.about["device"] == device
        ]
        bandwidth, peak = (max(run.ceilings[index] for run, *_ in own if run.ceilings) for index in (0, 1))
        ridge = 1e3 * peak / bandwidth
        ends = [min(x for *_, x in own), ridge, max(x for *_, x in own)]
        roof = [(x, min(peak, x * bandwidth / 1e3), "") for x in sorted(ends)]
        series = [Series(f"{bandwidth:,.4g} GB/s and {peak:,.4g} TFLOP/s", "ink", roof)]
        for (benchmark, (name, markers)), cold in itertools.product(_ROOFLINE.items(), (True, False)):
            points = [
                (x, row["tflop_per_s"], f"{row['name']}: {row['tflop_per_s']:.4g} TFLOP/s, {row['percent']:.0f} %")
                for run, row, x in own
                if run.benchmark == benchmark and row.get("cold", True) == cold
            ]
            label, marker = (name, markers[0]) if cold else (f"{name} that fit the cache", markers[1])
            series.append(Series(label, "ours", points, marker, None))
        panels.append(Panel(f"{device}: TFLOP/s", "FLOP a byte", series))
    share = statistics.median(row["percent"] for _, row in rows) if rows else 0
    return f"Roofline: the median of {len(rows)} rows reaches {share:.0f} % of its roof", panels


def _decode_latency(run: Run) -> tuple[str, list[Panel]]:
    """Time of a decode step over the context, a panel for each batch that was measured at several contexts."""
    batches: dict[tuple[int, str, int], list[Json]] = {}
    for row in run.rows:
        if row["kind"] == "decode" and len(row["groups"]) == 1:
            heads = "/".join(map(str, row["heads"]))
            batches.setdefault((row["groups"][0][0], heads, row["block_size"]), []).append(row)
    panels = [
        Panel(f"{count} x {heads} heads, blocks of {block_size}: µs", "context, tokens", _times(rows, _context), 4)
        for (count, heads, block_size), rows in sorted(batches.items())
        if len(set(map(_context, rows))) > 1
    ]
    return f"Decode latency over the context, {run.label}", panels


def _experts(model: str, rows: Sequence[Json], run: Run) -> tuple[str, list[Panel]]:
    """Of one model: time, share of the limit and speed over peers, over the number of tokens and by routing."""
    panels = []
    for routing in sorted({row["routing"] for row in rows}):
        part = [row for row in rows if row["routing"] == routing]
        if len(set(map(_tokens, part))) > 1:
            percent = _systems(part, _tokens, lambda row, own: 100 * own["bound_us"] / row["median_us"], "%")
            ratios = _systems(part, _tokens, lambda row, own: row["median_us"] / own["median_us"], "times ours")
            panels.append(Panel(f"{routing}: time, µs", "tokens", _times(part, _tokens), 4))
            panels.append(Panel(f"{routing}: % of the limit", "tokens", percent, 4, 0))
            panels += [Panel(f"{routing}: time over ours", "tokens", ratios, 4, 2)] if len(ratios) > 1 else []
    share = statistics.median(row["percent"] for row in rows)
    return f"{model}: the median is {share:.0f} % of the limit, {run.label}", panels


def _context(row: Json) -> float:
    return float(row["groups"][0][2])


def _tokens(row: Json) -> float:
    return float(row["tokens"])


def _times(rows: Sequence[Json], x: Quantity) -> list[Series]:
    """In microseconds, with the limit."""
    bounds = sorted((x(row), row["bound_us"], "") for row in rows)
    limit = Series(_LIMIT.label, _LIMIT.colour, bounds, dashes=_LIMIT.dashes)
    return [*_systems(rows, x, lambda row, _: row["median_us"], "µs"), limit]


def _systems(rows: Sequence[Json], x: Quantity, y: Callable[[Any, Json], float], unit: str) -> list[Series]:
    """A line for ours and for each peer of these rows; `y` is of a system's row and of ours in the same case."""
    found = []
    for name in (None, *dict.fromkeys(name for row in rows for name in row.get("peers", {}))):
        who = system(name) if name else OURS
        times = [(row, row["peers"][name] if name else row) for row in rows if not name or name in row.get("peers", {})]
        values = sorted((x(own), y(row, own), own["name"]) for own, row in times)
        points = [(at, value, f"{who.label}, {case}: {value:,.4g} {unit}") for at, value, case in values]
        found.append(Series(who.label, who.colour, points, who.marker, who.dashes))
    return found
