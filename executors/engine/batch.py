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
from paged.executors.requests.request import Completion, Request
from paged.executors.sampling.rows import index_tensor
from paged.executors.sampling.sampler import Drafts, SampledOnDevice
from paged.forward_step import decode_step


class Rows:
    """Completions that run in the same step, one a row, and what stays the same while they decode on together.

    Attributes:
        handles: their sequences in the cache.
        outputs: of their requests.
        reads_tokens: whether the earlier tokens of any must be known to sample its next one.
        takes_batches: whether `next_batch` can run them: they hold cache, and none has embeddings or returns states.
    """

    def __init__(self, completions: list[Completion]) -> None:
        self.completions = completions
        self.handles = [completion.handle for completion in completions]
        self.outputs = dict.fromkeys(completion.request_output for completion in completions)
        self.reads_tokens = any(completion.reads_tokens for completion in completions)
        has_embeds = any(completion.request.embeds is not None for completion in completions)
        returns_states = any(completion.states is not None for completion in completions)
        self.takes_batches = None not in self.handles and not has_embeds and not returns_states
        self._columns = BatchColumns(
            seq_ids=[completion.seq_id for completion in completions],
            kv_caches=self.handles,
            counts=[1] * len(completions),
            is_decode=True,
            has_embeds=False,
            wants_logits=True,
        )
        self._token_ids = [completion.token_ids for completion in completions]
        self._ending_ids = frozenset[int]().union(*{completion.ending_ids for completion in completions})
        self._is_watched = any(completion.is_watched for completion in completions)
        self._max_tokens = [completion.max_tokens for completion in completions]

    def next_batch(self, manager: PagedKvCacheManager, newest: torch.Tensor | None) -> UnifiedBatch:
        """Reserve capacity for the newest token of each row, and return the batch that runs it.

        newest: the tokens, int64 [n] on the device; None if the host knows them.

        Raises:
            OutOfBlocksError: the cache has too few free blocks.
        """
        tokens: NDArray[np.int64] | torch.Tensor | None = newest
        if tokens is None:
            tokens = np.array([token_ids[-1] for token_ids in self._token_ids], np.int64)
        # Without the dataclass's constructor, which takes the items, and which `dataclasses.replace` needs as it is.
        batch = object.__new__(_DecodeBatch)
        batch.__dict__.update(
            rows=self.completions,
            columns=self._columns,
            prepared=decode_step(manager, self.handles, tokens),  # type: ignore[arg-type]
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
        is_full = any(map(ge, map(len, self._token_ids), self._max_tokens))
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


@dataclass(eq=False)
class StepBatch:
    """What runs in one step, with its capacity in the cache.

    Attributes:
        completions: in the order of the batch's items.
        chunks: those of them that run prompt tokens.
        drafts: of `decodes`, row by row; None if there are none.
        batch: what the executor runs; None if each completion is a forward of its own.
        rows: of completions that all decode by one token; None in any other step.
        is_ahead: whether the tokens of the step before are not known yet.
        num_prefill_tokens: tokens of chunks.
    """

    completions: list[Completion]
    decodes: list[Completion]
    chunks: list[Completion]
    drafts: Drafts | None
    batch: UnifiedBatch | None
    rows: Rows | None
    is_ahead: bool
    num_prefill_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        """Count the tokens now: the next step's chunks are planned before this step's tokens are read."""
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
        parts = [(rows, sampled.token_ids) for rows, sampled in self.parts if sampled.token_ids is not None]
        if len(parts) == 1:
            rows, token_ids = parts[0]
            if rows.completions == completions:
                return token_ids
        places: dict[Completion, int] = {}
        for rows, _ in parts:
            for completion in rows.completions:
                places[completion] = len(places)
        if not places.keys() >= set(completions):
            return None
        tokens = torch.cat([tokens for _, tokens in parts])
        index = index_tensor([places[completion] for completion in completions], device)
        return tokens[index]


def captured_of(completions: Sequence[Completion]) -> CapturedStates | None:
    """Return what a forward has to capture for completions, None for nothing."""
    all_states = [completion.states for completion in completions if completion.states is not None]
    if not all_states:
        return None
    return CapturedStates(has_experts=any(states.requested["routed_experts"] for states in all_states))
