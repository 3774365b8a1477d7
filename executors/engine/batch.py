"""What a step carries: the rows that decode together, the batch that runs, and its tokens while they are under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import ge

import numpy as np
import torch
from numpy.typing import NDArray

from paged.batch import BatchColumns, CapturedStates, UnifiedBatch, UnifiedBatchItem
from paged.cache.manager import PagedKvCacheManager
from paged.executors.requests.request import Completion, Request, State
from paged.executors.sampling.rows import index_tensor
from paged.executors.sampling.sampler import Drafts, SampledOnDevice
from paged.forward_step import ForwardStep


class Rows:
    """Completions that run in the same step, one a row, and what stays the same while they decode on together.

    Attributes:
        outputs: of their requests.
        steps_left: steps until one of them may have all its tokens, counted as they are sampled; 0 or less if unknown.
        reads_tokens: whether the earlier tokens of any must be known to sample its next one.
        takes_batches: whether `next_batch` can run them: they hold cache, and none has embeddings or returns states.
    """

    def __init__(self, completions: list[Completion]) -> None:
        self.completions = completions
        handles = [completion.handle for completion in completions]
        self._handles = [handle for handle in handles if handle is not None]
        self.outputs = dict.fromkeys(completion.request_output for completion in completions)
        self.takes_batches = True
        self.reads_tokens = self._is_watched = False
        for completion in completions:
            if completion.handle is None or completion.request.embeds is not None or completion.states is not None:
                self.takes_batches = False
            if completion.reads_tokens:
                self.reads_tokens = True
            if completion.is_watched:
                self._is_watched = True
        self._columns = BatchColumns(
            seq_ids=[completion.seq_id for completion in completions],
            kv_caches=handles,
            counts=[1] * len(completions),
            is_decode=True,
            has_embeds=False,
            wants_logits=True,
        )
        self._token_ids = [completion.token_ids for completion in completions]
        ending_ids = {completion.ending_ids for completion in completions}  # few differ
        self._ending_ids = frozenset[int]().union(*ending_ids)
        self._max_tokens = [completion.max_tokens for completion in completions]
        tokens_left = [completion.max_tokens - completion.num_sampled for completion in completions]
        self.steps_left = min(tokens_left, default=0)

    @cached_property
    def _row_ids(self) -> NDArray[np.int64]:
        return np.arange(len(self.completions))

    def next_batch(
        self, manager: PagedKvCacheManager, device: torch.device, newest: torch.Tensor | None, *, is_invariant: bool
    ) -> UnifiedBatch:
        """Reserve capacity for the newest token of each row, and return the batch that runs it.

        newest: the tokens, int64 [n] on the cache's device; None if the host knows them.
        is_invariant: as in `ForwardStep`.

        Raises:
            OutOfBlocksError: the cache has too few free blocks.
        """
        if newest is None:
            tokens = np.array([token_ids[-1] for token_ids in self._token_ids], np.int64)
        else:
            tokens = np.zeros(len(self._handles), np.int64)
        counts = self._columns.counts
        reservation, host = manager.reserve_step(self._handles, counts)
        prepared = ForwardStep(
            token_ids=tokens,
            host=host,
            row_ids=self._row_ids,
            handles=self._handles,
            counts=counts,
            device=device,
            device_ids=newest,
            reservation=reservation,
            only_decodes=True,
            is_invariant=is_invariant,
        )
        # Without the dataclass's constructor, which takes the items, and which `dataclasses.replace` needs as it is.
        batch = object.__new__(_DecodeBatch)
        batch.__dict__.update(
            rows=self.completions,
            columns=self._columns,
            prepared=prepared,
            device_ids=newest,
            is_stacked=True,
            returns_hidden=False,
            captured=None,
        )
        return batch

    def advance(self, tokens: Sequence[list[int]]) -> list[Completion]:
        """Append one token to the output of each row, given in a list; return those for which it may be the last."""
        for token_ids, newest in zip(self._token_ids, tokens, strict=True):
            token_ids += newest
        is_full = self.steps_left <= 0 and any(map(ge, map(len, self._token_ids), self._max_tokens))
        if not (self._is_watched or is_full) and self._ending_ids.isdisjoint(chain.from_iterable(tokens)):
            return []
        ending = []
        for completion, (token,) in zip(self.completions, tokens, strict=True):
            if completion.is_watched or token in completion.ending_ids or completion.is_full:
                ending.append(completion)
        return ending


class _DecodeBatch(UnifiedBatch):
    """One token of each row. Its items are made on the first read: 256 take 0.4 ms."""

    rows: list[Completion]

    @cached_property
    def items(self) -> list[UnifiedBatchItem]:  # type: ignore[override]
        assert self.prepared is not None
        starts = self.prepared.host.positions.tolist()
        tokens = self.prepared.token_ids.tolist()
        items = []
        for completion, start, token in zip(self.rows, starts, tokens, strict=True):
            metadata = completion.request.metadata
            items.append(UnifiedBatchItem(completion.seq_id, [token], completion.handle, start, metadata=metadata))
        return items


class StepBatch:
    """What runs in one step: the scheduler fills it, then reserves its capacity in the cache.

    Attributes:
        decodes: completions that run their newest token, and drafts behind it.
        chunks: completions that run prompt tokens, with their chunks set.
        num_prefill_tokens: tokens of `chunks`, counted as they join: the next step's chunks are planned before this
            step's tokens are read.
        tokens_left: prompt tokens that may still join; 0 once nothing may.
        max_chunk: prompt tokens that the step could run of one completion.
        prompt_rows_left: prompt tokens that may still have logits for each.
        completions: decodes and chunks, in the order of the batch's items.
        drafts: of `decodes`, row by row; None if there are none.
        batch: what the executor runs; None if each completion is a forward of its own.
        rows: of completions that all decode by one token; None in any other step.
        is_ahead: whether the tokens of the step before are not known yet.
    """

    def __init__(self, decodes: list[Completion], tokens_left: int, max_chunk: int, prompt_rows_left: int) -> None:
        self.decodes = decodes
        self.chunks: list[Completion] = []
        self.num_prefill_tokens = 0
        self.tokens_left = tokens_left
        self.max_chunk = max_chunk
        self.prompt_rows_left = prompt_rows_left
        self.completions = decodes
        self.drafts: Drafts | None = None
        self.batch: UnifiedBatch | None = None
        self.rows: Rows | None = None
        self.is_ahead = False

    def add_chunk(self, completion: Completion, count: int) -> None:
        """Let the next `count` prompt tokens of a completion join."""
        completion.take_chunk(count)
        self.chunks.append(completion)
        self.num_prefill_tokens += len(completion.chunk)
        self.tokens_left -= count

    def close(self) -> None:
        """Let nothing more join."""
        self.tokens_left = 0

    def drop_preempted(self) -> None:
        """Leave out completions that no longer run."""
        self.decodes = [completion for completion in self.decodes if completion.state is State.DECODE]
        self.chunks = [completion for completion in self.chunks if completion.state is State.PREFILL]
        self.num_prefill_tokens = sum(len(completion.chunk) for completion in self.chunks)


Part = tuple[Rows, SampledOnDevice]


@dataclass(eq=False)
class StepOutput:
    """The tokens of a step, which the host has not read yet.

    Attributes:
        step: what ran.
        started: when it was planned, in seconds of `perf_counter`.
        parts: completions and their tokens, in as many parts as were sampled.
        prompts: requests, and what reads the log probabilities of their prompts' next tokens.
    """

    step: StepBatch
    started: float
    parts: list[Part] = field(default_factory=list)
    prompts: list[tuple[Request, Callable[[], list[dict[int, float]]]]] = field(default_factory=list)

    def newest_of(self, completions: list[Completion], device: torch.device) -> torch.Tensor | None:
        """Return the newest tokens of its completions, int64 [n] on the device; None if one was not sampled in it."""
        all_rows: list[Rows] = []
        all_tokens: list[torch.Tensor] = []
        for rows, sampled in self.parts:
            if sampled.token_ids is not None:
                all_rows.append(rows)
                all_tokens.append(sampled.token_ids)
        if len(all_rows) == 1 and all_rows[0].completions == completions:
            return all_tokens[0]
        places: dict[Completion, int] = {}
        for rows in all_rows:
            for completion in rows.completions:
                places[completion] = len(places)
        if not places.keys() >= set(completions):
            return None
        index = index_tensor([places[completion] for completion in completions], device)
        return torch.cat(all_tokens)[index]


def captured_of(completions: Sequence[Completion]) -> CapturedStates | None:
    """Return what a forward has to capture for completions, None for nothing."""
    captured: CapturedStates | None = None
    for completion in completions:
        if completion.states is None:
            continue
        if captured is None:
            captured = CapturedStates(has_experts=False)
        if completion.states.requested["routed_experts"]:
            captured.has_experts = True
    return captured
