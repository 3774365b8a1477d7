"""Choices of tokens as custom ops."""

from __future__ import annotations

from typing import Any

import torch

from paged.kernels.common.custom_ops import define, ops
from paged.kernels.sampling.penalties import Penalties

__all__ = ["ops"]


def _as_object(arguments: dict[str, Any]) -> None:
    tables = [arguments.pop(each, None) for each in ("rows", "counts", "seen", "weights")]
    arguments["penalties"] = None if tables[0] is None else Penalties(*tables)


@define(
    "sample_tokens",
    "paged.kernels.sampling.sample_tokens",
    "Tensor logits, Tensor keys, Tensor temperature, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, "
    "Tensor? rows=None, Tensor? counts=None, Tensor? seen=None, Tensor? weights=None",
    "Tensor",
    prepare=_as_object,
)
@define(
    "greedy_argmax",
    "paged.kernels.sampling.greedy_argmax",
    "Tensor logits, Tensor? token_mask=None, Tensor? repetition_penalty=None",
    "Tensor",
)
def _one_token_a_row(logits: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
