"""Log probabilities of chosen tokens and of the best tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paged.step.staging import HostCopy, to_device


def own_and_best(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Return log probabilities of one token of each row, [n, 1], and of the row's best tokens, [n, count], with ids.

    logits: float32 [n, V]. token_ids: int64 [n]; -1 (no token) counts as 0.
    """
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(count, logits.shape[1]))
    return logprobs.gather(1, token_ids.clamp(min=0)[:, None]), best.values, best.indices


def logprob_table(
    token_ids: Sequence[int], chosen: NDArray[np.float64], values: NDArray[np.float64], indices: NDArray[np.float64]
) -> list[dict[int, float]]:
    """Return log probability by token id for each row, the chosen token first. Arguments: arrays of `own_and_best`."""
    best_ids = indices.astype(np.int64).tolist()
    table = []
    for token, logprob, ids, logprobs in zip(token_ids, chosen[:, 0].tolist(), best_ids, values.tolist(), strict=True):
        table.append({token: logprob} | dict(zip(ids, logprobs, strict=True)))
    return table


def prompt_logprobs(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> Callable[[], list[dict[int, float]]]:
    """Start to copy the log probabilities of `token_ids`, one per row of `logits`; return a function to read them."""
    (chosen,) = to_device((np.array(token_ids, np.int64),), logits.device)
    parts = own_and_best(logits, chosen, count)
    width = parts[1].shape[1]
    host = HostCopy(torch.cat([part.double() for part in parts], 1))  # float64 holds ids exactly

    def read() -> list[dict[int, float]]:
        return logprob_table(token_ids, *np.split(host.numpy(), [1, 1 + width], axis=1))

    return read
