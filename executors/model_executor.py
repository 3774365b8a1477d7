"""Interface of executors (five calls are abstract), and of executors that load adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError, PagedError, UnsupportedError
from paged.executors.types import ExecutorCapabilities, ExecutorStatus, ModelInfo
from paged.kernels.core.errors import shown
from paged.kernels.core.launch import serving_begins
from paged.prompt_embeds import EmbedsLimits
from paged.seq_id import SeqId
from paged.step.batch import DecodeInput, DecodeOutput, PrefillInput, PrefillOutput, UnifiedBatch


class ExecutorShutDownError(PagedError):
    """A call needed an executor that has been shut down."""


class ModelExecutor(ABC):
    """Runs a model on batches of token ids over KV caches.

    Calls are synchronous and run one at a time; `AsyncModelExecutor` queues them. Every call is atomic: if it raises,
    every cache is as before. After `shutdown`, calls that run or change something raise ExecutorShutDownError; calls
    that only report still work.

    Attributes:
        kv_manager: cache manager of the sequences, or None. `kv_cache` of items are its handles.
        embeds_limits: limits for the `embeds` of items; None if they are not supported.
        metadata_keys: keys of items' `metadata` that are read; other keys are refused. None accepts any key.
    """

    kv_manager: PagedKvCacheManager | None = None
    embeds_limits: EmbedsLimits | None = None
    metadata_keys: frozenset[str] | None = None

    @property
    def weights_generation(self) -> int:
        """Number that grows whenever the weights are replaced."""
        return 0

    @property
    def sleep_level(self) -> int:
        """Sleep level of the model, see `LlmExecutor.sleep`; 0 if it is awake."""
        return 0

    @abstractmethod
    def info(self) -> ModelInfo:
        """Return the model's identity and sizes."""

    @abstractmethod
    def prefill(self, inputs: PrefillInput) -> PrefillOutput:
        """Run the prompts of B sequences; return the logits of each row's last token."""

    @abstractmethod
    def decode(self, inputs: DecodeInput) -> DecodeOutput:
        """Run one more token of each sequence."""

    @abstractmethod
    def capabilities(self) -> ExecutorCapabilities:
        """Return the capabilities and limits of this executor."""

    @abstractmethod
    def status(self) -> ExecutorStatus:
        """Return the state of this executor and the work it has done."""

    def supports_native_unified_decode(self) -> bool:
        """Return whether `unified_decode` runs any mix of items in one forward."""
        return False

    def kv_capacity(self) -> int | None:
        """Return how many tokens of all sequences together fit into the KV cache, or None if unknown."""
        return None

    def batch_prefill(self, inputs: Sequence[PrefillInput]) -> list[PrefillOutput]:
        """Run `prefill` for each input, in order."""
        return [self.prefill(prompts) for prompts in inputs]

    def batch_decode(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """Run `decode` for each input, in order."""
        return [self.decode(step) for step in inputs]

    def unified_decode(self, batch: UnifiedBatch) -> list[torch.Tensor | None]:
        """Run a batch of items.

        Returns:
            One entry for each item. None if the item is not final. Otherwise float32 logits [V]; under GreedyArgmax and
            DrawToken a token id (int64 scalar); under VerifyLogits float32 logits [n, V].

        Raises:
            UnsupportedError: this executor has no unified_decode.
        """
        raise UnsupportedError(f"{type(self).__name__} has no unified_decode ({len(batch.items)} items given)")

    def forward(self, inputs: Any) -> Any:
        """Run a forward on the model's own kind of input.

        Raises:
            UnsupportedError: this executor has no such call.
        """
        raise UnsupportedError(f"{type(self).__name__} has no forward of its own (given {type(inputs).__name__})")

    def truncate_kv(self, kv_cache: Any, new_len: int) -> None:  # noqa: B027
        """Roll a sequence back to its first `new_len` tokens; the default does nothing."""

    def forward_verify(self, inputs: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """Run consecutive tokens of one sequence; return the output after each of them."""
        outputs: list[DecodeOutput] = []
        for step in inputs:
            if outputs:
                step = replace(step, kv_cache=outputs[-1].kv_cache)
            outputs.append(self.decode(step))
        return outputs

    def cache_metrics_snapshot(self) -> Any | None:
        """Return measurements of the KV cache, or None if there are none."""
        return None

    def lora_metrics_snapshot(self) -> Mapping[str, Any] | None:
        """Return measurements of the LoRA adapters, or None if there are none."""
        return None

    def warmup(self) -> None:
        """Prepare for full speed, for example by compiling. PAGED_JIT controls later compilations."""
        serving_begins()

    def shutdown(self) -> None:  # noqa: B027
        """Refuse all further work; a second call does nothing."""

    def release_cache(self, seq_id: SeqId) -> None:  # noqa: B027
        """Free the KV cache of a sequence; do nothing if it does not exist."""


@runtime_checkable
class LoraLoader(Protocol):
    """Interface of an executor that loads adapters; see `LlmExecutor` for the calls and their errors."""

    def load_lora(self, name: str, path: str | Path) -> None: ...

    def unload_lora(self, name: str) -> None: ...

    def list_loras(self) -> tuple[str, ...]: ...


def lora_loader(executor: ModelExecutor) -> LoraLoader:
    """Return the executor as a `LoraLoader`.

    Raises:
        UnsupportedError: it does not load adapters.
    """
    if not isinstance(executor, LoraLoader):
        raise UnsupportedError(f"{type(executor).__name__} takes no adapters")
    return executor


def check_capture(executor: ModelExecutor, *, has_experts: bool) -> None:
    """Raise UnsupportedError unless the executor can return hidden states and, if requested, routed experts."""
    capabilities = executor.capabilities()
    lacks_experts = has_experts and not capabilities.has_routed_experts
    if not capabilities.supports_hidden_states or lacks_experts:
        lack = "routed experts" if has_experts else "hidden states"
        raise UnsupportedError(f"{executor.info().model_id} ({type(executor).__name__}) returns no {lack}")


def check_metadata(executor: ModelExecutor, name: str, metadata: Mapping[str, Any]) -> None:
    """Raise InvalidInputError for a key of `metadata` that the executor does not read. name: the argument's name."""
    keys = executor.metadata_keys
    if keys is None:
        return
    for key in metadata:
        if key not in keys:
            raise InvalidInputError(f"{name}: nothing reads the key {shown(key)}, expected one of {sorted(keys)}")


def check_adapter(executor: ModelExecutor, name: object) -> None:
    """Raise unless the executor can run sequences with the adapter `name`; None means no adapter.

    Raises:
        InvalidInputError: `name` is not a str, or the adapter is not loaded.
        UnsupportedError: the executor does not support adapters.
    """
    if name is None:
        return
    if not isinstance(name, str) or not name:
        raise InvalidInputError(f"lora_adapter: {shown(name)}, expected the name of an adapter, or None")
    if not executor.capabilities().supports_lora:
        raise UnsupportedError(f"lora_adapter: {name!r}, but {type(executor).__name__} takes no adapters")
    loaded = executor.list_loras() if isinstance(executor, LoraLoader) else ()
    # Without a metrics snapshot, only the model itself knows its adapters.
    if name not in loaded and executor.lora_metrics_snapshot() is not None:
        raise InvalidInputError(f"lora_adapter: {name!r} is not loaded, expected one of {list(loaded)}")
