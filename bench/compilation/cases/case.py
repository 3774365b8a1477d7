"""A case of ahead-of-time compilation: one configuration of a kernel, for the targets it may run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942")

# Every case is compiled for one target of each generation. Other targets compile only cases in which they take tiles
# of their own.
EVERY_CASE = ("sm_80", "sm_90", "sm_100", "gfx942")
# Target -> number of streaming multiprocessors or compute units.
NUM_SMS = {"sm_80": 108, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_103": 148, "sm_120": 170, "gfx942": 304}
# Targets that convert e4m3 in hardware, see `has_native_e4m3`.
NATIVE_FP8 = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120")

# Target -> matrix instruction of products with tiles of 64 rows or more; see `machine_code.INSTRUCTIONS`.
TENSOR_CORES = {"sm_90": "HGMMA", "sm_100": "UTCHMMA", "sm_103": "UTCHMMA", "gfx942": "v_mfma"}
TENSOR_CORES |= dict.fromkeys(("sm_80", "sm_89", "sm_120"), "HMMA")


@dataclass(frozen=True)
class CompileCase:
    """One configuration of one kernel, as a wrapper may launch it.

    signature: type of every kernel argument in order: "*fp16", "*i32", "i32", "fp32", ...; "constexpr" for a constant
        or None.
    constexprs: the value of every "constexpr" argument.
    divisible_by_16: arguments that the launcher would find divisible by 16; pointers of torch tensors always are.
    expect: target -> names of `machine_code.INSTRUCTIONS` that the code must contain.
    targets: the TARGETS on which the wrapper would launch this configuration.
    programs_per_sm: number of programs that the wrapper expects an SM to hold.
    may_spill: whether spills are acceptable, because the dtype must be right rather than fast.
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
