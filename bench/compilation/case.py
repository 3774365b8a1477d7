"""A case of ahead-of-time compilation: one configuration of a kernel, for the targets it may run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from triton.backends.compiler import GPUTarget

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_103": GPUTarget("cuda", 103, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

# One of each generation, for which every case is compiled; the others get those with tiles that are chosen for them.
EVERY_CASE = ("sm_80", "sm_90", "sm_100", "gfx942")
# Streaming multiprocessors or compute units.
NUM_SMS = {"sm_80": 108, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_103": 148, "sm_120": 170, "gfx942": 304}
# Those that convert e4m3 by themselves, see `has_native_e4m3`.
NATIVE_FP8 = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120")

# Instructions of products that fill a tile of 64 rows; see `machine_code.INSTRUCTIONS`.
TENSOR_CORES = {"sm_90": "HGMMA", "sm_100": "UTCHMMA", "sm_103": "UTCHMMA", "gfx942": "v_mfma"}
TENSOR_CORES |= dict.fromkeys(("sm_80", "sm_89", "sm_120"), "HMMA")


@dataclass(frozen=True)
class CompileCase:
    """One configuration of one kernel, as a wrapper may launch it.

    signature: every kernel argument in order: "*fp16", "*i32", "i32", "fp32", ... or "constexpr", which None is, too.
    constexprs: the value of every "constexpr" argument.
    divisible_by_16: the arguments that the launcher would find divisible by 16 (pointers of torch tensors always are).
    expect: target -> names of `machine_code.INSTRUCTIONS` that the code must contain.
    targets: those of TARGETS on which the wrapper would launch this configuration.
    programs_per_sm: how many the wrapper counts on an SM to hold.
    may_spill: whether spills are no problem, in a dtype that is to be right rather than fast.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible_by_16: tuple[str, ...] = ()
    expect: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    targets: tuple[str, ...] = EVERY_CASE
    programs_per_sm: int = 1
    may_spill: bool = False
