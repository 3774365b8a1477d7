"""A launch that is repeated hands the compiled kernel what a first one would, with the new tensors."""

from __future__ import annotations

from typing import Any

import torch

from paged.kernels.common.launch import Launch, signature


class _Kernel:
    """A jitted function that notes what its compiled form is run with."""

    arg_names = ("x_ptr", "n", "y_ptr", "BLOCK")

    def __init__(self) -> None:
        self.compiled = 0
        self.runs: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**arguments: Any) -> Any:
            self.compiled += 1
            self.runs.append((grid, *(arguments[name] for name in self.arg_names)))
            return self

        return launch if self.compiled == 0 else lambda *arguments: self.runs.append((grid, *arguments))


def test_repeats_with_other_tensors() -> None:
    kernel = _Kernel()
    launch = Launch(kernel, (3,), {"n": 7, "BLOCK": 16}, num_warps=4)
    a, b, c = (torch.zeros(2) for _ in range(3))
    launch({"x_ptr": a, "y_ptr": None, "unknown": 0})
    assert not any(isinstance(kept, torch.Tensor) for kept in launch._ordered), "it would keep the first layer's alive"
    launch({"x_ptr": b, "y_ptr": None, "unknown": 0})
    launch({"x_ptr": c, "y_ptr": None, "unknown": 0})
    assert kernel.compiled == 1
    assert [run[0] for run in kernel.runs] == [(3, 1, 1)] * 3
    assert all(run[1] is x and run[2:] == (7, None, 16) for run, x in zip(kernel.runs, (a, b, c), strict=True))


def test_signature_tells_apart_what_compiles_differently() -> None:
    base = torch.zeros(8, 8)
    assert signature(base) == signature(torch.ones(8, 8))
    assert signature(None) is None
    others = (base.t(), base.half(), base[:, :4], base.flatten()[1:].as_strided((7, 8), (8, 1)), base.to("meta"))
    assert all(signature(other) != signature(base) for other in others)
    unaligned = torch.zeros(65)[1:].view(8, 8)
    assert signature(unaligned) != signature(base)
