"""Plug-in for vLLM's entry point `vllm.general_plugins`: registers this attention as backend CUSTOM."""

from __future__ import annotations

import logging
from inspect import signature
from typing import Any

from paged.interop.vllm_interface import gone

# Tested versions of vLLM. Another version is accepted if it has all marked lines of vllm_interface.txt.
VERSIONS = ("0.32", "0.33")
BACKEND = "paged.interop.vllm_engine.backend.PagedBackend"

_LOGGER = logging.getLogger(__name__)


def register() -> None:
    """Register the backend as `AttentionBackendEnum.CUSTOM` without selecting it.

    vLLM calls this in each of its processes, even if another backend is in use. If vLLM's version is untested and its
    interface differs, or if another plug-in holds CUSTOM, it logs a warning and leaves vLLM unchanged. Selecting CUSTOM
    then gives vLLM's own error or the other plug-in's backend.
    """
    import vllm

    if ".".join(vllm.__version__.split(".")[:2]) not in VERSIONS:
        known = " or ".join(VERSIONS)
        missing = gone()
        if missing:
            _LOGGER.warning(
                "paged attention is not registered: vLLM is %s, expected %s, or one that has %s",
                vllm.__version__, known, missing[0],
            )  # fmt: skip
            return
        _LOGGER.warning(
            "paged attention is not tested with vLLM %s, which has the interface of %s", vllm.__version__, known
        )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        _LOGGER.warning(
            "%s is not registered: CUSTOM is %s; VLLM_PLUGINS=paged loads no other plug-in", BACKEND, custom.get_path()
        )
        return
    register_backend(custom, BACKEND)
    _offer_on_cpu(custom)


def _offer_on_cpu(custom: Any) -> None:
    """Make the CPU platform accept CUSTOM, which it would otherwise replace by its own backend.

    The platform's choice is wrapped once. For CUSTOM it returns the backend's path or raises with the reasons against
    it, like vLLM's GPU platforms.
    """
    from vllm import platforms

    platform = type(platforms.current_platform)
    original = platform.get_attn_backend_cls
    if not platforms.current_platform.is_cpu() or hasattr(original, "offers_custom"):
        return

    def get_attn_backend_cls(cls: Any, *args: Any, **named: Any) -> Any:
        call = signature(original).bind(*args, **named).arguments
        backend, config = call["selected_backend"], call["attn_selector_config"]
        if backend is not custom:
            return original(*args, **named)
        reasons = backend.get_class().validate_configuration(device_capability=None, **config._asdict())
        if reasons:
            raise ValueError(f"Selected backend {backend} is not valid for this configuration. Reason: {reasons}")
        return backend.get_path()

    get_attn_backend_cls.offers_custom = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
