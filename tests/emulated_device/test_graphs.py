"""Steps replayed from graphs whose memory is poisoned before every replay: the logits that they should have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paged.batch import DrawToken, FullLogits, GreedyArgmax, LogitsPolicy, UnifiedBatchItem, VerifyLogits
from paged.kernels.sampling.sample_tokens import sample_tokens
from paged.models.loading.load_options import LoadOptions
from paged.models.paged_lm import PagedCausalLM
from paged.models.parallel.ranks import Ranks
from paged.models.parallel.share import Share
from paged.models.registry import _load, load_model
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.models.families import FAMILIES, Case, assert_same_logits, save_checkpoint, tokens
from tests.models.lora.folders import Adapter

LENGTHS = (7, 3)
# The tokens that each sequence gets in a step; a tuple's are drafts, whose logits are all wanted. Sequence 1 has an
# adapter, 2 begins with the last step.
STEPS: list[dict[int, Any]] = [{0: (3, 4)}, {0: [5], 1: [6]}, {1: (3, 4), 0: [6], 2: [7]}]


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


class _StandIn(Ranks):
    """The first of two ranks, the other of which computes the same; what is sent is work of the device alone."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x), -1)


def test_a_rank_of_two_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it adds up with others is within the graph, and nothing is waited for; tokens are chosen behind it."""
    save_checkpoint(FAMILIES["qwen3_moe"], tmp_path)
    policies: list[list[LogitsPolicy]] = [[FullLogits(), FullLogits()], [GreedyArgmax(), DrawToken(0.7, (3, 5))]]
    with EmulatedCuda(num_sms=2) as cuda:
        options = LoadOptions(device="cuda", block_size=4, num_blocks=8, max_seq_len=32, cuda_graphs=(2,))  # type: ignore[arg-type]
        ours = _load(tmp_path, options, _StandIn(Share(0, 2, expert_parallel=True)))

        def steps() -> list[torch.Tensor | None]:
            results = []
            for pair in policies:
                results += ours.unified_forward(
                    [UnifiedBatchItem(i, [5 + i], pos_offset=7, logits_policy=one) for i, one in enumerate(pair)]
                )
                for i in range(2):
                    ours.truncate_kv(i, 7)
            return results

        monkeypatch.setenv("PAGED_BACKEND", "torch")
        ours.unified_forward([UnifiedBatchItem(i, tokens(7, i)) for i in range(2)])
        expected = steps()
        monkeypatch.setenv("PAGED_BACKEND", "triton")
        ours.graphs.capture()
        assert ours.num_graph_replays == 0
        ones = torch.ones(2, device="cuda")
        sample_tokens(torch.zeros(2, 64, device="cuda"), ones.long()[:, None].repeat(1, 2), ones)  # as warmup does
        mark = cuda.report.mark()
        found = steps()
        assert ours.num_graph_replays == cuda.report.num_replays == 2
        assert (cuda.report.hazards, cuda.report.compiled_after(mark)) == ([], [])
        assert not cuda.report.synchronised_after(mark)
        pairs = [(mine.cpu(), theirs.cpu()) for mine, theirs in zip(found, expected, strict=True)]  # type: ignore[union-attr]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


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


def test_every_kind_of_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay is all that is launched, nothing is waited for or compiled: the logits of eager steps."""
    save_checkpoint(FAMILIES["llama"], tmp_path / "base")
    adapter = Adapter(("q_proj", "o_proj"), seed=1).save(tmp_path / "adapter", tmp_path / "base")
    with EmulatedCuda(num_sms=2) as cuda:
        ours = load_model(
            tmp_path / "base", device="cuda", block_size=4, num_blocks=16, max_seq_len=32, cuda_graphs=[4]
        )
        ours.adapters.load("poetry", adapter)
        ours.set_lora_adapter_for_cache(1, "poetry")
        monkeypatch.setenv("PAGED_BACKEND", "torch")  # quicker, for the prompts
        ours.unified_forward([UnifiedBatchItem(i, tokens(length, i)) for i, length in enumerate(LENGTHS)])
        monkeypatch.setenv("PAGED_BACKEND", "triton")
        ours.graphs.capture()
        mark = cuda.report.mark()
        replayed = [_run(ours, step) for step in STEPS]
        assert ours.num_graph_replays == cuda.report.num_replays == len(STEPS)
        assert (cuda.report.hazards, cuda.report.compiled_after(mark)) == ([], [])
        assert not cuda.report.synchronised_after(mark)
        assert len(cuda.report.launches) == mark.launches
        ours.release(2)
        for i, length in enumerate(LENGTHS):
            ours.truncate_kv(i, length)
        ours.graphs.clear()
        eager = [_run(ours, step) for step in STEPS]
        assert ours.num_graph_replays == len(STEPS)
        assert len(cuda.report.launches) - mark.launches > 10 * len(STEPS)
        results = [[rows.cpu() for rows in step] for step in (*replayed, *eager)]
    for actual, expected in zip(results[: len(STEPS)], results[len(STEPS) :], strict=True):
        for got, want in zip(actual, expected, strict=True):
            assert_same_logits(got, want)


def _run(model: PagedCausalLM, step: dict[int, Any]) -> list[torch.Tensor]:
    lengths = {handle.cache_id: handle.num_tokens for handle in model.kv_manager.handles()}
    items = []
    for name, ids in step.items():
        policy: LogitsPolicy = VerifyLogits() if isinstance(ids, tuple) else FullLogits()
        items.append(UnifiedBatchItem(name, ids, pos_offset=lengths.get(name, 0), logits_policy=policy))
    return [rows for rows in model.unified_forward(items) if rows is not None]
