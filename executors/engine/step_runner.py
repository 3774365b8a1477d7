"""Runs the forward of a step: preempts where blocks run out, and after an error finds the completions that fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from paged.batch import CapturedStates, DecodeInput, PrefillInput, UnifiedBatch, UnifiedBatchItem, VerifyLogits
from paged.errors import OutOfBlocksError, PagedError, RankFailedError
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.isolation import describe, quietly, raise_exit
from paged.executors.model_executor import ExecutorShutDownError, ModelExecutor
from paged.executors.requests.request import Completion, State
from paged.executors.row_batches import results_mismatch

_LOG = logging.getLogger("paged")


class WrongResultsError(PagedError):
    """An executor gave results that do not fit what it was given."""


class CallResults(NamedTuple):
    """The completions of a call, and its answers: one for each item, or in one tensor those of the final ones."""

    completions: list[Completion]
    answers: list[torch.Tensor | None] | torch.Tensor


class StepRunner:
    """Runs the completions of a step so that one that fails takes no other with it.

    A step is one `unified_decode`. An executor without it gets one `batch_decode` for all decodes, one `prefill` for
    each chunk, and one `forward_verify` for each sequence with drafts; its handles are kept with the completions.

    If a call raises, its items run again in halves, until the failing one is alone. An error that does not come again
    ends none. If results do not fit the items, the state of the caches is unknown, and all of that call fail.

    Args:
        make_room: frees blocks, of which a call needs a number, by taking them from completions other than those given;
            returns False if there are none.
        fail: ends a completion with a reason.
        release: frees what a completion holds. An executor without a cache manager may have run some items of a call
            that raised, so they begin again with all of their tokens.
        runs_apart: whether each completion is a call of its own.

    Attributes:
        num_capturing: unfinished requests that ask for states of their tokens.
    """

    def __init__(
        self,
        executor: ModelExecutor,
        make_room: Callable[[Collection[Completion], int], bool],
        fail: Callable[[Completion, str], None],
        release: Callable[[Completion], None],
        metrics: EngineMetrics,
        *,
        runs_apart: bool = False,
    ) -> None:
        self._executor = executor
        self._runs_apart = runs_apart
        self.num_capturing = 0
        self._is_unified = executor.supports_native_unified_decode()
        self._make_room = make_room
        self._fail = fail
        self._release = release
        self._metrics = metrics

    def run(self, completions: Sequence[Completion]) -> list[CallResults]:
        """Run all that can.

        Raises:
            ExecutorShutDownError, RankFailedError: nothing can run any more.
        """
        ran: list[CallResults] = []
        self._run(completions, ran)
        return ran

    def run_ahead(self, completions: list[Completion], batch: UnifiedBatch) -> list[CallResults]:
        """Run their batch, or after an error none: it runs again, by `run`, when all tokens are known."""
        try:
            if self.num_capturing:
                batch = replace(batch, captured=_capture_of(completions))
            return [CallResults(completions, self._run_batch(completions, batch))]
        except (ExecutorShutDownError, RankFailedError):
            raise
        except WrongResultsError as error:
            self._metrics.failed_forwards += 1
            self._fail_all(completions, error)
        except BaseException as error:
            raise_exit(error)
            if not isinstance(error, OutOfBlocksError):
                self._metrics.failed_forwards += 1
                _LOG.warning("the next step was not launched ahead: %s", describe(error))
        return []

    def _run(self, completions: Sequence[Completion], ran: list[CallResults]) -> None:
        if self._is_unified and not self._runs_apart:
            self._run_call(completions, ran)
            return
        decodes = [one for one in completions if _is_decode(one) and not self._runs_apart]
        others = [one for one in completions if self._runs_apart or not _is_decode(one)]
        self._run_call(decodes, ran)
        for completion in others:
            self._run_call([completion], ran)

    def _run_call(self, group: Sequence[Completion], ran: list[CallResults]) -> None:
        """Run one call and, on an error, its halves."""
        while group := [one for one in group if one.state in (State.PREFILL, State.DECODE)]:
            try:
                answers = self._forward(group)
            except OutOfBlocksError as error:
                if self._drop_drafts(group):
                    continue
                self._start_over(group)
                if not self._make_room([one for call in ran for one in call.completions], error.needed):
                    self._fail_all(group, error)
            except (ExecutorShutDownError, RankFailedError):
                raise
            except WrongResultsError as error:
                self._metrics.failed_forwards += 1
                self._fail_all(group, error)
            except BaseException as error:
                raise_exit(error)
                self._metrics.failed_forwards += 1
                self._start_over(group)
                if len(group) == 1:
                    self._fail_all(group, error)
                    return
                middle = len(group) // 2
                self._run(group[:middle], ran)
                self._run(group[middle:], ran)
                return
            else:
                ran.append(CallResults(group, answers))
                return

    def _run_batch(self, group: Sequence[Completion], batch: UnifiedBatch) -> list[torch.Tensor | None] | torch.Tensor:
        answers, items = self._executor.unified_decode(batch), batch.items
        if isinstance(answers, torch.Tensor):
            count = answers.shape[0]  # six times as fast as `len`
            expected = len(items) if batch.columns.is_decode else sum(map(answer_rows, items))
            mismatch = None if count == expected else f"{count} results for {len(items)} items, expected {expected}"
        else:
            mismatch = results_mismatch(items, answers)
        if mismatch is not None:
            raise WrongResultsError(mismatch)
        if batch.captured is not None:
            _keep_states(group, batch.captured, self._executor.weights_generation)
        return answers

    def _forward(self, group: Sequence[Completion]) -> list[torch.Tensor | None] | torch.Tensor:
        """Make one call; return per item None if it is not final, else logits [V], or [rows, V] for VerifyLogits."""
        if self._is_unified:
            captured = _capture_of(group) if self.num_capturing else None
            batch = UnifiedBatch([completion.item for completion in group], is_stacked=True, captured=captured)
            return self._run_batch(group, batch)
        first = group[0]
        if _is_decode(first):
            outputs = self._executor.batch_decode([_decode_input(one, one.item.q_tokens[0]) for one in group])
            if len(outputs) != len(group):
                raise WrongResultsError(f"batch_decode gave {len(outputs)} results for {len(group)} sequences")
            for completion, output in zip(group, outputs, strict=True):
                completion.handle = output.kv_cache  # type: ignore[assignment]
            return [output.logits[0] for output in outputs]
        item = first.item
        if isinstance(item.logits_policy, VerifyLogits):
            verified = self._executor.forward_verify([_decode_input(first, token) for token in item.q_tokens])
            first.handle = verified[-1].kv_cache  # type: ignore[assignment]
            return [torch.cat([output.logits for output in verified])]
        caches = None if first.handle is None else [first.handle]
        prompt = PrefillInput(torch.tensor([item.q_tokens]), kv_caches=caches, metadata=item.metadata)
        prefilled = self._executor.prefill(prompt)
        first.handle = prefilled.kv_cache
        return [prefilled.last_token_logits()[0] if item.is_final_chunk else None]

    def _drop_drafts(self, group: Sequence[Completion]) -> bool:
        """Let completions run without the drafts that the cache has no blocks for; return False if there are none."""
        drafted = [one for one in group if one.state is State.DECODE and len(one.item.q_tokens) > 1]
        if self._executor.kv_manager is None:
            return False
        for completion in drafted:
            completion.follow()
        return bool(drafted)

    def _start_over(self, group: Sequence[Completion]) -> None:
        if self._executor.kv_manager is None:
            for completion in group:
                if completion.prefilled:
                    quietly(self._release, completion)
                    completion.start_over()

    def _fail_all(self, group: Sequence[Completion], error: BaseException) -> None:
        for completion in group:
            self._fail(completion, describe(error))


def _is_decode(completion: Completion) -> bool:
    return completion.is_decoding and len(completion.item.q_tokens) == 1


def answer_rows(item: UnifiedBatchItem) -> int:
    """Return the number of rows that an item's answer has."""
    return len(item.q_tokens) if type(item.logits_policy) is VerifyLogits else item.is_final_chunk


def _decode_input(completion: Completion, token: int) -> DecodeInput:
    assert completion.handle is not None
    return DecodeInput(torch.tensor([[token]]), completion.handle, metadata=completion.item.metadata)


def _capture_of(completions: Sequence[Completion]) -> CapturedStates | None:
    """Return what a forward has to capture for completions, None for nothing."""
    wanted = [one.states.wanted for one in completions if one.states is not None]
    return CapturedStates(has_experts=any(one["routed_experts"] for one in wanted)) if wanted else None


def _keep_states(completions: Sequence[Completion], captured: CapturedStates, generation: int) -> None:
    """Give each completion that asks for states those of the tokens of its item, by weights of `generation`."""
    end = 0
    for one in completions:
        begin, end = end, end + len(one.item.q_tokens)
        if one.states is None:
            continue
        assert captured.hidden_states is not None
        rows = {"hidden_states": captured.hidden_states[begin:end].to(torch.float32, copy=True)}
        if captured.routed_experts is not None:
            rows["routed_experts"] = captured.routed_experts[begin:end].clone()
        one.states.add(one.item.pos_offset, rows, generation)
