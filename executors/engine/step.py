"""A step of the engine, and the completions that decode together from one step to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import ge
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paged.errors import StaleHandleError
from paged.executors.foreign import WrongResultsError
from paged.executors.requests.request import Completion, Request, State
from paged.executors.sampling.rows import index_tensor, row_matrix
from paged.executors.sampling.sampler import Drafts, Sampled
from paged.step.batch import CapturedStates
from paged.step.batch_step import take_items
from paged.step.step import Step


class DecodeGroup:
    """Completions that decode together, one row each, with precomputed data that stays valid while they do.

    Attributes:
        outputs: outputs of their requests.
        steps_left: number of sampled steps before the first row may reach its last token; 0 or less if unknown.
        reads_tokens: whether sampling any row needs its earlier tokens on the host.
        fills_steps: whether `fill` supports the group: all completions hold cache, and none has embeddings or returns
            states.
    """

    def __init__(self, completions: list[Completion]) -> None:
        self.completions = completions
        handles = [completion.handle for completion in completions]
        self._handles = [handle for handle in handles if handle is not None]
        self._counts = [1] * len(completions)
        self.outputs = dict.fromkeys(completion.request_output for completion in completions)
        self.fills_steps = True
        self.reads_tokens = self._is_watched = False
        for completion in completions:
            if completion.handle is None or completion.request.embeds is not None or completion.states is not None:
                self.fills_steps = False
            if completion.reads_tokens:
                self.reads_tokens = True
            if completion.is_watched:
                self._is_watched = True
        self._token_ids = [completion.token_ids for completion in completions]
        ending_ids = {completion.ending_ids for completion in completions}  # a set, because most are equal
        self._ending_ids = frozenset[int]().union(*ending_ids)
        self._max_tokens = [completion.max_tokens for completion in completions]
        tokens_left = [completion.max_tokens - completion.num_sampled for completion in completions]
        self.steps_left = min(tokens_left, default=0)

    @cached_property
    def _row_ids(self) -> NDArray[np.int64]:
        return np.arange(len(self.completions))

    def fill(self, step: EngineStep, newest: torch.Tensor | None) -> None:
        """Set the sequences and tokens of a step that runs the newest token of each row.

        newest: the tokens, int64 [n] on the cache's device; None if the host knows them.
        """
        step.only_decodes = True  # first, because after an error the completions' chunks are set if this is False
        step.completions = self.completions
        step.handles, step.counts, step.row_ids = self._handles, self._counts, self._row_ids
        step.device_ids = newest
        if newest is None:
            step.token_ids = np.array([token_ids[-1] for token_ids in self._token_ids], np.int64)
        else:
            step.token_ids = np.zeros(len(self._handles), np.int64)
        # The step may have been set from chunks before, whose drafts found no blocks.
        step.items, step.policies, step.published, step.captured, step.embeds = (), None, None, None, None

    def advance(self, tokens: Sequence[list[int]]) -> list[Completion]:
        """Append one token to each row's output; return the completions that it may end. tokens: a list per row."""
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


