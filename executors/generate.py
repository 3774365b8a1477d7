"""Greedy generation for a fixed set of prompts: chunked prefill and decode steps together in every forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paged.batch import GreedyArgmax, UnifiedBatch, UnifiedBatchItem
from paged.errors import InvalidInputError
from paged.executors.model_executor import ModelExecutor


@dataclass
class Generation:
    """One prompt and what has come of it so far; `done` once an end token came or the limit is reached."""

    seq_id: str
    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    token_ids: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    done: bool = False


@dataclass(frozen=True)
class Step:
    """What one forward did."""

    prefill_tokens: int
    decode_tokens: int
    finished: tuple[Generation, ...]


def generate_steps(
    executor: ModelExecutor,
    generations: Sequence[Generation],
    *,
    eos_token_ids: Sequence[int] = (),
    chunk_size: int = 64,
    token_budget: int = 256,
    block_size: int = 1,
) -> Iterator[Step]:
    """Run all generations to their end, one forward a step, and yield after each.

    A step takes one token of every sequence that decodes, then prompt chunks of at most `chunk_size` tokens, oldest
    prompt first, until `token_budget` tokens are reached. A prompt starts once the cache, in whole blocks of
    `block_size` tokens, has room for it at its longest, so that none has to stop halfway. Finished sequences, and all
    others when the caller stops early or a step fails, give their blocks back.

    Raises:
        InvalidInputError: chunk_size or token_budget is not positive, or one prompt alone does not fit the cache.
    """
    if min(chunk_size, token_budget) < 1:
        raise InvalidInputError(f"chunk_size {chunk_size}, token_budget {token_budget}: expected positive numbers")
    capacity = executor.kv_capacity()

    def room(generation: Generation) -> int:
        longest = len(generation.prompt_token_ids) + generation.max_new_tokens
        return -(-longest // block_size) * block_size

    for generation in generations:
        if capacity is not None and room(generation) > capacity:
            raise InvalidInputError(
                f"prompt {generation.seq_id!r}: {room(generation)} tokens with what it may generate, "
                f"the cache holds {capacity}"
            )
    waiting, running = list(generations), list[Generation]()
    try:
        while waiting or running:
            while waiting and (capacity is None or sum(map(room, [*running, waiting[0]])) <= capacity):
                running.append(waiting.pop(0))
            items = _next_items(running, chunk_size, token_budget)
            decode_tokens = sum(bool(generation.token_ids) for generation, _ in items)
            results = executor.unified_decode(UnifiedBatch([item for _, item in items]))
            for (generation, item), token in zip(items, results, strict=True):
                generation.num_prefilled += 0 if generation.token_ids else len(item.q_tokens)
                if token is not None:
                    generation.token_ids.append(int(token))
                    is_full = len(generation.token_ids) >= generation.max_new_tokens
                    generation.done = is_full or generation.token_ids[-1] in eos_token_ids
            finished = tuple(generation for generation in running if generation.done)
            running = [generation for generation in running if not generation.done]
            for generation in finished:
                executor.release_cache(generation.seq_id)
            total = sum(len(item.q_tokens) for _, item in items)
            yield Step(total - decode_tokens, decode_tokens, finished)
    finally:
        for generation in running:
            executor.release_cache(generation.seq_id)


def _next_items(
    running: Sequence[Generation], chunk_size: int, token_budget: int
) -> list[tuple[Generation, UnifiedBatchItem]]:
    items = []
    decoding = [generation for generation in running if generation.token_ids]
    for generation in decoding:
        position = len(generation.prompt_token_ids) + len(generation.token_ids) - 1
        items.append((generation, _item(generation, generation.token_ids[-1:], position, is_final=True)))
    left = max(token_budget - len(decoding), 0 if decoding else 1)
    for generation in running:
        if left > 0 and not generation.token_ids:
            begin = generation.num_prefilled
            chunk = generation.prompt_token_ids[begin : begin + min(chunk_size, left)]
            is_final = begin + len(chunk) == len(generation.prompt_token_ids)
            items.append((generation, _item(generation, chunk, begin, is_final=is_final)))
            left -= len(chunk)
    return items


def _item(generation: Generation, tokens: Sequence[int], position: int, *, is_final: bool) -> UnifiedBatchItem:
    return UnifiedBatchItem(
        seq_id=generation.seq_id,
        q_tokens=tokens,
        pos_offset=position,
        is_final_chunk=is_final,
        logits_policy=GreedyArgmax(),
    )
