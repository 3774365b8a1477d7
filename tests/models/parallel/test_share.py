"""A rank's part of a network: what it reads is what it holds, and all parts together are the whole, packed ones too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.errors import UnsupportedError
from paged.models.layers.modules import Linear
from paged.models.loading import weights
from paged.models.parallel.share import Share, cut
from paged.models.registry import read_model_config
from tests.models.families import FAMILIES, save_checkpoint
from tests.models.parallel.parts import load_part
from tests.models.quantization.checkpoints import write
from tests.models.quantization.packers import FORMATS
from tests.tolerance import assert_within

# 384 units would be in two parts of 192, and columns that are sorted by group stand in no part.
REFUSED = ("fp8 blocks", "float-quantized blocks", "gptq zeros, order", "pack-quantized zeros, order")


class _Counted:
    """A file whose tensors are counted when they are read."""

    def __init__(self, file: Any, read: list[int]) -> None:
        self._file, self._read = file, read

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        self._read.append(tensor.nbytes)
        return tensor

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._counted(self._file.get_tensor(name))

    def get_part(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        return self._counted(self._file.get_part(name, dim, start, stop))

    def fill(self, name: str, out: torch.Tensor) -> None:
        self._file.fill(name, self._counted(out))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize(
    "name",
    ["llama_biases_linear_rope", "phi3", "gpt_oss", "qwen2_moe", "glm4_moe", "gemma4_moe", "minimax_m2", "deepseek_v3"],
)
def test_a_rank_reads_what_it_holds(
    name: str, expert_parallel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(FAMILIES[name], tmp_path)
    opened, read = weights.open_tensors, list[int]()

    @contextmanager
    def counted(file: Path, stamp: tuple[int, ...] = ()) -> Iterator[Any]:
        with opened(file, stamp) as tensors:
            yield _Counted(tensors, read)

    monkeypatch.setattr(weights, "open_tensors", counted)
    total = whole = 0
    for size in (1, 4):
        for rank in range(size):
            read.clear()
            network = load_part(tmp_path, Share(rank, size, expert_parallel))
            sizes = [parameter.nbytes for parameter in network.parameters()]
            held = sum(sizes)
            assert sum(read) <= held
            assert max(read) <= max(sizes)
            total += sum(read) if size > 1 else 0
            whole = held if size == 1 else whole
            assert size == 1 or held < 0.5 * whole
    assert total >= whole


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [("llama", 3, "num_key_value_heads 2"), ("qwen3_moe", 64, "num_attention_heads 4")],
)
def test_what_does_not_divide_is_refused_by_name(name: str, size: int, message: str, tmp_path: Path) -> None:
    save_checkpoint(FAMILIES[name], tmp_path)
    _, config = read_model_config(tmp_path)
    with pytest.raises(UnsupportedError, match=f"tensor_parallel_size {size}: {message}"):
        Share(0, size).config(config)


def _linears(folder: Path, share: Share) -> dict[str, Linear]:
    network = load_part(folder, share)
    for module in network.modules():
        if isinstance(module, Linear) and module.packed is not None:
            module.packed.derive_from_weights()
    return {path: module for path, module in network.named_modules() if isinstance(module, Linear)}


@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_projections(name: str, packable: Path, tmp_path: Path) -> None:
    folder = write(name, packable, tmp_path).packed
    _, config = read_model_config(folder)
    if name in REFUSED:
        with pytest.raises(UnsupportedError, match=r"tensor_parallel_size 2: layers\.0\."):
            _linears(folder, Share(0, 2))
        return
    whole = _linears(folder, Share())
    share = Share(1, 2)
    for path, own in _linears(folder, share).items():
        inputs = torch.randn(3, whole[path].in_features)
        names = [f"model.{path.rpartition('.')[0]}.{part}.weight" for part in own.parts]
        parts = [share.sections(config, name) for name in (["lm_head.weight"] if path == "lm_head" else names)]
        if own.in_features < whole[path].in_features:  # of its columns alone, the others' input is 0
            kept = torch.zeros_like(inputs)
            start, stop = parts[0][0].start, parts[0][0].stop
            kept[:, start:stop] = inputs[:, start:stop]
            expected, found = whole[path](kept), own(cut(inputs, parts[0], 1))
        else:
            results = whole[path](inputs).split(whole[path].sizes, 1)
            expected = torch.cat([cut(result, part, 1) for result, part in zip(results, parts, strict=True)], 1)
            found = own(inputs)
        assert_within(found, expected, 1e-4 * (1 + expected.abs()))
