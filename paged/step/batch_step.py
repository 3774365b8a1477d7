"""Steps of batches: checks of the items, capacity for all of them or for none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import add, gt
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from paged.errors import InvalidInputError, SequenceTooLongError
from paged.seq_id import SeqId
from paged.step.batch import CapturedStates, FullLogits, LogitsPolicy, UnifiedBatchItem, VerifyLogits
from paged.step.embeds import embed_step
from paged.step.step import Step

if TYPE_CHECKING:
    from paged.cache.kv_cache import KvCacheHandle
    from paged.cache.manager import PagedKvCacheManager


def step_of(
    manager: PagedKvCacheManager,
    items: Sequence[UnifiedBatchItem],
    *,
    device_ids: torch.Tensor | None = None,
    returns_hidden: bool = False,
    captured: CapturedStates | None = None,
    prepare: Callable[[], object] | None = None,
) -> Step:
    """Return the step of valid items, with reserved capacity.

    An item without `kv_cache` uses the manager's sequence `seq_id`, created on first use. Use the step as a context
    manager: an exception rolls back lengths, capacity and the sequences created here.

    Args:
        device_ids, returns_hidden, captured: as in `UnifiedBatch`.
        prepare: called before missing sequences are created, and may create some of them itself.

    Raises:
        InvalidInputError: a handle is not the manager's, or two items use the same one.
        StaleHandleError: a handle has been freed or is swapped out.
        SequenceTooLongError: a sequence would exceed the cache's `max_seq_len`.
        OutOfBlocksError: the pool has too few free blocks.
    """
    known = [item.kv_cache or manager.get_handle(item.seq_id) for item in items]
    # Listed before the sequences are made, so that an interrupt loses none.
    new_ids = [item.seq_id for item, handle in zip(items, known, strict=True) if handle is None]
    step = Step(device_ids=device_ids, device=manager.device, returns_hidden=returns_hidden, captured=captured)
    if new_ids:
        step.undo = (partial(_free_all, manager, new_ids),)
    try:
        if prepare is not None:
            prepare()
        handles = []
        for item, handle in zip(items, known, strict=True):
            handles.append(handle or manager.get_handle(item.seq_id) or manager.allocate(item.seq_id))
        step.handles = handles
        take_items(step, items)
        reserve_items(manager, step)
        return step
    except BaseException:
        step.rollback()
        raise


def take_items(step: Step, items: Sequence[UnifiedBatchItem]) -> None:
    """Set the tokens and wanted rows of a step from its items. `device_ids` of the step are set."""
    num_unknown = 0 if step.device_ids is None else step.device_ids.shape[0]
    step.items = items
    step.counts = [len(item.q_tokens) for item in items]
    step.token_ids = np.zeros(sum(step.counts), np.int64)
    if num_unknown < len(items):
        known_ids = [item.q_tokens for item in items[num_unknown:]]
        step.token_ids[num_unknown:] = list(chain.from_iterable(known_ids))
    step.row_ids, step.policies = _wanted_rows(items, step.counts)
    step.published = step.embeds = None
    if step.returns_hidden or num_unknown == len(items):
        return
    published: list[Sequence[int] | None] = []
    for index, item in enumerate(items):
        if index < num_unknown:
            published.append(None)
        elif item.embeds is None:
            published.append(item.q_tokens)
        else:
            published.append(item.embeds.ids(item.q_tokens, item.pos_offset))
    step.published = published


def reserve_items(manager: PagedKvCacheManager, step: Step) -> None:
    """Reserve the capacity of a step whose items are set; raises the errors of `PagedKvCacheManager.reserve`."""
    manager.reserve_for(step)
    if any(item.embeds is not None for item in step.items):
        step.embeds, step.positions = embed_step(step.items, step.positions, step.cu_seqlens_q, step.device)


def _free_all(manager: PagedKvCacheManager, seq_ids: Sequence[SeqId]) -> None:
    for seq_id in seq_ids:
        handle = manager.get_handle(seq_id)
        if handle is not None:
            manager.free(handle)


def _wanted_rows(
    items: Sequence[UnifiedBatchItem], counts: Sequence[int]
) -> tuple[NDArray[np.int64], list[LogitsPolicy] | None]:
    """Return the rows of the tokens whose results final items want, and what each row returns; None for all logits."""
    rows: list[int] = []
    policies: list[LogitsPolicy] = []
    wants_logits = True
    end = 0
    for item, count in zip(items, counts, strict=True):
        end += count
        if not item.is_final_chunk:
            continue
        policy = item.logits_policy
        if type(policy) is VerifyLogits:
            rows += range(end - count, end)
            policies += [policy] * count
        else:
            rows.append(end - 1)
            policies.append(policy)
            wants_logits = wants_logits and type(policy) is FullLogits
    return np.array(rows, np.int64), None if wants_logits else policies


def validate_items(
    items: Sequence[UnifiedBatchItem],
    handles: Sequence[KvCacheHandle | None],
    *,
    vocab_size: int,
    max_seq_len: int,
) -> None:
    """Check a batch before anything is written. An empty batch is legal.

    Args:
        handles: the sequence of each item; None if it does not exist yet.

    Raises:
        InvalidInputError: two items of the same sequence, an item without tokens, a `pos_offset` that is not the
            cache's length, or a token id outside [0, vocab_size).
        SequenceTooLongError: an item would reach beyond `max_seq_len`.
    """
    seq_ids = [item.seq_id for item in items]
    cache_ids: list[SeqId] = []
    lengths: list[int] = []
    for item, handle in zip(items, handles, strict=True):
        if handle is None:
            cache_ids.append(item.seq_id)
            lengths.append(0)
        else:
            cache_ids.append(handle.cache_id)
            lengths.append(handle.num_tokens)
    for name, ids in (("seq_id", seq_ids), ("cache_id", cache_ids)):
        if len(set(ids)) != len(ids):
            raise InvalidInputError(f"item {Counter(ids).most_common(1)[0][0]!r}: its {name} is given twice")
    # Check the values of all items at once, because a decode step has hundreds of items.
    rows = [item.q_tokens for item in items]
    tokens, ends = list(chain.from_iterable(rows)), list(map(add, lengths, map(len, rows)))
    continues = [item.pos_offset for item in items] == lengths and all(map(gt, ends, lengths))
    are_ids = min(tokens, default=0) >= 0 and max(tokens, default=0) < vocab_size
    if not continues or not are_ids or max(ends, default=0) > max_seq_len:
        for item, length in zip(items, lengths, strict=True):
            _check_item(item, length, vocab_size, max_seq_len)


def _check_item(item: UnifiedBatchItem, length: int, vocab_size: int, max_seq_len: int) -> None:
    name = f"item {item.seq_id!r}"
    end = length + len(item.q_tokens)
    if end == length:
        raise InvalidInputError(f"{name}: q_tokens is empty, expected at least one token")
    if item.pos_offset != length:
        raise InvalidInputError(f"{name}: pos_offset {item.pos_offset}, expected {length}, the length of its cache")
    for token in item.q_tokens:
        if not 0 <= token < vocab_size:
            raise InvalidInputError(f"{name}: token id {token}, expected 0 <= id < {vocab_size}")
    if end > max_seq_len:
        raise SequenceTooLongError(f"{name}: would reach {end} tokens, expected at most {max_seq_len}")
