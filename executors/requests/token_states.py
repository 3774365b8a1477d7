"""Hidden states and routed experts of a completion's tokens, collected from its forwards."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paged.executors.requests.sampling_params import SamplingParams
from paged.step.staging import HostCopy


class _Part(NamedTuple):
    """States of the tokens from `start` to `end`, computed by one version of the weights."""

    generation: int
    start: int
    end: int
    copies: dict[str, HostCopy]


class TokenStates:
    """States of one completion's tokens by position; a token that runs again replaces its states.

    After an update of the weights, all tokens run again. Until then, the states belong to the old weights.
    """

    def __init__(self, num_prompt: int, params: SamplingParams) -> None:
        self._num_prompt = num_prompt
        self.requested = {
            "hidden_states": params.return_hidden_states,
            "routed_experts": params.return_routed_experts,
        }
        self._parts: list[_Part] = []

    @classmethod
    def of(cls, num_prompt: int, params: SamplingParams) -> TokenStates | None:
        """Return empty states if the parameters request states, else None."""
        return cls(num_prompt, params) if params.returns_states else None

    def add(self, position: int, rows: dict[str, torch.Tensor], generation: int) -> None:
        """Start to copy the states of tokens from `position` on. generation: version of the weights."""
        copies = {}
        for name, is_requested in self.requested.items():
            if is_requested:
                copies[name] = HostCopy(rows[name])
        end = position + len(rows["hidden_states"])
        self._parts.append(_Part(generation, position, end, copies))
        if self._parts[0].generation < generation and end >= max(part.end for part in self._parts):
            self._parts = [part for part in self._parts if part.generation == generation]

    def begin_as(self, source: TokenStates) -> None:
        """Take over the prompt's states from another completion of the request."""
        self._parts = list(source._parts)

    def rows(self, name: str, num_tokens: int) -> torch.Tensor | None:
        """Return the states of all but the last of `num_tokens` tokens, prompt included; None if not requested."""
        if not self.requested[name] or not num_tokens:
            return None
        total = self._num_prompt + num_tokens - 1
        all_parts = self._parts.copy()
        complete = [part.generation for part in all_parts if part.end >= total]
        newest = max(complete, default=None)
        states: NDArray[Any] | None = None
        for part in all_parts:
            if part.generation == newest:
                rows = part.copies[name].numpy()
                if states is None:
                    states = np.empty((total, *rows.shape[1:]), rows.dtype)
                states[part.start : part.end] = rows[: max(total - part.start, 0)]
        return None if states is None else torch.from_numpy(states)
