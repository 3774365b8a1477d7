"""A step that was launched, and the sampling of its tokens, which the host reads later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from paged.batch import UnifiedBatch
from paged.executors.engine.step_runner import WrongResultsError
from paged.executors.isolation import describe, raise_exit
from paged.executors.requests.request import Completion, Request, Rows
from paged.executors.sampling.rows import index_tensor, row_matrix
from paged.executors.sampling.sampler import Drafts, SampledOnDevice, Sampler
from paged.executors.speculation.drafting import aligned_drafts
from paged.executors.unified_executor import Answers


@dataclass
class LaunchedStep:
    """A step whose tokens are not read yet.

    Attributes:
        started: when it was planned.
        batch: what ran if it was launched ahead.
        parts: completions and their tokens, in as many parts as were sampled.
        prompts: requests, and what reads the log probabilities of their prompts' next tokens.
    """

    started: float
    has_decodes: bool
    num_prefill_tokens: int
    is_drafted: bool
    batch: UnifiedBatch | None
    parts: list[tuple[Rows, SampledOnDevice]] = field(default_factory=list)
    prompts: list[tuple[Request, Callable[[], list[dict[int, float]]]]] = field(default_factory=list)

    def following(self, decodes: list[Completion]) -> UnifiedBatch | None:
        """Return the next step's batch if it was one of the same decodes, whose items then stay as they are."""
        batch, (rows, sampled) = self.batch, self.parts[0] if self.parts else (None, None)
        if batch is None or rows is None or sampled is None or sampled.token_ids is None or rows.completions != decodes:
            return None
        is_whole = len(batch.items) == len(decodes) and batch.columns.is_decode and not batch.columns.has_embeds
        return batch.following(sampled.token_ids) if is_whole else None

    def next_batch(self, completions: list[Completion], device: torch.device) -> tuple[list[Completion], UnifiedBatch]:
        """Return the next step's completions, those whose last tokens only the device knows first, and its batch."""
        late = [one for one in completions if one.is_behind]
        completions = [*late, *(one for one in completions if not one.is_behind)]
        items = [one.item for one in completions]
        return completions, UnifiedBatch(items, self._token_ids(late, device) if late else None, is_stacked=True)

    def _token_ids(self, completions: list[Completion], device: torch.device) -> torch.Tensor:
        """Return the newest tokens of some of its completions, int64 [n] on the device."""
        parts = [(rows, sampled.token_ids) for rows, sampled in self.parts if sampled.token_ids is not None]
        tokens = torch.cat([tokens for _, tokens in parts]) if len(parts) > 1 else parts[0][1]
        own = [one for part, _ in parts for one in part.completions]
        if own == completions:
            return tokens
        rows = {completion: row for row, completion in enumerate(own)}
        return tokens[index_tensor([rows[one] for one in completions], device)]


class StepSampler:
    """Samples for the completions of a step so that one that fails takes no other with it.

    Args:
        fail: ends a completion with a reason.
        settle: reads the tokens of the step before, which the device alone may know.
    """

    def __init__(
        self,
        sampler: Sampler,
        vocab_size: int,
        fail: Callable[[Completion, str], None],
        settle: Callable[[], None],
    ) -> None:
        self._sampler, self._vocab_size = sampler, vocab_size
        self._fail, self._settle = fail, settle
        self._last = Rows([])

    def sample(
        self,
        completions: list[Completion],
        rows: Answers,
        launched: LaunchedStep,
        drafted: tuple[Drafts, Sequence[Completion]] | None,
    ) -> None:
        """Sample and begin to copy the tokens; after an error in halves, until the failing completion is alone."""
        if not completions:
            return
        if drafted is not None or self._last.completions != completions:
            self._last = Rows(completions)
        own, sizes = self._last, [1] * len(completions)
        if own.reads_tokens:
            self._settle()  # while the device runs this one
        try:
            if drafted is not None:
                drafts = aligned_drafts(*drafted, completions)
                sizes = [len(ids) + 1 for ids in drafts.token_ids]
            answers = rows if isinstance(rows, torch.Tensor) else _stacked([row for row in rows if row is not None])
            if answers.shape == (len(completions),) and not answers.is_floating_point():
                sampled = SampledOnDevice.of(answers)
            elif answers.shape != (sum(sizes), self._vocab_size):
                raise WrongResultsError(f"logits {tuple(answers.shape)}, expected {(sum(sizes), self._vocab_size)}")
            elif drafted is None or not any(drafts.token_ids):
                sampled = self._sampler.sample(answers.float(), completions)
            else:
                sampled = self._sampler.verify(answers.float(), completions, drafts)
        except BaseException as error:
            raise_exit(error)
            self._settle()  # what is built anew depends on tokens that the device alone may know
            self._sampler.reset()
            if len(completions) == 1:
                self._fail(completions[0], describe(error))
                return
            middle = len(completions) // 2
            halves = [rows[:middle], rows[middle:]]
            if isinstance(rows, torch.Tensor):
                halves = list(rows.split([sum(sizes[:middle]), len(rows) - sum(sizes[:middle])]))
            self.sample(completions[:middle], halves[0], launched, drafted)
            self.sample(completions[middle:], halves[1], launched, drafted)
            return
        launched.parts.append((own, sampled))
        for one in completions:
            one.num_sampled += 1


def _stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tokens as int64 [n], or logits as one matrix."""
    return torch.stack([*rows]) if all(row.dim() == 0 for row in rows) else row_matrix(rows)
