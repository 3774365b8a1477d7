"""Run tests in many processes, a few in each, so that a crash, a hang or a lost GPU affects few of them.

    python -m bench.suite PATH ... [--processes N] [--limit SECONDS] [--skip REGEX] [--done FILE] [PYTEST OPTIONS]

Needs only pytest. A process's output is printed when the process ends; without failures, only its last line. A process
without a finished test for SECONDS is killed. If a process ends early, another runs the tests that it had not begun.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from paged.bench.benchmark import option_parser

_PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--no-header"]
_FAILED, _NO_TESTS = 1, 5


def collected(options: Sequence[str]) -> tuple[list[str], str]:
    """Return the ids of the tests that pytest finds with `options`, in order, and its errors about unreadable files."""
    command = [*_PYTEST, *options, "--collect-only", "-q", "--continue-on-collection-errors"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    ids = []
    for line in process.stdout.splitlines():
        if "::" in line and not line.startswith(("ERROR", " ")):
            ids.append(line)
    if process.returncode in (0, _NO_TESTS):
        return ids, ""
    return ids, process.stdout + process.stderr


def groups(ids: Sequence[str], max_tests: int) -> list[list[str]]:
    """Group at most `max_tests` tests of a file, because tests of a file share its fixtures."""
    by_file = defaultdict(list)
    for test in ids:
        by_file[test.partition("::")[0]].append(test)
    parts = []
    for tests in by_file.values():
        for start in range(0, len(tests), max_tests):
            parts.append(tests[start : start + max_tests])
    return parts


def run_group(ids: Sequence[str], limit: float, note: Callable[[str], object]) -> tuple[int, str]:
    """Run tests in a process; return its exit code and its output.

    The code is -9 if the process was killed after `limit` seconds of silence. If it ended early, other processes run
    the tests that it had not begun, and their output follows. note: called with every line as soon as it is printed.
    """
    code, text = _run_process(ids, limit, note)
    waiting = [test for test in ids if f"\n{test} " not in text]
    if code in (0, _FAILED, _NO_TESTS) or len(waiting) in (0, len(ids)):
        return code, text
    return code, text + run_group(waiting, limit, note)[1]


def _run_process(ids: Sequence[str], limit: float, note: Callable[[str], object]) -> tuple[int, str]:
    text = ""
    with tempfile.NamedTemporaryFile("w+", suffix=".txt") as file:
        file.write("\n".join(ids))
        file.flush()
        # Verbose, so that the last line of a killed process is its current test.
        command = [*_PYTEST, "-v", "-rf", "--tb=short", f"@{file.name}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            watch = _timer(limit, process)
            for line in process.stdout:
                watch.cancel()
                note(line)
                text += line
                watch = _timer(limit, process)
            process.wait()
            watch.cancel()
    return process.returncode, text


def _timer(seconds: float, process: subprocess.Popen[str]) -> threading.Timer:
    """Return a timer that kills the process after this many seconds, unless it is cancelled."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    return timer


def main(argv: list[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Run the tests; the exit code is 1 if one failed, a process was killed, or a file cannot be read."""
    parser = option_parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="longest time without a finished test; default: %(default)s",
    )
    parser.add_argument("--skip", type=re.compile, help="leave out tests whose id contains a match")
    parser.add_argument("--done", type=Path, help="leave out tests whose ids are in this file; add tests that pass")
    args, options = parser.parse_known_args(argv)
    ids, errors = collected(options)
    write(errors)
    if args.done and args.done.exists():
        done = set(args.done.read_text().splitlines())
        ids = [test for test in ids if test not in done]
    if args.skip:
        ids = [test for test in ids if not args.skip.search(test)]
    # Make two groups for each process, so that none waits long for the last one. More groups would start too often.
    parts = groups(ids, max(40, len(ids) // (2 * args.processes)))
    num_failed = 0

    def note(line: str) -> None:
        """Save each passed test at once, in case this process is killed."""
        passed = re.match("(.+::.+) PASSED", line)
        if passed and args.done:
            with args.done.open("a") as file:
                file.write(f"{passed[1]}\n")

    with ThreadPoolExecutor(args.processes) as pool:
        files = {}
        for part in parts:
            files[pool.submit(run_group, part, args.limit, note)] = part[0].partition("::")[0]
        for future in as_completed(files):
            code, text = future.result()
            lines = [line for line in text.splitlines() if " PASSED" not in line]
            if code in (0, _NO_TESTS):
                lines = lines[-1:]
            else:
                num_failed += 1
            write("\n".join([*lines, f"{files[future]}: exit code {code}"]))
    write(f"{len(ids)} tests, {len(parts) - num_failed} groups passed, {num_failed} groups failed")
    return int(bool(errors or num_failed))


if __name__ == "__main__":
    sys.exit(main())
