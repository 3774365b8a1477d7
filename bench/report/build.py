"""A page of what benchmark runs wrote.

    python -m bench.report.build RESULTS.json [RESULTS.json ...] --out DIR

Takes what the benchmarks of attention, moe, kernels, cache and engine, attention.tune and bench.gpu write with
--json, of one device or of several, and writes DIR/report.html, tables and charts, which needs no other file. What did
not run stands in no table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from paged.bench.benchmark import option_parser
from paged.bench.report.charts import charts
from paged.bench.report.page import page
from paged.bench.report.results import ResultsError, load_runs
from paged.printable import one_line


def main(argv: list[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Write the report; a file that is no results of a benchmark is an error, and then nothing is written."""
    parser = option_parser(__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path())
    args = parser.parse_args(argv)
    try:
        runs = load_runs(args.results)
    except ResultsError as error:
        parser.error(one_line(f"{type(error).__name__}: {error}"))
    found = charts(runs)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "report.html").write_text(page(runs, found), encoding="utf-8")
    except OSError as error:
        parser.error(one_line(f"--out {args.out}: {error.strerror or error}"))
    for chart in found:
        if not chart.panels:
            write(chart.title)
    write(f"{args.out / 'report.html'}: {sum(bool(chart.panels) for chart in found)} charts of {len(runs)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
