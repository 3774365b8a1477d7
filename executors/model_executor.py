"""What every executor can be asked: 18 calls, five of them required; and three of those that take adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from paged.batch import DecodeInput, DecodeOutput, PrefillInput, PrefillOutput, UnifiedBatch
from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError, PagedError, UnsupportedError
from paged.executors.types import ExecutorCapabilities, ExecutorStatus, ModelInfo
from paged.kernels.common.compilation import serving_begins
from paged.kernels.common.scalars import shown
from paged.seq_id import SeqId


class ExecutorShutDownError(PagedError):
    """The executor was asked to work after `shutdown`."""


class ModelExecutor(ABC):
    """Runs a model on batches of token ids over KV caches.

    Calls are synchronous and come one at a time; `AsyncModelExecutor` queues them. After a call that raised, every
    cache is as it was before. After `shutdown`, calls that work raise ExecutorShutDownError, and those that only report
    still answer.

    kv_manager: where sequences live in a cache manager, that; the items' `kv_cache` are its handles.
    """

    kv_manager: PagedKvCacheManager | None = None

    @abstractmethod
    def info(self) -> ModelInfo:
        """The model's identity and sizes."""

    @abstractmethod
    def prefill(self, inputs: PrefillInput) -> PrefillOutput:
        """Run the prompts of B sequences; the logits of each row's last token."""

    @abstractmethod
    def decode(self, inputs: DecodeInput) -> DecodeOutput:
        """Run one more token of each sequence."""

    @abstractmethod
    def capabilities(self) -> ExecutorCapabilities:
        """What can be asked of this executor."""

    @abstractmethod
    def status(self) -> ExecutorStatus:
        """What it is doing and has done."""

    def supports_native_unified_decode(self) -> bool:
        """Whether `unified_decode` runs any mix of items in one forward."""
        return False

    def kv_capacity(self) -> int | None:
        """Tokens that fit into the KV cache over all sequences, None where unknown."""
        return None

    def batch_prefill(self, inputs: Sequence[PrefillInput]) -> list[PrefillOutput]:
        """`prefill` for each, in order."""
        return [self.prefill(one) for one in inputs]

    def batch_decode(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """`decode` for each, in order."""
        return [self.decode(one) for one in inputs]

    def unified_decode(self, batch: UnifiedBatch) -> list[torch.Tensor | None]:
        """Run a batch; an entry an item: logits float32 [V], or an id, int64, under GreedyArgmax; None if not final."""
        raise UnsupportedError(f"{type(self).__name__} has no unified_decode ({len(batch.items)} items given)")

    def forward(self, inputs: Any) -> Any:
        """A forward in the model's own terms, for executors that have such a thing."""
        raise UnsupportedError(f"{type(self).__name__} has no forward of its own (given {type(inputs).__name__})")

    def truncate_kv(self, kv_cache: Any, new_len: int) -> None:  # noqa: B027
        """Roll a sequence back to its first `new_len` tokens."""

    def forward_verify(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """Run consecutive tokens of one sequence; the output after each of them."""
        outputs: list[DecodeOutput] = []
        for one in inputs:
            outputs.append(self.decode(replace(one, kv_cache=outputs[-1].kv_cache) if outputs else one))
        return outputs

    def cache_metrics_snapshot(self) -> Any | None:
        """What the KV cache measured so far, None where nothing is measured."""
        return None

    def lora_metrics_snapshot(self) -> Mapping[str, Any] | None:
        """What the LoRA adapters measured so far, None where there are none."""
        return None

    def warmup(self) -> None:
        """Do now what would otherwise slow the first call; kernels compiled later are what PAGED_JIT says."""
        serving_begins()

    def shutdown(self) -> None:  # noqa: B027
        """Refuse work from here on; a second call is harmless."""

    def release_cache(self, seq_id: SeqId) -> None:  # noqa: B027
        """Give back the KV cache of a sequence; one that does not exist is no error."""


@runtime_checkable
class LoraLoader(Protocol):
    """An executor whose items may name an adapter; `LlmExecutor` says what its calls do and raise."""

    def load_lora(self, name: str, path: str | Path) -> None: ...

    def unload_lora(self, name: str) -> None: ...

    def list_loras(self) -> tuple[str, ...]: ...


def lora_loader(executor: ModelExecutor) -> LoraLoader:
    """The executor, if it loads adapters.

    Raises:
        UnsupportedError: it does not.
    """
    if not isinstance(executor, LoraLoader):
        raise UnsupportedError(f"{type(executor).__name__} takes no adapters")
    return executor


def check_adapter(executor: ModelExecutor, name: object) -> None:
    """Raise unless sequences of the executor can run with the adapter of that name; None is none.

    Raises:
        InvalidInputError: it is no text, or not loaded.
        UnsupportedError: the executor takes no adapters.
    """
    if name is None:
        return
    if not isinstance(name, str) or not name:
        raise InvalidInputError(f"lora_adapter: {shown(name)}, expected the name of an adapter, or None")
    if not executor.capabilities().supports_lora:
        raise UnsupportedError(f"lora_adapter: {name!r}, and {type(executor).__name__} takes no adapters")
    loaded = executor.list_loras() if isinstance(executor, LoraLoader) else ()
    # Adapters of another's model are known to it alone, and then there is no snapshot.
    if name not in loaded and executor.lora_metrics_snapshot() is not None:
        raise InvalidInputError(f"lora_adapter: {name!r}, which is not loaded; loaded are {list(loaded)}")
