"""Sampling of a step's tokens, with one copy of the ids to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paged.executors.requests.request import Completion
from paged.executors.sampling.counts import TokenCounts
from paged.executors.sampling.logprobs import logprob_table, own_and_best
from paged.executors.sampling.noise import Stream, noise_keys, split_keys, uniform
from paged.executors.sampling.own_rules import Span, own_rules
from paged.executors.sampling.rejection_sampling import rejection_sample
from paged.executors.sampling.rows import RowDrafts, SamplingRows, index_tensor, row_pairs
from paged.kernels.core.operation import Bound
from paged.kernels.sampling.definition import penalised
from paged.kernels.sampling.greedy_argmax import greedy_argmax
from paged.kernels.sampling.penalties import Penalties
from paged.kernels.sampling.sample_tokens import FILTERS, filter_logits, sample_tokens
from paged.step.batch import DrawToken
from paged.step.staging import HostCopy, to_device

# New tokens of each completion, and the log probability by token id of each token or None.
_Tokens = tuple[list[list[int]], list[list[dict[int, float]]] | None]


class Sampled:
    """New tokens of completions: on the device from the start, on the host after `read`.

    Attributes:
        completions: completions that get the tokens.
        device_ids: int64 [n] on the device, one for each completion; None if drafts are verified.
        token_ids: tokens of each completion.
        logprobs: log probability by token id of each token; None if no completion requests any.
    """

    def __init__(
        self, completions: list[Completion], device_ids: torch.Tensor | None, copied: Callable[[], _Tokens]
    ) -> None:
        """copied: waits for the running copy to the host and returns the tokens."""
        self.completions = completions
        self.device_ids = device_ids
        self.token_ids: list[list[int]] = []
        self.logprobs: list[list[dict[int, float]]] | None = None
        self._copied = copied

    @classmethod
    def of(cls, completions: list[Completion], device_ids: torch.Tensor) -> Sampled:
        """Start to copy one token for each completion, int64 [n]."""
        host = HostCopy(device_ids)
        return cls(completions, device_ids, lambda: (host.numpy()[:, None].tolist(), None))

    def read(self) -> Sampled:
        """Wait for the copy; set the tokens on the host, and return the object."""
        self.token_ids, self.logprobs = self._copied()
        return self


class Drafts(NamedTuple):
    """Drafts for completions, and the distributions they were drawn from, float32 [n, k, V]; None if certain."""

    token_ids: list[list[int]]
    probs: torch.Tensor | None = None

    @classmethod
    def empty(cls, num_completions: int) -> Drafts:
        """Return empty drafts for each completion."""
        return cls([[] for _ in range(num_completions)])

    def first(self, counts: Sequence[int]) -> Drafts:
        """Return the first `counts[i]` drafts of completion i."""
        token_ids = []
        for drafted, count in zip(self.token_ids, counts, strict=True):
            token_ids.append(drafted[:count])
        if self.probs is None:
            return Drafts(token_ids)
        return Drafts(token_ids, self.probs[:, : max(counts)])


# Logits after masks and biases, and the penalties that are still to be applied.
_Ruled = tuple[torch.Tensor, Penalties | None]


class Sampler:
    """Samples tokens. A row's token depends only on the row's logits, parameters, tokens and seed.

    The token is -1 if all logits are NaN or -inf.

    has_raw_logprobs: see `EngineConfig.logprobs_mode`.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, has_raw_logprobs: bool = True) -> None:
        self._has_raw_logprobs = has_raw_logprobs
        self._vocab_size = vocab_size
        self._device = self.device = device
        self._counts: TokenCounts | None = None
        self._last: SamplingRows | None = None
        self._best = Bound(greedy_argmax)

    def sample(self, logits: torch.Tensor, completions: list[Completion]) -> Sampled:
        """Sample one token for each completion, from logits float32 [n, V]."""
        rows = self._rows(completions)
        if rows.is_plain and rows.num_logprobs is None:
            return Sampled.of(completions, self._best(logits))
        spans = [Span(completions[row], row, ()) for row in rows.reading]
        ruled = self._ruled(own_rules(logits, spans), rows, None)
        _, penalties = ruled
        tokens = self._choose(ruled, rows, None)
        if rows.num_logprobs is not None and not self._has_raw_logprobs:
            logits = self._filtered(ruled, rows)  # before the new tokens change the penalties
        if self._counts is not None and penalties is not None:
            index = rows.penalised_rows
            self._counts.add([completions[row] for row in rows.penalised], penalties.rows[index], tokens[index])
        if rows.num_logprobs is None:
            return Sampled.of(completions, tokens)
        return self._with_logprobs(logits, completions, rows, tokens[:, None], None, [1] * len(completions))

    def draws(self, completions: list[Completion]) -> list[DrawToken] | None:
        """Return policies by which the executor draws the tokens itself; None if rows need more than filters."""
        rows = self._rows(completions)
        if not rows.is_free or rows.num_logprobs is not None:
            return None
        keys = split_keys(noise_keys(rows.hashed_seeds, rows.positions(None), Stream.TOKEN)).tolist()
        draws = []
        for completion, (low, high) in zip(completions, keys, strict=True):
            params = completion.params
            if params.is_greedy:
                draws.append(DrawToken(0.0, (low, high)))
                continue
            filters: dict[str, Any] = {}
            for name, value in params.filters.items():
                if FILTERS[name].cuts(value, self._vocab_size):
                    filters[name] = value
            draws.append(DrawToken(params.temperature, (low, high), **filters))
        return draws

    def propose(
        self, logits: torch.Tensor, completions: list[Completion], drafts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw a draft model's next tokens int64 [n]; also return the distributions [n, V] unless all are certain.

        drafts: int64 [n, drafts so far] on the device.
        """
        rows = self._rows(completions)
        row_drafts = RowDrafts(drafts, np.full(len(completions), drafts.shape[1], np.int64))
        ruled = self._ruled(logits, rows, row_drafts)
        tokens = self._choose(ruled, rows, row_drafts)
        if not rows.is_drawn:
            return tokens, None
        return tokens, self._filtered(ruled, rows).softmax(-1)

    def verify(self, logits: torch.Tensor, completions: list[Completion], drafts: Drafts) -> Sampled:
        """Accept drafts of each completion and sample one more token.

        logits: [num_rows, V]; each completion has a row for each draft and one more.
        """
        counts = [len(ids) for ids in drafts.token_ids]
        sizes = [count + 1 for count in counts]
        width = max(counts)
        padded_ids = np.zeros((len(counts), width), np.int64)
        row_completions: list[Completion] = []
        for index, completion in enumerate(completions):
            padded_ids[index, : counts[index]] = drafts.token_ids[index]
            row_completions += [completion] * sizes[index]
        rows = self._rows(row_completions)
        firsts = np.array([0, *accumulate(sizes[:-1])], np.int64)
        seeds = rows.hashed_seeds[firsts][:, None]
        positions = rows.positions(None)[firsts][:, None] + np.arange(width + 1)
        first_rows, owners, ids, num_drafts, uniforms, keys = to_device(
            (
                firsts,
                np.repeat(np.arange(len(sizes)), sizes),
                padded_ids,
                np.array(counts, np.int64),
                uniform(noise_keys(seeds, positions[:, :width], Stream.ACCEPT)),
                split_keys(noise_keys(seeds, positions, Stream.TOKEN)),
            ),
            self._device,
        )
        num_before = np.arange(len(row_completions)) - np.repeat(firsts, sizes)
        row_drafts = RowDrafts(ids[owners], num_before)
        spans = []
        for completion, first, draft_ids in zip(completions, firsts.tolist(), drafts.token_ids, strict=True):
            if completion.reads_tokens:
                spans.append(Span(completion, first, draft_ids))
        changed = own_rules(logits, spans)
        filtered = self._filtered(self._ruled(changed, rows, row_drafts), rows)
        tokens, accepted = rejection_sample(filtered, first_rows, ids, num_drafts, drafts.probs, uniforms, keys)
        if not self._has_raw_logprobs:
            logits = filtered
        return self._with_logprobs(logits, completions, rows, tokens, accepted, sizes)

    def forget(self, completion: Completion) -> None:
        """Drop the state of a finished completion."""
        self._last = None
        if self._counts is not None:
            self._counts.forget(completion)

    def reset(self) -> None:
        """Drop all state after an error, which may have left it inconsistent; it is rebuilt on use."""
        self._counts = self._last = None  # rebuilt later, because memory may be short now

    def _rows(self, completions: list[Completion]) -> SamplingRows:
        if self._last is None or self._last.completions != completions:
            self._last = SamplingRows(completions, self._vocab_size, self._device)
        return self._last

    def _choose(self, ruled: _Ruled, rows: SamplingRows, row_drafts: RowDrafts | None) -> torch.Tensor:
        """Return tokens int64 [n], or with `row_drafts` the tokens after these drafts."""
        logits, penalties = ruled
        if rows.is_plain:
            return self._best(logits)
        if row_drafts is None:
            keys = rows.next_keys()
        else:
            draft_keys = split_keys(noise_keys(rows.hashed_seeds, rows.positions(row_drafts), Stream.DRAFT))
            (keys,) = to_device((draft_keys,), self._device)
        return sample_tokens(logits, keys, **rows.filters, penalties=penalties)

    def _filtered(self, ruled: _Ruled, rows: SamplingRows) -> torch.Tensor:
        """Return the logits of the final distributions, -inf for excluded tokens."""
        logits, penalties = ruled
        if penalties is not None:
            logits = penalised(logits, penalties, rows.penalised_rows)
        return filter_logits(logits, **rows.filters)

    def _ruled(self, logits: torch.Tensor, rows: SamplingRows, row_drafts: RowDrafts | None) -> _Ruled:
        """Return the logits, or a copy with masks (-inf) and biases if any row has them, and the penalties."""
        penalties = self._penalties(rows, row_drafts)
        banned_rows, banned_tokens = [], []
        for row in rows.with_minimum:
            completion = rows.completions[row]
            num_before = completion.num_sampled
            if row_drafts is not None:
                num_before += int(row_drafts.counts[row])
            if num_before < completion.params.min_tokens:
                banned_rows.append(row)
                banned_tokens.append(completion.request.end_ids)
        if rows.allowed is None and rows.biased is None and not banned_rows:
            return logits, penalties
        masked = logits
        logits = logits.clone()
        if rows.allowed is not None:
            allowed_rows, pairs = rows.allowed
            kept = logits[pairs]
            # Fill by distinct rows. Filling by pairs would fill a row once for every allowed token.
            logits.index_fill_(0, allowed_rows, -torch.inf)
            logits[pairs] = kept
        if rows.biased is not None:
            logits.index_put_(*rows.biased, accumulate=True)
        if banned_rows:
            logits[row_pairs(banned_rows, banned_tokens, self._device)] = -torch.inf
        if rows.with_mask_and_rules:
            self._end_whole_texts(logits, masked, rows)
        return logits, penalties

    def _end_whole_texts(self, logits: torch.Tensor, masked: torch.Tensor, rows: SamplingRows) -> None:
        """Undo all other rules in rows whose token mask allows only end tokens, because their text is complete."""
        ends = [rows.completions[row].request.end_ids for row in rows.with_mask_and_rules]
        index = index_tensor(rows.with_mask_and_rules, self._device)
        by_mask = masked[index]
        without_ends = by_mask.clone()
        without_ends[row_pairs(range(len(ends)), ends, self._device)] = -torch.inf
        is_whole = (without_ends == -torch.inf).all(dim=1, keepdim=True)
        logits[index] = torch.where(is_whole, by_mask, logits[index])

    def _penalties(self, rows: SamplingRows, row_drafts: RowDrafts | None) -> Penalties | None:
        if not rows.penalised or (row_drafts is None and rows.counted is not None):
            return rows.counted
        index = rows.penalised_rows
        counts = self._counts = self._counts or TokenCounts(self._vocab_size, self._device)
        counted = counts.rows([rows.completions[row] for row in rows.penalised])
        outputs, seen = counts.outputs, counts.seen
        if row_drafts is not None:
            outputs, seen = outputs[counted], seen[counted]
            counted, drafted = torch.arange(len(counted), device=self._device), row_drafts.token_ids[index]
            is_before = np.arange(drafted.shape[1]) < row_drafts.counts[rows.penalised][:, None]
            (ones,) = to_device((is_before.astype(np.int32),), self._device)
            outputs.index_put_((counted[:, None], drafted), ones, accumulate=True)
            seen |= outputs > 0
        tables = torch.full((len(rows.completions),), -1, device=self._device).index_copy_(0, index, counted)
        penalties = Penalties(tables, outputs, seen, rows.penalties)
        if row_drafts is None:
            rows.counted = penalties
        return penalties

    def _with_logprobs(
        self,
        logits: torch.Tensor,
        completions: list[Completion],
        rows: SamplingRows,
        tokens: torch.Tensor,
        accepted: torch.Tensor | None,
        sizes: Sequence[int],
    ) -> Sampled:
        """Start one copy of tokens [n, k + 1], numbers of accepted drafts, and log probabilities.

        The copy is float64, which holds ids exactly. Completion i has `sizes[i]` rows of `logits`. Only rows of
        completions that request log probabilities are read.
        """
        width, logprob_rows = tokens.shape[1], rows.with_logprobs
        newest = None
        num_accepted = accepted
        if num_accepted is None:
            newest = tokens.flatten()
            num_accepted = torch.zeros_like(tokens[:, 0])
        parts = [tokens, num_accepted]
        if rows.num_logprobs is not None:
            places: list[int] = []  # index of each row's token in the flattened tokens
            for index, size in enumerate(sizes):
                places += range(index * width, index * width + size)
            chosen = tokens.flatten()[index_tensor([places[row] for row in logprob_rows], self._device)]
            if len(logprob_rows) < len(logits):
                logits = logits[index_tensor(logprob_rows, self._device)]
            parts += own_and_best(logits, chosen, rows.num_logprobs)
        host = HostCopy(torch.cat([part.double().flatten() for part in parts]))
        shapes = [part.shape for part in parts]
        return Sampled(completions, newest, lambda: _unpack(host.numpy(), shapes, rows, sizes))


def _unpack(
    host: NDArray[np.float64], shapes: Sequence[torch.Size], rows: SamplingRows, sizes: Sequence[int]
) -> _Tokens:
    """Read the copy of `Sampler._with_logprobs`."""
    parts = []
    start = 0
    for shape in shapes:
        end = start + shape.numel()
        parts.append(host[start:end].reshape(shape))
        start = end
    ids, num_kept, *logprobs = parts
    kept_ids = []
    for row_ids, count in zip(ids.astype(np.int64).tolist(), num_kept.astype(np.int64).tolist(), strict=True):
        kept_ids.append(row_ids[: count + 1])
    if rows.num_logprobs is None:
        return kept_ids, None
    lines = {row: line for line, row in enumerate(rows.with_logprobs)}
    chosen, values, indices = logprobs
    tables: list[list[dict[int, float]]] = []
    for token_ids, start in zip(kept_ids, [0, *accumulate(sizes[:-1])], strict=True):
        count = rows.completions[start].params.logprobs
        if count is None:
            tables.append([])
            continue
        span = slice(lines[start], lines[start] + len(token_ids))
        tables.append(logprob_table(token_ids, chosen[span], values[span, :count], indices[span, :count]))
    return kept_ids, tables
