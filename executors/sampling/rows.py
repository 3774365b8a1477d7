"""Sampling parameters of a batch as tensors on the device, and logits as one matrix."""

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
from paged.staging import to_device

# Keys of 256 rows take 86 us of host time for 16 steps, 54 us for one.
_STEPS_AHEAD = 16
# (row, token) pairs on the device, int64 [m] each.
Pairs = tuple[torch.Tensor, torch.Tensor]


class RowDrafts(NamedTuple):
    """Drafts before the next token of each row; the host need not know their ids.

    Attributes:
        token_ids: int64 [n, width], on the device.
        counts: int64 [n], the number of drafts in each row, on the host.
    """

    token_ids: torch.Tensor
    counts: NDArray[np.int64]


class SamplingRows:
    """The parameters of each row; they hold as long as the same completions stand in the same rows.

    Tensors that only some rows need are made on first use.

    Attributes:
        prompt_lengths: of each row's completion.
        is_drawn: whether any row is drawn at random.
        is_free: whether only temperature and filters change the logits of any row.
        is_plain: whether every row takes its best token, without rules.
        penalised: rows that have penalties.
        with_minimum: rows whose end tokens may have to wait.
        reading: rows whose completions have a token mask or a logits processor.
        with_logprobs: rows that want log probabilities.
        num_logprobs: the largest number of log probabilities for a token; None if no row wants any.
        counted: the penalties of rows that sample one token a step, once they were made.
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
        """The temperature and those of `sample_tokens`' filters that any row asks for."""
        return _filters(self._params, self._vocab_size, self._device)

    @cached_property
    def allowed(self) -> tuple[torch.Tensor, Pairs] | None:
        """The rows with allowed_token_ids, each once, and pairs of these rows and their allowed tokens."""
        if not self._with_allowed:
            return None
        tokens = [self.completions[row].request.allowed_ids for row in self._with_allowed]
        rows = index_tensor(self._with_allowed, self._device)
        return rows, row_pairs(self._with_allowed, tokens, self._device)

    @cached_property
    def biased(self) -> tuple[Pairs, torch.Tensor] | None:
        """Pairs of rows and tokens with a bias, and the biases, float32 [m]."""
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
        """Repetition, presence and frequency penalty of every row, float32 [n, 3]."""
        names = attrgetter("repetition_penalty", "presence_penalty", "frequency_penalty")
        return _columns(self._params, names, self._device)

    def positions(self, row_drafts: RowDrafts | None) -> NDArray[np.int64]:
        """Return the position of each row's next token, after its drafts if there are some."""
        num_sampled = np.array([completion.num_sampled for completion in self.completions], np.int64)
        lengths = self.prompt_lengths + num_sampled
        return lengths if row_drafts is None else lengths + row_drafts.counts

    def next_keys(self) -> torch.Tensor:
        """Return the noise keys of the rows' next tokens, as `sample_tokens` takes them; made for several steps."""
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
    """Return values as int64 [n] on the device."""
    return to_device([np.array(values, np.int64)], device)[0]


def row_pairs(rows: Sequence[int], tokens: Sequence[NDArray[np.int64]], device: torch.device) -> Pairs:
    """Return each row with its tokens as pairs, two tensors int64 [n]; one request may name all of a vocabulary."""
    sizes = [len(row_tokens) for row_tokens in tokens]
    row_indices = np.repeat(np.array(rows, np.int64), sizes)
    first, second = to_device([row_indices, np.concatenate(tokens)], device)
    return first, second


def _filters(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> dict[str, torch.Tensor]:
    drawn = [row_params for row_params in params if not row_params.is_greedy]
    filters = {"temperature": _columns(params, _temperature, device)}
    if any(0 < row_params.top_k < vocab_size for row_params in drawn):
        limits = [vocab_size] * len(params)
        for row, row_params in enumerate(params):
            if row_params.top_k > 0:
                limits[row] = min(row_params.top_k, vocab_size)
        filters["top_k"] = index_tensor(limits, device)
    if any(row_params.top_p < 1 for row_params in drawn):
        filters["top_p"] = _columns(params, attrgetter("top_p"), device)
    if any(row_params.min_p > 0 for row_params in drawn):
        filters["min_p"] = _columns(params, attrgetter("min_p"), device)
    return filters


def _temperature(params: SamplingParams) -> float:
    return 0.0 if params.is_greedy else params.temperature


def _columns(
    params: Sequence[SamplingParams], read: Callable[[SamplingParams], float | tuple[float, ...]], device: torch.device
) -> torch.Tensor:
    values = [read(row_params) for row_params in params]
    return to_device([np.array(values, np.float32)], device)[0]


def row_matrix(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return rows [V] or [n, V] one below the other, [num_rows, V].

    The rows of one forward are views of one matrix, in order: 256 of 150,000 logits would take 150 MB to copy.
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
    """Return whether it lies along the rows of `base`; a column of a square matrix may begin at the same address."""
    return row.shape[-1] == base.shape[1] and row.dtype == base.dtype and row.stride(-1) == 1
