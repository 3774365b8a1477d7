"""What the completions of a batch ask of the sampler, as tensors on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from paged.executors.requests.request import Completion
from paged.executors.requests.sampling_params import SamplingParams
from paged.executors.sampling.noise import hash_seeds
from paged.executors.sampling.operations import Filters, TokenRules
from paged.staging import to_device


@dataclass(frozen=True)
class SamplingRows:
    """The parameters of each row; they hold as long as the same completions stand in the same rows.

    prompt_lengths, outputs: of each row's completion; outputs are its new tokens, which grow.
    is_drawn: rows that are drawn by chance, `num_drawn` of them; random: their indices, None for all or none.
    hashed_seeds, filters: one row for each that is drawn.
    penalised, penalties: rows that have any, and of each repetition, presence and frequency, float32 [n, 1].
    with_minimum: rows whose end tokens may have to wait.
    with_logprobs: rows that want log probabilities, num_logprobs: the most that one wants, None where none wants any.
    """

    completions: list[Completion]
    prompt_lengths: NDArray[np.int64]
    outputs: list[list[int]]
    is_drawn: NDArray[np.bool_]
    num_drawn: int
    hashed_seeds: NDArray[np.uint64]
    random: torch.Tensor | None
    rules: TokenRules
    filters: Filters
    penalised: list[int]
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    with_minimum: list[int]
    with_logprobs: list[int]
    num_logprobs: int | None

    @property
    def is_plain(self) -> bool:
        """Whether the best token of every row is all that is wanted."""
        has_rules = self.rules.allowed is not None or self.rules.biased is not None
        return not (self.num_drawn or has_rules or self.penalised or self.with_minimum)

    def positions(self, extras: Sequence[Sequence[int]] | None) -> NDArray[np.int64]:
        """Where each row's next token stands; `extras` are the drafts before it."""
        lengths = self.prompt_lengths + np.fromiter(map(len, self.outputs), np.int64, len(self.outputs))
        return lengths if extras is None else lengths + np.array([len(extra) for extra in extras], np.int64)


def sampling_rows(completions: list[Completion], vocab_size: int, device: torch.device) -> SamplingRows:
    """Gather the parameters of all rows."""
    params = [one.params for one in completions]
    is_drawn = np.array([not one.is_greedy for one in params], bool)
    random = np.flatnonzero(is_drawn).tolist()
    penalised = [row for row, one in enumerate(params) if one.has_penalties]
    with_penalties = [params[row] for row in penalised]
    allowed = [(row, one.request.allowed_ids) for row, one in enumerate(completions) if one.params.allowed_token_ids]
    biased = [(row, one.request.biases) for row, one in enumerate(completions) if one.params.logit_bias]
    bias = np.concatenate([values for _, (_, values) in biased]) if biased else None
    return SamplingRows(
        completions=completions,
        prompt_lengths=np.array([len(one.request.prompt) for one in completions], np.int64),
        outputs=[one.token_ids for one in completions],
        is_drawn=is_drawn,
        num_drawn=len(random),
        hashed_seeds=hash_seeds(np.array([completions[row].seed for row in random], np.uint64)),
        random=None if len(random) in (0, len(params)) else index_tensor(random, device),
        rules=TokenRules(
            allowed=row_pairs(allowed, device) if allowed else None,
            allowed_rows=index_tensor([row for row, _ in allowed], device) if allowed else None,
            biased=row_pairs([(row, tokens) for row, (tokens, _) in biased], device) if biased else None,
            bias=None if bias is None else to_device([bias], device)[0],
        ),
        filters=_filters([params[row] for row in random], vocab_size, device),
        penalised=penalised,
        penalties=(
            _column(with_penalties, attrgetter("repetition_penalty"), device),
            _column(with_penalties, attrgetter("presence_penalty"), device),
            _column(with_penalties, attrgetter("frequency_penalty"), device),
        ),
        with_minimum=[row for row, one in enumerate(params) if one.min_tokens],
        with_logprobs=[row for row, one in enumerate(params) if one.logprobs is not None],
        num_logprobs=max((one.logprobs for one in params if one.logprobs is not None), default=None),
    )


def index_tensor(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [n]."""
    return to_device([np.array(values, np.int64)], device)[0]


def row_pairs(rows: Sequence[tuple[int, NDArray[np.int64]]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row with its tokens as pairs, two tensors int64 [n]; one request may name all of a vocabulary."""
    sizes = [len(tokens) for _, tokens in rows]
    row_indices = np.repeat(np.array([row for row, _ in rows], np.int64), sizes)
    first, second = to_device([row_indices, np.concatenate([tokens for _, tokens in rows])], device)
    return first, second


def _filters(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Filters:
    limits = [min(one.top_k, vocab_size) if one.top_k > 0 else vocab_size for one in params]
    is_cut = [one.top_k > 0 or one.top_p < 1 for one in params]
    return Filters(
        temperature=_column(params, attrgetter("temperature"), device),
        top_k=index_tensor(limits, device)[:, None] if any(one.top_k > 0 for one in params) else None,
        # 1 keeps all, so no rounding of the sum up to there may drop the last.
        top_p=_column(params, lambda one: one.top_p if one.top_p < 1 else 2.0, device)
        if any(one.top_p < 1 for one in params)
        else None,
        min_p=_column(params, attrgetter("min_p"), device) if any(one.min_p > 0 for one in params) else None,
        is_whole=to_device([~np.array(is_cut, bool)[:, None]], device)[0] if not all(is_cut) else None,
        limit=max((limit for limit, cut in zip(limits, is_cut, strict=True) if cut), default=0),
    )


def _column(
    params: Sequence[SamplingParams], read: Callable[[SamplingParams], float], device: torch.device
) -> torch.Tensor:
    return to_device([np.array([read(one) for one in params], np.float32).reshape(-1, 1)], device)[0]
