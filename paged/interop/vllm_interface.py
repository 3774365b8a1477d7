"""Compare the installed vLLM with the interface that the backend relies on.

    python -m paged.interop.vllm_interface [--record]

Prints lines that are gone (-), new (+), or whose function has another body (~, to be reviewed). "!" marks lines that
the backends override, call or read. If a marked line is gone, the exit code is 1, and the plug-in refuses an untested
vLLM. --record writes `EXPECTED`. Importing this module does not import vLLM.
"""

from __future__ import annotations

import sys
from pathlib import Path

from paged.interop.interface import Interface

# Names in vLLM that the backends need. An entry without a member means the class with all its public members.
NAMES = (
    "vllm.config:CompilationConfig.static_forward_context",
    "vllm.config:ParallelConfig.cp_kv_cache_interleave_size",
    "vllm.config:ParallelConfig.decode_context_parallel_size",
    "vllm.config:SchedulerConfig.max_num_batched_tokens",
    "vllm.distributed:is_global_first_rank",
    "vllm.distributed.parallel_state:get_dcp_group",
    "vllm.distributed.parallel_state:get_dcp_world_size_and_rank",
    "vllm.envs:VLLM_BATCH_INVARIANT",
    "vllm.model_executor.warmup.jit_warmup:VllmJitKernel",
    "vllm.platforms.interface:DeviceCapability",
    "vllm.platforms.interface:Platform.get_attn_backend_cls",
    "vllm.v1.attention.backend:AttentionBackend",
    "vllm.v1.attention.backend:AttentionCGSupport",
    "vllm.v1.attention.backend:AttentionImpl",
    "vllm.v1.attention.backend:AttentionLayer",
    "vllm.v1.attention.backend:AttentionMetadataBuilder",
    "vllm.v1.attention.backend:AttentionType",
    "vllm.v1.attention.backend:CommonAttentionMetadata",
    "vllm.v1.attention.backend:MultipleOf",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.CUSTOM",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.get_path",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.is_overridden",
    "vllm.v1.attention.backends.registry:register_backend",
    "vllm.v1.attention.backends.utils:get_dcp_local_seq_lens",
)
# More names, which only the backends for latents need.
LATENT_NAMES = (
    "vllm.config:AttentionConfig.hisparse_config",
    "vllm.config:AttentionConfig.mla_prefill_backend",
    "vllm.config:ParallelConfig.prefill_context_parallel_size",
    "vllm.config:get_current_vllm_config",
    "vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward_impl",
    "vllm.model_executor.layers.attention.mla_attention:MLAAttention.update_kv_cache",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonBackend",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonDecodeMetadata",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonImpl",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonMetadata",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonMetadataBuilder",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonMetadataBuilder._build_decode",
    "vllm.model_executor.layers.attention.mla_attention:MLACommonPrefillMetadata",
    "vllm.model_executor.layers.attention.mla_attention:QueryLenSupport",
    "vllm.model_executor.layers.attention.sparse_mla_attention:SparseMLACommonImpl",
    "vllm.model_executor.layers.attention.sparse_mla_attention:SparseMLACommonMetadata",
    "vllm.model_executor.layers.attention.sparse_mla_attention:SparseMLACommonMetadataBuilder",
    "vllm.model_executor.layers.attention.sparse_mla_attention:SparseMLACommonMetadataBuilder._build_req_id_per_token",
    "vllm.v1.attention.backend:max_decode_query_len",
    "vllm.v1.attention.backends.mla.prefill.base:MLAPrefillBackend",
    "vllm.v1.attention.backends.mla.prefill.registry:register_mla_prefill_backend",
)
# The backends' own classes, as text because importing them imports vLLM.
DERIVED = (
    "paged.interop.vllm_engine.backend:PagedBackend",
    "paged.interop.vllm_engine.backend:PagedImpl",
    "paged.interop.vllm_engine.backend:AttentionWarmup",
    "paged.interop.vllm_engine.metadata:PagedMetadataBuilder",
    "paged.interop.vllm_engine.latents:CachedRequests",
    "paged.interop.vllm_engine.latents:PagedMlaBackend",
    "paged.interop.vllm_engine.latents:PagedMlaBuilder",
    "paged.interop.vllm_engine.latents:PagedMlaImpl",
    "paged.interop.vllm_engine.latents:PagedPrefill",
    "paged.interop.vllm_engine.sparse_latents:PagedSparseMlaBackend",
    "paged.interop.vllm_engine.sparse_latents:PagedSparseMlaBuilder",
    "paged.interop.vllm_engine.sparse_latents:PagedSparseMlaImpl",
    "paged.interop.vllm_engine.sparse_latents:PagedSparseMlaMetadata",
)
INTERFACE = Interface(NAMES + LATENT_NAMES, DERIVED, Path(__file__).with_name("vllm_interface.txt"))


def gone(*, latents: bool = False) -> list[str]:
    """Return the lines that attention, or attention over latents, relies on and the installed vLLM lacks."""
    return INTERFACE.gone(LATENT_NAMES if latents else NAMES)


if __name__ == "__main__":
    sys.exit(INTERFACE.main(__doc__))
