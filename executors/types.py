"""Reports of an executor: model, capabilities, memory needs, measured work."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Identity and sizes of the model behind an executor.

    Attributes:
        model_id: name of the model; for a checkpoint, the name of its folder.
        model_type: architecture of the model.
        num_parameters: number of weights.
        max_sequence_length: longest sequence in tokens, prompt and output together.
        dtype, device: dtype and device of the model's activations.
        eos_token_ids: tokens that end an answer, from the checkpoint.
    """

    model_id: str
    model_type: str
    num_parameters: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_sequence_length: int
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MemoryRequirements:
    """Memory needs of a model, in bytes.

    Attributes:
        weight_bytes: size of all weights.
        kv_bytes_per_token_per_layer: size of a token's key and value; the average if layers differ or share K/V.
        activation_bytes_per_token: peak of a forward per token, freed when the forward ends.
    """

    weight_bytes: int
    kv_bytes_per_token_per_layer: int
    activation_bytes_per_token: int

    def total(self, batch_size: int, seq_len: int, num_layers: int) -> int:
        """Return the bytes for `batch_size` sequences of `seq_len` tokens, if all tokens run in one forward."""
        per_token = num_layers * self.kv_bytes_per_token_per_layer + self.activation_bytes_per_token
        return self.weight_bytes + batch_size * seq_len * per_token


@dataclass(frozen=True, kw_only=True)
class ExecutorCapabilities:
    """Capabilities and limits of an executor.

    Attributes:
        max_batch_size: maximum number of sequences that can hold tokens at the same time; None if unknown.
        max_sequence_length: longest sequence in tokens, prompt and output together.
        supports_native_unified_decode: whether any mix of items runs in one forward; otherwise a batch is split.
        supports_chunked_prefill: whether a prompt can run in chunks.
        supports_truncate: whether sequences can be rolled back.
        supports_prefix_cache: whether sequences share cached prefixes.
        supports_lora: whether items may name an adapter.
        prefers_tokens: whether choosing a token (`DrawToken`) is cheaper than returning logits.
        has_draft_head: whether the model has a draft head, which needs the hidden state of the previous token.
        supports_device_ids, supports_hidden_states: whether `UnifiedBatch` may have `device_ids`, and `returns_hidden`
            or `captured`.
        has_routed_experts: whether the model has layers with experts, and `captured` may ask for their ids.
        has_invariant_rows: whether a step can run so that the bits of a row do not depend on other rows. `warmup` may
            change it.
    """

    max_batch_size: int | None
    max_sequence_length: int
    supports_native_unified_decode: bool
    supports_chunked_prefill: bool
    supports_truncate: bool
    supports_prefix_cache: bool
    supports_lora: bool
    prefers_tokens: bool = False
    has_draft_head: bool = False
    supports_device_ids: bool = False
    supports_hidden_states: bool = False
    has_routed_experts: bool = False
    has_invariant_rows: bool = False
    memory_requirements: MemoryRequirements


class ExecutorState(Enum):
    """State: READY for a call, BUSY in a call, FAILED after an error that is no `PagedError`, SHUTDOWN for good."""

    READY = "ready"
    BUSY = "busy"
    FAILED = "failed"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, kw_only=True)
class ExecutorStatus:
    """Work and memory of an executor, measured since its creation.

    Attributes:
        prefill_count: prompts completed, in any number of chunks.
        decode_count: tokens decoded after a prompt, verified drafts included.
        prefill_tokens: tokens run for prompts.
        failed_calls: calls that raised.
        forwards: forwards that succeeded.
        average_prefill_seconds, average_decode_seconds: mean forward time per prompt and per decoded token; 0 before
            the first. The time of a mixed forward is divided by tokens.
        memory_bytes, peak_memory_bytes: size of weights and used KV cache, now and at the peak.
        graph_replays: forwards that ran as a CUDA graph or, on a CPU, as a recording.
        unrecorded_steps: number of step sizes that the last `warmup` could not record on a CPU; a warning names the
            operation.
    """

    state: ExecutorState
    prefill_count: int
    decode_count: int
    prefill_tokens: int
    failed_calls: int
    forwards: int
    average_prefill_seconds: float
    average_decode_seconds: float
    memory_bytes: int
    peak_memory_bytes: int
    graph_replays: int = 0
    unrecorded_steps: int = 0
