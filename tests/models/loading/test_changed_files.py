"""Weights files that change while they are read are errors that name the file, and leave the process alive."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged.errors import CheckpointError
from paged.models.loading import tensor_file
from paged.models.loading.tensor_file import TensorFile
from paged.models.loading.weights import load_weights, read_headers, read_tensor
from tests.models.edits import WEIGHTS

SHAPES = {"a": (5, 7), "b": (3, 4, 5), "c": (), "d": (0, 4), "e": (9,)}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file({name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}, tmp_path / WEIGHTS)
    return tmp_path


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _rewritten(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-4] + bytes(4))
    os.utime(file, ns=(0, 0))


def _replaced(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    other.replace(file)


@pytest.mark.parametrize("change", [_cut, _rewritten, _replaced, Path.unlink])
def test_between_header_and_tensors(weights: Path, change: Callable[[Path], None]) -> None:
    stored = read_headers(weights)
    change(weights / WEIGHTS)
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS}: missing"):
        load_weights(stored, {"a": torch.empty(5, 7)})
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS}: missing"):
        read_tensor(stored, "b")


@pytest.mark.parametrize("change", [_cut, _rewritten])
def test_while_it_is_open(weights: Path, change: Callable[[Path], None]) -> None:
    """However a tensor is read."""
    reads: list[Callable[[TensorFile], object]] = [
        lambda opened: opened.get_tensor("e"),
        lambda opened: opened.get_part("a", 0, 1, 3),
        lambda opened: opened.get_part("b", 1, 0, 2),
        lambda opened: opened.fill("a", torch.empty(5, 7)),
        lambda opened: opened.fill("a", torch.empty(5, 7, dtype=torch.bfloat16)),
    ]
    opened = TensorFile(weights / WEIGHTS)
    change(weights / WEIGHTS)
    for read in reads:
        with pytest.raises(CheckpointError, match=rf"{WEIGHTS}: .*(changed|ends within)"):
            read(opened)
    opened.close()


@pytest.mark.parametrize("piece", [16, 4 << 20])
def test_values(weights: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one thread and in several, in place and converted, whole and in parts."""
    monkeypatch.setattr(tensor_file, "_PIECE_BYTES", piece)
    monkeypatch.setattr(tensor_file, "_LEAST_SHARE", piece)
    monkeypatch.setattr(tensor_file, "_LEAST_RUN", piece)
    want, opened = load_file(weights / WEIGHTS), TensorFile(weights / WEIGHTS)
    for name, shape in SHAPES.items():
        assert torch.equal(opened.get_tensor(name), want[name])
        for dtype in (torch.bfloat16, torch.float32):
            out = torch.empty(shape, dtype=dtype)
            opened.fill(name, out)
            assert torch.equal(out, want[name].to(dtype))
        for dim, size in enumerate(shape):
            for stop in range(size + 1):
                part = opened.get_part(name, dim, stop // 2, stop)
                assert torch.equal(part, want[name].narrow(dim, stop // 2, stop - stop // 2))
                assert part.is_contiguous()
    out = torch.empty(4, 3, 5).transpose(0, 1)
    opened.fill("b", out)
    assert torch.equal(out, want["b"].float())
    opened.close()


def test_a_type_that_torch_has_not(tmp_path: Path) -> None:
    text = json.dumps({"a": _entry(0, 8, [2], "C32")}).encode()
    (tmp_path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS}: .*C32"):
        read_tensor(read_headers(tmp_path), "a")


def _entry(start: int, stop: int, shape: object = (2,), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": 1},
        {"a": _entry(0, 8) | {"data_offsets": [0]}},
        {"a": _entry(0, 8, [-2])},
        {"a": _entry(0, 8, [True, 2])},
        {"a": _entry(0, 8, [3])},
        {"a": _entry(0, 8, "2")},
        {"a": _entry(8, 0)},
        {"a": _entry(0, 8), "b": _entry(0, 8)},
        {"a": _entry(8, 16)},
        {"a": _entry(0, 16, [4])},
        {"a": _entry(0, 8, [1 << 62, 1 << 62])},
        {"a": _entry(4, 12, [2]), "b": _entry(0, 4, [9], "NEW")},
    ],
)
def test_headers_that_contradict_the_file(header: object, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    (tmp_path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=WEIGHTS):
        read_headers(tmp_path)
