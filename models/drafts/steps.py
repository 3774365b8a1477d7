"""Steps of a draft head beside its target: it stores keys and values in the target's blocks, and drafts tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from paged.cache.groups import ROLLBACK_SLACK
from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from paged.kernels.attention.plan import AttentionPlan
from paged.models.drafts.head import DraftHead
from paged.step.metadata import OutputRows
from paged.step.staging import to_device
from paged.step.step import Step


class _Kept(NamedTuple):
    """Features of a sequence's newest tokens, of positions `start` to `end`; `row` of `features` holds the first."""

    features: torch.Tensor
    row: int
    start: int
    end: int


class DraftSteps:
    """Runs a draft head on the sequences of its target.

    After every step of the target, `follow` writes the head's keys and values of the same tokens, from the target's
    hidden states. `drafting` then runs the head beyond a sequence's end. The drafts' keys and values lie beyond the
    sequence's length, and the target's next step replaces them.

    A token's features are needed when the next token runs. So the newest features of each sequence are kept: as many as
    rejected drafts can roll back.

    Attributes:
        most_drafts: most drafts of a sequence in a step; None for no limit.
    """

    most_drafts: int | None = None

    def __init__(
        self, head: DraftHead, manager: PagedKvCacheManager, computing: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """computing: the context in which the target computes, see `Network.computing`."""
        self._head, self._manager, self._computing = head, manager, computing
        self._kept: WeakKeyDictionary[KvCacheHandle, _Kept] = WeakKeyDictionary()
        manager.on_fork = self._fork

    def follow(self, step: Step, features: torch.Tensor) -> None:
        """Write keys and values of a step's tokens, and keep the newest features, [num_tokens, hidden_size]."""
        metadata, offsets = step.metadata, step.cu_seqlens_q.astype(np.int64)
        firsts, ends = offsets[:-1], offsets[1:]
        starts = step.positions[firsts]
        before, is_known = self._before(step.handles, starts, features)
        # After a cached prefix, the last token of a block runs again, because the head needs its features. Do not write
        # the head's K/V of this token again: the cached block holds them.
        is_repeated = ~is_known & ((starts + 1) % self._manager.config.block_size == 0)
        if is_repeated.any():
            (rows,) = to_device((firsts[is_repeated],), step.device)
            metadata = metadata.without_slots(rows)
        if len(features) == len(firsts):  # one token for each sequence
            previous = before
        else:
            previous = features.roll(1, 0).index_copy_(0, to_device((firsts,), step.device)[0], before)
        none = torch.zeros_like(metadata.cu_seqlens_q)
        plan = AttentionPlan(none, metadata.seq_lens, max_seqlen_q=0, max_seqlen_k=step.max_seqlen_k)
        no_rows = OutputRows(step.sample_rows[:0], none, 0, plan)
        self._head(step.input_ids, previous, metadata, no_rows)
        sizes = np.minimum(ends - firsts, ROLLBACK_SLACK)
        rows = np.cumsum(sizes) - sizes
        if sizes.sum() < len(features):
            kept: list[NDArray[np.int64]] = []
            for end, size in zip(ends, sizes, strict=True):
                kept.append(np.arange(end - size, end))
            features = features[to_device((np.concatenate(kept),), step.device)[0]]
        lengths = starts + ends - firsts
        spans = zip(step.handles, rows.tolist(), (lengths - sizes).tolist(), lengths.tolist(), strict=True)
        for handle, row, start, end in spans:
            self._kept[handle] = _Kept(features, row, start, end)

    def can_draft(self, handle: KvCacheHandle) -> bool:
        """Return whether the features of a sequence's last token are known."""
        kept = self._kept.get(handle)
        return kept is not None and kept.start < handle.num_tokens <= kept.end

    @contextmanager
    def drafting(self, handles: Sequence[KvCacheHandle], counts: Sequence[int]) -> Iterator[DraftRun]:
        """Reserve capacity for `counts` drafts of sequences that can draft; free it at the end.

        Raises:
            OutOfBlocksError: the cache has too few free blocks.
        """
        lengths = np.array([handle.num_tokens for handle in handles], np.int64)
        step = Step(handles, counts)
        self._manager.reserve_for(step)
        try:
            features, _ = self._before(handles, lengths, None)
            with self._computing():
                yield DraftRun(self._head, features, lengths, step.block_tables, self._manager)
        finally:
            step.rollback()

    def _fork(self, source: KvCacheHandle, target: KvCacheHandle) -> None:
        if source in self._kept:
            self._kept[target] = self._kept[source]

    def _before(
        self, handles: Sequence[KvCacheHandle], starts: NDArray[np.int64], like: torch.Tensor | None
    ) -> tuple[torch.Tensor, NDArray[np.bool_]]:
        """Return the features of the token before each position, [n, hidden_size], and whether they are known.

        Unknown features are 0.
        """
        sources: dict[int, tuple[torch.Tensor, list[int], list[int]]] = {}
        for place, (handle, start) in enumerate(zip(handles, starts.tolist(), strict=True)):
            kept = self._kept.get(handle)
            if kept is not None and kept.start < start <= kept.end:
                _, rows, places = sources.setdefault(id(kept.features), (kept.features, [], []))
                rows.append(kept.row + start - 1 - kept.start)
                places.append(place)
        if like is None:
            like = next(features for features, _, _ in sources.values())
        before = like.new_zeros(len(handles), like.shape[1])
        is_known = np.zeros(len(handles), np.bool_)
        for features, rows, places in sources.values():
            source, target = to_device([np.array(rows, np.int64), np.array(places, np.int64)], like.device)
            before.index_copy_(0, target, features[source])
            is_known[places] = True
        return before, is_known


class DraftRun:
    """The head's steps beyond the ends of sequences, one token of each sequence at a time."""

    def __init__(
        self,
        head: DraftHead,
        features: torch.Tensor,
        lengths: NDArray[np.int64],
        tables: NDArray[np.int32],
        manager: PagedKvCacheManager,
    ) -> None:
        self._head, self._features, self._lengths, self._tables = head, features, lengths, tables
        self._block_size, self._device, self._num_steps = manager.config.block_size, manager.device, 0

    def logits(self, sequences: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
        """Run the next token of some sequences, int64 [n]; return the logits of the drafts after them, float32 [n, V].

        sequences: indices of sequences; a call may only take sequences that the previous call took.
        """
        lengths = self._lengths[[*sequences]] + self._num_steps
        step = Step()
        step.place(lengths, None, self._tables[:, [*sequences]], self._block_size)
        rows, *tensors = to_device((np.array(sequences, np.int64), *step.arrays), self._device)
        hidden, features = self._head(token_ids.clamp(min=0), self._features[rows], step.over(tensors))
        self._features = self._features.index_copy(0, rows, features)
        self._num_steps += 1
        return self._head.logits(hidden)

    def confidences(self) -> None:
        """Return None: these heads do not estimate whether a draft is accepted."""
