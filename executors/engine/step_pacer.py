"""How many prompt tokens a step can take along without stretching the decodes in it too far."""

from __future__ import annotations

# Weight of the newest measurement: the costs drift with the lengths of the sequences.
_NEWEST = 0.3
# Of the time that a step may take, how much is planned with: a measured cost is that of the chunk before, and beside
# other work on its machine a step takes up to a half longer than foreseen.
_MARGIN = 0.8
# So that a prompt gets through, whatever a token of it costs.
_SMALLEST_CHUNK = 8


class StepPacer:
    """Learns from step times what a step without prompts takes, and what a prompt token adds.

    stretch: a step takes at most this many times as long as one without prompt tokens, unless 8 of them take longer.
    """

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._steady: float | None = None
        self._per_token: float | None = None
        self._largest = _SMALLEST_CHUNK

    @property
    def max_prefill_tokens(self) -> int:
        """How many prompt tokens the next step may take; at most twice the largest one that was measured."""
        if self._steady is None:
            return 0  # one step of decodes tells
        if self._per_token is None:
            return _SMALLEST_CHUNK
        spare = (self._stretch * _MARGIN - 1) * self._steady
        return max(_SMALLEST_CHUNK, min(int(spare / self._per_token), 2 * self._largest))

    def observe(self, seconds: float, num_prefill_tokens: int) -> None:
        """A step with decodes took `seconds`."""
        if num_prefill_tokens == 0:
            self._steady = _blend(self._steady, seconds)
        elif self._steady is not None:
            cost = max(seconds - self._steady, 0.01 * self._steady) / num_prefill_tokens
            # A cost that rises counts at once, one that falls slowly: the limit is for every step, not for the mean.
            is_higher = self._per_token is None or cost > self._per_token
            self._per_token = cost if is_higher else _blend(self._per_token, cost)
            self._largest = max(self._largest, num_prefill_tokens)


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _NEWEST * (new - old)
