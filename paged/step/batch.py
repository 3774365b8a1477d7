"""Inputs and outputs of a forward: plain data that validates only itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from paged.errors import InvalidInputError
from paged.kernels.core.errors import as_int, shown
from paged.seq_id import SeqId, as_seq_id
from paged.token_ids import as_token_ids

if TYPE_CHECKING:
    import torch

    from paged.cache.kv_cache import KvCacheHandle
    from paged.prompt_embeds import PromptEmbeds


@dataclass(frozen=True)
class FullLogits:
    """Return the logits of the item's last token, float32 [vocab_size]."""


@dataclass(frozen=True)
class GreedyArgmax:
    """Return the best token id, an int64 scalar; no logits leave the device.

    Attributes:
        token_mask: bool [vocab_size]; False forbids a token. None allows all.
        repetition_penalty: float32 [vocab_size], a factor for each token, 1 for none. Positive logits are divided by
            the factor, all other logits are multiplied by it.
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
"""Result of a final item: logits of its last token, a token id, or logits after each of its tokens."""


@dataclass(frozen=True)
class UnifiedBatchItem:
    """The next tokens of one sequence: a prompt, a prompt chunk, or a decode step.

    Integers of any library are accepted and converted to Python ints.

    Attributes:
        seq_id: id of the sequence. If `kv_cache` is None, the executor uses its own handle of this id, created on first
            use.
        q_tokens: token ids to run, at least one, in any iterable; kept as a list.
        kv_cache: handle of the sequence, if the caller owns it.
        pos_offset: position of the first of `q_tokens`. It must equal the number of tokens in the cache.
        is_final_chunk: whether the item returns what `logits_policy` asks for; otherwise it returns None.
        metadata: options by name. "lora_adapter" is the name of a loaded adapter.
        logits_policy: what the item returns.
        embeds: embeddings in place of some prompt tokens, the same for every item of the sequence. Supported by
            executors with `embeds_limits`.

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
        # Checked inline: a step makes hundreds of items, and each function call would add 0.2 us.
        if type(self.seq_id) is not str:
            object.__setattr__(self, "seq_id", as_seq_id("seq_id", self.seq_id))
        tokens = as_token_ids("q_tokens", self.q_tokens)
        if tokens is not self.q_tokens:
            object.__setattr__(self, "q_tokens", tokens)
        if type(self.pos_offset) is not int or self.pos_offset < 0:
            object.__setattr__(self, "pos_offset", as_int("pos_offset", self.pos_offset))

    @property
    def cache_id(self) -> SeqId:
        """Id of the sequence in the cache: the id of `kv_cache` if given, else `seq_id`."""
        return self.seq_id if self.kv_cache is None else self.kv_cache.cache_id


@dataclass(eq=False)
class CapturedStates:
    """Request for the states of all tokens of a batch, in order; the forward fills it in.

    Attributes:
        has_experts: whether to fill `routed_experts`.
        hidden_states: hidden states after the final norm, in the model's dtype, [num_tokens, hidden_size].
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
            yet (for example, the tokens drawn in the last step). Each of these items has one placeholder in `q_tokens`.
            Once the ids are known, pass them to `PagedKvCacheManager.append_tokens`. Requires the capability
            `supports_device_ids`.
        is_stacked: whether `unified_decode` may return the answers of the final items as one tensor: float32 logits
            [num_rows, vocab_size], or int64 tokens [num_rows] if every final item asks for a token. This saves the time
            to make a view for each row.
        returns_hidden: whether FullLogits and VerifyLogits return hidden states after the final norm, float32
            [hidden_size], in place of logits. K/V are then not published for other sequences. Requires the capability
            `supports_hidden_states`.
        captured: request for the states of all tokens besides the answers. The step then runs without a CUDA graph.
            Requires the capability `supports_hidden_states`, and `has_routed_experts` for experts.
    """

    items: Sequence[UnifiedBatchItem]
    device_ids: torch.Tensor | None = None
    is_stacked: bool = False
    returns_hidden: bool = False
    captured: CapturedStates | None = None

    @cached_property
    def counts(self) -> list[int]:
        """Number of tokens of each item.

        Raises:
            InvalidInputError: `items` holds anything but items.
        """
        try:
            return [len(item.q_tokens) for item in self.items]
        except (AttributeError, TypeError) as error:
            raise InvalidInputError(f"items: {shown(self.items)}, expected a list of UnifiedBatchItem") from error

    @property
    def total_q_tokens(self) -> int:
        """Number of tokens that the forward runs."""
        return sum(self.counts)

    @property
    def num_sampled_items(self) -> int:
        """Number of items that return logits or a token."""
        return sum(item.is_final_chunk for item in self.items)


@dataclass(frozen=True)
class PrefillInput:
    """Prompts of B sequences, padded to S tokens.

    Attributes:
        input_ids: int64 [B, S], or rows of token ids in another form.
        attention_mask: [B, S]; 0 marks padding, on either side.
        position_ids: [B, S]; consecutive from the length of the row's cache, padding excepted.
        metadata: options of every row, as in `UnifiedBatchItem`.
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
        logits: float32 [B, S, V], or [B, 1, V] for the last token only.
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
        position_ids: [B, 1], must equal the lengths of the caches; None takes the lengths.
        metadata: options of every row, as in `UnifiedBatchItem`.
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
        logits: float32 [B, V]; int64 token ids [B] under `GreedyArgmax` or `DrawToken`.
        kv_cache: the input's `kv_cache`.
    """

    logits: torch.Tensor
    kv_cache: KvCacheHandle | Sequence[KvCacheHandle]


# A NamedTuple, because a step makes one per sequence and a frozen dataclass takes three times as long to make.
class KvSlotRequest(NamedTuple):
    """Request to `PagedKvCacheManager.reserve` for capacity of one sequence.

    Attributes:
        cache_id: id of the sequence.
        target_len: length in tokens to reserve capacity for.
        admission_target_len: length that must also fit but is not reserved. None means target_len.
    """

    cache_id: SeqId
    target_len: int
    admission_target_len: int | None = None
