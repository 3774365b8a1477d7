"""How an engine shares its steps and its cache among requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paged.errors import InvalidInputError


@dataclass(frozen=True)
class EngineConfig:
    """Policy of an engine.

    token_budget: tokens a step; decodes come first, prompt chunks take what is left.
    chunk_size: tokens of one prompt a step, None for what the budget leaves.
    max_num_seqs: sequences that hold cache at the same time.
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
        InvalidInputError: a value is outside of its range.
    """

    token_budget: int = 2048
    chunk_size: int | None = None
    max_num_seqs: int = 256
    preemption: Literal["recompute", "swap"] = "recompute"
    admission_tokens: int | None = 64
    priority_requests: int = 1000
    decode_stretch: float | None = None
    prepare_ahead: bool | None = None

    def __post_init__(self) -> None:
        for name in ("token_budget", "chunk_size", "max_num_seqs", "priority_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInputError(f"{name}: {value}, expected at least 1")
        if self.admission_tokens is not None and self.admission_tokens < 0:
            raise InvalidInputError(f"admission_tokens: {self.admission_tokens}, expected at least 0")
        if self.preemption not in ("recompute", "swap"):
            raise InvalidInputError(f"preemption: {self.preemption!r}, expected 'recompute' or 'swap'")
        if self.decode_stretch is not None and self.decode_stretch <= 1:
            raise InvalidInputError(f"decode_stretch: {self.decode_stretch}, expected more than 1")
