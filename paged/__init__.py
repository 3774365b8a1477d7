"""Paged attention and fused MoE in Triton over a block-table KV cache, with executors that run real checkpoints.

Every public name is exported here and loaded on first use, so `import paged` takes neither torch nor triton.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS: dict[str, tuple[str, ...]] = {
    "paged.batch": (
        "DecodeInput",
        "DecodeOutput",
        "FullLogits",
        "GreedyArgmax",
        "KvSlotRequest",
        "LogitsPolicy",
        "PrefillInput",
        "PrefillOutput",
        "UnifiedBatch",
        "UnifiedBatchItem",
        "VerifyLogits",
    ),
    "paged.cache_events": ("BlockRemoved", "BlocksStored", "CacheCleared", "MemoryPressure"),
    "paged.cache_stats": ("CacheStats",),
    "paged.errors": (
        "CheckpointError",
        "InvalidInputError",
        "OutOfBlocksError",
        "PagedError",
        "SequenceTooLongError",
        "StaleHandleError",
        "UnsupportedError",
    ),
    "paged.executors.async_engine": ("AsyncEngine", "EngineStoppedError"),
    "paged.executors.async_executor": ("AsyncModelExecutor",),
    "paged.executors.chat_tokenizer": ("ChatTokenizer",),
    "paged.executors.draft_model": ("DraftModel",),
    "paged.executors.engine": ("Engine",),
    "paged.executors.engine_config": ("EngineConfig", "QueueFullError"),
    "paged.executors.engine_metrics": ("EngineMetrics", "EngineStatus", "prometheus_text"),
    "paged.executors.llm_executor": ("LlmExecutor",),
    "paged.executors.model_executor": ("ModelExecutor",),
    "paged.executors.paged_attention_executor": ("PagedAttentionExecutor", "PagedExecutorConfig"),
    "paged.executors.prompt_lookup": ("PromptLookup",),
    "paged.executors.request_output": ("CompletionOutput", "RequestMetrics", "RequestOutput"),
    "paged.executors.sampling_params": ("SamplingParams",),
    "paged.executors.speculative_decoder": ("SpeculativeDecoder",),
    "paged.executors.types": (
        "ExecutorCapabilities",
        "ExecutorState",
        "ExecutorStatus",
        "MemoryRequirements",
        "ModelInfo",
    ),
    "paged.kernels.attention_plan": ("AttentionPlan",),
    "paged.kernels.cascade_attention": ("cascade_attention",),
    "paged.kernels.copy_blocks": ("copy_blocks",),
    "paged.kernels.fused_moe": ("fused_moe",),
    "paged.kernels.greedy_argmax": ("greedy_argmax",),
    "paged.kernels.id_checks": ("check_ids",),
    "paged.kernels.lora": ("add_lora",),
    "paged.kernels.lora_batch": ("LoraBatch",),
    "paged.kernels.lora_weights": ("LoraWeights",),
    "paged.kernels.merge_attn_states": ("merge_attn_states",),
    "paged.kernels.moe_align_block_size": ("moe_align_block_size",),
    "paged.kernels.moe_alignment": ("MoeAlignment",),
    "paged.kernels.paged_attention": ("paged_attention",),
    "paged.kernels.qk_norm_rope_and_cache": ("qk_norm_rope_and_cache",),
    "paged.kernels.reshape_and_cache": ("reshape_and_cache",),
    "paged.kernels.rms_norm": ("fused_add_rms_norm", "rms_norm"),
    "paged.kernels.rotary_embedding": ("rotary_embedding",),
    "paged.kernels.route_and_align": ("route_and_align",),
    "paged.kernels.route_tokens": ("route_tokens",),
    "paged.kernels.routing": ("Routing",),
    "paged.kernels.silu_and_mul": ("silu_and_mul",),
    "paged.kv_cache": ("KvCacheHandle", "PagedKvCacheConfig"),
    "paged.kv_cache_manager": ("PagedKvCacheManager",),
    "paged.kv_slot_reservation": ("KvSlotReservation",),
    "paged.metadata": ("AttentionMetadata",),
    "paged.models.base": ("DecoderOnlyLLM", "LlmRuntimeConfig"),
    "paged.picture": ("CachePicture", "cache_picture"),
}

_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'paged' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
