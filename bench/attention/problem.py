"""Paged attention problems that catch paging bugs; tests and `paged verify` run them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from paged.kernels.core.dtypes import kv_kind


@dataclass(frozen=True)
class Problem:
    """Shapes of one batch; lengths are (query length, key length) per sequence."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 32
    v_head_dim: int | None = None  # head size of values; None: the head size of keys
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    causal: bool | tuple[bool, ...] = True  # one value for all sequences, or a value for each
    window_size: tuple[int, int] = (-1, -1)
    chunk_size: int = 0
    softcap: float = 0.0
    softmax_scale: float | None = None
    padding_rows: int = 0
    # "separate" tensors; "interleaved": K and V of a block side by side; "head_major": [Hkv, bs, D] in a block;
    # "shared": V is the first elements of K.
    layout: str = "separate"
    sinks: bool = False
    alibi: bool = False
    cache_dtype: torch.dtype | None = None  # None: the dtype of q
    v_cache_dtype: torch.dtype | None = None  # None: the dtype of keys
    # "tensor": one scale of K and one of V; "head": one per KV head; "table": the same for caches with scales.
    scales: str = ""
    tree: bool = False  # a random mask over the new keys; each query sees itself
    deterministic: bool = False
    # (positions of a chosen block, entries of a row): random blocks, in disorder among entries of -1; (0, 0): all keys.
    chosen: tuple[int, int] = (0, 0)
    kept: float = 0.0  # part of the blocks of a token that its successor chooses, too; 0: each token draws its own
    coverage: bool = False  # q = 0, V is one-hot of the position: every key counts the same, so a dropped key shows


@dataclass(frozen=True)
class Tensors:
    """The arguments of one call."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor


@dataclass(frozen=True)
class ScaledTensors(Tensors):
    """The arguments of one call over caches of which one holds scales."""

    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


def make(problem: Problem, device: torch.device) -> Tensors:
    """Make random tensors. Tables are shuffled over a pool three times as large as needed; free slots hold NaN."""
    num_q_heads, num_kv_heads = problem.heads
    block_size, head_dim = problem.block_size, problem.head_dim
    blocks_of = [math.ceil(seq_len / block_size) for _, seq_len in problem.lengths]
    num_blocks, v_head_dim = 3 * sum(blocks_of) + 1, problem.v_head_dim or head_dim
    if problem.layout == "interleaved":
        both = torch.full((num_blocks, 2, block_size, num_kv_heads, head_dim), math.nan)
        k_cache, v_cache = both[:, 0], both[:, 1, ..., :v_head_dim]
    elif problem.layout == "head_major":
        k_cache = torch.full((num_blocks, num_kv_heads, block_size, head_dim), math.nan).transpose(1, 2)
        v_cache = torch.full((num_blocks, num_kv_heads, block_size, v_head_dim), math.nan).transpose(1, 2)
    else:
        k_cache = torch.full((num_blocks, block_size, num_kv_heads, head_dim), math.nan)
        v_cache = torch.full((num_blocks, block_size, num_kv_heads, v_head_dim), math.nan)

    ids = iter((torch.randperm(num_blocks - 1) + 1).tolist())
    # Table entries beyond a sequence's blocks point far outside of the pool, so that a kernel that follows one fails.
    block_table = torch.full((len(problem.lengths), max([*blocks_of, 1])), 2**30, dtype=torch.int32)
    for seq, (_, seq_len) in enumerate(problem.lengths):
        for index in range(blocks_of[seq]):
            block_table[seq, index] = next(ids)
        position = torch.arange(seq_len)
        block, offset = block_table[seq, position // block_size].long(), position % block_size
        k_cache[block, offset] = torch.randn(seq_len, num_kv_heads, head_dim)
        values = torch.randn(seq_len, num_kv_heads, v_head_dim)
        if problem.coverage:
            values = torch.eye(v_head_dim)[position % v_head_dim][:, None].expand(-1, num_kv_heads, -1)
        v_cache[block, offset] = values

    q_lens = torch.tensor([q_len for q_len, _ in problem.lengths], dtype=torch.int32)
    num_tokens = int(q_lens.sum()) + problem.padding_rows
    q = torch.zeros(num_tokens, num_q_heads, head_dim)
    if not problem.coverage:
        q = torch.randn(num_tokens, num_q_heads, head_dim)
    k_dtype = problem.cache_dtype or problem.dtype
    kind, v_kind = kv_kind(k_dtype), kv_kind(problem.v_cache_dtype or k_dtype)
    k_cache, k_scale = kind.encode(k_cache, None)
    v_cache, v_scale = v_kind.encode(v_cache, None)
    k_cache, v_cache = k_cache.to(device), v_cache.to(device)
    if problem.layout == "shared":
        v_cache = k_cache[..., : kind.num_elements(v_head_dim)]
    tensors = Tensors(
        q=q.to(device, problem.dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table.to(device),
        cu_seqlens_q=torch.cat([torch.zeros(1, dtype=torch.int32), q_lens.cumsum(0, dtype=torch.int32)]).to(device),
        seq_lens=torch.tensor([seq_len for _, seq_len in problem.lengths], dtype=torch.int32).to(device),
    )
    if k_scale is None and v_scale is None:
        return tensors
    k_scale, v_scale = _strided(k_scale, device), _strided(v_scale, device)
    if problem.layout == "shared":
        assert k_scale is not None
        v_scale = k_scale[..., : kind.num_scales(v_head_dim)] if kind.group_size else k_scale
    return ScaledTensors(**vars(tensors), k_scale=k_scale, v_scale=v_scale)


def _strided(scale: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Return scales as views of a larger tensor."""
    if scale is None:
        return None
    return torch.stack([scale, scale], 3).to(device)[:, :, :, 0]


