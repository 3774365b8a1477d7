"""Any executor as coroutines: one worker thread runs the calls in the order they were made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from paged.batch import DecodeInput, DecodeOutput, PrefillInput, PrefillOutput, UnifiedBatch
from paged.executors.isolation import for_future
from paged.executors.lora_loader import lora_loader
from paged.executors.model_executor import ModelExecutor
from paged.executors.types import ExecutorCapabilities, ExecutorStatus, ModelInfo
from paged.seq_id import SeqId

P = ParamSpec("P")
R = TypeVar("R")


class AsyncModelExecutor:
    """The 18 calls of a `ModelExecutor`, awaitable, and those of a `LoraLoader`; errors arrive at the await.

    The event loop never waits: calls queue for one worker thread of this object's own. A call whose await is cancelled
    before its turn never runs; one that is running is finished, since a forward cannot be stopped halfway.
    """

    def __init__(self, executor: ModelExecutor) -> None:
        self.executor = executor
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paged-executor")

    async def _call(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.wrap_future(self._worker.submit(lambda: for_future(method, *args, **kwargs)))

    async def info(self) -> ModelInfo:
        return await self._call(self.executor.info)

    async def prefill(self, inputs: PrefillInput) -> PrefillOutput:
        return await self._call(self.executor.prefill, inputs)

    async def decode(self, inputs: DecodeInput) -> DecodeOutput:
        return await self._call(self.executor.decode, inputs)

    async def capabilities(self) -> ExecutorCapabilities:
        return await self._call(self.executor.capabilities)

    async def status(self) -> ExecutorStatus:
        return await self._call(self.executor.status)

    async def supports_native_unified_decode(self) -> bool:
        return await self._call(self.executor.supports_native_unified_decode)

    async def kv_capacity(self) -> int | None:
        return await self._call(self.executor.kv_capacity)

    async def batch_prefill(self, inputs: Sequence[PrefillInput]) -> list[PrefillOutput]:
        return await self._call(self.executor.batch_prefill, inputs)

    async def batch_decode(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        return await self._call(self.executor.batch_decode, inputs)

    async def unified_decode(self, batch: UnifiedBatch) -> list[torch.Tensor | None]:
        return await self._call(self.executor.unified_decode, batch)

    async def forward(self, inputs: Any) -> Any:
        return await self._call(self.executor.forward, inputs)

    async def truncate_kv(self, kv_cache: Any, new_len: int) -> None:
        await self._call(self.executor.truncate_kv, kv_cache, new_len)

    async def forward_verify(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        return await self._call(self.executor.forward_verify, inputs)

    async def cache_metrics_snapshot(self) -> Any | None:
        return await self._call(self.executor.cache_metrics_snapshot)

    async def lora_metrics_snapshot(self) -> Mapping[str, Any] | None:
        return await self._call(self.executor.lora_metrics_snapshot)

    async def warmup(self) -> None:
        await self._call(self.executor.warmup)

    async def shutdown(self) -> None:
        await self._call(self.executor.shutdown)

    async def release_cache(self, seq_id: SeqId) -> None:
        await self._call(self.executor.release_cache, seq_id)

    async def load_lora(self, name: str, path: str | Path) -> None:
        """As `LlmExecutor.load_lora`; UnsupportedError where the executor takes no adapters, as for the next two."""
        await self._call(lora_loader(self.executor).load_lora, name, path)

    async def unload_lora(self, name: str) -> None:
        await self._call(lora_loader(self.executor).unload_lora, name)

    async def list_loras(self) -> tuple[str, ...]:
        return await self._call(lora_loader(self.executor).list_loras)
