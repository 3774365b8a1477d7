"""Beam search for the most probable continuations of a prompt, on forks of its sequence in the cache."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from paged.cache.manager import PagedKvCacheManager
from paged.errors import OutOfBlocksError, PagedError
from paged.executors.engine.core import EngineCore
from paged.executors.unified_executor import Answers
from paged.step.batch import UnifiedBatch, UnifiedBatchItem


class BeamOutput(NamedTuple):
    """A continuation found by beam search.

    Attributes:
        token_ids: new token ids, an end token included.
        score: sum of log probabilities, divided by the number of tokens to the power of length_penalty.
        text: text of token_ids without the end token; empty if the engine has no tokenizer.
    """

    token_ids: list[int]
    score: float
    text: str = ""


def search_beams(
    core: EngineCore,
    manager: PagedKvCacheManager,
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    length_penalty: float,
    end_token_ids: Collection[int],
) -> list[BeamOutput]:
    """Return the best `width` continuations, best first, without texts; see `Engine.beam_search`."""
    sequences = _Sequences(core, manager)
    beams = [_Beam([], 0.0, 0)]
    done: list[BeamOutput] = []
    try:
        answers = _run_prompt(core, sequences.seq_ids[0], prompt)
        for length in range(1, max_tokens + 1):
            totals = _totals(beams, answers, length)
            beams, ended = _extended(beams, totals, width, end_token_ids, is_last=length == max_tokens)
            for beam in ended:
                done.append(BeamOutput(beam.token_ids, beam.total / length**length_penalty))
            done = sorted(done, key=lambda beam: -beam.score)[:width]
            if not beams:
                break
            # Upper bound for open beams: sums only fall, and a positive penalty divides by at most the final length.
            longest = max_tokens if length_penalty > 0 else length
            highest_score = beams[0].total / longest**length_penalty
            if len(done) == width and highest_score <= done[-1].score:
                break
            sequences.follow([beam.parent for beam in beams])
            items = []
            for seq_id, beam in zip(sequences.seq_ids, beams, strict=True):
                items.append(UnifiedBatchItem(seq_id, beam.token_ids[-1:], pos_offset=len(prompt) + length - 1))
            answers = core.run_now(UnifiedBatch(items))
        return done
    finally:
        sequences.release()


class _Beam(NamedTuple):
    """A continuation, open or ended. total: sum of log probabilities. parent: index of the beam that it extends."""

    token_ids: list[int]
    total: float
    parent: int


class _Sequences:
    """Sequences of the beams in the cache, in the order of the beams."""

    def __init__(self, core: EngineCore, manager: PagedKvCacheManager) -> None:
        self._core, self._manager = core, manager
        self._name = f"beam-{secrets.token_hex(8)}"
        self._num_names = 1
        self.seq_ids = [f"{self._name}/0"]

    def follow(self, parents: Sequence[int]) -> None:
        """Give each beam its parent's sequence, or a fork if another beam has it; release sequences without a child."""
        places: list[int] = []
        for parent in parents:
            place = parent
            if parent in places:
                place = len(self.seq_ids)
                self._fork(parent)
            places.append(place)
        for index, seq_id in enumerate(self.seq_ids):
            if index not in places:
                self._core.executor.release_cache(seq_id)
        self.seq_ids = [self.seq_ids[place] for place in places]

    def _fork(self, parent: int) -> None:
        source = self._manager.get_handle(self.seq_ids[parent])
        assert source is not None
        self.seq_ids.append(f"{self._name}/{self._num_names}")
        self._num_names += 1
        self._manager.fork(source, self.seq_ids[-1])

    def release(self) -> None:
        """Release all sequences."""
        for seq_id in self.seq_ids:
            self._core.executor.release_cache(seq_id)


def _totals(beams: Sequence[_Beam], answers: Answers, length: int) -> torch.Tensor:
    """Return the sum of log probabilities of every beam with every token, [num_beams, vocab_size]."""
    logits = torch.stack([row for row in answers if row is not None])
    # A token whose logit is NaN is never chosen, as in sampling.
    logprobs = logits.masked_fill(logits.isnan(), -torch.inf).log_softmax(-1)
    if not logprobs.isfinite().any(1).all():
        raise PagedError(f"beam_search: the logits left no token to choose as number {length}")
    return torch.tensor([[beam.total] for beam in beams], device=logits.device) + logprobs


def _extended(
    beams: Sequence[_Beam], totals: torch.Tensor, width: int, end_token_ids: Collection[int], *, is_last: bool
) -> tuple[list[_Beam], list[_Beam]]:
    """Extend by one token: return the best `width` open beams, and the ended beams among the best `width` of all."""
    # Enough candidates for `width` open beams, even if every beam's best tokens are end tokens.
    num_best = min((1 + max(len(end_token_ids), 1)) * width, totals.numel())
    best = totals.flatten().topk(num_best)
    alive: list[_Beam] = []
    ended: list[_Beam] = []
    for rank, (total, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
        if total == -torch.inf:
            break
        parent, token = divmod(place, totals.shape[1])
        beam = _Beam([*beams[parent].token_ids, token], total, parent)
        if token in end_token_ids or is_last:
            if rank < width:
                ended.append(beam)
        elif len(alive) < width:
            alive.append(beam)
    return alive, ended


def _run_prompt(core: EngineCore, seq_id: str, prompt: Sequence[int]) -> Answers:
    """Run a prompt in chunks, smaller if blocks run out; return the answers of the last chunk."""
    answers: Answers = []
    start, size = 0, core.config.token_budget
    while start < len(prompt):
        chunk = list(prompt[start : start + size])
        is_final = start + len(chunk) == len(prompt)
        try:
            answers = core.run_now(UnifiedBatch([UnifiedBatchItem(seq_id, chunk, None, start, is_final)]))
        except OutOfBlocksError:
            if len(chunk) == 1:
                raise
            size = len(chunk) // 2
            continue
        start += len(chunk)
    return answers
