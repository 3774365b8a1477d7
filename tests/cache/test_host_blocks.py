"""Blocks copied on the device, to the host and back, against a dictionary that says which data each block holds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paged.cache.host_blocks
from paged.cache.host_blocks import HostBlocks
from paged.kernels.cache.copy_blocks import BlockCopy

Step = tuple[str, list[tuple[int, int]]]
NUM_BLOCKS, NUM_HOST_BLOCKS = 9, 6


@st.composite
def pairs(draw: st.DrawFn, sources: range, targets: range, *, is_apart: bool) -> list[tuple[int, int]]:
    """Sources, which may come twice, and other targets, which may not."""
    chosen = draw(st.lists(st.sampled_from(targets), unique=True, max_size=len(targets) - 1))
    left = [block for block in sources if not is_apart or block not in chosen]
    return [(draw(st.sampled_from(left)), target) for target in chosen]


DEVICE, HOST = range(NUM_BLOCKS + 1), range(1, NUM_HOST_BLOCKS + 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("copy"), pairs(DEVICE, DEVICE, is_apart=True)),
        st.tuples(st.just("swap_out"), pairs(DEVICE, HOST, is_apart=False)),
        st.tuples(st.just("swap_in"), pairs(HOST, DEVICE, is_apart=False)),
    ),
    max_size=8,
)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("backend", "shape"),
    [("triton", (3, 5)), ("torch", (4, 2, 8)), ("torch", (3, 5)), ("torch", (1, 3))],
    indirect=["backend"],
    ids=str,
)
@settings(max_examples=12, deadline=None)
@given(steps=STEPS, num_staged=st.integers(1, NUM_HOST_BLOCKS))
def test_as_a_dictionary_would(shape: tuple[int, ...], steps: list[Step], num_staged: int) -> None:
    caches = torch.randint(-100, 100, (3, NUM_BLOCKS + 1, *shape), dtype=torch.int16)
    blocks = {("device", block): caches[:, block].clone() for block in DEVICE}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged.cache.host_blocks, "_STAGED_BYTES", num_staged * caches[:, 0].nbytes)
        host = HostBlocks(caches, NUM_HOST_BLOCKS)
    copy = BlockCopy(caches.unbind(), caches.unbind())
    host.swap_out([(0, block) for block in HOST])
    blocks |= {("host", block): blocks["device", 0] for block in HOST}
    places = {"copy": ("device", "device"), "swap_out": ("device", "host"), "swap_in": ("host", "device")}
    for name, moved in steps:
        if name == "copy":
            copy(torch.tensor(moved, dtype=torch.int64).view(-1, 2))
        else:
            getattr(host, name)(moved)
        one, other = places[name]
        blocks |= {(other, target): blocks[one, source] for source, target in moved}
        for block in DEVICE:
            assert torch.equal(caches[:, block], blocks["device", block])
