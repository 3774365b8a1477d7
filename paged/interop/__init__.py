"""Drop-in functions for FlashAttention and vLLM, with their names and arguments."""

from paged.interop.flash_attention import flash_attn_func as flash_attn_func
from paged.interop.flash_attention import flash_attn_kvpacked_func as flash_attn_kvpacked_func
from paged.interop.flash_attention import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
from paged.interop.flash_attention import flash_attn_varlen_func as flash_attn_varlen_func
from paged.interop.flash_attention import flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func
from paged.interop.flash_attention import flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func
from paged.interop.flash_attention import flash_attn_with_kvcache as flash_attn_with_kvcache
from paged.interop.vllm import fused_experts as fused_experts
from paged.interop.vllm import reshape_and_cache_flash as reshape_and_cache_flash
