"""An emulated device looks like one, and leaves nothing behind."""

import threading

import pytest
import torch

from tests.emulated_device.emulator.device import EmulatedCuda
from tests.emulated_device.planted import double


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
        assert [launch.kernel for launch in machine.report.launches] == ["double_kernel"]
        assert len(machine.report.synchronisations) == 1
        assert not machine.report.hazards
