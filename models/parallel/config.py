"""How a caller spreads a model over processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paged.kernels.common.scalars import as_bool, as_float, as_int

# More ranks than any model has heads; a gloo group connects each with each.
_MAX_RANKS = 1024
_LEAST_SECONDS, _MOST_SECONDS = 0.1, 86_400.0


@dataclass(frozen=True)
class ParallelConfig:
    """One model over several processes, each of which holds a part of every layer and runs `from_pretrained`.

    tensor_parallel_size: how many processes.
    expert_parallel: every process holds whole experts, in place of a part of each.
    mesh: a torch DeviceMesh of the processes, with one dimension or one named "tp"; None for those of the default
        process group, which is made from torchrun's environment where there is none.
    timeout_s: seconds after which a process that does not answer counts as failed.
    check_steps: after so many steps the processes compare what they have been told and what they computed.

    Raises:
        InvalidInputError: a value is of another kind or out of range.
    """

    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    mesh: Any = None
    timeout_s: float = 60.0
    check_steps: int = 256

    def __post_init__(self) -> None:
        as_int("tensor_parallel_size", self.tensor_parallel_size, 1, _MAX_RANKS)
        as_bool("expert_parallel", self.expert_parallel)
        as_int("check_steps", self.check_steps, 1)
        as_float("timeout_s", self.timeout_s, _LEAST_SECONDS, _MOST_SECONDS)
