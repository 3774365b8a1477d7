"""Compare the installed SGLang with the interface that the backend relies on.

    python -m paged.interop.sglang_interface [--record]

Prints lines that are gone (-), new (+), or whose function has another body (~, to be reviewed). "!" marks lines that
the backend overrides, calls or reads. If a marked line is gone, the exit code is 1, and the plug-in refuses an untested
SGLang. --record writes what is installed. Importing this module does not import SGLang.
"""

from __future__ import annotations

import sys
from pathlib import Path

from paged.interop.interface import Interface

# Name of the attention backend, as in --attention-backend paged.
BACKEND = "paged"
NAMES = (
    "sglang.kernels.fused_op:BaseFusedOp.forward",
    "sglang.srt.arg_groups.choices:ATTENTION_BACKEND_CHOICES",
    "sglang.srt.arg_groups.model_hook:attention_backends_of",
    "sglang.srt.layers.attention.attention_registry:register_attention_backend",
    "sglang.srt.layers.attention.base_attn_backend:AttentionBackend",
    "sglang.srt.layers.attention.dsa.dsa_indexer:Indexer.__init__",
    "sglang.srt.layers.attention.dsa.dsa_indexer:Indexer.forward_cuda",
    "sglang.srt.layers.radix_attention:AttentionType",
    "sglang.srt.layers.radix_attention:RadixAttention.__init__",
    "sglang.srt.mem_cache.memory_pool:DSATokenToKVPool.__init__",
    "sglang.srt.mem_cache.memory_pool:DSATokenToKVPool.get_index_k_with_scale_buffer",
    "sglang.srt.mem_cache.memory_pool:HybridLinearKVPool.__init__",
    "sglang.srt.mem_cache.memory_pool:HybridLinearKVPool.get_index_k_with_scale_buffer",
    "sglang.srt.mem_cache.memory_pool:HybridLinearKVPool.get_key_buffer",
    "sglang.srt.mem_cache.memory_pool:HybridLinearKVPool.get_value_buffer",
    "sglang.srt.mem_cache.memory_pool:HybridLinearKVPool.set_kv_buffer",
    "sglang.srt.mem_cache.memory_pool:KVWriteLoc",
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.get_key_buffer",
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.get_value_buffer",
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer",
    "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool.get_key_buffer",
    "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool.set_kv_buffer",
    "sglang.srt.mem_cache.memory_pool:ReqToTokenPool.__init__",
    "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool.__init__",
    "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool.get_key_buffer",
    "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool.set_kv_buffer",
    "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool.translate_loc_from_full_to_swa",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.batch_size",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.extend_num_tokens",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.extend_seq_lens",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.extend_seq_lens_cpu",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.out_cache_loc",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.req_pool_indices",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.seq_lens",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.seq_lens_cpu",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.spec_info",
    "sglang.srt.model_executor.forward_batch_info:ForwardMode",
    "sglang.srt.model_executor.forward_batch_info:ForwardMode.is_decode_or_idle",
    "sglang.srt.model_executor.forward_batch_info:ForwardMode.is_extend_without_speculative",
    "sglang.srt.model_executor.forward_batch_info:ForwardMode.is_target_verify",
    "sglang.srt.model_executor.forward_batch_info:build_inner_fb_view",
    "sglang.srt.model_executor.forward_context:get_attn_backend",
    "sglang.srt.model_executor.forward_context:get_token_to_kv_pool",
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph:eager_on_graph",
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph:is_in_breakable_cuda_graph",
    "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph:is_in_tc_piecewise_cuda_graph",
    "sglang.srt.model_executor.runner_utils.forward_batch:get_forward_batch",
    "sglang.srt.models.deepseek_common.attention_backend_handler:AttentionBackendRegistry.register",
    "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods:AttnForwardMethod.MLA",
    "sglang.srt.runtime_context:get_exec",
    "sglang.srt.runtime_context:get_parallel",
    "sglang.srt.runtime_context:get_spec",
    "sglang.srt.speculative.draft_utils:DraftBackendFactory._create_backend",
    "sglang.srt.speculative.spec_info:SpecInput.num_tokens_per_req",
    "sglang.srt.speculative.spec_info:SpecInput.ragged_verify_layout",
)
DERIVED = (
    "paged.interop.sglang_backend:PagedAttnBackend",
    "paged.interop.sglang_sparse_latents:PagedSparseLatentBackend",
)
INTERFACE = Interface(NAMES, DERIVED, Path(__file__).with_name("sglang_interface.txt"))


if __name__ == "__main__":
    sys.exit(INTERFACE.main(__doc__))
