"""Tables and a roofline of what benchmark runs wrote.

    python -m bench.report RESULTS.json [RESULTS.json ...] --out DIR

Takes what bench_attention, bench_moe, bench_kernels and bench.gpu write with --json, and writes DIR/report.md and
DIR/roofline.png (where matplotlib is installed). What did not run stands in no table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Results = dict[str, Any]


def environment_text(results: Results) -> str:
    """The device, the ceilings measured in the same run, and the versions."""
    versions = {name: results[name] for name in ("torch", "triton") if results[name]} | results.get("peers", {})
    return (
        f"{results['device']}, {results['dtype']}, {results['date']}. Measured in this run: copy "
        f"{results['copy_gb_per_s']:,.0f} GB/s, read {results['read_gb_per_s']:,.0f} GB/s, matrix product "
        f"{results['matmul_tflop_per_s']:,.1f} TFLOP/s. {', '.join(f'{name} {v}' for name, v in versions.items())}."
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; numbers stand at the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _microseconds(row: Results) -> str:
    return f"{row['median_us']:,.1f} ({row['p20_us']:,.1f} to {row['p80_us']:,.1f})"


def _limit(row: Results) -> list[str]:
    return [
        _microseconds(row),
        f"{row['bound_us']:,.1f}",
        f"{row['percent']:.1f} % of {row['bound_by']}",
        f"{row['gb_per_s']:,.0f}",
        f"{row['tflop_per_s']:,.4g}",
    ]


_LIMIT_HEADER = ["case", "us, median (p20 to p80)", "limit, us", "share of limit", "GB/s", "TFLOP/s"]


def attention_section(results: Results) -> str:
    """A table of times, peers and goals for each kind of batch, then what is wrong or did not run."""

    def more(row: Results) -> list[str]:
        host = "" if row["host_us"] is None else f"{row['host_us']:,.1f}"
        return [f"{row['per_sequence_bound_us']:,.1f}", f"{row['planning_us']:,.1f}", host]

    return _compared("Paged attention", results, "kind", ["limit by sequence, us", "planning, us", "host, us"], more)


def moe_section(results: Results) -> str:
    """As `attention_section`, a table for each model."""

    def more(row: Results) -> list[str]:
        return [f"{row['active_experts']} of {row['local_experts']}"]

    return _compared("Fused MoE", results, "model", ["experts hit"], more)


def _compared(
    title: str, results: Results, key: str, more_header: list[str], more: Callable[[Results], list[str]]
) -> str:
    parts = [f"## {title}", environment_text(results)]
    for group in dict.fromkeys(row[key] for row in results["rows"]):
        rows = [row for row in results["rows"] if row[key] == group]
        peers = list(dict.fromkeys(name for row in rows for name in row["peers"]))
        header = [*_LIMIT_HEADER, *more_header, *(f"{name}, us (ratio)" for name in peers), "goals"]
        cells = [
            [row["name"] + ("" if row["cold"] else " (warm)"), *_limit(row), *more(row), *_peer_cells(row, peers)]
            for row in rows
        ]
        parts += [f"### {group}", table(header, cells)]
    judged = [goal["met"] for row in results["rows"] for goal in row["goals"] if goal["met"] is not None]
    if judged:
        parts.insert(2, f"Goals met: {sum(judged)} of {len(judged)}.")
    faults = [
        f"- {row['name']}: {peer} {reason}"
        for row in results["rows"]
        for peer, reason in row["absent"].items()
        if reason.startswith(("wrong", "failed"))
    ]
    return "\n\n".join([*parts, *_outside(results, faults)])


def _peer_cells(row: Results, peers: Sequence[str]) -> Iterable[str]:
    for name in peers:
        peer = row["peers"].get(name)
        yield "" if peer is None else f"{peer['median_us']:,.1f} ({peer['ratio']:.2f}x)"
    yield "; ".join(verdict(goal) for goal in row["goals"] if goal["met"] is not None)


def verdict(goal: Results) -> str:
    """A goal, whether it is met, and what was reached."""
    return f"{goal['text']}: {'met' if goal['met'] else 'MISSED'} ({goal['value']:.2f})"


def kernel_section(results: Results) -> str:
    """One table of all operations."""
    rows = ([row["name"] + ("" if row["cold"] else " (warm)"), *_limit(row)] for row in results["rows"])
    return "\n\n".join(["## Kernels", environment_text(results), table(_LIMIT_HEADER, rows), *_outside(results, [])])


def _outside(results: Results, faults: list[str]) -> list[str]:
    lines = [f"- {name}: {reason}" for name, reason in results["refused"].items()] + faults
    not_run = results.get("not_run", [])
    return (["Refused, wrong or failed:\n\n" + "\n".join(lines)] if lines else []) + (
        [f"Not run: {', '.join(not_run)}."] if not_run else []
    )


def run_section(results: Results) -> str:
    """What `bench.gpu` ran."""
    rows = []
    for step in results["steps"]:
        ended = "well" if step["returncode"] == 0 else f"failed ({step['returncode']})"
        rows.append([step["name"], ended, f"{step['seconds']:.0f}", step["summary"].replace("|", "\\|")])
    return "## Run\n\n" + table(["step", "ended", "s", "last line"], rows)


def section_of(results: Results) -> Callable[[Results], str]:
    """How a file is told, from what stands in it."""
    if "steps" in results:
        return run_section
    if "geometric_means" in results:
        return moe_section
    return attention_section if "not_run" in results else kernel_section


def roofline(runs: Sequence[Results], path: Path) -> str | None:
    """Draw rows of attention under the ceilings of their runs; returns why nothing was drawn, or None."""
    runs = [run for run in runs if section_of(run) is attention_section and run["rows"]]
    if not runs:
        return "no rows of attention"
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed"
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    for run in runs:
        bandwidth, peak = max(run["copy_gb_per_s"], run["read_gb_per_s"]) / 1e3, run["matmul_tflop_per_s"]
        intensities = [row["flops"] / row["num_bytes"] for row in run["rows"]]
        ends = [min(*intensities, peak / bandwidth) / 2, peak / bandwidth, max(*intensities, peak / bandwidth) * 2]
        axes.plot(ends, [bandwidth * ends[0], peak, peak], color="black", linewidth=1, label=run["device"])
        for name, marker in (("paged", "o"), *zip(_peers_of(run), "xv^s+*", strict=False)):
            points = [
                (intensity, (row if name == "paged" else row["peers"][name])["tflop_per_s"])
                for intensity, row in zip(intensities, run["rows"], strict=True)
                if name == "paged" or name in row["peers"]
            ]
            axes.scatter(*zip(*points, strict=True), marker=marker, label=name, alpha=0.7)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    axes.legend()
    axes.grid(visible=True, which="both", alpha=0.2)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return None


def _peers_of(run: Results) -> list[str]:
    return list(dict.fromkeys(name for row in run["rows"] for name in row["peers"]))


def main(argv: list[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Write the report; an unreadable or unknown file is an error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path())
    args = parser.parse_args(argv)
    runs = [json.loads(path.read_text()) for path in args.results]
    for path, run in zip(args.results, runs, strict=True):
        if not {"rows", "steps"} & run.keys():
            parser.error(f"{path}: holds no rows of a benchmark and no steps of a run")
    args.out.mkdir(parents=True, exist_ok=True)
    reason = roofline(runs, args.out / "roofline.png")
    picture = ["![roofline](roofline.png)"] if reason is None else []
    report = "\n\n".join(["# Benchmark", *(section_of(run)(run) for run in runs), *picture]) + "\n"
    (args.out / "report.md").write_text(report)
    write("report.md written" + ("" if reason is None else f"; no roofline: {reason}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
