"""Conversion of rows of token tensors to batch items, and checks of items and results."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, TypeVar

import torch

from paged.cache.kv_cache import KvCacheHandle
from paged.errors import InvalidInputError
from paged.kernels.core.checks import check_shape
from paged.kernels.core.errors import shown
from paged.seq_id import SeqId
from paged.step.batch import DecodeInput, FullLogits, LogitsPolicy, PrefillInput, UnifiedBatchItem, VerifyLogits
from paged.token_ids import as_token_ids

T = TypeVar("T")


def is_decode_step(item: UnifiedBatchItem) -> bool:
    """Return whether an item is a decode step: one final token after others, or tokens to verify."""
    if not item.is_final_chunk or item.pos_offset <= 0:
        return False
    return len(item.q_tokens) == 1 or isinstance(item.logits_policy, VerifyLogits)


def results_mismatch(items: Sequence[UnifiedBatchItem], results: Sequence[torch.Tensor | None]) -> str | None:
    """Describe how results do not match their items (one per item, logits for each final item), or return None."""
    if len(results) == len(items):
        missing = []
        for item, result in zip(items, results, strict=True):
            if not item.is_final_chunk:
                continue
            if result is None:
                missing.append(item.seq_id)
            elif isinstance(item.logits_policy, VerifyLogits) and len(result) != len(item.q_tokens):
                return f"{len(result)} rows of logits for {len(item.q_tokens)} tokens"
        if not missing:
            return None
    else:
        missing = []
        for item, result in zip(items, results, strict=False):
            if item.is_final_chunk and result is None:
                missing.append(item.seq_id)
    return f"{len(results)} results for {len(items)} items, no logits for {missing}"


def inputs_of(kind: type[T], inputs: Sequence[T]) -> Sequence[T]:
    """Return the inputs of a call, after checking their type."""
    if not isinstance(inputs, Sequence) or not all(isinstance(call_input, kind) for call_input in inputs):
        raise InvalidInputError(f"inputs: {shown(inputs)}, expected {kind.__name__}, in calls of several a list of it")
    return inputs


def prefill_items(inputs: PrefillInput) -> list[UnifiedBatchItem]:
    """Convert each row without its padding to an item; a row without a cache gets a new sequence id.

    Raises:
        InvalidInputError: a shape or dtype is wrong, positions have a gap, or the number of caches differs from rows.
    """
    inputs = replace(inputs, input_ids=_id_rows(inputs.input_ids))
    return _items(inputs, inputs.attention_mask, inputs.kv_caches, FullLogits())


def decode_items(inputs: DecodeInput) -> list[UnifiedBatchItem]:
    """Convert each row to an item of one token.

    Raises:
        InvalidInputError: a shape or dtype is wrong, or the number of caches differs from the number of rows.
    """
    inputs = replace(inputs, input_ids=_id_rows(inputs.input_ids))
    check_shape("input_ids", inputs.input_ids, ("B", 1))
    caches = inputs.kv_cache if isinstance(inputs.kv_cache, Sequence) else [inputs.kv_cache]
    if any(cache is None for cache in caches):
        raise InvalidInputError("kv_cache: None, expected a handle for each row")
    return _items(inputs, None, caches, inputs.logits_policy)


def verify_item(inputs: Sequence[DecodeInput]) -> UnifiedBatchItem:
    """Convert consecutive tokens of one sequence to one item that returns the logits of every token.

    Raises:
        InvalidInputError: see `decode_items`; or an input has several rows or does not continue the previous input.
    """
    rows = [decode_items(step) for step in inputs]
    first = rows[0][0]
    for index, (step, row) in enumerate(zip(inputs, rows, strict=True)):
        if len(row) != 1 or row[0].seq_id != first.seq_id:
            seq_ids = [item.seq_id for item in row]
            raise InvalidInputError(f"inputs[{index}]: sequences {seq_ids}, expected one: {first.seq_id!r}")
        if step.position_ids is not None and row[0].pos_offset != first.pos_offset + index:
            raise InvalidInputError(
                f"inputs[{index}].position_ids: {row[0].pos_offset}, expected {first.pos_offset + index}"
            )
    return replace(first, q_tokens=[row[0].q_tokens[0] for row in rows], logits_policy=VerifyLogits())


def _items(
    inputs: PrefillInput | DecodeInput,
    attention_mask: torch.Tensor | None,
    kv_caches: Sequence[KvCacheHandle] | None,
    logits_policy: LogitsPolicy,
) -> list[UnifiedBatchItem]:
    check_shape("input_ids", inputs.input_ids, ("B", "S"))
    tokens = _integers("input_ids", inputs.input_ids)
    positions: list[list[int]] | None = None
    caches: Sequence[KvCacheHandle | None] = [None] * len(tokens)
    if kv_caches is not None:
        caches = kv_caches
    if not tokens or len(caches) != len(tokens):
        raise InvalidInputError(
            f"input_ids: {len(tokens)} rows for {len(caches)} caches, expected one each, at least one"
        )
    if inputs.position_ids is not None:
        check_shape("position_ids", inputs.position_ids, inputs.input_ids.shape)
        positions = _integers("position_ids", inputs.position_ids)
    if attention_mask is not None:
        check_shape("attention_mask", attention_mask, inputs.input_ids.shape)
        mask = attention_mask.tolist()
        tokens = _without_padding(tokens, mask)
        if positions is not None:
            positions = _without_padding(positions, mask)
    items = []
    for row, cache in enumerate(caches):
        if cache is None:
            start = 0
            seq_id: SeqId = f"prefill-{uuid.uuid4()}"
        else:
            start = cache.num_tokens
            seq_id = cache.cache_id
        if positions is not None:
            if positions[row]:
                start = positions[row][0]
            if positions[row] != list(range(start, start + len(positions[row]))):
                raise InvalidInputError(
                    f"position_ids: row {row} holds {positions[row]}, expected consecutive positions"
                )
        items.append(
            UnifiedBatchItem(
                seq_id=seq_id,
                q_tokens=tokens[row],
                kv_cache=cache,
                pos_offset=start,
                metadata=inputs.metadata,
                logits_policy=logits_policy,
            )
        )
    return items


def _id_rows(value: Any) -> torch.Tensor:
    """Convert rows of token ids to a tensor [B, S]."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        rows = [as_token_ids("input_ids", row) for row in value]
        return torch.tensor(rows, dtype=torch.int64)
    except (InvalidInputError, MemoryError):
        raise
    except Exception as error:  # a caller's class, rows of unequal length, or ids beyond 64 bits
        raise InvalidInputError(f"input_ids: {shown(value)}, expected rows of as many token ids each") from error


def _without_padding(rows: list[list[int]], mask: list[list[int]]) -> list[list[int]]:
    """Return each row's values where the mask is not 0."""
    return [list(compress(row, row_mask)) for row, row_mask in zip(rows, mask, strict=True)]


def _integers(name: str, tensor: torch.Tensor) -> list[list[int]]:
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise InvalidInputError(f"{name}: dtype {tensor.dtype}, expected integers")
    rows: list[list[int]] = tensor.tolist()
    return rows
