"""Limit of prompt tokens beside decodes, by measured times."""

from __future__ import annotations

# Weight of the newest measurement in the running means. Costs drift with the lengths of the sequences.
_NEWEST = 0.3
# Safety factor: use 80 % of a step's time limit, because the next chunk can take longer than the measured one.
_MARGIN = 0.8
# Smallest chunk that the pacer allows, so that every prompt progresses.
_SMALLEST_CHUNK = 8


class StepPacer:
    """Limits prompt tokens per step, by the measured time of a step without prompts and of a prompt token.

    Args:
        stretch: maximum time of a step as a multiple of a step without prompt tokens. A chunk of 8 tokens is
            always allowed.
    """

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._steady: float | None = None
        self._per_token: float | None = None
        self._largest = _SMALLEST_CHUNK

    @property
    def max_prefill_tokens(self) -> int:
        """Maximum number of prompt tokens for the next step; at most twice the largest measured number."""
        if self._steady is None:
            return 0  # first measure a step of decodes
        if self._per_token is None:
            return _SMALLEST_CHUNK
        spare = (self._stretch * _MARGIN - 1) * self._steady
        return max(_SMALLEST_CHUNK, min(int(spare / self._per_token), 2 * self._largest))

    def observe(self, seconds: float, num_prefill_tokens: int) -> None:
        """Note that a step with decodes took `seconds`."""
        if num_prefill_tokens == 0:
            self._steady = _blend(self._steady, seconds)
        elif self._steady is not None:
            cost = max(seconds - self._steady, 0.01 * self._steady) / num_prefill_tokens
            # A higher cost counts at once, a lower cost slowly, because the limit holds for every step, not for the
            # mean.
            if self._per_token is None or cost > self._per_token:
                self._per_token = cost
            else:
                self._per_token = _blend(self._per_token, cost)
            self._largest = max(self._largest, num_prefill_tokens)


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _NEWEST * (new - old)
