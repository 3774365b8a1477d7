"""How long the sequences of a model are that keeps no account of it: counted along, call by call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import isfunction
from typing import Any

from paged.seq_id import SeqId

Lengths = dict[SeqId, int]


def lengths_of(model: object) -> Lengths:
    """Tokens of each sequence that a model runs whose class is counted along."""
    lengths: Lengths = vars(model).setdefault("_counted_lengths", {})
    return lengths


def count_along(cls: type) -> None:
    """Have the methods that a class defines, of those that change lengths, counted."""
    for name, count in _COUNTS.items():
        if isfunction(method := vars(cls).get(name)):
            setattr(cls, name, _counted(method, count))


def _counted(method: Callable[..., Any], count: Callable[..., Lengths]) -> Callable[..., Any]:
    @wraps(method)
    def run(model: object, *args: Any, **named: Any) -> Any:
        lengths = lengths_of(model)
        # From the lengths before the call: a method may run others that are counted, or its base class's own.
        after = count(lengths, *args, **named)
        result = method(model, *args, **named)
        for cache_id, length in after.items():
            if length:
                lengths[cache_id] = length
            else:
                lengths.pop(cache_id, None)
        return result

    return run


# What a call of each method leaves of the sequences it names. Parameters that a class adds are none of theirs.
_COUNTS: Mapping[str, Callable[..., Lengths]] = {
    "prefill": lambda before, cache_id, tokens, **_: {cache_id: before.get(cache_id, 0) + len(tokens)},
    "decode": lambda before, cache_id, token, pos, **_: {cache_id: pos + 1},
    **dict.fromkeys(
        ("decode_batch", "decode_batch_with_full_logits"),
        lambda before, items, **_: {cache_id: pos + 1 for cache_id, _token, pos in items},
    ),
    "unified_forward": lambda before, items, **_: {
        item.seq_id if item.kv_cache is None else item.kv_cache.cache_id: item.pos_offset + len(item.q_tokens)
        for item in items
    },
    "truncate_kv": lambda before, cache_id, new_len, **_: {cache_id: new_len},
    "release": lambda before, cache_id, **_: {cache_id: 0},
    "reset": lambda before, **_: dict.fromkeys(before, 0),
}
