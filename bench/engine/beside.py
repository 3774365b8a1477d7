"""Let whole engines generate tokens in turns, on a machine whose host may steal CPU time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from time import perf_counter, sleep
from typing import NamedTuple

import torch

from paged import Engine, LlmExecutor, SamplingParams
from paged.bench.benchmark import Json
from paged.bench.check import WrongResultError
from paged.bench.contest import OURS, beside
from paged.bench.limits import Ceilings, Cost, at_least, speed
from paged.bench.timing import late_kernels, stolen_seconds
from paged.bench.watchdog import WATCHDOG

# Largest accepted CPU steal of a run, as a fraction of a core's time. A quiet machine has less. More steal may double
# the time of either engine by chance; see bench/limits.md.
_MAX_STOLEN = 0.03


class Run(NamedTuple):
    """One run of an engine.

    seconds: total time. first_seconds: time until each prompt's first token, if known. tokens: tokens of each prompt.
    late_kernels: kernels compiled during the run. stolen: CPU steal as a fraction of `seconds`.
    """

    seconds: float
    first_seconds: list[float]
    tokens: list[list[int]]
    late_kernels: str = ""
    stolen: float = 0.0


def run_engine(executor: LlmExecutor, prompts: Sequence[Sequence[int]], new_tokens: int) -> Run:
    """Generate the best tokens after each prompt, with an empty prefix cache."""
    assert executor.kv_manager is not None
    executor.kv_manager.clear_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=new_tokens)
    start = perf_counter()
    outputs = Engine(executor, eos_token_ids=()).generate(prompts, params, progress=False)
    seconds = perf_counter() - start
    first_seconds = [output.metrics.first_token_s or 0.0 for output in outputs]
    return Run(seconds, first_seconds, [list(output.outputs[0].token_ids) for output in outputs])


def check_same_texts(
    ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], length: int, share: float = 0.9
) -> None:
    """Check that at least this share of the texts begin alike. Rounding may change a text if two logits are close.

    Raises:
        WrongResultError: fewer texts begin alike.
    """
    num_same = 0
    for our_text, their_text in zip(ours, theirs, strict=True):
        num_same += list(our_text[:length]) == list(their_text[:length])
    if num_same < share * len(ours):
        raise WrongResultError(f"{num_same} of {len(ours)} texts are those of the peer")


def quiet_runs(
    engines: Mapping[str, Callable[[int], Run]],
    num_rounds: int,
    max_rounds: int,
    *,
    rest_s: float = 0.0,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, list[Run]]:
    """Return each engine's `num_rounds` runs with the least CPU steal.

    Engines are called with the round's number. Rounds continue until each engine has enough runs with at most
    `_MAX_STOLEN` steal, or until `max_rounds`. The order is reversed in every other round.
    """
    runs: dict[str, list[Run]] = {engine: [] for engine in engines}
    for number in range(max_rounds):
        for engine in sorted(engines, reverse=number % 2 == 1):
            sleep(rest_s)
            runs[engine].append(_watched(engines[engine], number))
        after_round()
        quietest = {}
        for engine, engine_runs in runs.items():
            quietest[engine] = sorted(engine_runs, key=lambda run: run.stolen)[:num_rounds]
        if number + 1 >= num_rounds and _most_stolen(quietest) <= _MAX_STOLEN:
            break
    return quietest


def _watched(engine: Callable[[int], Run], number: int) -> Run:
    """Run an engine; add its late kernels and CPU steal to the run."""
    before = stolen_seconds()
    with late_kernels() as late:
        run = engine(number)
    WATCHDOG.progress()
    stolen = max(end - start for start, end in zip(before, stolen_seconds(), strict=True))
    return run._replace(late_kernels=", ".join(late), stolen=stolen / run.seconds)


def _most_stolen(runs: Mapping[str, Sequence[Run]]) -> float:
    return max(run.stolen for run in chain(*runs.values()))


def row_beside(
    name: str,
    runs: Mapping[str, Sequence[Run]],
    num_tokens: int,
    cost: Cost,
    limits: Ceilings,
    target: float,
    peer_name: str,
) -> Json:
    """Return the row of `quiet_runs`: tokens per second, and the goal to be `target` times as fast as the fastest peer.

    percent: share of the least time for `cost`.
    """
    taken = {}
    for engine, engine_runs in runs.items():
        taken[engine] = [run.seconds for run in engine_runs]
    ours, peers = beside(taken, lambda seconds: speed(seconds, cost, limits))
    fastest = min(peers, key=lambda peer: peers[peer]["ratio"])
    detail = {
        "peer_tokens_per_second": num_tokens / peers[fastest]["median_us"] * 1e6,
        "peer_percent": peers[fastest]["percent"],
        "stolen_percent": 100 * _most_stolen(runs),
        "threads": torch.get_num_threads(),
        "read_gb_per_s": limits.bandwidth / 1e9,
        "matmul_tflop_per_s": limits.matmul / 1e12,
    }
    for prefix, engine in (("", OURS), ("peer_", fastest)):
        if all(run.first_seconds for run in runs[engine]):
            medians = [statistics.median(run.first_seconds) for run in runs[engine]]
            detail[f"{prefix}first_token_ms"] = statistics.median(medians) * 1e3
    late: dict[str, None] = {}
    for run in chain(*runs.values()):
        if run.late_kernels:
            late[run.late_kernels] = None
    return {
        "name": name,
        "value": num_tokens / ours["median_us"] * 1e6,
        "unit": "tokens/s",
        "goals": [at_least(f"{target:g}x {peer_name}", peers[fastest]["ratio"], target)],
        "late_kernels": "; ".join(late),
        "detail": detail,
        **ours,
        "cold": True,
        "peers": peers,
    }
