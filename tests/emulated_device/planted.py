"""A kernel to plant faults with, and what is found of them."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tests.emulated_device.emulator.device import EmulatedCuda

ROOM = "tests/emulated_device/"


@triton.jit
def double_kernel(x_ptr, out_ptr, length, BLOCK: tl.constexpr, MASKED: tl.constexpr = True):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (offs < length) if MASKED else (offs >= 0)
    tl.store(out_ptr + offs, 2 * tl.load(x_ptr + offs, mask=mask), mask=mask)


def double(x: torch.Tensor, out: torch.Tensor, length: int | None = None, masked: bool = True) -> Any:
    return double_kernel[(1,)](x, out, x.numel() if length is None else length, BLOCK=32, MASKED=masked)


def kinds(machine: EmulatedCuda) -> list[str]:
    """The kinds of hazards found, each at a line of this room's tests."""
    assert all(hazard.place.startswith(ROOM) for hazard in machine.report.hazards), machine.report.hazards
    return sorted({hazard.kind for hazard in machine.report.hazards})


def captured(run: Callable[[], None], pool: Any = None) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph
