"""Inputs and outputs of a forward: plain data that validates only itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from paged.errors import InvalidInputError
from paged.kernels.common.scalars import as_int, shown
from paged.seq_id import SeqId, as_seq_id
from paged.token_ids import as_token_ids

if TYPE_CHECKING:
    import torch

    from paged.cache.kv_cache import KvCacheHandle
    from paged.prompt_embeds import PromptEmbeds


_EMBEDS = attrgetter("embeds")


@dataclass(frozen=True)
class FullLogits:
    """Return the logits of the item's last token, float32 [vocab_size]."""


@dataclass(frozen=True)
class GreedyArgmax:
    """Return the best token id, an int64 scalar; no logits leave the device.

    Attributes:
        token_mask: bool [vocab_size]; False forbids a token. None allows all.
        repetition_penalty: float32 [vocab_size], a factor for each token, 1 for none. Positive logits are divided by
            it, others multiplied.
    """

    token_mask: torch.Tensor | None = None
    repetition_penalty: torch.Tensor | None = None


@dataclass(frozen=True)
class DrawToken:
    """Return a token id that `sample_tokens` draws, an int64 scalar; no logits leave the device.

    Attributes:
        temperature: 0 takes the best token.
        key: key of the noise as two 32-bit halves, the lower one first.
        top_k: number of best tokens to keep; 0 keeps all.
        top_p: fraction of the probability mass to keep; 1 keeps all.
        min_p: lowest probability to keep, as a fraction of the best token's; 0 keeps all.
    """

    temperature: float
    key: tuple[int, int]
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class VerifyLogits:
    """Return the logits after each of the item's n tokens, float32 [n, vocab_size], to verify drafts."""


LogitsPolicy = FullLogits | GreedyArgmax | DrawToken | VerifyLogits
"""What a final item returns: logits of its last token, a token id, or logits after each of its tokens."""


@dataclass(frozen=True)
class UnifiedBatchItem:
    """The next tokens of one sequence: a prompt, a prompt chunk, or a decode step.

    Integers of any library are accepted and kept as Python ints.

    Attributes:
        seq_id: id of the sequence. If `kv_cache` is None, the executor uses its own handle of that id, created on first
            use.
        q_tokens: token ids to run, at least one, in any iterable; kept as a list.
        kv_cache: handle of the sequence, if the caller owns it.
        pos_offset: position of the first of `q_tokens`. It must equal the number of tokens that the cache holds.
        is_final_chunk: whether the item returns what `logits_policy` asks for; otherwise it returns None.
        metadata: options by name. "lora_adapter" is the name of a loaded adapter.
        logits_policy: what the item returns.
        embeds: embeddings of the sequence's prompt in place of some tokens, the same for every item of the sequence. An
            executor takes them if it has `embeds_limits`.

    Raises:
        InvalidInputError: seq_id is neither str nor int, or q_tokens or pos_offset are not integers.
    """

    seq_id: SeqId
    q_tokens: Sequence[int]
    kv_cache: KvCacheHandle | None = None
    pos_offset: int = 0
    is_final_chunk: bool = True
    metadata: Mapping[str, Any] = field(default_factory=dict)
    logits_policy: LogitsPolicy = FullLogits()
    embeds: PromptEmbeds | None = None

    def __post_init__(self) -> None:
        # Without further calls: a step makes hundreds of items, and each call would cost 0.2 us.
        if type(self.seq_id) is not str:
            object.__setattr__(self, "seq_id", as_seq_id("seq_id", self.seq_id))
        tokens = as_token_ids("q_tokens", self.q_tokens)
        if tokens is not self.q_tokens:
            object.__setattr__(self, "q_tokens", tokens)
        if type(self.pos_offset) is not int or self.pos_offset < 0:
            object.__setattr__(self, "pos_offset", as_int("pos_offset", self.pos_offset))

    @property
    def cache_id(self) -> SeqId:
        """Id of the sequence in the cache: that of `kv_cache` if given, else `seq_id`."""
        return self.seq_id if self.kv_cache is None else self.kv_cache.cache_id


class BatchColumns(NamedTuple):
    """Fields of a batch's items that stay the same while its sequences decode on.

    Attributes:
        counts: number of tokens of each item.
        is_decode: whether each item is one token and final.
        has_embeds: whether any item has `embeds`.
        wants_logits: whether each item wants logits, and not a token.
    """

    seq_ids: list[SeqId]
    kv_caches: list[KvCacheHandle | None]
    counts: list[int]
    is_decode: bool
    has_embeds: bool
    wants_logits: bool


@dataclass(eq=False)
class CapturedStates:
    """Asks a forward for the states of all tokens of its batch, in order; the forward sets them.

    Attributes:
        has_experts: whether `routed_experts` are wanted.
        hidden_states: after the final norm, in the model's dtype, [num_tokens, hidden_size].
        routed_experts: ids of the chosen experts, int32 [num_tokens, num_layers, top_k], -1 in layers without experts.
    """

    has_experts: bool = False
    hidden_states: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None


