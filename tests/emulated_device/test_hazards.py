"""Every hazard that the emulated device claims to find, planted once and found; and beside it what is no hazard."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.emulated_device.device import EmulatedCuda

HERE = str(Path(__file__).relative_to(Path(__file__).resolve().parents[2]))


@triton.jit
def _double_kernel(x_ptr, out_ptr, length, BLOCK: tl.constexpr, MASKED: tl.constexpr = True):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (offs < length) if MASKED else (offs >= 0)
    tl.store(out_ptr + offs, 2 * tl.load(x_ptr + offs, mask=mask), mask=mask)


def double(x: torch.Tensor, out: torch.Tensor, length: int | None = None, masked: bool = True) -> Any:
    return _double_kernel[(1,)](x, out, x.numel() if length is None else length, BLOCK=32, MASKED=masked)


def kinds(machine: EmulatedCuda) -> list[str]:
    """The kinds of hazards found, each at a line of this file."""
    assert all(hazard.place.startswith(f"{HERE}:") for hazard in machine.report.hazards), machine.report.hazards
    return sorted({hazard.kind for hazard in machine.report.hazards})


def test_tensors_say_cuda(cuda: EmulatedCuda) -> None:
    x = torch.arange(6, device="cuda").view(2, 3)
    assert (x.device, x.is_cuda, x.get_device()) == (torch.device("cuda:0"), True, 0)
    assert x.t()[1].tolist() == [1, 4]
    assert torch.nn.Linear(3, 2, device="cuda").weight.device == x.device
    assert torch.tensor([1, 2]).to("cuda").device == torch.tensor([1], device="cuda").device == x.device
    assert torch.from_dlpack(x).data_ptr() == x.data_ptr() == torch.Tensor.data_ptr(x)
    assert x.data_ptr() % 256 in range(0, 256, 16)
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


def test_nothing_is_left_when_it_is_off() -> None:
    before = torch.cuda.is_available, torch.cuda.Stream, torch.Tensor.to, threading.Thread.run
    with EmulatedCuda(num_sms=7):
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_properties(0).multi_processor_count == 7
    assert before == (torch.cuda.is_available, torch.cuda.Stream, torch.Tensor.to, threading.Thread.run)
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_mixed_devices_are_refused() -> None:
    with EmulatedCuda(num_devices=2) as machine:
        one, other = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
        for stranger in (torch.ones(3), other):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                one + stranger
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                torch.cat([one, stranger])
        assert (one + torch.tensor(1.0) + other.to("cuda:0")).tolist() == [3, 3, 3]
        assert not machine.report.hazards


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool(x[0] > 1),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "set one": lambda x: x.__setitem__(0, 5),  # a copy of a scalar tensor on the host, where several are filled
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x),
    "host index": lambda x: x[torch.tensor([1, 2])],
    "list index": lambda x: x[[1, 2]],
    "list": lambda x: torch.tensor([1, 2], device=x.device),
    "pageable": lambda x: x.copy_(torch.ones(4), non_blocking=True),
    "pinned, blocking": lambda x: x.copy_(torch.ones(4, pin_memory=True)),
    "pinned, of another dtype": lambda x: x.copy_(torch.ones(4, dtype=torch.float64, pin_memory=True), True),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
}
FREE: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda x: (x * 2 + 1).sum(),
    "views": lambda x: (x[1:3], x.view(2, 2), len(x), x.shape),
    "fill by mask": lambda x: x.__setitem__(x > 1, 0),
    "where": lambda x: torch.where(x > 1, x, 0),
    "device index": lambda x: x[x],
    "set several": lambda x: x.__setitem__(slice(1, 3), 5),
    "pinned": lambda x: x.copy_(torch.ones(4, dtype=torch.int64, pin_memory=True), non_blocking=True),
    "to the host": lambda x: x.to("cpu", non_blocking=True),
    "wait_stream": lambda x: torch.cuda.Stream().wait_stream(torch.cuda.current_stream()),
    "query": lambda x: torch.cuda.current_stream().record_event().query(),
    "output_size": lambda x: x.repeat_interleave(x, output_size=6),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_host_waits(name: str, cuda: EmulatedCuda) -> None:
    """Noted with its line, and refused while a graph is captured."""
    x = torch.arange(4, device="cuda")
    if "pinned" in name or name == "pageable":
        x = x.float()
    mark = cuda.report.mark()
    WAITS[name](x)
    line = inspect.getsourcelines(WAITS[name])[1]
    assert {one.place for one in cuda.report.synchronised_after(mark)} == {f"{HERE}:{line}"}
    x = x + 1
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        captured(lambda: WAITS[name](x))
    assert kinds(cuda) == ["wait in a capture"]


@pytest.mark.parametrize("name", FREE)
def test_the_host_does_not_wait(name: str, cuda: EmulatedCuda) -> None:
    x = torch.arange(4, device="cuda")
    FREE[name](x)
    assert not cuda.report.synchronisations
    assert not cuda.report.hazards


def test_a_wait_for_what_is_over_is_none(cuda: EmulatedCuda) -> None:
    x = torch.ones(3, device="cuda")
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    x.tolist()
    event.synchronize()
    assert event.query()
    assert len(cuda.report.synchronisations) == 1


@pytest.mark.parametrize("by", ["numpy", "torch"])
@pytest.mark.parametrize("waits", [False, True])
def test_a_pinned_source_is_overwritten(by: str, waits: bool, cuda: EmulatedCuda) -> None:
    host = torch.arange(8, pin_memory=True)
    there = host.to("cuda", non_blocking=True)
    if waits:
        torch.cuda.current_stream().record_event().synchronize()
    if by == "numpy":
        host.numpy()[3] = 100
    else:
        host[3] = 100
    assert there.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert kinds(cuda) == ([] if waits else ["host memory in flight"])


@pytest.mark.parametrize("waits", [False, True])
def test_a_pinned_target_is_read_too_early(waits: bool, cuda: EmulatedCuda) -> None:
    host = torch.arange(8, device="cuda").to("cpu", non_blocking=True)
    assert host.is_pinned()
    if waits:
        torch.cuda.synchronize()
    assert (host.numpy().tolist() == list(range(8))) == waits
    assert kinds(cuda) == []
    assert int(host.sum()) == (28 if waits else -8)
    assert kinds(cuda) == ([] if waits else ["host memory in flight"])


def test_there_and_back_is_in_order(cuda: EmulatedCuda) -> None:
    """What one stream sends to the host and takes from it again is right without a wait."""
    host = torch.arange(8, device="cuda").to("cpu", non_blocking=True)
    assert host.to("cuda", non_blocking=True).tolist() == list(range(8))
    assert kinds(cuda) == []


def captured(run: Callable[[], None], pool: Any = None) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph


def test_a_capture_runs_nothing_and_a_replay_all(cuda: EmulatedCuda) -> None:
    x, out = torch.arange(4.0, device="cuda"), torch.zeros(4, device="cuda")
    double(x, out)
    out.zero_()

    def run() -> None:
        between = torch.empty_like(x)
        double(x, between)
        out.copy_((between + 1).to(torch.float64))

    graph = captured(run)
    assert out.tolist() == [0, 0, 0, 0]
    graph.replay()
    assert out.tolist() == [1, 3, 5, 7]
    x += 1
    graph.replay()
    assert out.tolist() == [3, 5, 7, 9]
    x = x * 100  # another tensor, of which the graph knows nothing
    graph.replay()
    assert kinds(cuda) == ["freed memory", "out of bounds"]


@pytest.mark.parametrize("length", [2, 4])
def test_what_a_replay_does_not_write_is_poison(length: int, cuda: EmulatedCuda) -> None:
    x, out = torch.ones(4, device="cuda"), torch.empty(4, device="cuda")
    double(x, out, length)
    kept: list[torch.Tensor] = []

    def run() -> None:
        kept.append(torch.empty_like(x))
        double(x, kept[0], length)
        out.copy_(kept[0])

    graph = captured(run)
    for _ in range(2):
        graph.replay()
        assert out.isnan().tolist() == [False] * length + [True] * (4 - length)
        kept[0].fill_(1)


@pytest.mark.parametrize("shared", [False, True])
def test_graphs_of_one_pool_overwrite_each_other(shared: bool, cuda: EmulatedCuda) -> None:
    x, pool = torch.ones(4, device="cuda"), torch.cuda.graph_pool_handle()
    results: list[torch.Tensor] = []
    graphs = [captured(lambda: results.append(x + 1), pool if shared else None) for _ in range(2)]
    graphs[0].replay()
    assert results[0].tolist() == [2, 2, 2, 2]
    graphs[1].replay()
    assert bool(results[0].isnan().all()) == shared


@pytest.mark.parametrize("is_freed", [False, True])
def test_a_graph_outlives_a_tensor(is_freed: bool, cuda: EmulatedCuda) -> None:
    tensors = {"x": torch.ones(4, device="cuda"), "out": torch.zeros(4, device="cuda")}
    graph = captured(lambda: tensors["out"].copy_(tensors["x"] + 1))
    if is_freed:
        del tensors["x"]
    graph.replay()
    assert kinds(cuda) == (["freed memory"] if is_freed else [])


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_kernel_is_compiled_in_a_capture(is_warm: bool, cuda: EmulatedCuda) -> None:
    x = torch.ones(4, device="cuda")
    if is_warm:
        double(x, torch.empty_like(x))
    captured(lambda: double(x, torch.empty_like(x)))
    assert kinds(cuda) == ([] if is_warm else ["compiled in a capture"])


def test_a_capture_copies_from_the_host(cuda: EmulatedCuda) -> None:
    x, host = torch.zeros(4, device="cuda"), torch.ones(4, pin_memory=True)
    graph = captured(lambda: x.copy_(host, non_blocking=True))
    host.fill_(7)
    graph.replay()
    assert x.tolist() == [7, 7, 7, 7]
    assert kinds(cuda) == ["host in a graph"]


@pytest.mark.parametrize("leaves", [False, True])
def test_work_leaves_the_capture(leaves: bool, cuda: EmulatedCuda) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def run() -> None:
        with torch.cuda.stream(side if leaves else None):
            x.add_(1)

    captured(run)
    assert kinds(cuda) == (["outside the capture"] if leaves else [])


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
    assert {kernel.place.split(":")[0] for kernel in cuda.report.compiled} == {HERE}


@pytest.mark.parametrize(("start", "length"), [(0, 17), (1, 17), (0, 16), (0, 1)])
def test_a_repeated_launch_is_another_variant(start: int, length: int, cuda: EmulatedCuda) -> None:
    x, out = torch.ones(33, device="cuda"), torch.empty(33, device="cuda")
    compiled = double(x, out, 18)
    compiled[(1, 1, 1)](x[start:], out, length, 32, True)
    assert kinds(cuda) == ([] if (start, length) == (0, 17) else ["other specialisation"])


@pytest.mark.parametrize("grid", [(65536, 1, 1), (1, 65535, 65535), (1, 65536, 1), (1, 1, 65536), (2**31, 1, 1)])
def test_grids(grid: tuple[int, int, int]) -> None:
    with EmulatedCuda(executes=False) as machine:
        x = torch.ones(4, device="cuda")
        _double_kernel[grid](x, x, 4, BLOCK=32)
        assert kinds(machine) == (["grid"] if max(grid[1:]) > 65535 or grid[0] > 65536 else [])


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
    graph = captured(lambda: out.copy_(x))
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (one, other):
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(one):
        if second == "writes":
            out.copy_(x)
        else:
            x.add_(1)
    ORDERS[order](one, other)
    with torch.cuda.stream(other):
        if second == "is a kernel":
            double(x, out)
        elif second == "is a replay":
            graph.replay()
        elif second == "reads":
            out.copy_(x)
        else:
            x.fill_(0)
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


def test_memory_is_counted() -> None:
    with EmulatedCuda(total_memory=10_000) as machine:
        x = torch.zeros(1000, device="cuda")
        view = x[10:]
        assert torch.cuda.memory_allocated() == 4000
        assert torch.cuda.mem_get_info() == (6000, 10_000)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(2000, device="cuda")
        del x
        assert torch.cuda.memory_allocated() == 4000
        del view
        assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (0, 4000)
        assert not machine.report.hazards


def test_threads_have_streams_of_their_own(cuda: EmulatedCuda) -> None:
    """And factories work there too."""
    side, seen = torch.cuda.Stream(), []

    def run() -> None:
        seen.append((torch.cuda.current_stream(), torch.ones(2, device="cuda").tolist()))

    with torch.cuda.stream(side):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert seen == [(torch.cuda.default_stream(), [1, 1])]


def test_nothing_is_computed_but_all_is_noted() -> None:
    """A matrix of 32 GB, of which no page is ever touched."""
    with EmulatedCuda(executes=False) as machine:
        x = torch.randn(10**5, 8 * 10**4, device="cuda", dtype=torch.bfloat16)
        y = (x @ x[:, :8].new_ones(8 * 10**4, 8)).float().softmax(-1)
        assert (y.shape, y.dtype, y[0, 0].item()) == ((10**5, 8), torch.float32, 0)
        double(y, torch.empty_like(y))
        assert [launch.kernel for launch in machine.report.launches] == ["_double_kernel"]
        assert len(machine.report.synchronisations) == 1
        assert not machine.report.hazards