@dataclass(eq=False)
class EngineStep(Step):
    """A `Step` with the completions of an engine that it runs and, after it has run, their answers and tokens.

    Attributes:
        completions: one for each item. The first `num_decodes` run their newest token and any drafts; the others run
            prompt tokens and have their chunk set.
        num_prefill_tokens: number of prompt tokens, counted when they join, because the next step's chunks are
            scheduled before this step's tokens are read.
        drafts: drafts of each decode; None if there are none.
        runs_apart: whether each completion is a forward of its own.
        started: time of its scheduling, in seconds of `perf_counter`.
        answers: answers of the wanted rows, logits [num_rows, V] or tokens [num_rows], once the step has run.
        sampled: its tokens; more than one entry if completions were sampled apart.
        scores: (request, function that reads the log probabilities of its prompt tokens).
    """

    completions: list[Completion] = field(default_factory=list)
    num_decodes: int = 0
    num_prefill_tokens: int = 0
    drafts: Drafts | None = None
    runs_apart: bool = False
    started: float = 0.0
    answers: torch.Tensor | None = None
    sampled: list[Sampled] = field(default_factory=list)
    scores: list[tuple[Request, Callable[[], list[dict[int, float]]]]] = field(default_factory=list)

    @property
    def decodes(self) -> list[Completion]:
        """Completions that run their newest token."""
        return self.completions[: self.num_decodes]

    @property
    def chunks(self) -> list[Completion]:
        """Completions that run prompt tokens."""
        return self.completions[self.num_decodes :]

    def add_decode(self, completion: Completion) -> None:
        """Add a completion that runs its newest token."""
        self.completions.insert(self.num_decodes, completion)
        self.num_decodes += 1

    def add_chunk(self, completion: Completion, count: int) -> None:
        """Add the next `count` prompt tokens of a completion."""
        completion.take_chunk(count)
        self.completions.append(completion)
        self.num_prefill_tokens += len(completion.chunk)

    def drop_preempted(self) -> None:
        """Remove completions that no longer run."""
        decodes = [completion for completion in self.decodes if completion.state is State.DECODE]
        chunks = [completion for completion in self.chunks if completion.state is State.PREFILL]
        self.completions = decodes + chunks
        self.num_decodes = len(decodes)
        self.num_prefill_tokens = sum(len(completion.chunk) for completion in chunks)

    def take_chunks(self, completions: list[Completion], device_ids: torch.Tensor | None = None) -> None:
        """Set sequences and tokens from the chunks of completions. device_ids: tokens of the first completions.

        Raises:
            StaleHandleError: a completion holds no cache.
        """
        self.completions, self.only_decodes = completions, False
        self.device_ids = device_ids
        handles = []
        for completion in completions:
            if completion.handle is None:
                raise StaleHandleError(f"{completion!r} holds no cache")
            handles.append(completion.handle)
        self.handles = handles
        self.captured = _captured_of(completions)
        take_items(self, [completion.item() for completion in completions])

    def alone(self, completion: Completion) -> EngineStep:
        """Return a step of one completion of this step, with its chunk."""
        return EngineStep(device=self.device, is_invariant=self.is_invariant, completions=[completion])

    def answer_rows(self) -> list[AnswerRows]:
        """Return where the answers of each completion are."""
        assert self.answers is not None
        rows = []
        end = 0
        for num_rows in self.num_rows():
            begin = end
            end += num_rows
            rows.append(AnswerRows(self.answers, begin, end))
        return rows

    def newest_of(self, completions: list[Completion], device: torch.device) -> torch.Tensor | None:
        """Return the completions' newest tokens, int64 [n] on the device; None if one was not sampled in this step."""
        all_tokens: list[torch.Tensor] = []
        places: dict[Completion, int] = {}
        for sampled in self.sampled:
            if sampled.device_ids is None:
                continue
            if sampled.completions == completions:
                return sampled.device_ids
            all_tokens.append(sampled.device_ids)
            for completion in sampled.completions:
                places[completion] = len(places)
        if not places.keys() >= set(completions):
            return None
        index = index_tensor([places[completion] for completion in completions], device)
        return torch.cat(all_tokens)[index]


class AnswerRows(NamedTuple):
    """Rows of a step's answers. They are read late, within error handling, because memory may be short."""

    answers: torch.Tensor
    begin: int
    end: int

    @property
    def last(self) -> AnswerRows:
        """The last row only."""
        return self._replace(begin=self.end - 1)

    def read(self, vocab_size: int) -> torch.Tensor:
        """Return logits [rows, V], or tokens [rows].

        Raises:
            WrongResultsError: logits have another vocabulary.
        """
        rows = self.answers[self.begin : self.end]
        expected = (self.end - self.begin, vocab_size)
        if rows.is_floating_point() and rows.shape != expected:
            raise WrongResultsError(f"logits {tuple(rows.shape)}, expected {expected}")
        return rows


def _captured_of(completions: Sequence[Completion]) -> CapturedStates | None:
    """Return the capture request for a forward of these completions, or None."""
    captured: CapturedStates | None = None
    for completion in completions:
        if completion.states is None:
            continue
        if captured is None:
            captured = CapturedStates(has_experts=False)
        if completion.states.requested["routed_experts"]:
            captured.has_experts = True
    return captured


def joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return answers as int64 tokens [n] or as one matrix of logits."""
    if rows[0].is_floating_point():
        return row_matrix(rows)
    return torch.cat(list(rows))
