"""A rank's part of a network: what it reads is what it holds, and all parts together are the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.errors import UnsupportedError
from paged.models.loading import weights
from paged.models.network_loader import load_network
from paged.models.parallel.config import ParallelConfig
from paged.models.parallel.ranks import Ranks
from paged.models.parallel.share import Share
from paged.models.registry import read_model_config
from tests.models.families import FAMILIES, save_checkpoint

CPU = torch.device("cpu")


class _Counted:
    """A file whose tensors are counted when they are read."""

    def __init__(self, file: Any, read: list[int], name: str = "") -> None:
        self._file, self._read, self._name = file, read, name

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._count(self._file.get_tensor(name))

    def get_slice(self, name: str) -> _Counted:
        return _Counted(self._file.get_slice(name), self._read)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._count(self._file[index])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self._read.append(tensor.nbytes)
        return tensor


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize(
    "name", ["llama_biases_linear_rope", "phi3", "gpt_oss", "qwen2_moe", "glm4_moe", "gemma4_moe", "minimax_m2"]
)
def test_a_rank_reads_what_it_holds(
    name: str, expert_parallel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(FAMILIES[name], tmp_path)
    network_class, config = read_model_config(tmp_path)
    opened, read = weights.open_tensors, list[int]()

    @contextmanager
    def counted(file: Path) -> Iterator[Any]:
        with opened(file) as tensors:
            yield _Counted(tensors, read)

    monkeypatch.setattr(weights, "open_tensors", counted)
    total = whole = 0
    for size in (1, 4):
        for rank in range(size):
            read.clear()
            ranks = Ranks(Share(rank, size, expert_parallel))
            network = load_network(
                network_class, config, tmp_path, dtype=torch.float32, device=CPU, has_fp8_cache=False, ranks=ranks
            )
            held = sum(parameter.nbytes for parameter in network.parameters())
            assert sum(read) <= held
            assert max(read) <= max(parameter.nbytes for parameter in network.parameters())
            total += sum(read) if size > 1 else 0
            whole = held if size == 1 else whole
            assert size == 1 or held < 0.5 * whole
    assert total >= whole


def test_ranks_alone_send_nothing() -> None:
    ranks, x = Ranks.join(ParallelConfig(), CPU), torch.ones(2, 3)
    assert ranks.sum(x) is x
    assert ranks.gather(x) is x
    ranks.wait_for_all()
    ranks.close()
    assert not ranks.num_bytes


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("llama", 3, "num_key_value_heads 2"),
        ("qwen3_moe", 64, "num_attention_heads 4"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(name: str, size: int, message: str, tmp_path: Path) -> None:
    save_checkpoint(FAMILIES[name], tmp_path)
    _, config = read_model_config(tmp_path)
    with pytest.raises(UnsupportedError, match=f"tensor_parallel_size {size}: {message}"):
        Share(0, size).config(config)
