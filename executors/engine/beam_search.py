"""Beam search: the most probable continuations of a prompt, over forks of its sequence in the cache."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from paged.batch import UnifiedBatch, UnifiedBatchItem
from paged.cache.manager import PagedKvCacheManager
from paged.errors import OutOfBlocksError, PagedError
from paged.executors.engine.core import EngineCore
from paged.executors.unified_executor import Answers


class BeamOutput(NamedTuple):
    """A continuation that beam search has found.

    Attributes:
        token_ids: new token ids, an end token included.
        score: the sum of their log probabilities, divided by their number to the power of length_penalty.
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
    """Return the best `width` continuations, best first, without their texts; see `Engine.beam_search`."""
    name, release = f"beam-{secrets.token_hex(8)}", core.executor.release_cache
    seq_ids, num_made = [f"{name}/0"], 1
    beams: list[tuple[list[int], float]] = [([], 0.0)]  # tokens, and the sum of their log probabilities
    done: list[BeamOutput] = []
    try:
        answers = _run_prompt(core, seq_ids[0], prompt)
        for length in range(1, max_tokens + 1):
            logits = torch.stack([row for row in answers if row is not None])
            # As in sampling, NaN is no token to choose.
            logprobs = logits.masked_fill(logits.isnan(), -torch.inf).log_softmax(-1)
            if not logprobs.isfinite().any(1).all():
                raise PagedError(f"beam_search: the logits left no token to choose as number {length}")
            totals = torch.tensor([[total] for _, total in beams], device=logits.device) + logprobs
            # Even if every beam's best tokens are end tokens, `width` others are among these.
            best = totals.flatten().topk(min((1 + max(len(end_token_ids), 1)) * width, totals.numel()))
            parents: list[int] = []
            alive: list[tuple[list[int], float]] = []
            for rank, (total, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
                if total == -torch.inf:
                    break
                parent, token = divmod(place, totals.shape[1])
                token_ids = [*beams[parent][0], token]
                if token in end_token_ids or length == max_tokens:
                    if rank < width:
                        done.append(BeamOutput(token_ids, total / length**length_penalty))
                elif len(alive) < width:
                    parents.append(parent)
                    alive.append((token_ids, total))
            done = sorted(done, key=lambda beam: -beam.score)[:width]
            # Sums only fall; a positive penalty divides them by the length that they may come to.
            longest = max_tokens if length_penalty > 0 else length
            if not alive or (len(done) == width and alive[0][1] / longest**length_penalty <= done[-1].score):
                break
            beams, places = alive, list[int]()
            for parent in parents:
                if parent in places:
                    source = manager.get_handle(seq_ids[parent])
                    assert source is not None
                    seq_ids.append(f"{name}/{num_made}")
                    manager.fork(source, seq_ids[-1])
                    parent, num_made = len(seq_ids) - 1, num_made + 1
                places.append(parent)
            for index in set(range(len(seq_ids))).difference(places):
                release(seq_ids[index])
            seq_ids, position = [seq_ids[place] for place in places], len(prompt) + length - 1
            pairs = zip(seq_ids, beams, strict=True)
            items = [UnifiedBatchItem(seq_id, token_ids[-1:], pos_offset=position) for seq_id, (token_ids, _) in pairs]
            answers = core.run_now(UnifiedBatch(items))
        return done
    finally:
        for seq_id in seq_ids:
            release(seq_id)


def _run_prompt(core: EngineCore, seq_id: str, prompt: Sequence[int]) -> Answers:
    """Run a prompt in chunks, smaller ones where blocks run out; return the answers of the last."""
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
