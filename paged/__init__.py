"""Paged attention and fused MoE in Triton over a block-table KV cache, with executors that run real checkpoints.

Every public name is exported here and loaded on first use, so `import paged` imports neither torch nor triton. If torch
is not loaded yet, the import sets GOMP_SPINCOUNT for torch's threads; see `paged.executors.thread_waits`.
"""

from __future__ import annotations

import importlib
import os
import sys

# Do not import the name from `typing`, which would double the time until the command line can handle an interrupt.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_EXPORTS: dict[str, tuple[str, ...]] = {
    "paged.step.batch": (
        "DecodeInput",
        "DecodeOutput",
        "DrawToken",
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
    "paged.cache.events": ("BlockRemoved", "BlocksStored", "CacheCleared", "MemoryPressure"),
    "paged.cache.inspection": ("CacheStats",),
    "paged.errors": (
        "CanaryError",
        "CheckpointError",
        "InvalidInputError",
        "OutOfBlocksError",
        "OutOfStateSlotsError",
        "PinBudgetError",
        "ModelAsleepError",
        "PagedError",
        "RankFailedError",
        "SequenceTooLongError",
        "StaleHandleError",
        "UnsupportedError",
    ),
    "paged.executors.engine.async_engine": ("AsyncEngine", "EngineStoppedError"),
    "paged.executors.async_executor": ("AsyncModelExecutor",),
    "paged.serving.text.chat_tokenizer": ("ChatTokenizer",),
    "paged.executors.speculation.draft_model": ("DraftModel",),
    "paged.executors.engine.beam_search": ("BeamOutput",),
    "paged.executors.engine.engine": ("Engine",),
    "paged.executors.engine.speculative_decoder": ("SpeculativeDecoder",),
    "paged.executors.engine.config": ("EngineConfig", "QueueFullError"),
    "paged.executors.engine.metrics": ("EngineMetrics", "EngineStatus", "prometheus_text"),
    "paged.executors.llm_executor": ("LlmExecutor",),
    "paged.executors.model_executor": ("ModelExecutor",),
    "paged.executors.paged_attention_executor": ("PagedAttentionExecutor", "PagedExecutorConfig"),
    "paged.executors.speculation.head_proposer": ("HeadProposer",),
    "paged.executors.speculation.prompt_lookup": ("PromptLookup",),
    "paged.executors.requests.output": ("CompletionOutput", "RequestMetrics", "RequestOutput"),
    "paged.executors.requests.sampling_params": ("SamplingParams",),
    "paged.executors.types": (
        "ExecutorCapabilities",
        "ExecutorState",
        "ExecutorStatus",
        "MemoryRequirements",
        "ModelInfo",
    ),
    "paged.kernels.attention.plan": ("AttentionPlan",),
    "paged.kernels.attention.cascade_attention": ("cascade_attention",),
    "paged.kernels.cache.concat_and_cache_mla": ("concat_and_cache_mla", "mla_norm_rope_and_cache"),
    "paged.kernels.cache.copy_blocks": ("copy_blocks",),
    "paged.kernels.moe.fused_moe": ("fused_moe",),
    "paged.kernels.core.ids": ("check_ids",),
    "paged.kernels.lora.add_lora": ("add_lora",),
    "paged.kernels.lora.batch": ("LoraBatch",),
    "paged.kernels.lora.weights": ("LoraWeights",),
    "paged.kernels.attention.merge_attn_states": ("merge_attn_states",),
    "paged.kernels.moe.moe_align_block_size": ("MoeAlignment", "moe_align_block_size"),
    "paged.kernels.attention.paged_attention": ("paged_attention",),
    "paged.kernels.attention.choose_blocks": ("choose_blocks",),
    "paged.kernels.attention.choose_keys": ("choose_keys",),
    "paged.kernels.attention.paged_compressed_attention": ("paged_compressed_attention",),
    "paged.kernels.attention.paged_mla_attention": ("paged_mla_attention",),
    "paged.kernels.cache.qk_norm_rope_and_cache": ("qk_norm_rope_and_cache",),
    "paged.kernels.cache.canaries": ("check_canaries", "write_canaries"),
    "paged.kernels.cache.reshape_and_cache": ("reshape_and_cache",),
    "paged.kernels.cache.write_pooled_entries": ("write_pooled_entries",),
    "paged.kernels.quantization.quantized_linear": ("quantized_linear",),
    "paged.kernels.quantization.weight": ("QuantizedWeight",),
    "paged.kernels.layers.gate_streams": ("gate_streams",),
    "paged.kernels.layers.mix_snapshots": ("mix_snapshots",),
    "paged.kernels.layers.mix_streams": ("mix_streams",),
    "paged.kernels.layers.rms_norm": ("fused_add_rms_norm", "rms_norm"),
    "paged.kernels.layers.rotary_embedding": ("rotary_embedding",),
    "paged.kernels.moe.route_and_align": ("route_and_align",),
    "paged.kernels.moe.route_tokens": ("route_tokens",),
    "paged.kernels.moe.routing": ("Routing",),
    "paged.kernels.recurrent.causal_conv1d": ("causal_conv1d",),
    "paged.kernels.recurrent.gated_delta_rule": ("gated_delta_rule",),
    "paged.kernels.recurrent.gated_rms_norm": ("gated_rms_norm",),
    "paged.kernels.recurrent.mamba2_scan": ("mamba2_scan",),
    "paged.kernels.recurrent.metadata": ("RecurrentBatch", "RecurrentState"),
    "paged.kernels.sampling.greedy_argmax": ("greedy_argmax",),
    "paged.kernels.sampling.penalties": ("Penalties",),
    "paged.kernels.sampling.sample_tokens": ("sample_tokens",),
    "paged.kernels.layers.silu_and_mul": ("silu_and_mul",),
    "paged.cache.groups": ("CacheGroup", "RecurrentSpec"),
    "paged.cache.kv_cache": ("KvCacheHandle", "PagedKvCacheConfig"),
    "paged.cache.manager": ("PagedKvCacheManager",),
    "paged.cache.pins": ("PinnedPrefix",),
    "paged.cache.pooled_groups": (
        "BorderGroup",
        "Entries",
        "EntriesGroup",
        "OpenPart",
        "OpenPoolGroup",
        "PooledGroup",
    ),
    "paged.cache.retention": ("Retention",),
    "paged.cache.slot_reservation": ("KvSlotReservation",),
    "paged.step.metadata": ("AttentionMetadata",),
    "paged.models.base": ("DecoderOnlyLLM", "LlmRuntimeConfig"),
    "paged.models.parallel.ranks": ("ParallelConfig",),
    "paged.tools.recorder": ("record",),
    "paged.prompt_embeds": ("EmbedsLimits", "PromptEmbeds", "mrope_positions"),
    "paged.tools.picture": ("CachePicture", "cache_picture"),
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


if "torch" not in sys.modules:  # when torch is loaded, it reads the variable GOMP_SPINCOUNT
    importlib.import_module("paged.executors.thread_waits").set_spin_count()
if "PAGED_RECORD" in os.environ:
    importlib.import_module("paged.tools.recorder").record_as_environment_says()
