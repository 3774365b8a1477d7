"""vLLM's entry point `vllm.general_plugins`: makes `paged.interop.vllm_backend` its attention backend CUSTOM."""

from __future__ import annotations

import logging

BACKEND = "paged.interop.vllm_backend.PagedBackend"
# Backends' interface changes between minor versions, the meaning of an argument with it.
VLLM_VERSION = "0.33"

_LOGGER = logging.getLogger(__name__)


def register() -> None:
    """Register `PagedBackend` as `AttentionBackendEnum.CUSTOM`; nothing is chosen by that.

    vLLM calls it in each of its processes, whichever backend is in use, so where it cannot register it logs a warning
    that says why and leaves vLLM as it was: with another version than VLLM_VERSION, or where CUSTOM is another
    plug-in's. Choosing CUSTOM then ends in vLLM's own error, or in that plug-in's backend.
    """
    import vllm

    if vllm.__version__.split(".")[:2] != VLLM_VERSION.split("."):
        _LOGGER.warning("%s is not registered: vLLM is %s, expected %s", BACKEND, vllm.__version__, VLLM_VERSION)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        _LOGGER.warning(
            "%s is not registered: CUSTOM is %s; VLLM_PLUGINS=paged loads no other plug-in", BACKEND, custom.get_path()
        )
        return
    register_backend(custom, BACKEND)
