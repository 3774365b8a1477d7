"""What an executor says about itself: its model, its limits, and what it has done so far."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The model behind an executor. num_parameters counts weights; max_sequence_length counts tokens.

    eos_token_ids: tokens that end an answer, as its checkpoint says.
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
    """Bytes a model needs.

    kv_bytes_per_token_per_layer: keys and values of one token, on average where layers differ or read another's.
    activation_bytes_per_token: what a token of a forward needs at its widest point, given back when the forward ends.
    """

    weight_bytes: int
    kv_bytes_per_token_per_layer: int
    activation_bytes_per_token: int

    def total(self, batch_size: int, seq_len: int, num_layers: int) -> int:
        """Bytes for `batch_size` sequences of `seq_len` tokens, all of them run in one forward."""
        per_token = num_layers * self.kv_bytes_per_token_per_layer + self.activation_bytes_per_token
        return self.weight_bytes + batch_size * seq_len * per_token


@dataclass(frozen=True, kw_only=True)
class ExecutorCapabilities:
    """What calls an executor can serve.

    max_batch_size: sequences that can hold a token at the same time, None where the model alone knows.
    max_sequence_length: tokens, prompt and output together.
    supports_native_unified_decode: any mix of items is one forward; otherwise it is taken apart.
    prefers_tokens: to choose tokens by itself (`DrawToken`) takes it less than to return logits.
    """

    max_batch_size: int | None
    max_sequence_length: int
    supports_native_unified_decode: bool
    supports_chunked_prefill: bool
    supports_truncate: bool
    supports_prefix_cache: bool
    supports_lora: bool
    prefers_tokens: bool = False
    memory_requirements: MemoryRequirements


class ExecutorState(Enum):
    """READY for a call, BUSY in one, FAILED when the last one met an error of the machine, SHUTDOWN for good."""

    READY = "ready"
    BUSY = "busy"
    FAILED = "failed"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, kw_only=True)
class ExecutorStatus:
    """Measured, from the executor's start until now; nothing here moves unless a forward ran or a call failed.

    prefill_count: prompts completed, however many chunks they came in; prefill_tokens: rows computed for prompts.
    decode_count: tokens run one at a time after that, verified ones included. failed_calls: calls that raised.
    forwards: those that succeeded; graph_replays: of them those that ran as a CUDA graph, or on a CPU as a recording;
    unrecorded_steps: step sizes that the last `warmup` could not record on a CPU; a warning names the operation.
    average_prefill_seconds, average_decode_seconds: time in forwards a prompt or a decoded token, 0 before the first; a
    forward with both is divided between them by tokens.
    memory_bytes, peak_memory_bytes: weights and the KV cache in use, now and at the most.
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
