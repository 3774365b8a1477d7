"""The interface between an executor and a language model; batches and rollback are optional."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import isfunction
from typing import Any

import torch

from paged.errors import InvalidInputError, UnsupportedError
from paged.seq_id import SeqId
from paged.step.batch import UnifiedBatchItem
from paged.token_ids import as_token_ids


@dataclass(frozen=True)
class LlmRuntimeConfig:
    """Model sizes that an executor needs.

    Attributes:
        max_seq_len: longest sequence in tokens, prompt and output together.
    """

    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int


class DecoderOnlyLLM(ABC):
    """A causal language model that keeps the KV cache of each sequence itself, by `cache_id`.

    Only `config`, `prefill`, `decode` and `release` are required. By default, other methods run the required methods
    one by one, or raise UnsupportedError. Logits are float32.

    If a class does not override `forward_verify`, calls that change a sequence's length are counted, so that the
    default knows where the sequence ends.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.forward_verify is DecoderOnlyLLM.forward_verify:
            for name, count in _COUNTS.items():
                if isfunction(method := vars(cls).get(name)):
                    setattr(cls, name, _counted(method, count))

    @property
    @abstractmethod
    def config(self) -> LlmRuntimeConfig:
        """Sizes of the model."""

    @abstractmethod
    def prefill(self, cache_id: SeqId, tokens: Sequence[int]) -> torch.Tensor:
        """Append tokens to a sequence, started here if it is new, and return the last token's logits, [V]."""

    @abstractmethod
    def decode(self, cache_id: SeqId, token: int, pos: int) -> torch.Tensor:
        """Append one token at position `pos`, the sequence's length, and return its logits, [V]."""

    @abstractmethod
    def release(self, cache_id: SeqId) -> None:
        """Forget a sequence; does nothing if it does not exist."""

    def cache_metrics_snapshot(self) -> Any | None:
        """Return metrics of the KV cache, or None."""
        return None

    def lora_metrics_snapshot(self) -> Mapping[str, Any] | None:
        """Return metrics of the adapters, or None."""
        return None

    def set_lora_adapter_for_cache(self, cache_id: SeqId, adapter: str | None) -> None:
        """Choose a loaded adapter for a sequence, or None for the base model.

        Raises:
            UnsupportedError: an adapter is given, but this model supports none.
        """
        if adapter is not None:
            raise UnsupportedError(
                f"adapter {adapter!r} for cache {cache_id!r}: {type(self).__name__} takes no adapters"
            )

    def prepare(self) -> None:  # noqa: B027
        """Warm up: do all work now that would slow down the first request."""

    def kv_capacity(self) -> int:
        """Return the number of tokens that the KV cache can hold, over all sequences."""
        return self.config.max_seq_len

    def decode_batch(self, items: Sequence[tuple[SeqId, int, int]]) -> torch.Tensor:
        """Run `decode` for each (cache_id, token, pos); return logits [n, V]."""
        return self.decode_batch_with_full_logits(items)

    def decode_batch_with_full_logits(self, items: Sequence[tuple[SeqId, int, int]]) -> torch.Tensor:
        """Run `decode_batch` for callers that need all logits, even if a model's `decode_batch` returns less."""
        if len(items) == 0:
            return torch.empty(0, self.config.vocab_size)
        return torch.stack([self.decode(cache_id, token, pos) for cache_id, token, pos in items])

    def forward_verify(self, cache_id: SeqId, tokens: Sequence[int], *, start_pos: int | None = None) -> torch.Tensor:
        """Append tokens to a sequence and return the logits after each of them, [n, V].

        The default calls `decode` in a loop.

        Args:
            start_pos: the sequence's length; None takes the counted length, which may be wrong after a failed call.

        Raises:
            InvalidInputError: tokens are empty, or not token ids.
        """
        ids = as_token_ids("tokens", tokens)
        if not ids:
            raise InvalidInputError("tokens: empty, expected at least one token id")
        if start_pos is None:
            start_pos = _lengths(self).get(cache_id, 0)
        rows: list[torch.Tensor] = []
        for pos, token in enumerate(ids, start_pos):
            rows.append(self.decode(cache_id, token, pos))
        return torch.stack(rows)

    def unified_forward(self, items: Sequence[UnifiedBatchItem]) -> list[torch.Tensor | None]:
        """Run any mix of prefill chunks and decode steps in one forward.

        Returns:
            One entry for each item, in order: None if the chunk is not final, else the last token's logits [V]. With
            GreedyArgmax, the entry is the token id, an int64 scalar.

        Raises:
            UnsupportedError: this model runs one sequence at a time.
        """
        raise UnsupportedError(f"{type(self).__name__} has no unified forward ({len(items)} items given)")

    def truncate_kv(self, cache_id: SeqId, new_len: int) -> None:
        """Roll a sequence back to its first `new_len` tokens.

        Raises:
            UnsupportedError: this model cannot roll back.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot truncate cache {cache_id!r} to {new_len} tokens")

    def reset(self) -> None:  # noqa: B027
        """Forget every sequence."""


def _lengths(model: object) -> dict[SeqId, int]:
    """Return the counted length of each sequence of a model."""
    lengths: dict[SeqId, int] = vars(model).setdefault("_counted_lengths", {})
    return lengths


def _counted(method: Callable[..., Any], count: Callable[..., dict[SeqId, int]]) -> Callable[..., Any]:
    @wraps(method)
    def run(model: object, *args: Any, **named: Any) -> Any:
        lengths = _lengths(model)
        # Count from the lengths before the call, because a method may call other counted methods.
        after = count(lengths, *args, **named)
        result = method(model, *args, **named)
        for cache_id, length in after.items():
            if length:
                lengths[cache_id] = length
            else:
                lengths.pop(cache_id, None)
        return result

    return run


def _after_items(before: dict[SeqId, int], items: Sequence[UnifiedBatchItem], **_: Any) -> dict[SeqId, int]:
    lengths: dict[SeqId, int] = {}
    for item in items:
        lengths[item.cache_id] = item.pos_offset + len(item.q_tokens)
    return lengths


def _after_prompt(before: dict[SeqId, int], cache_id: SeqId, tokens: Sequence[int], **_: Any) -> dict[SeqId, int]:
    return {cache_id: before.get(cache_id, 0) + len(as_token_ids("tokens", tokens))}


# How each method changes a sequence's length. Parameters that a subclass adds are ignored.
_COUNTS: Mapping[str, Callable[..., dict[SeqId, int]]] = {
    "prefill": _after_prompt,
    "decode": lambda before, cache_id, token, pos, **_: {cache_id: pos + 1},
    **dict.fromkeys(
        ("decode_batch", "decode_batch_with_full_logits"),
        lambda before, items, **_: {cache_id: pos + 1 for cache_id, _token, pos in items},
    ),
    "unified_forward": _after_items,
    "truncate_kv": lambda before, cache_id, new_len, **_: {cache_id: new_len},
    "release": lambda before, cache_id, **_: {cache_id: 0},
    "reset": lambda before, **_: dict.fromkeys(before, 0),
}
