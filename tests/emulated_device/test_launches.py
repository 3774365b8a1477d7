"""Launches that a GPU would do otherwise, or in another order: each planted, beside what is right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paged.errors import InvalidInputError
from paged.kernels.core.launch import launch, run_compiled
from paged.kernels.layers.rms_norm import rms_norm
from paged.kernels.layers.silu_and_mul import silu_and_mul
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.emulated_device.planted import ROOM, captured, double, double_kernel, kinds
from tests.tolerance import assert_close


def test_what_is_compiled_and_why(cuda: EmulatedCuda) -> None:
    x, out = torch.ones(33, device="cuda"), torch.empty(33, device="cuda")
    double(x, out, 17)
    mark = cuda.report.mark()
    double(x, out, 18)
    assert cuda.report.compiled_after(mark) == []
    double(x, out, 1)
    double(x, out, 32)
    double(x[1:], out, 17)
    double(x, out, 2**40)
    differences = [cuda.report.nearest(kernel) for kernel in cuda.report.compiled_after(mark)]
    assert differences == [
        {"length": ("i32", "1")},
        {"length": ("i32", "i32 / 16")},
        {"x_ptr": ("*fp32 / 16", "*fp32")},
        {"length": ("i32", "i64 / 16")},
    ]
    assert {kernel.place.split(":")[0] for kernel in cuda.report.compiled} == {f"{ROOM}planted.py"}


def test_what_is_compiled_ahead_runs_once(cuda: EmulatedCuda) -> None:
    x, results, seen = torch.ones(3, 64, device="cuda"), [], []

    def run() -> None:
        seen.append((len(cuda.report.compiled), len(cuda.report.launches)))
        results.append(silu_and_mul(x))
        results.append(silu_and_mul(x))

    run_compiled(run)
    assert seen == [(0, 0), (1, 0)]
    assert (len(cuda.report.compiled), len(cuda.report.launches)) == (1, 2)
    for result in results[2:]:
        assert_close(result, torch.full((3, 32), 1 / (1 + 1 / torch.e)).double())
    run_compiled(run)
    assert seen[2:] == [(1, 2), (1, 2)], "launches that ran before are left out, too"


@pytest.mark.parametrize(("start", "length"), [(0, 17), (1, 17), (0, 16), (0, 1)])
def test_a_repeated_launch_is_another_variant(start: int, length: int, cuda: EmulatedCuda) -> None:
    x, out = torch.ones(33, device="cuda"), torch.empty(33, device="cuda")
    compiled = double(x, out, 18)
    compiled[(1, 1, 1)](x[start:], out, length, 32, True)
    assert kinds(cuda) == ([] if (start, length) == (0, 17) else ["other specialisation"])


def test_grids() -> None:
    with EmulatedCuda(executes=False) as machine:
        x = torch.ones(4, device="cuda")
        for right in ((65536, 1, 1), (1, 65535, 65535)):
            double_kernel[right](x, x, 4, BLOCK=32)
        assert kinds(machine) == []
        wrong = [(1, 65536, 1), (1, 1, 65536), (2**31, 1, 1)]
        for grid in wrong:
            double_kernel[grid](x, x, 4, BLOCK=32)
        assert [hazard.kind for hazard in machine.report.hazards] == ["grid"] * len(wrong)


@pytest.mark.parametrize("current", [0, 1])
def test_a_launch_on_the_wrong_device(current: int) -> None:
    with EmulatedCuda(num_devices=2) as machine:
        x = torch.arange(4.0, device="cuda:1")
        out = x + 1  # PyTorch's own operations go where their tensors are
        with torch.cuda.device(current):
            double(x, out)
        assert ("wrong device" in kinds(machine)) == (current == 0)
        assert current == 0 or not kinds(machine)


def test_every_device_compiles_its_own() -> None:
    with EmulatedCuda(num_devices=2) as machine:
        for device in (0, 1, 0):
            with torch.cuda.device(device):
                x = torch.ones(4, device="cuda")
                compiled = double(x, x)
        assert [kernel.device for kernel in machine.report.compiled] == [0, 1]
        with torch.cuda.device(1):
            y = torch.ones(4, device="cuda")
            compiled[(1, 1, 1)](y, y, 4, 32, True)
        assert kinds(machine) == ["wrong device"]


ORDERS: dict[str, Callable[[Any, Any], None]] = {
    "none": lambda one, other: None,
    "stream": lambda one, other: other.wait_stream(one),
    "event": lambda one, other: other.wait_event(one.record_event()),
    "host": lambda one, other: one.synchronize(),
    "the wrong way": lambda one, other: one.wait_stream(other),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("second", ["reads", "writes", "is a kernel", "is a replay"])
def test_streams_without_order(order: str, second: str, cuda: EmulatedCuda) -> None:
    x, out = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    double(x, out)
    replay = captured(lambda: out.copy_(x)).replay
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (one, other):
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(one):
        _ = out.copy_(x) if second == "writes" else x.add_(1)
    ORDERS[order](one, other)
    works = {
        "reads": lambda: out.copy_(x),
        "writes": x.zero_,
        "is a kernel": lambda: double(x, out),
        "is a replay": replay,
    }
    with torch.cuda.stream(other):
        works[second]()
    assert kinds(cuda) == (["unordered streams"] if order in ("none", "the wrong way") else [])


def test_two_streams_may_read_the_same(cuda: EmulatedCuda) -> None:
    x = torch.ones(4, device="cuda")
    for _ in range(2):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            double(x, torch.empty_like(x))
    assert kinds(cuda) == []


@pytest.mark.parametrize("care", ["none", "record_stream", "wait"])
def test_memory_is_freed_while_another_stream_uses_it(care: str, cuda: EmulatedCuda) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kept = x + 1
    if care == "record_stream":
        x.record_stream(side)
    elif care == "wait":
        torch.cuda.current_stream().wait_stream(side)
    del x
    assert kinds(cuda) == (["freed in use"] if care == "none" else [])
    del kept


@pytest.mark.parametrize("masked", [False, True])
def test_a_kernel_reaches_beyond_its_tensors(masked: bool, cuda: EmulatedCuda) -> None:
    x, out = torch.arange(20.0, device="cuda"), torch.zeros(20, device="cuda")
    double(x, out, masked=masked)
    assert out.tolist() == [2.0 * i for i in range(20)]
    assert kinds(cuda) == ([] if masked else ["out of bounds"])


def test_a_kernel_takes_no_host_memory(cuda: EmulatedCuda) -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        double(torch.ones(4), x)
    double(torch.ones(4, pin_memory=True), x)
    assert x.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("choice", ["", "0", "1"])
def test_early_launches(choice: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are asked for and offered; not of a kernel that does not wait for the one before it."""
    monkeypatch.setenv("PAGED_PDL", choice)
    with EmulatedCuda(capability=capability) as machine:
        x = torch.ones(4, 8, device="cuda")
        rms_norm(x, x[0])
        launch(double_kernel, (1,), x_ptr=x, out_ptr=x, length=4, BLOCK=4, MASKED=True)
        is_early = ["launch_pdl=True" in kernel.options for kernel in machine.report.compiled]
    assert is_early == [choice == "1" and capability == (9, 0), False]


def test_another_word_for_early_launches(monkeypatch: pytest.MonkeyPatch, cuda: EmulatedCuda) -> None:
    monkeypatch.setenv("PAGED_PDL", "yes")
    x = torch.ones(4, 8, device="cuda")
    with pytest.raises(InvalidInputError, match="PAGED_PDL='yes': expected '1' or '0'"):
        rms_norm(x, x[0])
