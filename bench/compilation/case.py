"""What is compiled ahead of time: a configuration of a kernel, for the targets it may run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from triton.backends.compiler import GPUTarget

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class CompileCase:
    """One configuration of one kernel, as a wrapper may launch it.

    signature: every kernel argument in order: "*fp16", "*i32", "i32", "fp32", ... or "constexpr", which None is, too.
    constexprs: the value of every "constexpr" argument.
    divisible_by_16: the arguments that the launcher would find divisible by 16 (pointers of torch tensors always are).
    expect: target -> names of `machine_code.INSTRUCTIONS` that the code must contain.
    targets: those of TARGETS on which the wrapper would launch this configuration.
    programs_per_sm: how many the wrapper counts on an SM to hold.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible_by_16: tuple[str, ...] = ()
    expect: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    targets: tuple[str, ...] = tuple(TARGETS)
    programs_per_sm: int = 1
