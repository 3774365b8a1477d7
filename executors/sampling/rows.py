"""Sampling parameters of a batch as device tensors, and logits as one matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paged.executors.requests.request import Completion
from paged.executors.requests.sampling_params import SamplingParams
from paged.executors.sampling.noise import Stream, hash_seeds, noise_keys, split_keys
from paged.kernels.sampling.penalties import Penalties
from paged.kernels.sampling.sample_tokens import FILTERS
from paged.step.staging import to_device

# Number of steps whose noise keys are computed at once. This hardly takes longer than the keys of one step, see
# limits.md.
_STEPS_AHEAD = 16
# (row, token) pairs: two int64 [m] on the device.
Pairs = tuple[torch.Tensor, torch.Tensor]


class RowDrafts(NamedTuple):
    """Drafts before the next token of each row, known only on the device.

    Attributes:
        token_ids: int64 [n, width] on the device.
        counts: int64 [n] on the host, number of drafts of each row.
    """

    token_ids: torch.Tensor
    counts: NDArray[np.int64]


class SamplingRows:
    """Parameters of each row; valid as long as the same completions have the same rows.

    Tensors that few batches need are made on first use.

    Attributes:
        prompt_lengths: prompt length of each row.
        is_drawn: whether any row is drawn at random.
        is_free: whether only temperature and filters change the logits.
        is_plain: whether every row takes its best token, without rules.
        penalised: rows with penalties.
        with_minimum: rows with min_tokens.
        reading: rows whose completions have a token mask or a logits processor.
        with_logprobs: rows that request log probabilities.
        num_logprobs: largest requested number of log probabilities per token; None without requests.
        counted: cached penalties of rows that sample one token per step, or None.
    """

    def __init__(self, completions: list[Completion], vocab_size: int, device: torch.device) -> None:
        self.completions = completions
        self._params = [completion.params for completion in completions]
        self._vocab_size, self._device = vocab_size, device
        self.prompt_lengths = np.array([len(completion.request.prompt) for completion in completions], np.int64)
        self.hashed_seeds = hash_seeds(np.array([completion.seed for completion in completions], np.uint64))
        self.is_drawn = False
        self.penalised: list[int] = []
        self.with_minimum: list[int] = []
        self.reading: list[int] = []
        self.with_mask_and_rules: list[int] = []
        self.with_logprobs: list[int] = []
        self.num_logprobs: int | None = None
        self._with_allowed: list[int] = []
        self._with_biases: list[int] = []
        for row, completion in enumerate(completions):
            params = completion.params
            if not params.is_greedy:
                self.is_drawn = True
            if params.has_penalties:
                self.penalised.append(row)
            if params.min_tokens:
                self.with_minimum.append(row)
            if completion.reads_tokens:
                self.reading.append(row)
            if params.logprobs is not None:
                self.with_logprobs.append(row)
                if self.num_logprobs is None or params.logprobs > self.num_logprobs:
                    self.num_logprobs = params.logprobs
            if params.allowed_token_ids:
                self._with_allowed.append(row)
            if params.logit_bias:
                self._with_biases.append(row)
            if completion.token_mask is not None and (
                params.min_tokens or params.allowed_token_ids or params.logit_bias
            ):
                self.with_mask_and_rules.append(row)
        has_rules = self.penalised or self.with_minimum or self.reading or self._with_allowed or self._with_biases
        self.is_free = not has_rules
        self.is_plain = self.is_free and not self.is_drawn
        self.counted: Penalties | None = None
        self._keys: tuple[int, Sequence[torch.Tensor]] = 0, ()

    @cached_property
    def filters(self) -> dict[str, torch.Tensor]:
        """Temperature, and the filters of `sample_tokens` that any row requests."""
        return _filters(self._params, self._vocab_size, self._device)

    @cached_property
    def allowed(self) -> tuple[torch.Tensor, Pairs] | None:
        """Rows with allowed_token_ids, and (row, allowed token) pairs."""
        if not self._with_allowed:
            return None
        tokens = [self.completions[row].request.allowed_ids for row in self._with_allowed]
        rows = index_tensor(self._with_allowed, self._device)
        return rows, row_pairs(self._with_allowed, tokens, self._device)

    @cached_property
    def biased(self) -> tuple[Pairs, torch.Tensor] | None:
        """(row, token) pairs with a bias, and the biases, float32 [m]."""
        if not self._with_biases:
            return None
        all_tokens, all_biases = [], []
        for row in self._with_biases:
            tokens, biases = self.completions[row].request.biases
            all_tokens.append(tokens)
            all_biases.append(biases)
        (device_biases,) = to_device([np.concatenate(all_biases)], self._device)
        return row_pairs(self._with_biases, all_tokens, self._device), device_biases

    @cached_property
    def penalised_rows(self) -> torch.Tensor:
        """`penalised` on the device, int64."""
        return index_tensor(self.penalised, self._device)

    @cached_property
    def penalties(self) -> torch.Tensor:
        """Repetition, presence and frequency penalties of every row, float32 [n, 3]."""
        names = attrgetter("repetition_penalty", "presence_penalty", "frequency_penalty")
        return _columns(self._params, names, self._device)

    def positions(self, row_drafts: RowDrafts | None) -> NDArray[np.int64]:
        """Return the position of each row's next token, after its drafts, if any."""
        num_sampled = np.array([completion.num_sampled for completion in self.completions], np.int64)
        lengths = self.prompt_lengths + num_sampled
        return lengths if row_drafts is None else lengths + row_drafts.counts

    def next_keys(self) -> torch.Tensor:
        """Return the noise keys of the rows' next tokens, for `sample_tokens`; computed for several steps at once."""
        first, keys = self._keys
        step = self.completions[0].num_sampled - first
        if not 0 <= step < len(keys):
            ahead = self.positions(None) + np.arange(_STEPS_AHEAD)[:, None]
            host_keys = split_keys(noise_keys(self.hashed_seeds, ahead, Stream.TOKEN))
            (device_keys,) = to_device([host_keys], self._device)
            keys, step = device_keys.unbind(), 0
            self._keys = self.completions[0].num_sampled, keys
        return keys[step]


