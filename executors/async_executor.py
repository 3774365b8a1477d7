"""Coroutines for any executor: one worker thread runs the calls in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from paged.executors.isolation import for_future
from paged.executors.model_executor import ModelExecutor, lora_loader

P = ParamSpec("P")
R = TypeVar("R")


def _awaitable(
    method: Callable[Concatenate[ModelExecutor, P], R],
) -> Callable[Concatenate[AsyncModelExecutor, P], Coroutine[Any, Any, R]]:
    """Return a coroutine function that runs this method of the executor in the worker thread."""

    @wraps(method)
    async def call(self: AsyncModelExecutor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._call(getattr(self.executor, method.__name__), *args, **kwargs)

    return call


class AsyncModelExecutor:
    """Runs the calls of a `ModelExecutor` and of a `LoraLoader` as coroutines; the await raises their errors.

    The event loop never blocks: calls queue for one worker thread of this object. If an await is cancelled before the
    call starts, the call never runs. A running call is completed, because a forward cannot be stopped halfway.
    """

    def __init__(self, executor: ModelExecutor) -> None:
        self.executor = executor
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paged-executor")

    async def _call(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.wrap_future(self._worker.submit(lambda: for_future(method, *args, **kwargs)))

    info = _awaitable(ModelExecutor.info)
    prefill = _awaitable(ModelExecutor.prefill)
    decode = _awaitable(ModelExecutor.decode)
    capabilities = _awaitable(ModelExecutor.capabilities)
    status = _awaitable(ModelExecutor.status)
    supports_native_unified_decode = _awaitable(ModelExecutor.supports_native_unified_decode)
    kv_capacity = _awaitable(ModelExecutor.kv_capacity)
    batch_prefill = _awaitable(ModelExecutor.batch_prefill)
    batch_decode = _awaitable(ModelExecutor.batch_decode)
    unified_decode = _awaitable(ModelExecutor.unified_decode)
    forward = _awaitable(ModelExecutor.forward)
    truncate_kv = _awaitable(ModelExecutor.truncate_kv)
    forward_verify = _awaitable(ModelExecutor.forward_verify)
    cache_metrics_snapshot = _awaitable(ModelExecutor.cache_metrics_snapshot)
    lora_metrics_snapshot = _awaitable(ModelExecutor.lora_metrics_snapshot)
    warmup = _awaitable(ModelExecutor.warmup)
    shutdown = _awaitable(ModelExecutor.shutdown)
    release_cache = _awaitable(ModelExecutor.release_cache)

    async def load_lora(self, name: str, path: str | Path) -> None:
        """Load an adapter, see `LlmExecutor.load_lora`; raises UnsupportedError if the executor does not support it."""
        await self._call(lora_loader(self.executor).load_lora, name, path)

    async def unload_lora(self, name: str) -> None:
        await self._call(lora_loader(self.executor).unload_lora, name)

    async def list_loras(self) -> tuple[str, ...]:
        return await self._call(lora_loader(self.executor).list_loras)
