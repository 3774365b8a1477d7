"""Device tables of token occurrences, for completions with penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paged.executors.requests.request import Completion
from paged.step.staging import to_device

# Tables with more rows are freed once they are unused, because a large table can take gigabytes, see limits.md.
_FEW_ROWS = 64


class TokenCounts:
    """Tables with a row for each completion with penalties. They grow by doubling.

    `add` counts tokens when they are sampled. `rows` counts tokens that are not counted yet.

    outputs: int32 [rows, V], occurrences in the output. seen: bool [rows, V], whether output or prompt has the token.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.outputs = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._rows: dict[Completion, int] = {}
        self._counted: dict[Completion, int] = {}
        self._free: list[int] = []

    def rows(self, completions: Sequence[Completion]) -> torch.Tensor:
        """Count all uncounted tokens; return the row of each completion, int64 [n]."""
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
        """Count a new token of each completion, int64 [n] on the device. rows: result of `rows`."""
        tokens = tokens.clamp(min=0)  # -1 (no token) may count as 0, because it ends its completion
        self.outputs.index_put_((rows, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)
        self.seen[rows, tokens] = True
        for completion in completions:
            self._counted[completion] += 1

    def forget(self, completion: Completion) -> None:
        """Free the row of a finished completion."""
        if completion in self._rows:
            self._free.append(self._rows.pop(completion))
            del self._counted[completion]
            if not self._rows and len(self.outputs) > _FEW_ROWS:
                self.outputs, self.seen, self._free = self.outputs[:0].clone(), self.seen[:0].clone(), []

    def _new_row(self) -> int:
        if not self._free:
            num_rows = len(self.outputs)
            num_new = max(num_rows, 8)
            self.outputs = torch.cat([self.outputs, self.outputs.new_zeros(num_new, self.outputs.shape[1])])
            self.seen = torch.cat([self.seen, self.seen.new_zeros(num_new, self.seen.shape[1])])
            self._free = list(range(num_rows, num_rows + num_new))
        row = self._free.pop()
        self.outputs[row] = 0
        self.seen[row] = False
        return row


def _pairs(rows: Sequence[tuple[int, Sequence[int]]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (row, token) pairs as two arrays: each row repeated for each of its tokens, and the tokens."""
    sizes: list[int] = []
    tokens: list[int] = []
    for _, row_tokens in rows:
        sizes.append(len(row_tokens))
        tokens += row_tokens
    indices = np.repeat(np.array([row for row, _ in rows], np.int64), sizes)
    return indices, np.array(tokens, np.int64)
