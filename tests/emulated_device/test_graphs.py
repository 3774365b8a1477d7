"""Decode steps replayed from graphs whose memory is poisoned before every replay: the logits of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paged.batch import UnifiedBatchItem
from paged.models.registry import load_model
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.models.families import FAMILIES, Case, assert_same_logits, save_checkpoint, tokens

LENGTHS = (7, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_replays(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, waited for, or read that is gone; PyTorch runs the prompts, as that is quicker."""
    theirs = save_checkpoint(FAMILIES[family], tmp_path)
    with EmulatedCuda(num_sms=2) as cuda:
        ours = load_model(tmp_path, device="cuda", block_size=4, num_blocks=8, max_seq_len=32, cuda_graphs=[2])
        case = Case(theirs, ours)
        monkeypatch.setenv("PAGED_BACKEND", "torch")
        ours.unified_forward([UnifiedBatchItem(i, tokens(length, i)) for i, length in enumerate(LENGTHS)])
        monkeypatch.setenv("PAGED_BACKEND", "triton")
        ours.graphs.capture()
        mark = cuda.report.mark()
        logits = ours.decode_batch([(i, 5 + i, length) for i, length in enumerate(LENGTHS)])
        assert ours.num_graph_replays == cuda.report.num_replays == 1
        assert (cuda.report.hazards, cuda.report.compiled_after(mark)) == ([], [])
        assert not cuda.report.synchronised_after(mark)
        on_host = logits.cpu()
    for i, length in enumerate(LENGTHS):
        assert_same_logits(on_host[i], case.expected([*tokens(length, i), 5 + i])[-1])


def test_larger_and_smaller_batches_in_turns(tmp_path: Path) -> None:
    """Graphs of two sizes over the same memory, steps prepared ahead, and an eager step between: all the same."""
    case_model = save_checkpoint(FAMILIES["llama"], tmp_path)
    with EmulatedCuda(num_sms=2) as cuda:
        ours = load_model(tmp_path, device="cuda", block_size=4, num_blocks=16, max_seq_len=32, cuda_graphs=[1, 2])
        texts = {0: tokens(4, 0), 1: tokens(3, 1)}
        ours.unified_forward([UnifiedBatchItem(i, text) for i, text in texts.items()])
        ours.graphs.capture()
        mark = cuda.report.mark()
        rows: list[tuple[int, torch.Tensor, int]] = []
        for names in ((0, 1), (1,), (0, 1)):
            handles = [handle for handle in ours.kv_manager.handles() if handle.cache_id in names]
            assert ours.prepare_step(handles) is not None
            items = []
            for handle in handles:
                texts[handle.cache_id].append(9)  # type: ignore[index]
                items.append(UnifiedBatchItem(handle.cache_id, [9], kv_cache=handle, pos_offset=handle.num_tokens))
            for item, row in zip(items, ours.unified_forward(items), strict=True):
                assert row is not None
                rows.append((item.seq_id, row, len(texts[item.seq_id])))  # type: ignore[index, arg-type]
        assert ours.num_graph_replays == 3
        assert cuda.report.hazards == []
        assert not cuda.report.synchronised_after(mark)
        results = [(name, row.cpu(), length) for name, row, length in rows]
    case = Case(case_model, ours)
    for name, row, length in results:
        assert_same_logits(row, case.expected(texts[name][:length])[-1])
