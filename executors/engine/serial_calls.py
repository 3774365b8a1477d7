"""Adapts an executor that runs no mixed batches to one call like `unified_decode`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paged.batch import DecodeInput, PrefillInput, VerifyLogits
from paged.errors import PagedError
from paged.executors.model_executor import ModelExecutor
from paged.executors.requests.request import Completion


class WrongResultsError(PagedError):
    """An executor returned results that do not fit its inputs."""


class SerialCalls:
    """Runs completions by one `batch_decode`, and a `prefill` or `forward_verify` for each that is no plain decode.

    The handles that the executor returns are kept with the completions.
    """

    def __init__(self, executor: ModelExecutor) -> None:
        self._executor = executor

    def run(self, completions: Sequence[Completion]) -> list[torch.Tensor | None]:
        """Run the chunks of completions; return for each None if its prompt goes on, else logits [V] or [n, V]."""
        answers: dict[Completion, torch.Tensor | None] = {}
        decodes = []
        for completion in completions:
            if completion.is_decoding and len(completion.chunk) == 1:
                decodes.append(completion)
        if decodes:
            inputs = [_decode_input(completion, completion.chunk[0]) for completion in decodes]
            outputs = self._executor.batch_decode(inputs)
            if len(outputs) != len(decodes):
                raise WrongResultsError(f"batch_decode gave {len(outputs)} results for {len(decodes)} sequences")
            for completion, output in zip(decodes, outputs, strict=True):
                completion.handle = output.kv_cache  # type: ignore[assignment]
                answers[completion] = output.logits[0]
        for completion in completions:
            if completion not in answers:
                answers[completion] = self._run_one(completion)
        return [answers[completion] for completion in completions]

    def _run_one(self, completion: Completion) -> torch.Tensor | None:
        if isinstance(completion.policy, VerifyLogits):
            tokens = [_decode_input(completion, token) for token in completion.chunk]
            verified = self._executor.forward_verify(tokens)
            completion.handle = verified[-1].kv_cache  # type: ignore[assignment]
            return torch.cat([output.logits for output in verified])
        caches = None if completion.handle is None else [completion.handle]
        prompt = torch.tensor([completion.chunk])
        prefilled = self._executor.prefill(PrefillInput(prompt, kv_caches=caches, metadata=completion.request.metadata))
        completion.handle = prefilled.kv_cache
        return prefilled.last_token_logits()[0] if completion.is_final else None


def _decode_input(completion: Completion, token: int) -> DecodeInput:
    assert completion.handle is not None
    return DecodeInput(torch.tensor([[token]]), completion.handle, metadata=completion.request.metadata)
