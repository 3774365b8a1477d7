"""The backend for vLLM 0.33."""

from __future__ import annotations

from paged.interop.vllm_engine.backend import PagedBackend


class Backend(PagedBackend):
    """Its layers may write the cache in a fused operation of vLLM's and then call `forward` without key and value."""

    supports_kv_cache_update_bypass = True