def options(problem: Problem, device: torch.device) -> dict[str, Any]:
    """Return the keywords of `paged_attention` that the reference also takes."""
    num_q_heads, num_kv_heads = problem.heads
    chosen: dict[str, Any] = {
        "softmax_scale": problem.softmax_scale,
        "causal": problem.causal,
        "window_size": problem.window_size,
        "softcap": problem.softcap,
        "attention_chunk_size": problem.chunk_size,
    }
    if isinstance(problem.causal, tuple):
        chosen["causal"] = torch.tensor(problem.causal, device=device)
    if problem.sinks:
        chosen["sinks"] = torch.randn(num_q_heads, device=device).to(problem.dtype)
    if problem.alibi:
        chosen["alibi_slopes"] = 0.5 ** torch.arange(1, num_q_heads + 1, device=device)
    if problem.scales == "table":
        chosen["k_table_scale"] = 0.5 + torch.rand(1, device=device)
        chosen["v_table_scale"] = 0.5 + torch.rand((), device=device)
    elif problem.scales:
        size = {"head": num_kv_heads, "tensor": 1}[problem.scales]
        chosen["k_scale"] = 0.5 + torch.rand(size, device=device)
        chosen["v_scale"] = 0.5 + torch.rand(size, device=device)
    if problem.tree:
        q_lens = [q_len for q_len, _ in problem.lengths]
        mask = torch.rand(sum(q_lens) + problem.padding_rows, max(q_lens) + 3) < 0.5
        start = 0
        for q_len in q_lens:
            mask[start + torch.arange(q_len), torch.arange(q_len)] = True
            start += q_len
        chosen["mask"] = mask.to(device)
    if problem.chosen[1]:
        if problem.kept:
            blocks = draw_similar_blocks(problem.lengths, num_kv_heads, *problem.chosen, problem.kept)
        else:
            blocks = draw_blocks(problem.lengths, problem.padding_rows, num_kv_heads, *problem.chosen)
        chosen["chosen_blocks"] = blocks.to(device)
        chosen["chosen_block_size"] = problem.chosen[0]
    return chosen


def draw_blocks(
    lengths: tuple[tuple[int, int], ...], padding_rows: int, num_kv_heads: int, block_size: int, count: int
) -> torch.Tensor:
    """Draw int32 [num_tokens, num_kv_heads, count] blocks of each token's sequence, in disorder among entries of -1.

    Some lie behind the token. Every other token and head chooses the token's own block, and every fifth token chooses a
    block twice.
    """
    num_tokens = sum(q_len for q_len, _ in lengths) + padding_rows
    chosen = torch.full((num_tokens, num_kv_heads, count), -1, dtype=torch.int32)
    row = 0
    for q_len, seq_len in lengths:
        num_blocks = math.ceil(seq_len / block_size)
        for position in range(seq_len - q_len, seq_len):
            for head in range(num_kv_heads):
                blocks = torch.randperm(num_blocks)
                if (row + head) % 2 == 0 and num_blocks:
                    own_block = max(position, 0) // block_size
                    blocks = torch.cat([torch.tensor([own_block]), blocks[blocks != own_block]])
                if row % 5 == 4:
                    blocks = torch.cat([blocks[:1], blocks])
                blocks = blocks[: max(count - 1, 1)]
                places = torch.randperm(count)[: len(blocks)]
                chosen[row, head, places] = blocks.int()
            row += 1
    return chosen


def draw_similar_blocks(
    lengths: tuple[tuple[int, int], ...], num_kv_heads: int, block_size: int, count: int, kept: float
) -> torch.Tensor:
    """Draw int32 [num_tokens, num_kv_heads, count] blocks, of which a token's successor keeps the part `kept`.

    A token chooses its own block and count - 1 others before it, or all if there are no more.
    """
    chosen = torch.full((sum(q_len for q_len, _ in lengths), num_kv_heads, count), -1, dtype=torch.int32)
    row = 0
    for q_len, seq_len in lengths:
        ranks = torch.rand(num_kv_heads, math.ceil(seq_len / block_size))
        for position in range(seq_len - q_len, seq_len):
            own_block = position // block_size
            chosen[row, :, 0] = own_block
            best = ranks[:, :own_block].topk(min(count - 1, own_block)).indices  # [Hkv, k - 1]
            chosen[row, :, 1 : best.shape[1] + 1] = best
            is_replaced = torch.rand(best.shape) >= kept
            ranks.scatter_(1, best, ranks.gather(1, best) * ~is_replaced)
            row += 1
    return chosen


def call_of(problem: Problem, device: torch.device) -> dict[str, Any]:
    """Make all arguments of `paged_attention`, with an output that holds NaN."""
    tensors = make(problem, device)
    return {
        **vars(tensors),
        **options(problem, device),
        "out": tensors.q.new_full((*tensors.q.shape[:2], problem.v_head_dim or problem.head_dim), math.nan),
        "max_seqlen_q": max((q_len for q_len, _ in problem.lengths), default=0),
        "return_lse": True,
        "deterministic": problem.deterministic,
    }
