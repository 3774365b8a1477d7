"""The least time of an operation, from its work and the device's measured rates; and goals of rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """Work of one call: operations of matrix products, and bytes read and written, each byte counted once.

    Element-wise operations do not count, because memory traffic hides them.
    """

    flops: int
    num_bytes: int


@dataclass(frozen=True)
class Ceilings:
    """Measured rates per second: bytes copied (reads plus writes), bytes read, matrix-product operations."""

    copy: float
    read: float
    matmul: float

    @property
    def bandwidth(self) -> float:
        """The faster of both streams: an operation that mostly reads may beat the copy, but never both."""
        return max(self.copy, self.read)

    def bound(self, cost: Cost) -> tuple[float, str]:
        """Return the least seconds for `cost` if memory and matrix units overlap, and which of the two is the limit."""
        memory, matmul = cost.num_bytes / self.bandwidth, cost.flops / self.matmul
        if memory >= matmul:
            return memory, "memory"
        return matmul, "matmul"


def percentile(samples: Sequence[float], tenths: int) -> float:
    """Return the percentile 10 * tenths of at least two samples."""
    return statistics.quantiles(samples, n=10, method="inclusive")[tenths - 1]


def times_us(samples: Sequence[float]) -> dict[str, float]:
    """Return median, 20th and 80th percentile in microseconds of at least two samples in seconds."""
    return {
        "median_us": statistics.median(samples) * 1e6,
        "p20_us": percentile(samples, 2) * 1e6,
        "p80_us": percentile(samples, 8) * 1e6,
    }


def speed(samples: Sequence[float], cost: Cost, limits: Ceilings) -> dict[str, Any]:
    """Return times of a call that took `seconds`, at least two samples, beside the call's limit.

    percent: the reached share of the limit, bound_us over median_us.
    """
    median = statistics.median(samples)
    bound, bound_by = limits.bound(cost)
    return {
        **times_us(samples),
        "gb_per_s": cost.num_bytes / median / 1e9,
        "tflop_per_s": cost.flops / median / 1e12,
        "bound_us": bound * 1e6,
        "bound_by": bound_by,
        "percent": 100 * bound / median,
    }


Goal = dict[str, Any]
"""A row's item for a goal: text, value, met. The last two are None if the peer of the goal did not run."""


def is_fault(reason: str) -> bool:
    """Return whether a peer ran and was wrong or failed, unlike a peer that is absent or cannot take the case."""
    return reason.startswith(("wrong", "failed"))


def at_least(text: str, value: float | None, target: float) -> Goal:
    is_met = None
    if value is not None:
        is_met = value >= target
    return {"text": f"at least {text}", "value": value, "met": is_met}


def at_most(text: str, value: float, target: float) -> Goal:
    return {"text": f"at most {text}", "value": value, "met": value <= target}
