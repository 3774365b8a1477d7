"""Weights of a CPU in huge pages, as the system's own account of a process's memory shows."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.executors.llm_executor import LlmExecutor
from paged.models.loading.huge_pages import move_to_huge_pages

MEMORY_MAP = Path("/proc/self/smaps")
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PAGE = 2 << 20

pytestmark = pytest.mark.skipif(
    not MEMORY_MAP.exists() or not SETTING.exists() or "[never]" in SETTING.read_text(),
    reason="needs transparent huge pages",
)


def mappings_of(tensor: torch.Tensor) -> Iterator[dict[str, str]]:
    """What the system says of each mapping that holds a part of a tensor, by name."""
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    for text in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", MEMORY_MAP.read_text(), flags=re.MULTILINE)[1:]:
        first, *lines = text.splitlines()
        low, high = (int(address, 16) for address in first.split()[0].split("-"))
        if low < end and start < high:
            yield dict(line.split(":", 1) for line in lines)


def huge_bytes(tensor: torch.Tensor) -> int:
    """Bytes in huge pages of the mappings that hold a tensor."""
    return sum(int(mapping["AnonHugePages"].split()[0]) << 10 for mapping in mappings_of(tensor))


def test_tensors_move_and_keep_addresses_and_values() -> None:
    tensors = [torch.randn(5 * PAGE // 4), torch.randn(1000), torch.randn(3, 5), torch.empty(0)]
    copies = [tensor.clone() for tensor in tensors]
    addresses = [tensor.data_ptr() for tensor in tensors]
    before = huge_bytes(tensors[0])
    move_to_huge_pages(tensors)
    if huge_bytes(tensors[0]) == before:
        pytest.skip("this Linux, before 6.1, moves them in the background")
    assert huge_bytes(tensors[0]) - before >= 4 * PAGE  # five pages, of which the first and last may hold others
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    for tensor, copied in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copied)


def assert_asked_for(network: Any) -> None:
    for weight in network.weight_tensors():
        if weight.is_mkldnn:  # has no address to ask about
            continue
        for mapping in mappings_of(weight):
            assert "hg" in mapping["VmFlags"].split()


@pytest.mark.parametrize("form", [None, "int4"])
def test_a_model_asks_for_huge_pages_for_all_its_weights(form: str | None, llama_folder: Path) -> None:
    """When it is packed, and for the new memory of weights that come after a sleep without any."""
    executor = LlmExecutor.from_pretrained(llama_folder, quantization=form, num_blocks=8, block_size=4)
    model: Any = executor.model
    model.pack()
    assert sum(weight.nbytes for weight in model.network.weight_tensors()) >= model.parameter_bytes()
    assert_asked_for(model.network)
    if form is None:
        executor.sleep(2)
        executor.update_weights(llama_folder)
        assert_asked_for(model.network)
