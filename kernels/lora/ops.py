"""Low-rank adapters as custom ops."""

from __future__ import annotations

from typing import Any

from paged.kernels.common.custom_ops import define, ops, writes_only
from paged.kernels.lora.batch import LoraBatch
from paged.kernels.lora.weights import LoraWeights

__all__ = ["ops"]


def _as_objects(arguments: dict[str, Any]) -> None:
    a, b, ranks, scales, sizes = (arguments.pop(each) for each in ("a", "b", "ranks", "scales", "part_sizes"))
    arguments["weights"] = LoraWeights(a, b, ranks, scales, tuple(sizes))
    arguments["batch"] = LoraBatch(arguments.pop("rows"), arguments.pop("slots"))


define(
    "add_lora",
    "paged.kernels.lora.add_lora",
    "Tensor(a!) out, Tensor x, Tensor a, Tensor b, Tensor ranks, Tensor scales, SymInt[] part_sizes, Tensor rows, "
    "Tensor slots",
    mutates=("out",),
    prepare=_as_objects,
)(writes_only)
