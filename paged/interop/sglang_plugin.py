"""Plug-in for SGLang's entry point `sglang.srt.plugins`: registers the attention backend `paged`."""

from __future__ import annotations

import functools
import logging
from importlib.metadata import version
from typing import Any

from paged.interop.sglang_interface import BACKEND, INTERFACE

# Tested versions of SGLang. Another version is accepted if it has all marked lines of sglang_interface.txt.
VERSIONS = ("0.5.23",)

_LOGGER = logging.getLogger(__name__)


def register() -> None:
    """Register the backend as `--attention-backend paged` without selecting it. SGLang calls this in every process.

    If SGLang's version is untested and its interface differs, it logs a warning and registers nothing.
    """
    installed = version("sglang")
    if installed not in VERSIONS:
        gone = INTERFACE.gone()
        if gone:
            _LOGGER.warning("attention backend %s is not registered: sglang %s lacks %s", BACKEND, installed, gone)
            return
        _LOGGER.warning(
            "sglang %s is untested with attention backend %s; its interface is as expected", installed, BACKEND
        )
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(BACKEND)
        _accept_as_triton()
        _serve_draft_workers()
    register_attention_backend(BACKEND)(make_backend)


def _accept_as_triton() -> None:
    """Have SGLang accept the backend for gpt-oss and Gemma 4, whose lists of backends no plug-in can extend.

    The lists name backends with sliding windows and sinks, and `triton` is in both.
    """
    from sglang.srt.arg_groups import model_hook

    resolve = model_hook.attention_backends_of

    @functools.wraps(resolve)
    def listed_backends(config: Any) -> tuple[str | None, ...]:
        names = []
        for name in resolve(config):
            names.append("triton" if name == BACKEND else name)
        return tuple(names)

    model_hook.attention_backends_of = listed_backends


def _serve_draft_workers() -> None:
    """Have SGLang's draft workers take the backend. Their factory has a list, which no plug-in can extend."""
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    create = DraftBackendFactory._create_backend

    @functools.wraps(create)
    def create_backend(
        factory: Any, backend_name: str, makers: dict[str, Any], error: str, stamps_children: bool = False
    ) -> Any:
        def make() -> tuple[str, Any]:
            runner = factory.draft_model_runner
            if not stamps_children:  # the backend of extends
                return BACKEND, make_backend(runner)
            from paged.interop.sglang_drafts import PagedDraftBackends

            return BACKEND, PagedDraftBackends(make_backend, runner, factory.speculative_num_steps)

        return create(factory, backend_name, makers | {BACKEND: make}, error, stamps_children)

    DraftBackendFactory._create_backend = create_backend


def make_backend(runner: Any) -> Any:
    """Return the backend of a model runner.

    Raises:
        UnsupportedError: the runner's model, pools or options need what the backend does not do.
    """
    from paged.interop.sglang_backend import PagedAttnBackend, full_pool

    if runner.use_mla_backend:
        from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

        if isinstance(full_pool(runner), DSATokenToKVPool):
            from paged.interop.sglang_sparse_latents import PagedSparseLatentBackend

            return PagedSparseLatentBackend(runner)
        from paged.interop.sglang_latents import PagedLatentBackend

        return PagedLatentBackend(runner)
    return PagedAttnBackend(runner)
