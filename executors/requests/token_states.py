"""Hidden states and routed experts of a completion's tokens, kept as forwards compute them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged.executors.requests.sampling_params import SamplingParams
from paged.staging import HostCopy


class TokenStates:
    """The states of one completion's tokens, by position; a token that runs again replaces its own."""

    def __init__(self, num_prompt: int, params: SamplingParams) -> None:
        self._num_prompt = num_prompt
        self.wanted = {"hidden_states": params.return_hidden_states, "routed_experts": params.return_routed_experts}
        self._parts: list[tuple[int, dict[str, HostCopy]]] = []

    @classmethod
    def of(cls, num_prompt: int, params: SamplingParams) -> TokenStates | None:
        """Return an empty one if the parameters ask for states."""
        return cls(num_prompt, params) if params.returns_states else None

    def add(self, position: int, rows: dict[str, torch.Tensor]) -> None:
        """Begin the copy of the states of tokens from `position` on."""
        self._parts.append((position, {name: HostCopy(rows[name]) for name, wanted in self.wanted.items() if wanted}))

    def begin_as(self, source: TokenStates) -> None:
        """Begin with the prompt that another completion of the request has run."""
        self._parts = list(source._parts)

    def rows(self, name: str, num_tokens: int) -> torch.Tensor | None:
        """Return the states of the prompt and of all but the last of `num_tokens` tokens; None if not asked for."""
        if not self.wanted[name] or not num_tokens:
            return None
        total = self._num_prompt + num_tokens - 1
        found: NDArray[Any] | None = None
        for position, copies in self._parts.copy():
            part = copies[name].numpy()
            if found is None:
                found = np.empty((total, *part.shape[1:]), part.dtype)
            found[position : position + len(part)] = part[: max(total - position, 0)]
        return None if found is None else torch.from_numpy(found)
