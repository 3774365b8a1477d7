"""Policy of an engine: how requests share its steps and its cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paged.errors import InvalidInputError, PagedError
from paged.kernels.core.errors import as_bool, as_float, as_int, shown


class QueueFullError(PagedError):
    """The queue already has `EngineConfig.max_waiting` completions; the request was not queued."""


@dataclass(frozen=True)
class EngineConfig:
    """Policy of an engine.

    Attributes:
        token_budget: maximum number of tokens in a step. Decodes come first; prompt chunks take the remaining tokens if
            blocks are free.
        chunk_size: maximum number of tokens of one prompt in a step; None for the remaining budget.
        max_num_seqs: maximum number of sequences that hold cache at the same time. A request with more completions runs
            alone.
        max_waiting: maximum number of completions in the queue, preempted ones included; beyond it, `add_request`
            raises QueueFullError. It also limits the prompts that wait in `AsyncEngine.embed`. None for no limit.
        preemption: what to do if the cache is full: "recompute" frees K/V and computes them again later; "swap" moves
            them to host memory if they fit. The sequence whose turn is last is preempted, see priority_requests.
        admission_tokens: a prompt starts if the cache can hold it and this many further tokens of it and of every
            running sequence. None for all tokens that they may generate, which makes preemption rare.
        priority_requests: one more unit of priority counts like an arrival this many requests earlier, so no request
            waits forever.
        decode_stretch: while sequences decode, prompt chunks are cut so that a step takes at most this many times as
            long as a step without prompts, by measured times. None cuts by the budget alone.
        overlap: whether the next step is launched before the tokens of the last step are read, so that the device never
            waits for the host. None enables it on GPUs only. Needs `ExecutorCapabilities.supports_device_ids` and a
            cache manager. It has no effect with a proposer, which reads the tokens.
        logprobs_mode: distribution of `SamplingParams.logprobs`: "raw" for the model's distribution, "processed" for
            the distribution after penalties, biases, masks, temperature and filters, from which tokens are drawn. Log
            probabilities of prompt tokens are always raw.
        batch_invariant: whether a request's logits, log probabilities and tokens have the same bits whatever runs
            at the same time, in any order, budget or preemption. Sequences then run in fixed chunks: the prompt in
            pieces of 256 tokens, which may exceed the budget, then single tokens. If the executor has no invariant rows
            (see `ExecutorCapabilities`), each sequence is a forward of its own. The prefix cache serves only full
            chunks, steps do not overlap, and there is no speculation. On a CPU, `warmup` of the engine's own executor
            may choose other kernels for engines made later; `warmup` of another executor does not.
        profiler_ranges: whether a step marks its parts for PyTorch's profiler, and through it for NVTX:
            "paged.schedule", "paged.forward", "paged.sample" and "paged.update".

    Raises:
        InvalidInputError: a value has the wrong type or is out of range.
    """

    token_budget: int = 2048
    chunk_size: int | None = None
    max_num_seqs: int = 256
    max_waiting: int | None = None
    preemption: Literal["recompute", "swap"] = "recompute"
    admission_tokens: int | None = 64
    priority_requests: int = 1000
    decode_stretch: float | None = None
    overlap: bool | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    batch_invariant: bool = False
    profiler_ranges: bool = False

    def __post_init__(self) -> None:
        """Check every value and convert it to Python's types."""
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, as_int(name, value, low=minimum, high=_MOST))
        if self.preemption not in ("recompute", "swap"):
            raise InvalidInputError(f"preemption: {shown(self.preemption)}, expected 'recompute' or 'swap'")
        if self.logprobs_mode not in ("raw", "processed"):
            raise InvalidInputError(f"logprobs_mode: {shown(self.logprobs_mode)}, expected 'raw' or 'processed'")
        if self.decode_stretch is not None:
            stretch = as_float("decode_stretch", self.decode_stretch, math.nextafter(1, 2))
            object.__setattr__(self, "decode_stretch", stretch)
        if self.overlap is not None:
            object.__setattr__(self, "overlap", as_bool("overlap", self.overlap))
        for name in ("batch_invariant", "profiler_ranges"):
            object.__setattr__(self, name, as_bool(name, getattr(self, name)))


_MINIMA = {"token_budget": 1, "chunk_size": 1, "max_num_seqs": 1, "max_waiting": 0, "priority_requests": 1}
_MINIMA |= {"admission_tokens": 0}
_OPTIONAL = ("chunk_size", "max_waiting", "admission_tokens")
_MOST = 1 << 31
