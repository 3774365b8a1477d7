"""Models and executors of others, which keep their K/V themselves, run by steps over a cache manager without memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.errors import PagedError, UnsupportedError
from paged.executors.isolation import describe, once_more, quietly, raise_exit
from paged.executors.model_executor import ModelExecutor
from paged.executors.row_batches import is_decode_step, results_mismatch
from paged.executors.types import ExecutorCapabilities, ModelInfo
from paged.models.base import DecoderOnlyLLM
from paged.models.logits_policy import Rows, apply_policies
from paged.models.parallel.ranks import Ranks
from paged.seq_id import SeqId
from paged.step.batch import DecodeInput, PrefillInput, UnifiedBatch, UnifiedBatchItem, VerifyLogits
from paged.step.step import Step

_LOG = logging.getLogger("paged")
# Number of sequences that a model of others can hold at the same time.
_MOST_SEQUENCES = 4096


class WrongResultsError(PagedError):
    """An executor returned results that do not match its inputs, so the state of its caches is unknown."""


class ForeignCache(PagedKvCacheManager):
    """Cache manager without memory, for sequences whose K/V an owner keeps. Each sequence takes one block.

    Args:
        token_bytes: bytes that the owner takes for a token.
        truncate: rolls the owner's sequence back to a number of tokens.
        release: makes the owner forget a sequence; does nothing if it does not know the sequence.
    """

    _has_memory = False

    def __init__(
        self,
        info: ModelInfo,
        token_bytes: int,
        truncate: Callable[[KvCacheHandle, int], object],
        release: Callable[[KvCacheHandle], object],
    ) -> None:
        config = PagedKvCacheConfig(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=info.max_sequence_length,
            num_blocks=_MOST_SEQUENCES,
            enable_prefix_cache=False,
        )
        super().__init__(config)
        self._token_bytes, self._truncate, self._release = token_bytes, truncate, release

    @property
    def used_bytes(self) -> int:
        return self._token_bytes * sum(handle.num_tokens for handle in self.handles())

    def truncate(self, handle: KvCacheHandle, num_tokens: int) -> None:
        self._truncate(handle, num_tokens)
        super().truncate(handle, num_tokens)

    def free(self, handle: KvCacheHandle) -> None:
        super().free(handle)
        once_more(self._release, handle)

    def roll_back(self, items: Sequence[UnifiedBatchItem]) -> None:
        """Roll the owner's sequences back to their lengths before a step that failed.

        A sequence that the owner cannot truncate is freed, and its handle becomes invalid.
        """
        for item in items:
            handle = self.get_handle(item.cache_id)
            if handle is None:
                continue
            if handle.num_tokens == 0:
                quietly(self._release, handle)
                continue
            try:
                self._truncate(handle, handle.num_tokens)
            except BaseException as error:
                raise_exit(error)
                _LOG.warning("sequence %r is dropped: %s", handle.cache_id, describe(error))
                quietly(self.free, handle)


class ForeignModel:
    """Gives any `DecoderOnlyLLM` the methods of `PagedCausalLM` that `LlmExecutor` uses.

    Attributes:
        is_native: whether the model's own `unified_forward` runs items; False after it has raised UnsupportedError.
    """

    def __init__(self, model: DecoderOnlyLLM, info: ModelInfo) -> None:
        self.ranks = Ranks()
        self.is_native = type(model).unified_forward is not DecoderOnlyLLM.unified_forward
        self.token_bytes = 2 * info.num_layers * info.num_kv_heads * info.head_dim * info.dtype.itemsize
        self._parameter_bytes = info.num_parameters * info.dtype.itemsize
        self._model = model

        def truncate(handle: KvCacheHandle, num_tokens: int) -> None:
            model.truncate_kv(handle.cache_id, num_tokens)

        self.kv_manager = ForeignCache(info, self.token_bytes, truncate, lambda handle: model.release(handle.cache_id))

    def parameter_bytes(self) -> int:
        return self._parameter_bytes

    def prepare(self, track: Callable[..., object]) -> None:
        self._model.prepare()

    def run(self, step: Step) -> Rows:
        """Run a step; return the answers of its wanted rows. If it fails, the model's sequences are rolled back."""
        step.undo = (partial(self.kv_manager.roll_back, step.items), *step.undo)
        for item in step.items:
            if "lora_adapter" in item.metadata:
                self._model.set_lora_adapter_for_cache(item.cache_id, item.metadata["lora_adapter"])
        answers = self._answers(step.items)
        try:
            return rows_of(step, answers)
        except WrongResultsError as error:  # the caller rolls the sequences back, so their state is known
            raise PagedError(f"the forward returned {error}") from error

    def reset(self) -> None:
        for handle in self.kv_manager.handles():
            self.kv_manager.free(handle)
        self._model.reset()

    def _answers(self, items: Sequence[UnifiedBatchItem]) -> list[torch.Tensor | None]:
        # The model's own forward need not support VerifyLogits.
        if self.is_native and not any(isinstance(item.logits_policy, VerifyLogits) for item in items):
            try:
                return self._model.unified_forward(items)
            except UnsupportedError:
                self.is_native = False
        return self._run_by_kind(items)

    def _run_by_kind(self, items: Sequence[UnifiedBatchItem]) -> list[torch.Tensor | None]:
        """Run all decode steps in one `decode_batch`, and every other item in its own `prefill` or `forward_verify`."""
        model = self._model
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
                results.append(self._verify(item))
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

    def _verify(self, item: UnifiedBatchItem) -> torch.Tensor:
        """Return the logits after each token of an item, [n, V]. A new sequence begins by a `prefill` of one token."""
        model, tokens, start = self._model, item.q_tokens, item.pos_offset
        rows: list[torch.Tensor] = []
        if not start:
            rows.append(model.prefill(item.cache_id, tokens[:1])[None])
            tokens, start = tokens[1:], 1
        if tokens:
            # The default method decodes token by token and needs the start position. A method that overrides it
            # tracks the position itself.
            is_default = type(model).forward_verify is DecoderOnlyLLM.forward_verify
            options = {"start_pos": start} if is_default else {}
            rows.append(model.forward_verify(item.cache_id, tokens, **options))
        return torch.cat(rows)


