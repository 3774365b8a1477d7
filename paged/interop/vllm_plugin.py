"""vLLM's entry point `vllm.general_plugins`: makes attention here its backend CUSTOM."""

from __future__ import annotations

import logging

# Backends' interface changes between minor versions of vLLM, the meaning of an argument with it.
BACKENDS = {version: f"paged.interop.vllm_engine.v{version.replace('.', '_')}.Backend" for version in ("0.32", "0.33")}

_LOGGER = logging.getLogger(__name__)


def register() -> None:
    """Register this version's backend as `AttentionBackendEnum.CUSTOM`; nothing is chosen by that.

    vLLM calls it in each of its processes, whichever backend is in use, so where it cannot register it logs a warning
    that says why and leaves vLLM as it was: with a version that BACKENDS does not name, or where CUSTOM is another
    plug-in's. Choosing CUSTOM then ends in vLLM's own error, or in that plug-in's backend.
    """
    import vllm

    backend = BACKENDS.get(".".join(vllm.__version__.split(".")[:2]))
    if backend is None:
        known = " or ".join(BACKENDS)
        _LOGGER.warning("paged attention is not registered: vLLM is %s, expected %s", vllm.__version__, known)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != backend:
        _LOGGER.warning(
            "%s is not registered: CUSTOM is %s; VLLM_PLUGINS=paged loads no other plug-in", backend, custom.get_path()
        )
        return
    from paged.interop.vllm_cpu_platform import offer_custom

    register_backend(custom, backend)
    offer_custom()