@dataclass(frozen=True)
class UnifiedBatch:
    """Items that run in one forward, in any mix of prompts, prompt chunks and decode steps.

    Attributes:
        device_ids: int64 [n] on the executor's device, the tokens of the first n items, if the host does not know them
            yet: those of the last step, for example. These items have one placeholder each in `q_tokens`. Once the ids
            are known, tell the cache by `PagedKvCacheManager.append_tokens`. An executor takes them if its capabilities
            say `supports_device_ids`.
        is_stacked: whether `unified_decode` may return the answers of the final items as one tensor: logits float32
            [num_rows, vocab_size], or int64 [num_rows] tokens if every final item asks for one. 256 views of a matrix
            take 0.2 ms.
        returns_hidden: whether the rows of FullLogits and VerifyLogits hold hidden states after the final norm,
            float32 [hidden_size], in place of logits. Then K/V are not published for other sequences. An executor takes
            it if its capabilities say `supports_hidden_states`.
        captured: takes the states of all tokens beside the answers; then the step runs without a CUDA graph. An
            executor takes it if its capabilities say `supports_hidden_states`, and for experts `has_routed_experts`.
    """

    items: Sequence[UnifiedBatchItem]
    device_ids: torch.Tensor | None = None
    is_stacked: bool = False
    returns_hidden: bool = False
    captured: CapturedStates | None = None
    # The `ForwardStep`, if the caller has already checked the items and reserved their capacity.
    prepared: Any = field(default=None, init=False, repr=False, compare=False)

    @cached_property
    def columns(self) -> BatchColumns:
        items = self.items
        try:
            counts = [len(item.q_tokens) for item in items]
        except (AttributeError, TypeError) as error:
            raise InvalidInputError(f"items: {shown(items)}, expected a list of UnifiedBatchItem") from error
        is_decode = counts.count(1) == len(counts) and False not in [item.is_final_chunk for item in items]
        policies = {type(item.logits_policy) for item in items}
        return BatchColumns(
            seq_ids=[item.seq_id for item in items],
            kv_caches=[item.kv_cache for item in items],
            counts=counts,
            is_decode=is_decode,
            has_embeds=any(map(_EMBEDS, items)),
            wants_logits=policies <= {FullLogits, VerifyLogits},
        )

    @property
    def is_plain(self) -> bool:
        """Whether it asks for one answer an item and nothing else."""
        return not (self.is_stacked or self.returns_hidden) and self.device_ids is None and self.captured is None

    @property
    def total_q_tokens(self) -> int:
        """Number of tokens that the forward computes."""
        return sum(self.columns.counts)

    @property
    def num_sampled_items(self) -> int:
        """Number of items that return logits or a token."""
        return sum(item.is_final_chunk for item in self.items)


@dataclass(frozen=True)
class PrefillInput:
    """Prompts of B sequences, of S tokens with padding.

    Attributes:
        input_ids: int64 [B, S], or rows of token ids in another form.
        attention_mask: [B, S]; 0 marks padding, on either side.
        position_ids: [B, S]; consecutive in each row, padding aside, from the length of the row's cache.
        metadata: as in `UnifiedBatchItem`, for every row.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    kv_caches: Sequence[KvCacheHandle] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PrefillOutput:
    """Logits and cache handles of B prompts.

    Attributes:
        logits: float32 [B, S, V], or [B, 1, V] for the last token alone.
        kv_caches: one handle for each row.
    """

    logits: torch.Tensor
    kv_caches: Sequence[KvCacheHandle]

    def last_token_logits(self) -> torch.Tensor:
        """Return the logits of each row's last token, float32 [B, V]."""
        return self.logits[:, -1]

    @property
    def kv_cache(self) -> KvCacheHandle:
        """Handle of the only row.

        Raises:
            InvalidInputError: there is more than one row.
        """
        if len(self.kv_caches) != 1:
            raise InvalidInputError(f"kv_cache: {len(self.kv_caches)} rows, expected 1; use kv_caches")
        return self.kv_caches[0]


@dataclass(frozen=True)
class DecodeInput:
    """The next token of each of B sequences.

    Attributes:
        input_ids: int64 [B, 1], or rows of token ids in another form.
        kv_cache: the handle of the sequence; B handles if B > 1.
        position_ids: [B, 1], the lengths of the caches; None takes those.
        metadata: as in `UnifiedBatchItem`, for every row.
        logits_policy: what every row returns.
    """

    input_ids: torch.Tensor
    kv_cache: KvCacheHandle | Sequence[KvCacheHandle]
    position_ids: torch.Tensor | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    logits_policy: LogitsPolicy = FullLogits()


@dataclass(frozen=True)
class DecodeOutput:
    """Logits or token ids of a decode step.

    Attributes:
        logits: float32 [B, V]; int64 [B] token ids under `GreedyArgmax` or `DrawToken`.
        kv_cache: as in the input.
    """

    logits: torch.Tensor
    kv_cache: KvCacheHandle | Sequence[KvCacheHandle]


# A named tuple: a frozen dataclass takes three times as long to make, and a step makes one per sequence.
class KvSlotRequest(NamedTuple):
    """A request to `PagedKvCacheManager.reserve` for capacity of one sequence.

    Attributes:
        cache_id: id of the sequence.
        target_len: length in tokens to reserve capacity for.
        admission_target_len: length that must also fit, but is not reserved. None means target_len.
    """

    cache_id: SeqId
    target_len: int
    admission_target_len: int | None = None
