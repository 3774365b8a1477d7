"""Rollouts for TRL's `GRPOTrainer` by an engine of this package: its `rollout_func`, as TRL 1.16 calls it."""

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
    """One completion of each prompt by the trainer's weights: `GRPOTrainer(..., rollout_func=RolloutFunction(engine))`.

    The engine gets the trainer's weights whenever `trainer.state.global_step` is another one. Equal prompts that follow
    each other, a group of GRPO, are one request with `n` completions.

    Args:
        engine: runs the checkpoint that the trainer began with, under `EngineConfig(logprobs_mode="processed")`: TRL
            divides its own logits by the temperature, too. With a `ChatTokenizer`, prompts may be texts or messages.
        params: of every completion; None for those of the trainer's `GRPOConfig`. With a seed, each group has the next.
        weights: makes of the trainer what `Engine.update_weights` takes; None takes a transformers model's weights.
    """

    def __init__(
        self, engine: Engine, params: SamplingParams | None = None, *, weights: Callable[[Any], Any] | None = None
    ) -> None:
        self._engine, self._params = engine, params
        self._weights = model_weights if weights is None else weights
        self._step: int | None = None
        self._num_groups = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return prompt_ids, completion_ids and logprobs of the completions' tokens, a list for each prompt.

        Raises:
            RolloutError: a completion failed, with its reason.
            As `Engine.update_weights` and `Engine.generate`.
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
        """Return the log probabilities of completions' tokens under the trainer's weights, a list for each completion.

        They come from a forward of whole completions by the engine's operations. If the engine is `batch_invariant`,
        and `params` have no filters and penalties, they have the bits of those that the rollout returned.

        Raises:
            As `Engine.update_weights` and `Engine.score`.
        """
        params = self._begin(trainer)
        scores = []
        for prompt, ids in zip(prompt_ids, completion_ids, strict=True):
            scores.append(self._engine.score(prompt, ids, temperature=params.temperature).tolist())
        return scores

    def _begin(self, trainer: Any) -> SamplingParams:
        """Take the trainer's weights if they are new; return the parameters of completions."""
        if trainer.state.global_step != self._step:
            self._engine.update_weights(self._weights(trainer))
            self._step = trainer.state.global_step
        return _params_of(trainer.args) if self._params is None else self._params


def model_weights(trainer: Any) -> Any:
    """Return names as in a checkpoint and weights of a trainer's transformers model, whole on this process."""
    from transformers.core_model_loading import revert_weight_conversion

    model = trainer.accelerator.unwrap_model(trainer.model)
    tied = model.all_tied_weights_keys
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return revert_weight_conversion(model, tensors).items()


def _params_of(args: Any) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {name: getattr(args, name) for name in names}
    return SamplingParams(**values, max_tokens=args.max_completion_length)
