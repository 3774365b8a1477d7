"""Memory that recordings share: places come back when tensors are dropped, and no two live tensors overlap."""

import random

import pytest
import torch

from paged.kernels.cpu.recording import Recording
from paged.kernels.cpu.step_memory import StepMemory
from tests.backends import needs_numba


def test_live_tensors_never_overlap_and_all_memory_comes_back() -> None:
    """Random tensors, some larger than a chunk, and views that outlive them; each is filled with its own number."""
    random_ = random.Random(0)
    memory, live = StepMemory(), {}
    for number in range(3000):
        if len(live) > random_.randrange(40):
            del live[random_.choice(list(live))]
        size = random_.choice((0, 1, 63, 64, 65, 5000, 300_000, 9_000_000 if number % 500 == 0 else 7))
        tensor = torch.empty(0, dtype=torch.uint8).set_(memory.take(size))
        assert tensor.nbytes == size
        assert memory.holds(tensor)
        live[number] = tensor.fill_(number % 251)[size // 2 :]
        checked = random_.choice(list(live))
        assert bool((live[checked] == checked % 251).all()), f"tensor {checked} was overwritten"
    held = memory.num_bytes
    live.clear()
    del tensor
    whole = [memory.take(num_bytes) for num_bytes in (8 << 20,) * (held // (8 << 20) // 2)]
    assert memory.num_bytes == held, f"{len(whole)} chunks fit into what came back"


@needs_numba
@pytest.mark.by_cpu
def test_recordings_share_memory_but_not_with_what_outlives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two recordings of hundreds of tensors, by kernels and by PyTorch, need the memory of a few of them."""
    import paged

    monkeypatch.setenv("PAGED_BACKEND", "numba")
    memory, weight = StepMemory(), torch.rand(4096)
    x, out = torch.randn(64, 4096), torch.empty(64, 4096)
    kept = []

    def run() -> None:
        y = x
        for layer in range(60):
            y = paged.rms_norm(y, weight)
            y = y * 1.5 + x
            if layer == 7:
                kept.append(y)
        out.copy_(y)

    recordings = [Recording(run, memory) for _ in range(2)]
    assert all(recording.obstacle == "" for recording in recordings)
    assert memory.num_bytes < 24 * out.nbytes, "of 360 tensors"
    run()
    expected, expected_inside = out.clone(), kept[-1]
    for recording, inside in zip(recordings, kept, strict=False):
        out.zero_()
        assert recording.repeat()
        assert torch.equal(out, expected)
        assert torch.equal(inside, expected_inside)
    assert torch.equal(kept[0], expected_inside), "the second recording did not write there"
