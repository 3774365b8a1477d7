"""Paged attention that stores one element of its last row wrongly."""

import importlib
from collections.abc import Callable
from typing import Any


def plant(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """For the rest of the process, or as long as `set_attribute` has it."""
    module = importlib.import_module("paged.kernels.attention.paged_attention")
    right = module.run_step

    def run_step(bind_step: Any, call: Any, plan: Any) -> None:
        right(bind_step, call, plan)
        call.out[-1, 1, 2] += 1

    set_attribute(module, "run_step", run_step)
