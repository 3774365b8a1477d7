"""What goes into a forward and what comes out: plain data, no behaviour beyond its own checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from paged.errors import InvalidInputError
from paged.kernels.common.scalars import as_int
from paged.seq_id import SeqId, as_seq_id
from paged.token_ids import as_token_ids

if TYPE_CHECKING:
    import torch

    from paged.cache.kv_cache import KvCacheHandle


@dataclass(frozen=True)
class FullLogits:
    """The item returns its logits, float32 [vocab_size]."""


@dataclass(frozen=True)
class GreedyArgmax:
    """The item returns its best token id, an int64 scalar, and no logits leave the device.

    token_mask: bool [vocab_size], False forbids a token.
    repetition_penalty: float32 [vocab_size], a factor a token (1 for none): positive logits are divided by it, others
    multiplied.
    """

    token_mask: torch.Tensor | None = None
    repetition_penalty: torch.Tensor | None = None


@dataclass(frozen=True)
class DrawToken:
    """The item returns a token id, an int64 scalar, that `sample_tokens` draws, and no logits leave the device.

    temperature: 0 for the best token. key: of the noise, as two 32-bit halves, the lower first. top_k: 0 keeps all.
    """

    temperature: float
    key: tuple[int, int]
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class VerifyLogits:
    """The item returns the logits after each of its tokens, float32 [n, vocab_size]: drafts are verified by them."""


LogitsPolicy = FullLogits | GreedyArgmax | DrawToken | VerifyLogits


@dataclass(frozen=True)
class UnifiedBatchItem:
    """The next tokens of one sequence: a prompt, a chunk of one, or a decode step.

    seq_id: names the sequence; without `kv_cache` the executor's own handle of that id is used, made on first use.
    q_tokens: the token ids to run, at least one.
    kv_cache: the handle of the sequence, where the caller owns it.
    pos_offset: position of the first of q_tokens; it must be the number of tokens the cache holds.
    is_final_chunk: whether the last token's logits are wanted, or under VerifyLogits those of all.
    metadata: "lora_adapter" names a loaded adapter.

    Ids, tokens and positions may be of any integer type, and q_tokens any iterable of them: they are kept as ints and a
    list, so that an iterator is read once.

    Raises:
        InvalidInputError: seq_id is neither str nor int, or q_tokens or pos_offset are no integers.
    """

    seq_id: SeqId
    q_tokens: Sequence[int]
    kv_cache: KvCacheHandle | None = None
    pos_offset: int = 0
    is_final_chunk: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)
    logits_policy: LogitsPolicy = FullLogits()

    def __post_init__(self) -> None:
        # What a step makes hundreds of costs 0.2 us more by this.
        if type(self.seq_id) is not str:
            object.__setattr__(self, "seq_id", as_seq_id("seq_id", self.seq_id))
        tokens = as_token_ids("q_tokens", self.q_tokens)
        if tokens is not self.q_tokens:
            object.__setattr__(self, "q_tokens", tokens)
        if type(self.pos_offset) is not int or self.pos_offset < 0:
            object.__setattr__(self, "pos_offset", as_int("pos_offset", self.pos_offset))

    @property
    def cache_id(self) -> SeqId:
        """The sequence that it continues in the cache."""
        return self.seq_id if self.kv_cache is None else self.kv_cache.cache_id


@dataclass(frozen=True)
class UnifiedBatch:
    """Items that run in one forward, in any mix of prefill chunks and decode steps."""

    items: Sequence[UnifiedBatchItem]

    @property
    def total_q_tokens(self) -> int:
        """Rows the forward computes."""
        return sum(len(item.q_tokens) for item in self.items)

    @property
    def num_sampled_items(self) -> int:
        """Items that get logits."""
        return sum(item.is_final_chunk for item in self.items)


@dataclass(frozen=True)
class PrefillInput:
    """Prompts of B sequences.

    input_ids: int64 [B, S]. attention_mask: [B, S], 0 marks padding, on either side. position_ids: [B, S], consecutive
    from the length of the row's cache. kv_caches: one handle a row, or None for new sequences.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    kv_caches: Sequence[KvCacheHandle] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PrefillOutput:
    """logits: float32 [B, S, V], or [B, 1, V] for the last token alone; kv_caches: one handle a row."""

    logits: torch.Tensor
    kv_caches: Sequence[KvCacheHandle]

    def last_token_logits(self) -> torch.Tensor:
        """Logits of each row's last token, [B, V]."""
        return self.logits[:, -1]

    @property
    def kv_cache(self) -> KvCacheHandle:
        """The handle of the only row.

        Raises:
            InvalidInputError: there is more than one row.
        """
        if len(self.kv_caches) != 1:
            raise InvalidInputError(f"kv_cache: {len(self.kv_caches)} rows, expected 1; use kv_caches")
        return self.kv_caches[0]


@dataclass(frozen=True)
class DecodeInput:
    """One next token a sequence: input_ids int64 [B, 1], kv_cache the handle (B handles where B > 1)."""

    input_ids: torch.Tensor
    kv_cache: KvCacheHandle | Sequence[KvCacheHandle]
    position_ids: torch.Tensor | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    logits_policy: LogitsPolicy = FullLogits()


@dataclass(frozen=True)
class DecodeOutput:
    """logits: float32 [B, V], or int64 [B] token ids under GreedyArgmax; kv_cache: as in the input."""

    logits: torch.Tensor
    kv_cache: KvCacheHandle | Sequence[KvCacheHandle]


class KvSlotRequest(NamedTuple):
    """Room for one sequence up to target_len tokens; admission_target_len is checked for fit, not allocated.

    A named tuple, as a frozen dataclass takes three times as long to make, and a step makes one a sequence.
    """

    cache_id: SeqId
    target_len: int
    admission_target_len: int | None = None
