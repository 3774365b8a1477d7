"""Plug-in for vLLM's entry point `vllm.general_plugins`: registers the attention backends."""

from __future__ import annotations

import logging
from inspect import signature
from typing import Any

import torch

from paged.interop.vllm_interface import gone

# Tested versions of vLLM. Another version is accepted if it has all marked lines of vllm_interface.txt.
VERSIONS = ("0.32", "0.33")
LATENT_VERSIONS = ("0.33",)
BACKEND = "paged.interop.vllm_engine.backend.PagedBackend"
# Backends for latents (MLA) by the names that `--attention-backend` takes.
LATENT_BACKENDS = {
    "PAGED_MLA": "paged.interop.vllm_engine.latents.PagedMlaBackend",
    "PAGED_MLA_SPARSE": "paged.interop.vllm_engine.sparse_latents.PagedSparseMlaBackend",
}
# Our int4 caches by the name that `--kv-cache-dtype` takes.
INT4_CACHES = "paged_int4"
PREFILL_BACKEND = "paged.interop.vllm_engine.latents.PagedPrefill"

_LOGGER = logging.getLogger(__name__)


class _Path(str):
    """Path of a backend's class that registers the backends when it is unpickled.

    vLLM sends its configuration, with the chosen name, to processes that unpickle it before they load plug-ins.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered, (str(self),)


def _registered(path: str) -> str:
    register()
    return path


def register() -> None:
    """Register the backends as `AttentionBackendEnum.CUSTOM`, PAGED_MLA and PAGED_MLA_SPARSE without selecting one.

    vLLM calls this in each of its processes, even if another backend is in use. If vLLM's version is untested and its
    interface differs, or if another plug-in holds CUSTOM, it logs a warning and leaves that part of vLLM unchanged.
    Selecting CUSTOM then gives vLLM's own error or the other plug-in's backend.
    """
    import vllm

    version = ".".join(vllm.__version__.split(".")[:2])
    if not _has_interface(version, VERSIONS):
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        _LOGGER.warning(
            "%s is not registered: CUSTOM is %s; VLLM_PLUGINS=paged loads no other plug-in", BACKEND, custom.get_path()
        )
    else:
        register_backend(custom, BACKEND)
        _register_int4_caches()
    is_tested = version in VERSIONS
    if version in LATENT_VERSIONS or (not is_tested and _has_interface(version, LATENT_VERSIONS, latents=True)):
        _register_latents()
    _offer_on_cpu()


def _register_int4_caches() -> None:
    """Register `--kv-cache-dtype paged_int4`, which the backend alone reads. vLLM takes such formats from 0.33 on."""
    from vllm.config import cache as cache_config

    if not hasattr(cache_config, "register_kv_cache_dtype") or INT4_CACHES in cache_config.KV_CACHE_DTYPES:
        return
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Int4Handler:
        """Answers vLLM's questions of the format: vLLM's `KVCacheDTypeHandler`."""

        name = INT4_CACHES

        def torch_dtype(self) -> torch.dtype:
            return torch.bits4x2

        def quant_mode(self) -> Any:
            return KVQuantMode.CUSTOM

    cache_config.register_kv_cache_dtype(INT4_CACHES)(Int4Handler)


def _register_latents() -> None:
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in LATENT_BACKENDS.items():
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, _Path(path))
    if "PAGED_MLA" not in MLAPrefillBackendEnum.__members__:
        register_mla_prefill_backend("PAGED_MLA", _Path(PREFILL_BACKEND))


def _has_interface(version: str, tested: tuple[str, ...], *, latents: bool = False) -> bool:
    """Return whether a version is tested or has the interface of tested versions; log a warning if it is untested."""
    import vllm

    if version in tested:
        return True
    part, known, missing = (
        "attention over latents" if latents else "attention",
        " or ".join(tested),
        gone(latents=latents),
    )
    if missing:
        _LOGGER.warning(
            "paged %s is not registered: vLLM is %s, expected %s, or one that has %s",
            part, vllm.__version__, known, missing[0],
        )  # fmt: skip
        return False
    _LOGGER.warning("paged %s is not tested with vLLM %s, which has the interface of %s", part, vllm.__version__, known)
    return True


def _offer_on_cpu() -> None:
    """Make the CPU platform accept the registered backends, which it would otherwise replace by its own.

    The platform's choice is wrapped once. For these backends it returns the path or raises with the reasons against
    it, like vLLM's GPU platforms.
    """
    from vllm import platforms

    platform = type(platforms.current_platform)
    original = platform.get_attn_backend_cls
    if not platforms.current_platform.is_cpu() or hasattr(original, "offers_paged"):
        return
    paths = {BACKEND, *LATENT_BACKENDS.values()}

    def get_attn_backend_cls(cls: Any, *args: Any, **named: Any) -> Any:
        call = signature(original).bind(*args, **named).arguments
        backend, config = call["selected_backend"], call["attn_selector_config"]
        if backend is None or not backend.is_overridden() or backend.get_path() not in paths:
            return original(*args, **named)
        reasons = backend.get_class().validate_configuration(device_capability=None, **config._asdict())
        if reasons:
            raise ValueError(f"Selected backend {backend} is not valid for this configuration. Reason: {reasons}")
        return backend.get_path()

    get_attn_backend_cls.offers_paged = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
