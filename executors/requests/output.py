"""Outputs of a request: completions so far, and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from paged.executors.requests.sampling_params import SamplingParams
from paged.executors.requests.token_states import TokenStates
from paged.seq_id import SeqId


class Growth(NamedTuple):
    """All output of a completion. Lists only grow, so their lengths define a snapshot.

    texts: text added by each token.
    """

    token_ids: list[int]
    texts: list[str]
    logprobs: list[dict[int, float]] | None
    states: TokenStates | None = None


class Mark(NamedTuple):
    """Lengths of the lists of a `Growth`. Log probabilities have the same length as tokens."""

    token_ids: int = 0
    texts: int = 0


_START = Mark()


@dataclass(eq=False)
class CompletionOutput:
    """One completion so far. A copy is a snapshot, whose cost does not depend on the length.

    Returned lists and dictionaries are copies, so changing them changes no output.

    Attributes:
        index: number of the completion within its request, from 0.
        token_ids: new token ids, an end token included.
        text: text of token_ids without the end token, up to the stop string; empty if the engine has no tokenizer.
        logprobs: for each token the log probability by token id, the chosen token first; None unless requested.
        finish_reason: "stop", "length", "abort", "timeout" or "error"; None while it runs.
        stop_reason: token id or stop string that ended it.
    """

    index: int
    growth: Growth = field(default_factory=lambda: Growth([], [], None))
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    # Begin and end of the visible part of `growth`. If `end` is None, the visible part grows with it.
    begin: Mark = _START
    end: Mark | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.growth.token_ids[self.begin.token_ids : self.mark.token_ids]

    @property
    def text(self) -> str:
        return "".join(self.growth.texts[self.begin.texts : self.mark.texts])

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        logprobs = self.growth.logprobs
        if logprobs is None:
            return None
        return [entry.copy() for entry in logprobs[self.begin.token_ids : self.mark.token_ids]]

    @property
    def hidden_states(self) -> torch.Tensor | None:
        """Hidden states after the final norm, float32 [prompt + new tokens - 1, hidden_size] on the host.

        The first new token was chosen from the row of the prompt's last token. The last new token has no row, because
        it has not run. Every part of a stream begins with the prompt. None unless requested, and before the first
        token.
        """
        return self._states("hidden_states")

    @property
    def routed_experts(self) -> torch.Tensor | None:
        """Ids of the experts chosen for the same tokens, int32 [prompt + new tokens - 1, num_layers, top_k].

        -1 in layers without experts. None unless requested, and before the first token.
        """
        return self._states("routed_experts")

    def _states(self, name: str) -> torch.Tensor | None:
        states = self.growth.states
        return None if states is None else states.rows(name, self.mark.token_ids)

    @property
    def mark(self) -> Mark:
        """End of this part, counted from the start of `growth`."""
        if self.end is not None:
            return self.end
        return Mark(len(self.growth.token_ids), len(self.growth.texts))

    def since(self, begin: Mark) -> CompletionOutput:
        """Return a snapshot of the part from `begin` on."""
        return CompletionOutput(self.index, self.growth, self.finish_reason, self.stop_reason, begin, self.mark)


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request in seconds (None until known), and its preemptions.

    Attributes:
        queued_s: time from arrival until the prompt first got blocks in the cache.
        first_token_s: time from arrival to the first token.
        mean_token_s: mean time between later tokens, over all completions; known when the request has ended.
        preemptions: number of times that a completion lost its blocks to other requests.
        preemption_reason: blocks needed and free at the last preemption; None before the first.
        recomputed_tokens: tokens that ran again after preemptions, without tokens still found in the cache.
    """

    queued_s: float | None = None
    first_token_s: float | None = None
    mean_token_s: float | None = None
    preemptions: int = 0
    recomputed_tokens: int = 0
    preemption_reason: str | None = None


class Moment(NamedTuple):
    """Data from which `RequestOutput.at` makes a snapshot later; takes a tenth of the time of a snapshot.

    completions: finish reason, stop reason and mark of each completion. Other fields are as in `RequestOutput`.
    """

    completions: list[tuple[str | None, int | str | None, Mark]]
    finished: bool
    num_cached_tokens: int
    error: str | None
    metrics: RequestMetrics
    prompt_table: list[dict[int, float] | None] | None
    num_loaded_tokens: int


@dataclass(eq=False)
class RequestOutput:
    """A request so far; the same object grows with every step.

    Attributes:
        prompt: token ids of the prompt, shared by copies; `prompt_token_ids` is a new list for the reader.
        finished: whether all completions have ended.
        num_cached_tokens: prompt tokens whose K/V were found in the cache.
        num_loaded_tokens: how many of the cached tokens came from host memory or from files.
        error: reason of a failure.
        prompt_table: list behind `prompt_logprobs`, shared by copies; it grows until the first token.
    """

    request_id: SeqId
    prompt: tuple[int, ...]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    error: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_table: list[dict[int, float] | None] | None = None
    num_loaded_tokens: int = 0

    @classmethod
    def begin(cls, request_id: SeqId, prompt: tuple[int, ...], params: SamplingParams) -> RequestOutput:
        """Return the output of a request before its first token."""
        outputs = []
        for index in range(params.n):
            logprobs: list[dict[int, float]] | None = None
            if params.logprobs is not None:
                logprobs = []
            states = TokenStates.of(len(prompt), params)
            outputs.append(CompletionOutput(index, Growth([], [], logprobs, states)))
        prompt_table: list[dict[int, float] | None] | None = None
        if params.prompt_logprobs is not None:
            prompt_table = [None]  # the first token has no prediction
        return cls(request_id, prompt, outputs, prompt_table=prompt_table)

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self.prompt)

    @property
    def prompt_logprobs(self) -> list[dict[int, float] | None] | None:
        """For each prompt token the log probability by token id, its own first; None for the first token.

        None unless requested. Complete when the first new token exists.
        """
        if self.prompt_table is None:
            return None
        return [entry and entry.copy() for entry in list(self.prompt_table)]

    def copy(self) -> RequestOutput:
        """Return a snapshot, at a cost independent of the length."""
        return self.since([completion.begin for completion in self.outputs])

    def since(self, begins: Sequence[Mark]) -> RequestOutput:
        """Return a snapshot with each completion's part after its mark."""
        return self.at(self.moment(), begins)

    def moment(self) -> Moment:
        """Return the current state, for a later `at`."""
        completions = []
        for completion in self.outputs:
            completions.append((completion.finish_reason, completion.stop_reason, completion.mark))
        fields = self.finished, self.num_cached_tokens, self.error, self.metrics, self.prompt_table
        return Moment(completions, *fields, self.num_loaded_tokens)

    def at(self, moment: Moment, begins: Sequence[Mark]) -> RequestOutput:
        """Return the snapshot of a moment, with each completion's part after its mark."""
        outputs = []
        for completion, state, begin in zip(self.outputs, moment.completions, begins, strict=True):
            finish_reason, stop_reason, end = state
            outputs.append(
                CompletionOutput(completion.index, completion.growth, finish_reason, stop_reason, begin, end)
            )
        return RequestOutput(self.request_id, self.prompt, outputs, *moment[1:])
