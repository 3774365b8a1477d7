"""What the processes of a model send: as many bytes as the arithmetic says, and the same to all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from paged.batch import UnifiedBatch, UnifiedBatchItem
from paged.errors import PagedError
from paged.executors.llm_executor import LlmExecutor
from paged.executors.parallel.messages import Channel, Kind
from paged.models.parallel.ranks import Ranks
from paged.models.parallel.volume import step_bytes
from tests.executors.parallel.cases import OPTIONS
from tests.executors.parallel.followers import Followers
from tests.models.families import FAMILIES, save_checkpoint, tokens


class _Loop(Ranks):
    """Keeps what is broadcast, and gives it back."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[torch.Tensor] = []
        self.is_sender = True

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_sender:
            self.sent.append(x.clone())
            return x
        return x.copy_(self.sent.pop(0))


@pytest.mark.parametrize("rows", [0, 1, 300, 20_000])
def test_messages_arrive_as_they_were_sent(rows: int) -> None:
    """Short ones in one broadcast, long ones in two."""
    loop = _Loop()
    arrays = [np.arange(rows), np.arange(rows, dtype=np.int32), np.arange(rows % 7, dtype=np.uint8), np.array(5)]
    arrays.append(np.arange(6, dtype=np.int32).reshape(2, 1, 3)[:, :, ::2])
    sender, receiver = Channel(loop), Channel(loop)
    sender.send(Kind.STEP, arrays)
    assert len(loop.sent) == (2 if rows > 2000 else 1)
    loop.is_sender = False
    kind, found = receiver.receive()
    assert kind is Kind.STEP
    for mine, theirs in zip(found, arrays, strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert sender.state.tolist() == receiver.state.tolist()


@pytest.mark.parametrize("name", ["llama", "cohere2", "gemma4_moe", "olmo2"])
def test_bytes_of_a_step(name: str, followers: Followers, tmp_path: Path) -> None:
    save_checkpoint(FAMILIES[name], tmp_path)
    with followers.load(tmp_path, 2, dtype="bfloat16", **OPTIONS | {"cuda_graphs": False}) as spread:
        network: Any = spread.model.network
        for items in (
            [UnifiedBatchItem("a", tokens(11)), UnifiedBatchItem("b", tokens(6), is_final_chunk=False)],
            [UnifiedBatchItem("a", [1], pos_offset=11), UnifiedBatchItem("b", [2, 3], pos_offset=6)],
        ):
            batch = UnifiedBatch(items)
            before = spread.model.ranks.num_bytes.copy()
            spread.unified_decode(batch)
            sent = spread.model.ranks.num_bytes - before
            assert sent.pop("broadcast") == 1 << 14
            assert sent == step_bytes(
                network.config,
                num_sums=network.num_sums(network.config),
                last_sums=network.layer_class.num_sums(network.config, network.config.num_layers - 1),
                size=2,
                itemsize=2,
                num_tokens=batch.total_q_tokens,
                num_rows=batch.num_sampled_items,
            )


def test_processes_of_a_mesh(followers: Followers, tmp_path: Path) -> None:
    """Two models of two processes each."""
    save_checkpoint(FAMILIES["llama"], tmp_path)
    executor = followers.order(tmp_path, 4, {"tensor_parallel_size": 2, "mesh": (2, 2)}, OPTIONS)
    try:
        expected = LlmExecutor.from_pretrained(tmp_path, **OPTIONS)
        batch = UnifiedBatch([UnifiedBatchItem("a", tokens(9))])
        (found,), (alone,) = executor.unified_decode(batch), expected.unified_decode(batch)
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
        executor.shutdown()
        assert dist.is_initialized()  # it is the caller's
    finally:
        dist.destroy_process_group()
    assert followers.answers(4) == ["served"] * 3


def test_every_so_many_steps_all_have_been_told_the_same(followers: Followers, tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["llama"], tmp_path)
    executor = followers.order(tmp_path, 2, {"tensor_parallel_size": 2, "check_steps": 3}, OPTIONS)
    for step in range(5):
        executor.unified_decode(UnifiedBatch([UnifiedBatchItem("a", [step], pos_offset=step)]))
    channel: Channel = executor._driver._channel  # type: ignore[union-attr]
    channel.state[1] += 1
    with pytest.raises(PagedError, match=r"ranks \[1\] have been told something else"):
        executor.unified_decode(UnifiedBatch([UnifiedBatchItem("a", [5], pos_offset=5)]))
    executor.shutdown()
    assert "have been told something else" in followers.answers(2)[0]
