"""When the host waits for the device, and what it may do to memory meanwhile: each planted, beside what is allowed."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.emulated_device.emulator.device import EmulatedCuda
from tests.emulated_device.planted import ROOM, captured, kinds

HERE = f"{ROOM}test_host.py"


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
