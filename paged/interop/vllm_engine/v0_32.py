"""The backend for vLLM 0.32, which is the common one."""

from paged.interop.vllm_engine.backend import PagedBackend as Backend

__all__ = ["Backend"]
