"""What captures and replays must not do: each planted, beside what they may."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import paged
from paged import UnsupportedError
from paged.bench.cards.cards import CARDS
from paged.bench.problems.arguments import map_tensors
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.emulated_device.planted import captured, double, kinds
from tests.interop.test_custom_ops import small_call
from tests.operations import OPERATIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
ROWS = dict(re.findall(r"^\| `(\w+)` \| yes \| yes \| (yes|no) \|", PAGE.read_text(), re.MULTILINE))


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


def test_the_page_lists_every_operation() -> None:
    assert ROWS.keys() == set(OPERATIONS)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_graph_gives_what_the_call_gives(name: str, cuda: EmulatedCuda) -> None:
    """As the page says: a replay gives the call's results, or the capture is refused."""
    arguments = map_tensors(lambda tensor: tensor.to("cuda"), small_call(name, torch.device("cpu")))
    expected = CARDS[name].call(map_tensors(torch.clone, arguments))  # also compiles
    returned: list[Any] = []

    def run() -> None:
        returned.append(getattr(paged, name)(**arguments))

    if ROWS[name] == "no":
        with pytest.raises(UnsupportedError, match="capture of a CUDA graph"):
            captured(run)
        return
    captured(run).replay()
    assert kinds(cuda) == []
    found = CARDS[name].results(arguments, returned[0])
    for result, want in expected.items():
        assert torch.equal(found[result].double().nan_to_num(7), want.double().nan_to_num(7)), result
