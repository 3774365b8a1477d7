"""Weights are packed some rows at a time, and every kernel of theirs is known before a step needs it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paged import QuantizedWeight
from paged.kernels.quantization.gemm import row_counts
from paged.models import network_loader
from paged.models.quantization import packed_weights as packing
from paged.models.quantization.eight_bit import EightBit
from paged.models.warmup import run_packed
from tests.models.quantization.checkpoints import Folders, assert_as_unpacked, load, packed_weights
from tests.models.quantization.packers import FORMATS

pytestmark = pytest.mark.usefixtures("_fast")
# 128 rows of the widest projections.
PIECE = 128 * 384


class _Memory(TorchDispatchMode):
    """Bytes of the tensors that operations make and that are still there; the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, weakref.ref[Any]] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in {*self.known, *given}:
                self._add(each.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def drop(_: Any) -> None:
            self.known.pop(key)
            self.now -= size

        self.known[key] = weakref.ref(storage, drop)
        self.now += size
        self.most = max(self.most, self.now)


@pytest.mark.parametrize("folders", [name for name in FORMATS if name != "mxfp4-pack-quantized"], indirect=True)
def test_some_rows_at_a_time(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the weights there is as much as 128 rows take while they are unpacked, 16 bytes a code; nothing where
    codes are stored as they are."""
    monkeypatch.setattr(packing, "_MOST_CODES", PIECE)
    load_weights = network_loader.load_weights
    most = []

    def watched(*args: Any) -> None:
        with _Memory() as memory:
            load_weights(*args)
        most.append(memory.most)

    with monkeypatch.context() as patch:
        patch.setattr(network_loader, "load_weights", watched)
        model = load(folders.packed)
    assert most[0] < 16 * PIECE
    layouts = {type(weights.layout) for weights in packed_weights(model).values()}
    assert (most[0] == 0) == (layouts == {EightBit})
    assert_as_unpacked(folders)


@pytest.mark.parametrize("folders", ["gptq zeros, order"], indirect=True)
def test_every_kernel_is_launched_beforehand(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of as few rows as take each tile, of each run."""
    model = load(folders.packed)
    counts: dict[int, list[int]] = {}

    def recorded(x: torch.Tensor, weight: QuantizedWeight, **_: Any) -> torch.Tensor:
        counts.setdefault(weight.values.data_ptr(), []).append(len(x))
        return x

    monkeypatch.setattr(packing, "quantized_linear", recorded)
    run_packed(model.network, 3000)
    for weights in packed_weights(model).values():
        for _, weight in weights.runs:
            assert set(counts[weight.values.data_ptr()]) >= set(row_counts(3000, weight, torch.float32))
