"""Embedding rows of one forward, cut from the items' `PromptEmbeds` and copied to the device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paged.errors import InvalidInputError
from paged.step.batch import UnifiedBatchItem
from paged.step.metadata import EmbeddedRows
from paged.step.staging import to_device

if TYPE_CHECKING:
    from paged.prompt_embeds import EmbedsLimits


class StepEmbeds(NamedTuple):
    """Rows in place of token embeddings, for a step of T tokens. Only `rows` and `deepstack` may be on the device.

    Attributes:
        rows: [n, hidden_size], in place of the tokens `row_ids`.
        deepstack: [m, n, hidden_size], added to the same tokens after each of the first m layers.
        row_ids: int64 [n], indices of the replaced tokens.
        rope_positions: int64 [3, T], or [3, 0] if the axes of all tokens are equal.
        last_seen: int64 [T], for each token the last new token of its sequence that it sees, counted from the
            sequence's first new token; empty for causal attention.
    """

    rows: torch.Tensor
    deepstack: torch.Tensor
    row_ids: NDArray[np.int64]
    rope_positions: NDArray[np.int64]
    last_seen: NDArray[np.int64]

    def arrays(self) -> list[NDArray[Any]]:
        """Return all fields as arrays; rows are float32, which holds every 16-bit float exactly."""
        return [self.rows.cpu().float().numpy(), self.deepstack.cpu().float().numpy(), *self[2:]]

    @classmethod
    def read(cls, arrays: Sequence[NDArray[Any]]) -> StepEmbeds:
        """Rebuild from the result of `arrays`."""
        rows, deepstack, row_ids, rope_positions, last_seen = arrays
        return cls(torch.from_numpy(rows), torch.from_numpy(deepstack), row_ids, rope_positions, last_seen)

    def on(self, device: torch.device, dtype: torch.dtype, max_seqlen_q: int) -> EmbeddedRows:
        """Return a copy with rows on the model's device in its dtype."""
        row_ids, rope_positions, last_seen = to_device(self[2:], device)
        mask: torch.Tensor | None = None
        if len(last_seen):
            mask = torch.arange(max_seqlen_q, device=device) <= last_seen[:, None]
        return EmbeddedRows(
            row_ids=row_ids,
            rows=self.rows.to(device, dtype),
            deepstack=self.deepstack.to(device, dtype),
            rope_positions=rope_positions if rope_positions.numel() else None,
            mask=mask,
        )


def check_embeds(items: Sequence[UnifiedBatchItem], limits: EmbedsLimits | None) -> None:
    """Check the embeddings of all items (see `PromptEmbeds.check`), and that no chunk cuts a span.

    Raises:
        InvalidInputError, UnsupportedError: an item's embeddings cannot run.
    """
    for item in items:
        embeds = item.embeds
        if embeds is None:
            continue
        start, end = item.pos_offset, item.pos_offset + len(item.q_tokens)
        # Without rotary positions, the prompt's length is unknown; take the shortest prompt that holds all rows.
        num_tokens = max(embeds.positions, default=-1) + 1
        if embeds.rope_positions is not None:
            num_tokens = embeds.rope_positions.shape[1]
        embeds.check(num_tokens, limits)
        for begin, stop in embeds.spans:
            if start < stop and begin < end < stop:
                raise InvalidInputError(
                    f"item {item.seq_id!r}: ends at {end} within the span {begin, stop}, expected all of it"
                )


def embed_step(
    items: Sequence[UnifiedBatchItem],
    positions: NDArray[np.int64],
    cu_seqlens_q: NDArray[np.int32],
    device: torch.device,
) -> tuple[StepEmbeds | None, NDArray[np.int64]]:
    """Return the rows of a step, or None, and the rotary positions of its tokens.

    positions, cu_seqlens_q: as in `Step`.
    """
    positions, firsts = positions.copy(), cu_seqlens_q.tolist()
    own_key = np.arange(len(positions)) - np.repeat(firsts[:-1], np.diff(firsts))
    last_seen, has_axes = own_key.copy(), False
    axes: list[tuple[slice, NDArray[np.int64]]] = []
    row_ids: list[int] = []
    rows: list[torch.Tensor] = []
    added: list[tuple[int, torch.Tensor]] = []
    for first, item in zip(firsts, items, strict=False):
        embeds = item.embeds
        if embeds is None:
            continue
        start, end = item.pos_offset, item.pos_offset + len(item.q_tokens)
        shift = first - start
        if embeds.rope_positions is not None:
            positions[max(embeds.rope_positions.shape[1], start) + shift : end + shift] += embeds.delta
            item_rope = embeds.rope_positions[:, start:end].numpy()
            span = slice(first, first + item_rope.shape[1])
            axes.append((span, item_rope))
            positions[span] = item_rope[0]
            has_axes = has_axes or bool((item_rope != item_rope[0]).any())
        for begin, stop in embeds.spans:
            if start < stop and begin < end:
                last_seen[max(begin, start) + shift : stop + shift] = stop - start - 1
        low, high = bisect_left(embeds.positions, start), bisect_left(embeds.positions, end)
        if low < high:
            if embeds.deepstack is not None:
                added.append((len(row_ids), embeds.deepstack[:, low:high]))
            row_ids += [position + shift for position in embeds.positions[low:high]]
            rows.append(embeds.rows[low:high])
    if not (row_ids or has_axes):
        return None, positions
    rope = np.zeros((3, 0), np.int64)
    if has_axes:
        rope = np.stack([positions] * 3)
        for span, item_rope in axes:
            rope[:, span] = item_rope
    step_rows = torch.zeros(0, 1, device=device)
    if rows:
        step_rows = torch.cat([item_rows.to(device) for item_rows in rows])
    num_layers = max((len(item_layers) for _, item_layers in added), default=0)
    deepstack = step_rows.new_zeros(num_layers, *step_rows.shape)
    for start, item_layers in added:
        deepstack[: len(item_layers), start : start + item_layers.shape[1]] = item_layers
    if (last_seen == own_key).all():  # causal
        last_seen = last_seen[:0]
    return StepEmbeds(step_rows, deepstack, np.array(row_ids, np.int64), rope, last_seen), positions
