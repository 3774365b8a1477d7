"""Attention of prompts to latents that are expanded to keys and values of heads, one piece of the context at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged.kernels.attention.merge_attn_states import merge_attn_states
from paged.kernels.attention.paged_attention import paged_attention
from paged.kernels.attention.plan import AttentionPlan
from paged.kernels.cache.latent_cache import dequantized
from paged.models.layers.attention_config import AttentionConfig, LatentConfig
from paged.step.metadata import HostArrays
from paged.step.staging import to_device

# Limit of bytes for the expanded keys and values of one piece, the blocks that are expanded together.
PIECE_BYTES = 1 << 28


def expands(q_len: int, seq_len: int, sizes: LatentConfig, window: int | None = None) -> bool:
    """Return whether `q_len` queries at the end of `seq_len` tokens take fewer operations with expanded latents.

    window: number of visible tokens, the token itself included; None for all.

    Attention to expanded keys takes fewer operations for each query and key, but each token must be expanded first. So
    a whole prompt always expands, and a long context only under a chunk of enough queries. models/limits.md derives
    the counts.
    """
    if window is None:
        window = seq_len
    context = seq_len - q_len
    num_growing = min(max(window - 1 - context, 0), q_len)  # queries that see all tokens before them
    pairs = num_growing * context + num_growing * (num_growing + 1) // 2 + (q_len - num_growing) * window
    num_expanded = min(seq_len, q_len + window - 1)
    saved = 2 * (2 * sizes.rank - sizes.nope_dim - sizes.v_head_dim)
    projection = 2 * sizes.rank * (sizes.nope_dim + sizes.v_head_dim)
    return q_len > 1 and pairs * saved + q_len * projection >= num_expanded * projection


@dataclass(frozen=True)
class Piece:
    """Cache blocks whose latents are expanded together into a cache of their own.

    Attributes:
        blocks: int64 [num_blocks], ids of the blocks in the cache.
        arguments: arguments of `paged_attention` over the expanded blocks.
    """

    blocks: torch.Tensor
    arguments: dict[str, Any]


@dataclass(frozen=True)
class AbsorbedPart:
    """The sequences of a step that absorb while others expand; stands in for `AttentionMetadata`.

    Attributes:
        rows, seqs: int64, their query rows and their indices in the step.
    """

    rows: torch.Tensor
    seqs: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_seqlen_q: int
    plan: AttentionPlan


@dataclass(frozen=True)
class Split:
    """Division of a step's sequences into sequences that expand and sequences that absorb.

    Attributes:
        rows: int64, query rows of the sequences that expand; None for all.
        pieces: pieces of the contexts in order, then a last piece with the rest of every sequence and its queries. With
            a window there is the last piece alone, which begins with the first block that a query sees.
        absorbed: the sequences that absorb; None if there are none.
    """

    rows: torch.Tensor | None
    pieces: tuple[Piece, ...]
    absorbed: AbsorbedPart | None


def split_step(
    host: HostArrays, table: int, block_size: int, layer: AttentionConfig, itemsize: int, device: Any
) -> Split | None:
    """Return how to compute a step of latent attention, or None if no sequence expands."""
    sizes, window = layer.latent, layer.window
    assert sizes is not None
    offsets_q, all_lens, block_tables = host
    cu_seqlens_q = offsets_q.astype(np.int64)
    q_lens = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    seq_lens = all_lens.astype(np.int64)
    pairs = zip(q_lens.tolist(), seq_lens.tolist(), strict=True)
    is_expanded = np.array([expands(q_len, seq_len, sizes, window) for q_len, seq_len in pairs], bool)
    if not is_expanded.any():
        return None
    token_bytes = layer.num_heads * (sizes.nope_dim + sizes.rope_dim + sizes.v_head_dim) * itemsize
    blocks_at_once = max(1, PIECE_BYTES // (token_bytes * block_size))
    seqs = np.flatnonzero(is_expanded)
    tables = block_tables[table][seqs]
    pieces: list[Piece] = []
    contexts = seq_lens[seqs] - q_lens[seqs]
    first_blocks = np.zeros_like(contexts)  # blocks before these are not visible
    num_before = contexts // block_size  # blocks before the last piece
    if window is not None:
        first_blocks = num_before = np.maximum(contexts - window + 1, 0) // block_size
    for blocks, counts, lengths, is_last in _parts(
        tables, seq_lens[seqs], first_blocks, num_before, block_size, blocks_at_once
    ):
        pieces.append(_piece(blocks, counts, lengths, q_lens[seqs], is_last, layer.window_size, device))
    if is_expanded.all():
        return Split(None, tuple(pieces), None)
    is_expanded_row = np.repeat(is_expanded, q_lens)
    absorbed = np.flatnonzero(~is_expanded)
    rows, absorbed_rows, absorbed_seqs, offsets, absorbed_lens = to_device(
        (
            np.flatnonzero(is_expanded_row),
            np.flatnonzero(~is_expanded_row),
            absorbed,
            _offsets(q_lens[absorbed]),
            all_lens[absorbed],
        ),
        device,
    )
    longest = int(q_lens[absorbed].max())
    plan = AttentionPlan(offsets, absorbed_lens, max_seqlen_q=longest, max_seqlen_k=int(seq_lens[absorbed].max()))
    part = AbsorbedPart(absorbed_rows, absorbed_seqs, offsets, absorbed_lens, longest, plan)
    return Split(rows, tuple(pieces), part)


def _offsets(q_lens: NDArray[np.int64]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)


def _parts(
    tables: NDArray[np.int32],
    seq_lens: NDArray[np.int64],
    first_blocks: NDArray[np.int64],
    num_before: NDArray[np.int64],
    block_size: int,
    blocks_at_once: int,
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], bool]]:
    """Yield blocks, the number of blocks and of tokens of each sequence, and whether these are the last blocks.

    The last part begins with block `num_before` of a sequence, at the latest the block of its first query. So it is the
    only part that needs a mask. The parts before it begin with block `first_blocks`.
    """
    # The sequence of each block before the last part, and the block's index in the table of the sequence.
    num_context = num_before - first_blocks
    owners = np.repeat(np.arange(len(num_before)), num_context)
    indices = np.arange(len(owners)) - np.repeat(np.cumsum(num_context) - num_before, num_context)
    for start in range(0, len(owners), blocks_at_once):
        seqs = owners[start : start + blocks_at_once]
        counts = np.bincount(seqs, minlength=len(num_before))
        yield tables[seqs, indices[start : start + blocks_at_once]], counts, counts * block_size, False
    counts = -(-seq_lens // block_size) - num_before
    spans = zip(tables, num_before, num_before + counts, strict=True)
    blocks = np.concatenate([row[first:end] for row, first, end in spans])
    yield blocks, counts, seq_lens - num_before * block_size, True


def _piece(
    blocks: NDArray[np.int32],
    counts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    q_lens: NDArray[np.int64],
    is_last: bool,
    window_size: tuple[int, int],
    device: Any,
) -> Piece:
    starts = np.cumsum(counts) - counts
    table = starts[:, None] + np.minimum(np.arange(max(counts.max(), 1)), np.maximum(counts - 1, 0)[:, None])
    table = np.minimum(table, max(len(blocks) - 1, 0)).astype(np.int32)
    arrays = blocks.astype(np.int64), table, _offsets(q_lens), lengths.astype(np.int32)
    block_ids, block_table, cu_seqlens_q, seq_lens = to_device(arrays, device)
    longest = int(q_lens.max())
    plan = AttentionPlan(cu_seqlens_q, seq_lens, max_seqlen_q=longest, max_seqlen_k=int(lengths.max()))
    arguments = {
        "block_table": block_table,
        "cu_seqlens_q": cu_seqlens_q,
        "seq_lens": seq_lens,
        "max_seqlen_q": longest,
        "causal": is_last,
        "window_size": window_size,
        "plan": plan,
    }
    return Piece(block_ids, arguments)


def attend_expanded(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    pieces: tuple[Piece, ...],
    expand: Callable[[torch.Tensor], torch.Tensor],
    sizes: LatentConfig,
    softmax_scale: float,
    k_scale: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention of q [num_tokens, num_heads, nope + rope] to pieces, [num_tokens, num_heads, v_head_dim].

    expand: maps latents [num_tokens, rank] to unrotated keys and values, [num_tokens, num_heads, nope + v].
    sinks: [num_heads], as in `paged_mla_attention`; the last piece, which every query attends to, counts them.
    """
    state: tuple[torch.Tensor, torch.Tensor] | None = None
    stored = kv_cache
    if kv_cache.element_size() == 1:
        stored = kv_cache.view(torch.uint8)  # 8-bit floats have no indexing
    for piece in pieces:
        rows = stored[piece.blocks].view(kv_cache.dtype)  # [blocks, block_size, rank + rope]
        if rows.dtype != q.dtype:
            rows = dequantized(rows, k_scale).to(q.dtype)
        heads = expand(rows[..., : sizes.rank].flatten(0, 1)).unflatten(0, rows.shape[:2])
        nope, values = heads.split((sizes.nope_dim, sizes.v_head_dim), -1)  # [blocks, block_size, H, nope or v]
        rope = rows[..., None, sizes.rank :].expand(*nope.shape[:-1], sizes.rope_dim)
        keys, piece_sinks = torch.cat([nope, rope], -1), None
        if piece is pieces[-1]:
            piece_sinks = sinks
        piece_state: Any = paged_attention(
            q, keys, values, softmax_scale=softmax_scale, sinks=piece_sinks, return_lse=True, **piece.arguments
        )
        if state is None:
            state = piece_state
        else:
            state = merge_attn_states(*state, *piece_state)
    assert state is not None
    return state[0]
