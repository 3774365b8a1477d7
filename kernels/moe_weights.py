"""The weights of all experts' projections, and the forms that they come in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch


@dataclass(frozen=True)
class ExpertLinear:
    """One of the two projections of all experts.

    w: [num_experts, out_features, in_features]. bias: [num_experts, out_features], contiguous, or None.
    """

    w: torch.Tensor
    bias: torch.Tensor | None = None


class MoeOptions(TypedDict):
    """What lies between the two projections, as keywords."""

    activation: str
    interleaved: bool
