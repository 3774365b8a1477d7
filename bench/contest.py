"""Time an operation beside its peers, after every result has been checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paged.bench.benchmark import Json, Setting
from paged.bench.check import WrongResultError
from paged.bench.limits import Cost, speed, times_us
from paged.bench.timing import Call, Sample, sampler, take_in_turns
from paged.bench.watchdog import WATCHDOG

OURS = "ours"


@dataclass(frozen=True)
class Peer:
    """Another implementation of an operation.

    refuses(case, dtype, device): returns the reason why the peer cannot take the case, or None. make: returns the
    peer's calls on a case's tensors.
    """

    name: str
    refuses: Callable[[Any, torch.dtype, torch.device], str | None]
    make: Callable[..., Any]


def peers_of(peers: Sequence[Peer], case: Any, setting: Setting) -> list[str]:
    """Return the names of the peers that take the case."""
    names = []
    for peer in peers:
        if peer.refuses(case, setting.dtype, setting.device) is None:
            names.append(peer.name)
    return names


def beside(
    taken: Mapping[str, Sequence[float]], result: Callable[[Sequence[float]], Json]
) -> tuple[Json, dict[str, Json]]:
    """Return the result of our seconds, and each peer's with the ratio of its median to ours."""
    ours = result(taken[OURS])
    peers = {}
    for name, seconds in taken.items():
        if name != OURS:
            times = result(seconds)
            peers[name] = times | {"ratio": times["median_us"] / ours["median_us"]}
    return ours, peers


@dataclass
class Contest:
    """Implementations of one operation on the same tensors.

    about: items of the row other than times. cost: cost of a call; None if only times are compared. is_cold: whether
    the tensors exceed the cache. max_seconds: time limit for further samples after min_samples. samples: times of a
    call, by implementation. absent: peer -> the reason why it is absent. complete: adds items of this operation alone
    to the row, such as goals.
    """

    about: Json
    setting: Setting
    cost: Cost | None = None
    is_cold: bool = True
    max_seconds: float = math.inf
    min_samples: int = 1
    method: str = ""
    samples: dict[str, Sample] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    complete: Callable[[Json], None] = lambda row: None

    def add(self, name: str, calls: Sequence[Call], check: Callable[[Any], None], *, capturable: bool = True) -> None:
        """Add an implementation if `check` accepts the result of its first call.

        Raises:
            WrongResultError: the result is wrong.
        """
        check(calls[0]())
        method, self.samples[name] = sampler(calls, self.setting.device, capturable=capturable)
        if name == OURS:
            self.method = method

    def add_peers(
        self, peers: Sequence[Peer], case: Any, make: Callable[[Peer], Sequence[Call]], check: Callable[[Any], None]
    ) -> None:
        """Add the peers that take the case and pass the check; note why each other peer is absent."""
        for peer in peers:
            reason = peer.refuses(case, self.setting.dtype, self.setting.device)
            if reason is None:
                WATCHDOG.progress()  # a peer may compile for long
                try:
                    self.add(peer.name, make(peer), check)
                except WrongResultError as error:
                    reason = f"wrong: {error}"
                except Exception as error:
                    reason = f"failed: {type(error).__name__}: {str(error)[:500]}"
            if reason is not None:
                self.absent[peer.name] = reason

    def result(self, seconds: Sequence[float]) -> Json:
        """Return times of a call that took `seconds`, at least two samples, beside the limit."""
        if self.cost is None:
            return times_us(seconds)
        return speed(seconds, self.cost, self.setting.limits)

    def row(self) -> Json:
        """Time all implementations in turns: our result, and each peer's with the ratio of its median to ours."""
        taken = take_in_turns(
            self.samples, self.setting.repeats, max_seconds=self.max_seconds, min_samples=self.min_samples
        )
        ours, peers = beside(taken, self.result)
        row = {**self.about, "samples": len(taken[OURS]), **ours, "peers": peers, "absent": self.absent, "goals": []}
        if self.cost is not None:
            row |= {"flops": self.cost.flops, "num_bytes": self.cost.num_bytes}
            row |= {"method": self.method, "cold": self.is_cold}
        self.complete(row)
        return row
