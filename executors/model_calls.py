"""Runs items on a model without a unified forward, or with KV of its own, by the call that each kind of item takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paged.batch import UnifiedBatchItem, VerifyLogits
from paged.errors import PagedError
from paged.executors.row_batches import cache_id_of, is_decode_step
from paged.models.base import DecoderOnlyLLM
from paged.models.logits_policy import apply_policies
from paged.seq_id import SeqId


@dataclass(eq=False)
class ModelCacheHandle:
    """A sequence whose KV a third-party model keeps: what the executor knows of it."""

    cache_id: SeqId
    num_tokens: int = 0
    num_cached_tokens: int = 0
    is_valid: bool = True

    @property
    def request_id(self) -> SeqId:
        """The same as `cache_id`."""
        return self.cache_id


def is_verified(item: UnifiedBatchItem) -> bool:
    """Whether the logits of every row of an item are wanted."""
    return isinstance(item.logits_policy, VerifyLogits)


def run_by_kind(model: DecoderOnlyLLM, items: Sequence[UnifiedBatchItem]) -> list[torch.Tensor | None]:
    """Run decode steps in one `decode_batch`, the others by a `prefill` or a `forward_verify` each; one entry an item,
    as `unified_decode` returns them.

    Raises:
        PagedError: `decode_batch` gives another number of rows.
    """
    decodes = [item for item in items if is_decode_step(item) and not is_verified(item)]
    steps = [(cache_id_of(item), item.q_tokens[0], item.pos_offset) for item in decodes]
    decoded: Sequence[torch.Tensor] | torch.Tensor = model.decode_batch(steps) if steps else []
    if len(decoded) != len(steps):
        raise PagedError(f"decode_batch gave {len(decoded)} rows of logits for {len(steps)} tokens")
    decoded_rows = iter(decoded)
    results: list[torch.Tensor | None] = []
    for item in items:
        if is_verified(item):
            # The default decodes one by one and must be told the length; a model with its own keeps the length too.
            is_default = type(model).forward_verify is DecoderOnlyLLM.forward_verify
            start = {"start_pos": item.pos_offset} if is_default else {}
            results.append(model.forward_verify(cache_id_of(item), item.q_tokens, **start))
            continue
        logits = next(decoded_rows) if is_decode_step(item) else model.prefill(cache_id_of(item), item.q_tokens)
        is_wanted = item.is_final_chunk and logits is not None
        results.append(apply_policies(logits[None], [item.logits_policy])[0] if is_wanted else None)
    return results
