"""How an engine shares its steps and its cache among requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paged.errors import InvalidInputError, PagedError
from paged.kernels.common.scalars import as_bool, as_float, as_int, shown


class QueueFullError(PagedError):
    """As many completions wait as `EngineConfig.max_waiting` allows; nothing was queued."""


@dataclass(frozen=True)
class EngineConfig:
    """Policy of an engine.

    token_budget: tokens a step; decodes come first, prompt chunks take what is left.
    chunk_size: tokens of one prompt a step, None for what the budget leaves.
    max_num_seqs: sequences that hold cache at the same time; a request of more completions than that runs alone.
    max_waiting: completions in the queue at the most, None for any number; a request beyond that is refused by
        QueueFullError. Those that were preempted wait too.
    preemption: what becomes of K/V when the cache is full: computed again later, or swapped to host memory where that
        has room. The sequence of the lowest priority goes, of those the newest.
    admission_tokens: a prompt starts once the cache has room for it and for so many more tokens of it and of every
        sequence that runs; None for as many as they may generate, which makes preemption rare.
    priority_requests: a priority higher by one counts like having come so many requests earlier; so none waits forever.
    prepare_ahead: while the device runs a step of decodes, the host prepares the next one as far as it can be known:
        its room in the cache and its metadata; None for doing so on a GPU alone, since a CPU has nothing to run beside.
    decode_stretch: while others decode, prompt chunks are cut so that a step takes at most this many times as long as
        one without a prompt, by the times measured so far; None cuts by the budget alone.

    Raises:
        InvalidInputError: a value has another type, or is outside of its range.
    """

    token_budget: int = 2048
    chunk_size: int | None = None
    max_num_seqs: int = 256
    max_waiting: int | None = None
    preemption: Literal["recompute", "swap"] = "recompute"
    admission_tokens: int | None = 64
    priority_requests: int = 1000
    decode_stretch: float | None = None
    prepare_ahead: bool | None = None

    def __post_init__(self) -> None:
        """Check every value, and keep it as Python's own."""
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, as_int(name, value, low=minimum, high=_MOST))
        if self.preemption not in ("recompute", "swap"):
            raise InvalidInputError(f"preemption: {shown(self.preemption)}, expected 'recompute' or 'swap'")
        if self.decode_stretch is not None:
            stretch = as_float("decode_stretch", self.decode_stretch, math.nextafter(1, 2))
            object.__setattr__(self, "decode_stretch", stretch)
        if self.prepare_ahead is not None:
            object.__setattr__(self, "prepare_ahead", as_bool("prepare_ahead", self.prepare_ahead))


_MINIMA = {"token_budget": 1, "chunk_size": 1, "max_num_seqs": 1, "max_waiting": 0, "priority_requests": 1}
_MINIMA |= {"admission_tokens": 0}
_OPTIONAL = ("chunk_size", "max_waiting", "admission_tokens")
_MOST = 1 << 31
