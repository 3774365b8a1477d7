"""Runs of whole engines, consecutive or in turns, on a machine whose CPU time may be stolen by its host."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple

import torch

from paged import Engine, SamplingParams
from paged.bench.check import WrongResultError
from paged.bench.limits import Ceilings, Cost, at_least, speed
from paged.bench.timing import late_kernels, stolen_seconds
from paged.bench.watchdog import WATCHDOG
from paged.executors.model_executor import ModelExecutor

# Largest CPU steal of a run, as a fraction of a core's time. With more, a run of 1.9 s took up to 5 s, by chance for
# either engine. On a dedicated machine a run of 1 s shows at most 0.01, the clock's step.
_MOST_STOLEN = 0.03


class PeerProcess:
    """A peer in the Python of its own environment, which answers a line of JSON with another. told: its first line."""

    def __init__(self, name: str, python: Path, *command: str | Path, log: Path) -> None:
        self._name, self._log = name, log
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [python, "-P", *command],
                env=environment | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        weakref.finalize(self, _kill_group, self._process.pid)
        self.told: dict[str, Any] = self._answer()

    def ask(self, **job: Any) -> Any:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its log says more
            print(json.dumps(job), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        said = self._log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{self._name} ended with {self._process.wait()}: {said}")


def _kill_group(process: int) -> None:
    """Kill a process that has its own session, and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


class Run(NamedTuple):
    """seconds: total. first_seconds: until each prompt's first token, if known. late_kernels: compiled meanwhile."""

    seconds: float
    first_seconds: list[float]
    tokens: list[list[int]]
    late_kernels: str = ""


def run_engine(executor: ModelExecutor, prompts: Sequence[Sequence[int]], new_tokens: int) -> Run:
    """Generate the best tokens after each prompt, with an empty prefix cache."""
    manager = executor.kv_manager
    assert manager is not None
    manager.clear_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=new_tokens)
    start = perf_counter()
    outputs = Engine(executor, eos_token_ids=()).generate(prompts, params, progress=False)
    seconds = perf_counter() - start
    first = [output.metrics.first_token_s or 0.0 for output in outputs]
    return Run(seconds, first, [list(output.outputs[0].token_ids) for output in outputs])


def check_same_texts(
    ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], length: int, share: float = 0.9
) -> None:
    """Check that at least this share of the texts begin alike: rounding may change a text if two logits are close.

    Raises:
        WrongResultError: fewer do.
    """
    same = sum(list(one[:length]) == list(other[:length]) for one, other in zip(ours, theirs, strict=True))
    if same < share * len(ours):
        raise WrongResultError(f"{same} of {len(ours)} texts are those of the peer")


def quiet_runs(
    engines: Mapping[str, Callable[[int], Run]],
    rounds: int,
    most_rounds: int,
    *,
    rest_s: float = 0.0,
    after_round: Callable[[], None] = lambda: None,
) -> tuple[dict[str, list[Run]], float]:
    """Return each engine's `rounds` runs with the least CPU steal, and the largest steal among them as a fraction.

    Engines are called with the round's number. Rounds go on until each engine has enough runs without more steal than
    `_MOST_STOLEN`, or until `most_rounds`. The order turns from round to round.
    """
    found: dict[str, list[tuple[float, int, Run]]] = {engine: [] for engine in engines}
    for number in range(most_rounds):
        for engine in sorted(engines, reverse=number % 2 == 1):
            sleep(rest_s)
            before = stolen_seconds()
            with late_kernels() as late:
                run = engines[engine](number)
            WATCHDOG.progress()
            stolen = max(after - first for after, first in zip(stolen_seconds(), before, strict=True))
            found[engine].append((stolen / run.seconds, number, run._replace(late_kernels=", ".join(late))))
        after_round()
        quietest = [sorted(runs)[:rounds] for runs in found.values()]
        worst = max(runs[-1][0] for runs in quietest)
        if number + 1 >= rounds and worst <= _MOST_STOLEN:
            break
    return {engine: [run for *_, run in runs] for engine, runs in zip(found, quietest, strict=True)}, worst


def row_beside(
    name: str,
    runs: Mapping[str, Sequence[Run]],
    stolen: float,
    num_tokens: int,
    cost: Cost,
    limits: Ceilings,
    least: float,
    peer_name: str,
) -> dict[str, Any]:
    """Our tokens a second, and the goal to be `least` times as fast as the peer in its fastest mode, on the results of
    `quiet_runs`; percent: of the least time for `cost`."""
    times = {engine: speed([run.seconds for run in found], cost, limits) for engine, found in runs.items()}
    ours, peers = times.pop("ours"), {}
    for peer, theirs in times.items():
        peers[peer] = {"median_us": theirs["median_us"], "ratio": theirs["median_us"] / ours["median_us"]}
    fastest = min(peers, key=lambda peer: peers[peer]["ratio"])
    detail = {
        "peer_tokens_per_second": num_tokens / times[fastest]["median_us"] * 1e6,
        "peer_percent": times[fastest]["percent"],
        "stolen_percent": 100 * stolen,
        "threads": torch.get_num_threads(),
        "read_gb_per_s": limits.bandwidth / 1e9,
        "matmul_tflop_per_s": limits.matmul / 1e12,
    }
    for whose, engine in (("", "ours"), ("peer_", fastest)):
        if all(run.first_seconds for run in runs[engine]):
            medians = [statistics.median(run.first_seconds) for run in runs[engine]]
            detail[f"{whose}first_token_ms"] = statistics.median(medians) * 1e3
    goal = at_least(f"{least:g}x {peer_name}", peers[fastest]["ratio"], least)
    value = num_tokens / ours["median_us"] * 1e6
    late = dict.fromkeys(run.late_kernels for found in runs.values() for run in found if run.late_kernels)
    row = {"name": name, "value": value, "unit": "tokens/s", "goals": [goal], "late_kernels": "; ".join(late)}
    return {**row, "detail": detail, **ours, "cold": True, "peers": peers}
