"""Paged attention against the hardware's limits and against others' attention, in one process on the same tensors.

    python -m bench.bench_attention [--json FILE] [--only NAME] [--budget SECONDS] [--small]
    pytest bench/bench_attention.py --benchmark-json=FILE      the rows stand in extra_info

A GPU runs bfloat16 at full size, calls taken in turns out of CUDA graphs; a CPU the PyTorch twin in float32 at small
sizes. Block tables are shuffled; one call reads another layer's tensors than the last, as many as the cache cannot hold.

A row is of a call whose plan was made before, as for all layers of a step but the first; "planning" is what making it adds.
host_us: the host's time in a call outside a graph. A row that differs from `kernels/reference.py` is refused; a peer that
does, or that differs from ours, gets no ratio. Peers that are missing say so; vLLM's files come on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.attention_cases import (
    CASES,
    AttentionCase,
    Layer,
    MakeCalls,
    Step,
    expected,
    expected_spots,
    ours,
    ours_with_planning,
)
from bench.attention_goals import goals
from bench.attention_peers import PEERS, Peer, peer_versions
from bench.check import WrongResultError, compare
from bench.environment import DEVICE, INTERPRETING, SCALE, benchmark_dtype, environment
from bench.limits import Ceilings, speed
from bench.timing import Call, cache_bytes, ceilings, host_seconds, sampler
from paged.kernels.compat import interpreting

REPEATS = {"cuda": 50, "cpu": 10}
MIN_REPEATS = 10
# A case takes no more samples than fit in this time, beyond MIN_REPEATS: 16k prompts take 60 ms and more a sample.
MAX_SECONDS = 2.0
# Calls whose host time is taken: three kernels each, together far below the 1,024 launches that a device queues.
HOST_CALLS = 64
MAX_LAYERS = 512
_PLANNING = "planning"


@functools.cache
def check(case: AttentionCase, device: torch.device) -> None:
    """Raise WrongResultError unless `paged_attention` gives what the float64 reference gives; once for each case."""
    step, (layer,) = case.tensors(device, benchmark_dtype(device), 1)
    compare(ours(step, [layer])[0](), expected(step, layer))


@dataclass
class Contender:
    """The calls of one implementation for one case, and the samples taken of them, in seconds."""

    calls: list[Call]
    method: str
    sample: Callable[[], float]
    samples: list[float] = field(default_factory=list)


class Measurement:
    """One case: checked when made, sampled in turns by `take`, told by `row`."""

    def __init__(self, case: AttentionCase, device: torch.device, peers: dict[str, Peer | str]) -> None:
        """peers: by name, a peer or why it is missing.

        Raises:
            WrongResultError: the operation does not agree with the reference.
        """
        if interpreting():
            raise RuntimeError(INTERPRETING)
        torch.manual_seed(0)
        self._case, self._device, self._dtype = case, device, benchmark_dtype(device)
        check(case.sibling(), device)
        self._cost = case.cost(self._dtype)
        num_layers = 1 + min(2 * cache_bytes(device) // self._cost.num_bytes, MAX_LAYERS - 1)
        step, layers = case.tensors(device, self._dtype, num_layers)
        self.cold = num_layers * self._cost.num_bytes > cache_bytes(device)
        self._spots = expected_spots(step, layers[0])
        self.contenders = {"ours": self._contender(ours, step, layers, None)}
        out = self.contenders["ours"].calls[0]()
        self.contenders[_PLANNING] = self._contender(ours_with_planning, step, layers, out)
        self.absent: dict[str, str] = {}
        for name, peer in peers.items():
            reason = peer if isinstance(peer, str) else peer.refuses(case, self._dtype)
            if reason is None:
                try:
                    self.contenders[name] = self._contender(peer.make, step, layers, out)  # type: ignore[union-attr]
                except WrongResultError as error:
                    reason = f"wrong: {error}"
                except Exception as error:  # whatever a peer fails with, the others get their times
                    reason = f"failed: {type(error).__name__}: {str(error)[:500]}"
            if reason is not None:
                self.absent[name] = reason

    def _contender(self, make: MakeCalls, step: Step, layers: list[Layer], our_out: torch.Tensor | None) -> Contender:
        calls = make(step, layers)
        out = calls[0]().reshape(layers[0].q.shape)
        for token, heads, want in self._spots:
            compare(out[token, heads], want)
        if our_out is not None:
            compare(our_out, out)
        return Contender(calls, *sampler(calls, self._device))

    def take(self) -> None:
        """One more sample of everyone."""
        for contender in self.contenders.values():
            contender.samples.append(contender.sample())

    def row(self, limits: Ceilings) -> dict[str, Any]:
        """All that is known of the case; peers hold times and a ratio (their median over ours), or why they do not."""
        results = {name: self._result(contender, limits) for name, contender in self.contenders.items()}
        own, planning = results.pop("ours"), results.pop(_PLANNING)
        for result in results.values():
            result["ratio"] = result["median_us"] / own["median_us"]
        row = {
            "name": self._case.name,
            **{
                name: getattr(self._case, name)
                for name in ("kind", "batch", "groups", "heads", "head_dim", "block_size")
            },
            "longest_key": max(seq_len for _, seq_len in self._case.lengths),
            "flops": self._cost.flops,
            "num_bytes": self._cost.num_bytes,
            "method": self.contenders["ours"].method,
            "cold": self.cold,
            "samples": len(self.contenders["ours"].samples),
            **own,
            "per_sequence_bound_us": self._per_sequence_bound(limits) * 1e6,
            "planning_us": planning["median_us"] - own["median_us"],
            "host_with_planning_us": planning["host_us"],
            "peers": results,
            "absent": self.absent,
        }
        on_gpu = self._device.type == "cuda"
        return {**row, "goals": [asdict(goal) for goal in goals(self._case, row, limits)] if on_gpu else []}

    def _result(self, contender: Contender, limits: Ceilings) -> dict[str, Any]:
        host = None
        if self._device.type == "cuda" and self._case.kind != "prefill":
            host = statistics.median(host_seconds(contender.calls, self._device, HOST_CALLS)) * 1e6
        return {**asdict(speed(contender.samples, self._cost, limits)), "host_us": host}

    def _per_sequence_bound(self, limits: Ceilings) -> float:
        """The bound of a schedule that overlaps memory and matrix units within a sequence, but not across."""
        return sum(
            count * limits.bound(self._case.cost(self._dtype, [(q_len, seq_len)]))[0]
            for count, q_len, seq_len in self._case.groups
        )


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
    benchmark.extra_info.update(environment(device, limits), **measurement.row(limits))


def main(argv: list[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Print a line a case; the exit code is 1 where one got no row because it was refused. Missed goals are no error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the environment and the rows here too, after every case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--budget", type=float, default=float("inf"), help="start no case after so many seconds")
    parser.add_argument("--small", action="store_true", help="a CPU's sizes on a GPU")
    parser.add_argument("--device", choices=list(SCALE), default=DEVICE)
    parser.add_argument("--repeats", type=int, help=f"samples a case, at least 2; {REPEATS} when not given")
    args = parser.parse_args(argv)
    if interpreting():
        parser.error(INTERPRETING)
    end = time.monotonic() + args.budget
    device = torch.device(args.device)
    repeats = args.repeats or REPEATS[args.device]
    is_small = args.small or SCALE[args.device] == "small"
    limits, peers = ceilings(device, benchmark_dtype(device), repeats), present_peers(device)
    report: dict[str, Any] = {**environment(device, limits), "peers": peer_versions()}
    write("\n".join(f"{name}: {value}" for name, value in report.items()))
    write("\n".join(f"{name}: {peer}" for name, peer in peers.items() if isinstance(peer, str)))
    report |= {"rows": [], "refused": {}, "not_run": [case.name for case in CASES if args.only in case.name]}
    for case in CASES:
        if args.only not in case.name or time.monotonic() > end:
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
        if args.json:
            _replace(args.json, json.dumps(report, indent=1) + "\n")
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


def _replace(path: Path, text: str) -> None:
    """Write a file that is never seen half written: a run may be killed at any time."""
    draft = path.with_suffix(".part")
    draft.write_text(text)
    os.replace(draft, path)


def _line(row: dict[str, Any]) -> str:
    times = f"{row['median_us']:9.1f} us ({row['p20_us']:.1f} to {row['p80_us']:.1f})"
    host = "" if row["host_us"] is None else f", host {row['host_us']:.0f} us"
    limit = f"{row['percent']:5.1f} % of {row['bound_by']}, planning {row['planning_us']:.1f} us{host}"
    ratios = "".join(f", {name} {peer['ratio']:.2f}x" for name, peer in row["peers"].items())
    faults = "".join(f", {name} {why}" for name, why in row["absent"].items() if why.startswith(("wrong", "failed")))
    note = "" if row["cold"] else ", warm"
    return f"{row['name']:44} {times:40} {limit}{note}{ratios}{faults}"


if __name__ == "__main__":
    sys.exit(main())
