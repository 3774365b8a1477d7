"""Engines that run in turns, on a machine whose host may take its cores away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import sleep

from paged.bench.engine.rows import Run
from paged.bench.timing import stolen_seconds, timed

# Of a core's time during a run. Where a host gave cores to others, a run of 1.9 s took up to 5, and which engine met
# that was chance. Of a run of 1 s on a machine of its own it is 0.01 at most, the clock's step.
_MOST_STOLEN = 0.03


def quiet_runs(
    engines: Mapping[str, Callable[[int], Run]],
    rounds: int,
    most_rounds: int,
    *,
    rest_s: float = 0.0,
    after_round: Callable[[], None] = lambda: None,
) -> tuple[dict[str, list[Run]], float]:
    """Of each engine, which is called with the number of the round, the `rounds` runs in which the cores were away
    least; and the largest share of a run's time, of all these, in which a core was.

    Rounds go on until each engine has had so many runs in which no core was away for more than `_MOST_STOLEN`, or to
    `most_rounds`. The order turns from round to round.
    """
    found: dict[str, list[tuple[float, int, Run]]] = {engine: [] for engine in engines}
    for number in range(most_rounds):
        for engine in sorted(engines, reverse=number % 2 == 1):
            sleep(rest_s)
            before = stolen_seconds()
            with timed():
                run = engines[engine](number)
            stolen = max(after - first for after, first in zip(stolen_seconds(), before, strict=True))
            found[engine].append((stolen / run.seconds, number, run))
        after_round()
        quietest = [sorted(runs)[:rounds] for runs in found.values()]
        worst = max(runs[-1][0] for runs in quietest)
        if number + 1 >= rounds and worst <= _MOST_STOLEN:
            break
    return {engine: [run for *_, run in runs] for engine, runs in zip(found, quietest, strict=True)}, worst
