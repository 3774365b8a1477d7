"""Decode context parallelism: ranks, here threads, that each hold a part of a cache's positions."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paged import UnsupportedError
from paged.bench.attention.problem import Problem, make
from paged.kernels.attention import definition
from tests.deadline import HANG_S
from tests.tolerance import assert_close

pytest.importorskip("vllm", reason="needs vLLM's Python files: make vllm")

from vllm.config import CacheConfig, DeviceConfig, ParallelConfig, VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport

from paged.interop.vllm_engine import metadata as vllm_metadata
from paged.interop.vllm_engine.backend import PagedImpl
from paged.interop.vllm_engine.metadata import ContextShard, PagedMetadata, PagedMetadataBuilder

pytestmark = pytest.mark.thorough
LENGTHS = ((1, 37), (5, 18), (6, 6), (1, 1), (1, 2), (20, 41))
BLOCK_SIZE = 8


class Group:
    """One rank's view of a group of threads, with the collectives of vLLM's."""

    def __init__(self, rank: int, world_size: int, barrier: Barrier, shared: list[Any]) -> None:
        self.rank_in_group, self.world_size, self._barrier, self._shared = rank, world_size, barrier, shared

    def _exchanged(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._shared[self.rank_in_group] = tensor
        self._barrier.wait(HANG_S)
        tensors = list(self._shared)
        self._barrier.wait(HANG_S)
        return tensors

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._exchanged(tensor), dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.stack(self._exchanged(tensor)).sum(0).chunk(self.world_size, dim)[self.rank_in_group]


def on_ranks(world_size: int, run: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `run` gives on each rank."""
    barrier, shared, here = Barrier(world_size), [None] * world_size, local()

    def start(rank: int) -> Any:
        here.group = Group(rank, world_size, barrier, shared)
        return run(rank)

    monkeypatch.setattr(vllm_metadata, "get_dcp_group", lambda: here.group)
    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(start, range(world_size)))


def shard_of(cache: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A cache [num_blocks, BLOCK_SIZE, 1, head_dim] whose sequences have these positions (a bool each) alone."""
    part = torch.full_like(cache, torch.nan)
    for seq, (q_len, seq_len) in enumerate(LENGTHS):
        held = positions[: seq_len - q_len].nonzero().squeeze(1)
        index = torch.arange(len(held))
        blocks = table[seq].long()
        part[blocks[index // BLOCK_SIZE], index % BLOCK_SIZE] = cache[blocks[held // BLOCK_SIZE], held % BLOCK_SIZE]
    return part


@pytest.mark.parametrize(("world_size", "interleave_size"), [(2, 1), (3, 4)])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "sinks": True}], ids=str)
def test_ranks_together_see_all(
    world_size: int,
    interleave_size: int,
    options: dict[str, Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the ranks hold lies before the step; its own keys all are given, and rows beyond the batch get 0."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")  # triton's interpreter is none for threads
    heads = 2 * world_size
    problem = Problem("", LENGTHS, heads=(heads, 1), block_size=BLOCK_SIZE, padding_rows=3)
    tensors = make(problem, torch.device("cpu"))
    q_lens = torch.tensor([q_len for q_len, _ in LENGTHS])
    named = {**options, **({"sinks": torch.randn(heads)} if "sinks" in options else {})}
    wanted = definition.paged_attention(**vars(tensors), **named)[0]

    position = torch.cat([torch.arange(seq_len - q_len, seq_len) for q_len, seq_len in LENGTHS])
    blocks = tensors.block_table.repeat_interleave(q_lens, 0).gather(1, position[:, None] // BLOCK_SIZE)
    own = [torch.full((len(tensors.q), 1, cache.shape[3]), torch.nan) for cache in (tensors.k_cache, tensors.v_cache)]
    for rows, cache in zip(own, (tensors.k_cache, tensors.v_cache), strict=True):
        rows[: len(position)] = cache[blocks[:, 0].long(), position % BLOCK_SIZE]
    lengths = {"seq_lens": tensors.seq_lens.to(device), "max_query_len": 20, "max_seq_len": 41}
    common = {"query_start_loc": tensors.cu_seqlens_q.to(device), **lengths}

    def run(rank: int) -> torch.Tensor:
        held = torch.arange(64) // interleave_size % world_size == rank
        parts = [shard_of(cache, tensors.block_table, held) for cache in (tensors.k_cache, tensors.v_cache)]
        shard = ContextShard.of(SimpleNamespace(**common), world_size, rank, interleave_size)
        metadata = PagedMetadata(
            **common, num_actual_tokens=len(position), block_table=tensors.block_table.to(device),
            slot_mapping=torch.zeros(0, dtype=torch.int64), causal=True, shard=shard,
        )  # fmt: skip
        mine = slice(2 * rank, 2 * rank + 2)
        sinks = named["sinks"][mine].to(device) if "sinks" in named else None
        impl = PagedImpl(2, 32, 32**-0.5, 1, logits_soft_cap=named.get("softcap"), sinks=sinks)
        query, out = tensors.q[:, mine].to(device), torch.full((len(tensors.q), 2, 32), torch.nan, device=device)
        kv_cache = torch.cat(parts, -1).transpose(1, 2).to(device)
        given = [rows.to(device) for rows in own]
        return impl.forward(SimpleNamespace(), query, *given, kv_cache, metadata, out)

    outs = on_ranks(world_size, run, monkeypatch)
    assert_close(torch.cat(outs, 1), wanted)


def test_what_depends_on_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole cache has them all."""
    assert PagedImpl(4, 32, 0.2, 1, sliding_window=9).window_size == (8, 8)
    monkeypatch.setattr(PagedImpl, "dcp_world_size", property(lambda self: 2, lambda self, value: None), raising=False)
    assert PagedImpl(4, 32, 0.2, 1).window_size == (-1, -1)
    for option in ({"sliding_window": 9}, {"alibi_slopes": [0.5] * 4}):
        with pytest.raises(UnsupportedError, match=next(iter(option))):
            PagedImpl(4, 32, 0.2, 1, **option)


def test_graphs_are_for_whole_caches() -> None:
    config = VllmConfig(device_config=DeviceConfig(device="cpu"), cache_config=CacheConfig(block_size=16))
    assert PagedMetadataBuilder.get_cudagraph_support(config, None) == AttentionCGSupport.ALWAYS
    config.parallel_config = ParallelConfig(tensor_parallel_size=2, decode_context_parallel_size=2)
    assert PagedMetadataBuilder.get_cudagraph_support(config, None) == AttentionCGSupport.NEVER