def index_tensor(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return values as an int64 tensor [n] on the device."""
    return to_device([np.array(values, np.int64)], device)[0]


def row_pairs(rows: Sequence[int], tokens: Sequence[NDArray[np.int64]], device: torch.device) -> Pairs:
    """Return (row, token) pairs as two int64 tensors; a request may name a whole vocabulary."""
    sizes = [len(row_tokens) for row_tokens in tokens]
    row_indices = np.repeat(np.array(rows, np.int64), sizes)
    first, second = to_device([row_indices, np.concatenate(tokens)], device)
    return first, second


def _filters(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> dict[str, torch.Tensor]:
    tensors = {"temperature": _columns(params, _temperature, device)}
    values = [row_params.filters for row_params in params]
    drawn = [row for row, row_params in zip(values, params, strict=True) if not row_params.is_greedy]
    for name, kind in FILTERS.items():
        if not any(kind.cuts(row[name], vocab_size) for row in drawn):
            continue
        numbers = [kind.number(row[name]) for row in values]
        if kind.num_best is None:
            numbers = [min(number, vocab_size) for number in numbers]
        column = np.array(numbers, np.int64 if kind.dtype == torch.int64 else np.float32)
        tensors[name] = to_device([column], device)[0]
    return tensors


def _temperature(params: SamplingParams) -> float:
    return 0.0 if params.is_greedy else params.temperature


def _columns(
    params: Sequence[SamplingParams], read: Callable[[SamplingParams], float | tuple[float, ...]], device: torch.device
) -> torch.Tensor:
    values = [read(row_params) for row_params in params]
    return to_device([np.array(values, np.float32)], device)[0]


def row_matrix(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack rows [V] or [n, V] into one matrix [num_rows, V].

    If the rows are consecutive views of one forward's matrix, return a view, because a copy could take over 100 MB.
    """
    base, width = rows[0]._base, rows[0].shape[-1]
    if base is not None and base.dim() == 2 and base.is_contiguous() and _is_row_of(rows[0], base):
        size = width * base.element_size()
        starts = list(map(torch.Tensor.data_ptr, rows))
        first = (starts[0] - base.data_ptr()) // size
        if rows[-1].dim() == 1 and starts == list(range(starts[0], starts[0] + len(rows) * size, size)):
            return base[first : first + len(rows)]
        end = starts[0]
        for row, start in zip(rows, starts, strict=True):
            if start != end:
                break
            end += row.numel() * base.element_size()
        else:
            return base[first : first + (end - starts[0]) // size]
    return torch.cat([row.reshape(-1, width) for row in rows])


def _is_row_of(row: torch.Tensor, base: torch.Tensor) -> bool:
    """Return whether a view is made of rows of `base`; a column may begin at the same address."""
    return row.shape[-1] == base.shape[1] and row.dtype == base.dtype and row.stride(-1) == 1
