"""Paged attention against the hardware's limits and against others' attention, in one process on the same tensors.

    python -m bench.attention.run [--json FILE] [--only NAME] [--budget SECONDS] [--small]
    pytest bench/attention/run.py --benchmark-json=FILE      the rows stand in extra_info

A GPU runs bfloat16 at full size, in turns with the peers out of CUDA graphs; a CPU the PyTorch twin in float32 at small
sizes. Block tables are shuffled; each call reads another layer's tensors than the last, more than the cache can hold.

A row is of a call whose plan was made before, as for all layers of a step but the first; `planning_us` is what making
it adds. `host_us` is the host's time in a call outside a graph. A row that differs from the float64 reference is
refused; a peer that does, or that differs from ours, gets no ratio. Peers that are missing say so: vLLM's files come on
PYTHONPATH.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from paged.bench.attention.cases import CASES, AttentionCase
from paged.bench.attention.measurement import Measurement
from paged.bench.attention.peers import PEERS, Peer
from paged.bench.check import WrongResultError
from paged.bench.environment import DEVICE, benchmark_dtype, environment, parse_options
from paged.bench.goal import verdict
from paged.bench.limits import Ceilings
from paged.bench.timing import ceilings

REPEATS = {"cuda": 50, "cpu": 10}
MIN_REPEATS = 10
# A case takes no more samples than fit in this time, beyond MIN_REPEATS: 16k prompts take 60 ms and more a sample.
MAX_SECONDS = 2.0


@functools.cache
def present_peers(device: torch.device) -> dict[str, Peer | str]:
    """Every peer, or why it is missing."""
    return {peer.name: peer.missing(device) or peer for peer in PEERS}


def pytest_generate_tests(metafunc: Any) -> None:
    """Parametrise without importing pytest, which the command line does not need."""
    metafunc.parametrize("case", CASES, ids=[case.name for case in CASES])


def test_attention(case: AttentionCase, benchmark: Any) -> None:
    """One row of the pytest-benchmark suite, whose own statistics are of a sample of everyone."""
    device, repeats = torch.device(DEVICE), REPEATS[DEVICE]
    limits = ceilings(device, benchmark_dtype(device), repeats)
    measurement = Measurement(case if DEVICE == "cuda" else case.small(), device, present_peers(device))
    benchmark.pedantic(measurement.take, rounds=repeats)
    benchmark.extra_info.update(environment("attention", device, limits), **measurement.row(limits))


def main(argv: list[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Print a line a case; the exit code is 1 where one was refused. A missed goal is no error."""
    options = parse_options(__doc__, argv, REPEATS)
    device, repeats = options.device, options.repeats
    is_small = options.scale == "small"
    limits, peers = ceilings(device, benchmark_dtype(device), repeats), present_peers(device)
    report: dict[str, Any] = environment("attention", device, limits)
    write("\n".join(f"{name}: {value}" for name, value in report.items()))
    write("\n".join(f"{name}: {peer}" for name, peer in peers.items() if isinstance(peer, str)))
    report |= {"rows": [], "refused": {}, "not_run": [case.name for case in CASES if options.only in case.name]}
    for case in CASES:
        if options.only not in case.name or time.monotonic() > options.end:
            continue
        try:
            measurement = Measurement(case.small() if is_small else case, device, peers)
            row = _sampled(measurement, repeats, limits)
        except Exception as error:  # whatever is wrong with one case, the others get their rows
            report["refused"][case.name] = f"{type(error).__name__}: {str(error)[:500]}"
            write(f"{case.name}: refused: {report['refused'][case.name]}")
            if not isinstance(error, WrongResultError):
                write(traceback.format_exc(limit=-4))
        else:
            report["rows"].append(row)
            write(_line(row))
        report["not_run"].remove(case.name)
        options.save(report)
        measurement = row = None  # type: ignore[assignment]  # a case's tensors and graphs go before the next one's come
        if not _released(device):
            write("the device is lost: no further case can run")
            break
    write(f"{len(report['rows'])} rows, {len(report['refused'])} refused, {len(report['not_run'])} not run")
    return int(bool(report["refused"]))


def _sampled(measurement: Measurement, repeats: int, limits: Ceilings) -> dict[str, Any]:
    start = time.monotonic()
    for index in range(repeats):
        measurement.take()
        if index + 1 >= MIN_REPEATS and time.monotonic() - start > MAX_SECONDS:
            break
    return measurement.row(limits)


def _released(device: torch.device) -> bool:
    """Give freed memory back; False where an error has left the device unusable for this process."""
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


def _line(row: dict[str, Any]) -> str:
    times = f"{row['median_us']:9.1f} us ({row['p20_us']:.1f} to {row['p80_us']:.1f})"
    host = "" if row["host_us"] is None else f", host {row['host_us']:.0f} us"
    limit = f"{row['percent']:5.1f} % of {row['bound_by']}, planning {row['planning_us']:.1f} us{host}"
    ratios = "".join(f", {name} {peer['ratio']:.2f}x" for name, peer in row["peers"].items())
    faults = "".join(f", {name} {why}" for name, why in row["absent"].items() if why.startswith(("wrong", "failed")))
    missed = "".join(f", {verdict(goal)}" for goal in row["goals"] if goal["met"] is False)
    note = "" if row["cold"] else ", warm"
    return f"{row['name']:44} {times:40} {limit}{note}{ratios}{faults}{missed}"


if __name__ == "__main__":
    sys.exit(main())
