"""A launch that is repeated hands the compiled kernel what a first one would, with the new tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from paged.kernels.common.launch import Box, Launch, signatures


class _Kernel:
    """A jitted function that notes what its compiled form is run with."""

    arg_names = ("x_ptr", "n", "y_ptr", "BLOCK")

    def __init__(self) -> None:
        self.compiled = 0
        self.runs: list[tuple[Any, ...]] = []

    def run(self, *, grid: tuple[int, ...], warmup: bool, **arguments: Any) -> Any:
        assert not warmup
        self.compiled += 1
        self[grid](*(arguments[name] for name in self.arg_names))
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.runs.append((grid, *arguments))


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
    assert signatures([base, None]) == signatures([torch.ones(8, 8), None])
    others = (base.t(), base.half(), base[:, :4], base.flatten()[1:].as_strided((7, 8), (8, 1)), base.to("meta"))
    assert all(signatures([other]) != signatures([base]) for other in others)
    unaligned = torch.zeros(65)[1:].view(8, 8)
    assert signatures([unaligned]) != signatures([base])


class _OnSecond(torch.Tensor):
    """A tensor that says it lies on the second GPU."""

    is_cuda = True
    device = torch.device("cuda", 1)

    def get_device(self) -> int:
        return 1


def test_runs_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current, entered = [0], []

    @contextmanager
    def enter(device: torch.device | int) -> Iterator[None]:
        before = current[0]
        current[0] = device.index if isinstance(device, torch.device) else device
        entered.append(device)
        yield
        current[0] = before

    class Kernel(_Kernel):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            run = super().__getitem__(grid)

            def noted(*arguments: Any) -> Any:
                devices.append(current[0])
                return run(*arguments)

            return noted

    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    launch = Launch(Kernel(), (3,), {"n": 7, "BLOCK": 16})
    x = torch.zeros(2).as_subclass(_OnSecond)
    for _ in range(2):
        launch({"x_ptr": x, "y_ptr": None})
    assert devices == [1, 1]
    assert current == [0]
    current[0], entered[:] = 1, []
    launch({"x_ptr": x, "y_ptr": None})
    assert devices == [1, 1, 1]
    assert entered == [], "nothing to enter where it is current"


def test_a_descriptor_repeats_with_another_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Descriptor:
        def __init__(self, base: torch.Tensor, shape: list[int], strides: list[int], size: list[int]) -> None:
            self.base, self.shape, self.strides, self.block_shape = base, shape, strides, size

    monkeypatch.setattr("paged.kernels.common.launch.TensorDescriptor", Descriptor)
    kernel = _Kernel()
    launch = Launch(kernel, (3,), {"n": 7, "BLOCK": 16, "y_ptr": None}, boxes={"x_ptr": Box((4, 8), (8, 1), (2, 8))})
    tensors = [torch.zeros(4, 8) for _ in range(3)]
    for x in tensors:
        launch({"x_ptr": x})
    described = [run[1] for run in kernel.runs]
    assert [each.base is x for each, x in zip(described, tensors, strict=True)] == [True] * 3
    assert {(*each.shape, *each.strides, *each.block_shape) for each in described} == {(4, 8, 8, 1, 2, 8)}
    assert not any(isinstance(kept, torch.Tensor) for _, _, fields in launch._descriptors for kept in fields.values())
