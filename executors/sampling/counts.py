"""How often each token occurred in completions whose penalties depend on it, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from paged.executors.requests.request import Completion
from paged.staging import to_device

# Of a vocabulary of 150,000 they take 48 MB; the 3 GB of 4,096 completions are given back when those have ended.
_FEW_ROWS = 64


class TokenCounts:
    """A row of each table a completion. `add` counts tokens where they are sampled, `rows` others that came since.

    outputs: int32 [rows, V], occurrences in the output. seen: bool [rows, V], whether it stands in that or the prompt.
    They exist once a request has penalties, and grow by doubling.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.outputs = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._rows: dict[Completion, int] = {}
        self._counted: dict[Completion, int] = {}
        self._free: list[int] = []

    def rows(self, completions: Sequence[Completion]) -> torch.Tensor:
        """The row of each completion, int64 [n], after its newest tokens have been counted."""
        output: list[tuple[int, Sequence[int]]] = []
        prompts: list[tuple[int, Sequence[int]]] = []
        for completion in set(completions):
            if completion not in self._rows:
                self._rows[completion], self._counted[completion] = self._new_row(), 0
                prompts.append((self._rows[completion], completion.request.prompt))
            output.append((self._rows[completion], completion.token_ids[self._counted[completion] :]))
            self._counted[completion] = max(self._counted[completion], len(completion.token_ids))
        asked = np.array([self._rows[completion] for completion in completions], np.int64)
        arrays = asked, *_pairs(output), *_pairs(prompts)
        asked_rows, new_rows, new_tokens, prompt_rows, prompt_tokens = to_device(arrays, self.outputs.device)
        ones = torch.ones_like(new_tokens, dtype=torch.int32)
        self.outputs.index_put_((new_rows, new_tokens), ones, accumulate=True)
        self.seen[new_rows, new_tokens] = True
        self.seen[prompt_rows, prompt_tokens] = True
        return asked_rows

    def add(self, completions: Sequence[Completion], rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count a new token of each, int64 [n], which need not be known to the host; rows: as `rows` returns them."""
        tokens = tokens.clamp(min=0)  # one that is none ends its completion
        self.outputs.index_put_((rows, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)
        self.seen[rows, tokens] = True
        for completion in completions:
            self._counted[completion] += 1

    def forget(self, completion: Completion) -> None:
        """Give the row of a finished completion to another."""
        if completion in self._rows:
            self._free.append(self._rows.pop(completion))
            del self._counted[completion]
            if not self._rows and len(self.outputs) > _FEW_ROWS:
                self.outputs, self.seen, self._free = self.outputs[:0].clone(), self.seen[:0].clone(), []

    def _new_row(self) -> int:
        if not self._free:
            have = len(self.outputs)
            more = max(have, 8)
            self.outputs = torch.cat([self.outputs, self.outputs.new_zeros(more, self.outputs.shape[1])])
            self.seen = torch.cat([self.seen, self.seen.new_zeros(more, self.seen.shape[1])])
            self._free = list(range(have, have + more))
        row = self._free.pop()
        self.outputs[row] = 0
        self.seen[row] = False
        return row


def _pairs(rows: Sequence[tuple[int, Sequence[int]]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each row as often as it has tokens, and these."""
    indices = np.repeat(np.array([row for row, _ in rows], np.int64), [len(tokens) for _, tokens in rows])
    return indices, np.fromiter(chain.from_iterable(tokens for _, tokens in rows), np.int64, len(indices))
