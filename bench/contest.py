"""Time an operation against its peers, after every result has been checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paged.bench.benchmark import Setting
from paged.bench.check import WrongResultError
from paged.bench.limits import Cost, speed
from paged.bench.timing import Call, sampler, take_in_turns
from paged.bench.watchdog import WATCHDOG


@dataclass(frozen=True)
class Peer:
    """Another implementation of an operation.

    refuses(case, dtype, device): returns why it takes no part, or None. make: returns its calls, from a case's tensors.
    """

    name: str
    refuses: Callable[[Any, torch.dtype, torch.device], str | None]
    make: Callable[..., Any]


class Contest:
    """Implementations of one operation on the same tensors.

    calls: those of each implementation that takes part. absent: why others do not.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._samplers: dict[str, Callable[[], float]] = {}
        self._method = ""
        self.calls: dict[str, Sequence[Call]] = {}
        self.absent: dict[str, str] = {}

    def add(self, name: str, calls: Sequence[Call], check: Callable[[Any], None], *, capturable: bool = True) -> None:
        """Add an implementation if `check` accepts its first result; the first one added is ours.

        Raises:
            WrongResultError: the result is wrong.
        """
        check(calls[0]())
        method, self._samplers[name] = sampler(calls, self._setting.device, capturable=capturable)
        self._method, self.calls[name] = self._method or method, calls

    def add_peers(
        self, peers: Sequence[Peer], case: Any, make: Callable[[Peer], Sequence[Call]], check: Callable[[Any], None]
    ) -> None:
        """Those of the peers that take the case and pass the check; whatever another fails with, it becomes absent."""
        for peer in peers:
            reason = peer.refuses(case, self._setting.dtype, self._setting.device)
            if reason is None:
                WATCHDOG.progress()  # a peer may compile for long
                try:
                    self.add(peer.name, make(peer), check)
                    continue
                except WrongResultError as error:
                    reason = f"wrong: {error}"
                except Exception as error:
                    reason = f"failed: {type(error).__name__}: {str(error)[:500]}"
            self.absent[peer.name] = reason

    def row(self, cost: Cost, *, cold: bool, seconds: float = math.inf, least: int = 1) -> dict[str, Any]:
        """Sample everyone in turns, see `take_in_turns`: our times beside the limit, and each peer's with its median
        over ours as `ratio`."""
        samples = take_in_turns(self._samplers, self._setting.repeats, seconds=seconds, least=least)
        results = {name: speed(found, cost, self._setting.limits) for name, found in samples.items()}
        own = results.pop("ours")
        for result in results.values():
            result["ratio"] = result["median_us"] / own["median_us"]
        return {
            "flops": cost.flops,
            "num_bytes": cost.num_bytes,
            "method": self._method,
            "cold": cold,
            "samples": len(samples["ours"]),
            **own,
            "peers": results,
            "absent": self.absent,
        }
