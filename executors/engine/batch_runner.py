"""A step's items through an executor: in one forward where it can, else by its prefill and decode calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paged.batch import DecodeInput, PrefillInput, UnifiedBatch, VerifyLogits
from paged.errors import PagedError
from paged.executors.model_executor import ModelExecutor
from paged.executors.requests.request import Completion
from paged.executors.row_batches import results_mismatch


class WrongResultsError(PagedError):
    """An executor gave results that do not fit what it was given."""


class BatchRunner(Protocol):
    """How items run. A group is one call: it runs whole, or raises and leaves every cache as it was."""

    def groups(self, completions: Sequence[Completion]) -> list[list[Completion]]:
        """Completions that run together."""

    def run(self, group: Sequence[Completion]) -> list[torch.Tensor | None]:
        """Run a group; an entry an item: None if not final, else logits [V], or [rows, V] for VerifyLogits."""


class UnifiedRunner:
    """Runs one `unified_decode` for all."""

    def __init__(self, executor: ModelExecutor) -> None:
        self._executor = executor

    def groups(self, completions: Sequence[Completion]) -> list[list[Completion]]:
        return [list(completions)]

    def run(self, group: Sequence[Completion]) -> list[torch.Tensor | None]:
        items = [completion.item for completion in group]
        rows = self._executor.unified_decode(UnifiedBatch(items))
        if (mismatch := results_mismatch(items, rows)) is not None:
            raise WrongResultsError(mismatch)
        return rows


class HandleRunner:
    """Runs one `batch_decode` for all decodes, one `prefill` a chunk, one `forward_verify` a sequence with drafts; the
    executor's handles are kept with the completions.
    """

    def __init__(self, executor: ModelExecutor) -> None:
        self._executor = executor

    def groups(self, completions: Sequence[Completion]) -> list[list[Completion]]:
        decodes = [completion for completion in completions if _is_decode(completion)]
        others = [[completion] for completion in completions if not _is_decode(completion)]
        return [decodes, *others] if decodes else others

    def run(self, group: Sequence[Completion]) -> list[torch.Tensor | None]:
        first = group[0]
        if _is_decode(first):
            outputs = self._executor.batch_decode([_decode_input(one, one.item.q_tokens[0]) for one in group])
            if len(outputs) != len(group):
                raise WrongResultsError(f"batch_decode gave {len(outputs)} results for {len(group)} sequences")
            for completion, output in zip(group, outputs, strict=True):
                completion.handle = output.kv_cache  # type: ignore[assignment]
            return [output.logits[0] for output in outputs]
        if isinstance(first.item.logits_policy, VerifyLogits):
            verified = self._executor.forward_verify([_decode_input(first, token) for token in first.item.q_tokens])
            first.handle = verified[-1].kv_cache  # type: ignore[assignment]
            return [torch.cat([output.logits for output in verified])]
        prompt = PrefillInput(
            torch.tensor([first.item.q_tokens]),
            kv_caches=None if first.handle is None else [first.handle],
            metadata=first.item.metadata,
        )
        prefilled = self._executor.prefill(prompt)
        first.handle = prefilled.kv_cache
        return [prefilled.last_token_logits()[0] if first.item.is_final_chunk else None]


def _is_decode(completion: Completion) -> bool:
    return completion.is_decoding and len(completion.item.q_tokens) == 1


def _decode_input(completion: Completion, token: int) -> DecodeInput:
    assert completion.handle is not None
    return DecodeInput(torch.tensor([[token]]), completion.handle, metadata=completion.item.metadata)
