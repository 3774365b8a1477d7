"""Rollouts for TRL's `GRPOTrainer` (its `rollout_func`, as of TRL 1.16) by an engine of this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

from paged import Engine, SamplingParams
from paged.errors import PagedError


class RolloutError(PagedError):
    """A completion of a rollout failed."""


class RolloutFunction:
    """Rollout function: `GRPOTrainer(..., rollout_func=RolloutFunction(engine))`.

    It completes each prompt once with the trainer's weights, which the engine gets whenever `trainer.state.global_step`
    has changed. Consecutive equal prompts (a GRPO group) become one request with `n` completions.

    Args:
        engine: runs the trainer's initial checkpoint with `EngineConfig(logprobs_mode="processed")`, because TRL also
            divides its logits by the temperature. With a `ChatTokenizer`, prompts may be texts or messages.
        params: sampling parameters of every completion; None for the parameters of the trainer's `GRPOConfig`. A seed
            increases by one from group to group.
        weights: function from the trainer to an argument of `Engine.update_weights`; None for a transformers model.
    """

    def __init__(
        self, engine: Engine, params: SamplingParams | None = None, *, weights: Callable[[Any], Any] | None = None
    ) -> None:
        self._engine, self._params = engine, params
        self._weights = model_weights if weights is None else weights
        self._step: int | None = None
        self._num_groups = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return prompt_ids, completion_ids and logprobs of the completions' tokens, each with a list per prompt.

        Raises:
            RolloutError: a completion failed; the message has the reason.
            Any error of `Engine.update_weights` and `Engine.generate`.
        """
        params = self._begin(trainer)
        group_prompts, group_params = [], []
        for prompt, group in groupby(prompts):
            seed = params.seed
            if seed is not None:
                seed += self._num_groups
            group_prompts.append(prompt)
            group_params.append(replace(params, n=len(list(group)), logprobs=0, seed=seed))
            self._num_groups += 1
        outputs = self._engine.generate(group_prompts, group_params, progress=False)
        for output in outputs:
            if output.error is not None:
                raise RolloutError(f"{output.request_id!r}: {output.error}")
        lists: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for output in outputs:
            for completion in output.outputs:
                lists["prompt_ids"].append(output.prompt_token_ids)
                lists["completion_ids"].append(completion.token_ids)
                logprobs: list[float] = []
                for table in completion.logprobs or ():
                    logprobs += table.values()
                lists["logprobs"].append(logprobs)
        return lists

    def score(self, prompt_ids: list[Any], completion_ids: list[list[int]], trainer: Any) -> list[list[float]]:
        """Return the log probabilities of completions' tokens under the trainer's weights, a list per completion.

        The engine's operations run whole completions in one forward. If the engine is `batch_invariant` and `params`
        have no filters or penalties, the numbers equal the rollout's bit by bit.

        Raises:
            Any error of `Engine.update_weights` and `Engine.score`.
        """
        params = self._begin(trainer)
        scores = []
        for prompt, ids in zip(prompt_ids, completion_ids, strict=True):
            scores.append(self._engine.score(prompt, ids, temperature=params.temperature).tolist())
        return scores

    def _begin(self, trainer: Any) -> SamplingParams:
        """Load the trainer's weights if they are new; return the sampling parameters."""
        if trainer.state.global_step != self._step:
            self._engine.update_weights(self._weights(trainer))
            self._step = trainer.state.global_step
        return _params_of(trainer.args) if self._params is None else self._params


def model_weights(trainer: Any) -> Any:
    """Return (checkpoint name, weight) pairs of a trainer's transformers model, with weights gathered here."""
    return checkpoint_weights(trainer.accelerator.unwrap_model(trainer.model))


def checkpoint_weights(model: Any) -> Any:
    """Return (checkpoint name, weight) pairs of a transformers model, whose weights are all in this process."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = model.all_tied_weights_keys
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return revert_weight_conversion(model, tensors).items()


def _params_of(args: Any) -> SamplingParams:
    names = ("temperature", "repetition_penalty", *SamplingParams().filters)
    values = {name: getattr(args, name) for name in names}
    return SamplingParams(**values, max_tokens=args.max_completion_length)
