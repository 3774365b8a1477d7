"""Adapt any `DecoderOnlyLLM` to the interface of `PagedCausalLM`: one forward for all items, a handle per sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from paged.batch import UnifiedBatchItem, VerifyLogits
from paged.cache.kv_cache import KvCacheHandle
from paged.errors import PagedError, UnsupportedError
from paged.executors.row_batches import is_decode_step
from paged.executors.types import ModelInfo
from paged.models.base import DecoderOnlyLLM
from paged.models.logits_policy import apply_policies
from paged.models.parallel.ranks import Ranks
from paged.seq_id import SeqId


@dataclass(eq=False)
class ModelCacheHandle:
    """Handle of a sequence whose KV cache the model keeps."""

    cache_id: SeqId
    num_tokens: int = 0
    num_cached_tokens: int = 0
    is_valid: bool = True

    @property
    def request_id(self) -> SeqId:
        """The same as `cache_id`."""
        return self.cache_id


class AdaptedModel:
    """The methods of `PagedCausalLM` and its cache manager that `LlmExecutor` uses, for any `DecoderOnlyLLM`.

    Attributes:
        is_native: whether the model's own `unified_forward` runs items; False once it raised UnsupportedError.
    """

    def __init__(self, model: DecoderOnlyLLM, info: ModelInfo) -> None:
        self.ranks = Ranks()
        self.is_native = type(model).unified_forward is not DecoderOnlyLLM.unified_forward
        self.token_bytes = 2 * info.num_layers * info.num_kv_heads * info.head_dim * info.dtype.itemsize
        self._parameter_bytes = info.num_parameters * info.dtype.itemsize
        self._model = model
        self._handles: dict[SeqId, ModelCacheHandle] = {}

    @property
    def used_bytes(self) -> int:
        """Memory of the KV of all sequences."""
        return self.token_bytes * sum(handle.num_tokens for handle in self._handles.values())

    def parameter_bytes(self) -> int:
        return self._parameter_bytes

    def prepare(self, track: Callable[..., object]) -> None:
        self._model.prepare()

    def set_lora_adapter_for_cache(self, cache_id: SeqId, adapter: str | None) -> None:
        self._start(cache_id)
        self._model.set_lora_adapter_for_cache(cache_id, adapter)

    def unified_forward(self, items: Sequence[UnifiedBatchItem]) -> list[torch.Tensor | None]:
        """Run items. If a call raises, all items count as run: the executor truncates or frees their sequences."""
        try:
            # A model of another kind need not know VerifyLogits.
            if self.is_native and not any(isinstance(item.logits_policy, VerifyLogits) for item in items):
                try:
                    return self._model.unified_forward(items)
                except UnsupportedError:
                    self.is_native = False
            return self._run_by_kind(items)
        finally:
            for item in items:
                self._start(item.cache_id).num_tokens = item.pos_offset + len(item.q_tokens)

    def get_handle(self, cache_id: SeqId) -> KvCacheHandle | None:
        return cast("KvCacheHandle | None", self._handles.get(cache_id))

    def get_handles(self, cache_ids: Iterable[SeqId]) -> list[KvCacheHandle | None]:
        return list(map(self.get_handle, cache_ids))

    def truncate(self, handle: KvCacheHandle, num_tokens: int) -> None:
        self._model.truncate_kv(handle.cache_id, num_tokens)
        self._handles[handle.cache_id].num_tokens = num_tokens

    def free(self, handle: KvCacheHandle) -> None:
        self._handles.pop(handle.cache_id).is_valid = False
        self._model.release(handle.cache_id)

    def reset(self) -> None:
        self._model.reset()
        self._handles.clear()

    def _start(self, cache_id: SeqId) -> ModelCacheHandle:
        return self._handles.setdefault(cache_id, ModelCacheHandle(cache_id))

    def _run_by_kind(self, items: Sequence[UnifiedBatchItem]) -> list[torch.Tensor | None]:
        """Run all decode steps in one `decode_batch`, and each other item in its own `prefill` or `forward_verify`."""
        model, is_default = self._model, type(self._model).forward_verify is DecoderOnlyLLM.forward_verify
        steps = []
        for item in items:
            if is_decode_step(item) and not isinstance(item.logits_policy, VerifyLogits):
                steps.append((item.cache_id, item.q_tokens[0], item.pos_offset))
        decoded: Sequence[torch.Tensor] | torch.Tensor = []
        if steps:
            decoded = model.decode_batch(steps)
        if len(decoded) != len(steps):
            raise PagedError(f"decode_batch returned {len(decoded)} rows of logits for {len(steps)} tokens")
        decoded_rows = iter(decoded)
        results: list[torch.Tensor | None] = []
        for item in items:
            if isinstance(item.logits_policy, VerifyLogits):
                # The default decodes token by token and needs the start; a model that overrides it tracks the start.
                start = {"start_pos": item.pos_offset} if is_default else {}
                results.append(model.forward_verify(item.cache_id, item.q_tokens, **start))
                continue
            if is_decode_step(item):
                logits = next(decoded_rows)
            else:
                logits = model.prefill(item.cache_id, item.q_tokens)
            if item.is_final_chunk and logits is not None:
                results.append(apply_policies(logits[None], [item.logits_policy])[0])
            else:
                results.append(None)
        return results