class ForeignExecutor:
    """Runs an engine's steps on any `ModelExecutor`.

    If the executor has a cache manager, its sequences are used, and the executor reserves capacity and commits by
    itself. Otherwise a `ForeignCache` counts the sequences. An executor without mixed batches runs the plain decodes of
    a step by one `batch_decode`, and each other sequence by its own `prefill` or `forward_verify`.

    Attributes:
        sequences: cache manager of the sequences.
    """

    takes_items = True

    def __init__(self, executor: ModelExecutor) -> None:
        self._executor = executor
        self._theirs: dict[KvCacheHandle, Any] = {}  # handles that the executor has returned, by ours
        self.sequences = executor.kv_manager or ForeignCache(
            executor.info(), 0, self._truncate_theirs, self._release_theirs
        )

    @property
    def weights_generation(self) -> int:
        return self._executor.weights_generation

    def info(self) -> ModelInfo:
        return self._executor.info()

    def capabilities(self) -> ExecutorCapabilities:
        return self._executor.capabilities()

    def run(self, step: Step) -> Rows:
        """Run a step and commit it, or roll it back after an error; return the answers of its wanted rows."""
        with step:
            if isinstance(self.sequences, ForeignCache):
                step.undo = (partial(self.sequences.roll_back, step.items), *step.undo)
            elif step.reservation is not None:
                step.reservation.leave()  # keep the capacity for the executor's own reservation
                step.reservation = None
                step.undo = (partial(self._cut_back, step.items), *step.undo)
            if self._executor.supports_native_unified_decode():
                answers: Any = self._executor.unified_decode(self._batch(step))
            else:
                answers = self._run_by_kind(step.items)
            return rows_of(step, answers)

    def kv_capacity(self) -> int | None:
        return self._executor.kv_capacity()

    def truncate_kv(self, handle: KvCacheHandle, num_tokens: int) -> None:
        if isinstance(self.sequences, ForeignCache):
            self.sequences.truncate(handle, num_tokens)
        else:
            self._executor.truncate_kv(handle, num_tokens)

    def release_cache(self, seq_id: SeqId) -> None:
        if not isinstance(self.sequences, ForeignCache):
            self._executor.release_cache(seq_id)
            return
        handle = self.sequences.get_handle(seq_id)
        if handle is not None:
            self.sequences.free(handle)

    def _cut_back(self, items: Sequence[UnifiedBatchItem]) -> None:
        """Truncate the sequences that ran before another one failed.

        Raises:
            WrongResultsError: a sequence cannot be truncated.
        """
        for item in items:
            handle = self.sequences.get_handle(item.cache_id)
            if handle is not None and handle.num_tokens > item.pos_offset:
                try:
                    self._executor.truncate_kv(handle, item.pos_offset)
                except BaseException as error:
                    raise_exit(error)
                    raise WrongResultsError(f"{handle!r} has run and cannot be truncated: {describe(error)}") from error

    def _batch(self, step: Step) -> UnifiedBatch:
        items = step.items
        if isinstance(self.sequences, ForeignCache):
            items = [replace(item, kv_cache=None) for item in items]
        return UnifiedBatch(items, step.device_ids, is_stacked=True, captured=step.captured)

    def _run_by_kind(self, items: Sequence[UnifiedBatchItem]) -> list[torch.Tensor | None]:
        """Return None for an item that is not final, else logits [V], or [n, V] under VerifyLogits."""
        answers: dict[SeqId, torch.Tensor | None] = {}
        decodes = []
        for item in items:
            if is_decode_step(item) and not isinstance(item.logits_policy, VerifyLogits):
                decodes.append(item)
        if decodes:
            outputs = self._executor.batch_decode([self._decode_input(item, item.q_tokens[0]) for item in decodes])
            if len(outputs) != len(decodes):
                raise WrongResultsError(f"batch_decode gave {len(outputs)} results for {len(decodes)} sequences")
            for item, output in zip(decodes, outputs, strict=True):
                self._keep(item, output.kv_cache)
                answers[item.seq_id] = output.logits[0]
        for item in items:
            if item.seq_id not in answers:
                answers[item.seq_id] = self._run_one(item)
        return [answers[item.seq_id] for item in items]

    def _run_one(self, item: UnifiedBatchItem) -> torch.Tensor | None:
        if isinstance(item.logits_policy, VerifyLogits) and item.pos_offset:
            verified = self._executor.forward_verify([self._decode_input(item, token) for token in item.q_tokens])
            self._keep(item, verified[-1].kv_cache)
            return torch.cat([output.logits for output in verified])
        caches = None
        if item.pos_offset or not isinstance(self.sequences, ForeignCache):  # the manager has allocated the sequence
            caches = [self._theirs_of(item)]
        prompt = PrefillInput(torch.tensor([item.q_tokens]), kv_caches=caches, metadata=item.metadata)
        prefilled = self._executor.prefill(prompt)
        self._keep(item, prefilled.kv_cache)
        return prefilled.last_token_logits()[0] if item.is_final_chunk else None

    def _decode_input(self, item: UnifiedBatchItem, token: int) -> DecodeInput:
        return DecodeInput(torch.tensor([[token]]), self._theirs_of(item), metadata=item.metadata)

    def _theirs_of(self, item: UnifiedBatchItem) -> Any:
        """Return the executor's own handle of an item's sequence."""
        assert item.kv_cache is not None
        return self._theirs.get(item.kv_cache, item.kv_cache)

    def _keep(self, item: UnifiedBatchItem, handle: Any) -> None:
        if isinstance(self.sequences, ForeignCache):
            assert item.kv_cache is not None
            self._theirs[item.kv_cache] = handle

    def _truncate_theirs(self, handle: KvCacheHandle, num_tokens: int) -> None:
        if not self.capabilities().supports_truncate:
            raise UnsupportedError(f"{type(self._executor).__name__} cannot truncate sequences")
        self._executor.truncate_kv(self._theirs.get(handle, handle), num_tokens)

    def _release_theirs(self, handle: KvCacheHandle) -> None:
        self._executor.release_cache(self._theirs.get(handle, handle).cache_id)
        self._theirs.pop(handle, None)


def rows_of(step: Step, answers: Any) -> Rows:
    """Return the answers of a step's wanted rows, from an answer for each item, or from all rows as one tensor.

    Raises:
        WrongResultsError: an answer is missing, or has the wrong number of rows.
    """
    if isinstance(answers, torch.Tensor):
        if len(answers) != len(step.row_ids):
            mismatch = f"{len(answers)} results for {len(step.items)} items, expected {len(step.row_ids)}"
            raise WrongResultsError(mismatch)
        return answers
    mismatched = results_mismatch(step.items, answers)
    if mismatched is not None:
        raise WrongResultsError(mismatched)
    rows: list[torch.Tensor] = []
    for item, answer in zip(step.items, answers, strict=True):
        if not item.is_final_chunk:
            continue
        assert answer is not None
        if isinstance(item.logits_policy, VerifyLogits):
            rows += answer
        else:
            rows.append(answer)
    if not rows:
        return torch.empty(0)
    are_tokens = all(row.dim() == 0 for row in rows)
    return torch.stack(rows) if step.policies is None or are_tokens else rows
