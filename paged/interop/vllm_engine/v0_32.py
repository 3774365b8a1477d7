"""The backend for vLLM 0.32: the common one as it is."""

from paged.interop.vllm_engine.backend import PagedBackend as Backend

__all__ = ["Backend"]
