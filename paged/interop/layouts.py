"""Conversion of every FlashAttention layout of queries and keys to rows, offsets and a block table.

Lengths, offsets and ids are checked only if they are on the CPU, because reading them from a GPU would wait for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from paged.errors import InvalidInputError, UnsupportedError
from paged.interop.arguments import Arguments
from paged.kernels.core.checks import FLOAT_DTYPES, MAX_HEAD_DIM, check_dtype, check_tensor
from paged.kernels.core.errors import as_int
from paged.kernels.core.ids import Sequences, check_sequences_on_host


class Batch(NamedTuple):
    """Arguments of `paged_attention`.

    seq_lens: number of keys of each sequence before new keys are appended.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_seqlen_q: int

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def max_seqlen_k(self) -> int:
        """Number of keys of a sequence that the block table can hold."""
        return self.block_table.shape[1] * self.k_cache.shape[1]


def lengths(args: Arguments, key: str, size: int, device: torch.device) -> torch.Tensor | None:
    """Return an argument as contiguous int32 [size] on `device`, or None."""
    tensor = args.optional_tensor(key)
    if tensor is not None:
        check_tensor(key, tensor, (size,), (torch.int32,), device)
        tensor = tensor.contiguous()
    return tensor


def with_contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def unpack(args: Arguments) -> None:
    """Replace packed qkv or kv by q, k and v, and shared offsets by separate ones."""
    num_q_heads = args.integer("num_heads_q")
    for name, keys in (("qkv", ("q", "k_cache", "v_cache")), ("kv", ("k_cache", "v_cache"))):
        if name in args:
            packed = args.tensor(name)
            if num_q_heads and packed.dim() == 4:  # version 3 reads only this shape in this way
                num_kv_heads, remainder = divmod(packed.shape[2] - num_q_heads, 2)
                if num_kv_heads < 1 or remainder:
                    raise InvalidInputError(f"num_heads_q: {num_q_heads}, qkv has {packed.shape[2]} heads")
                parts = packed.split((num_q_heads, num_kv_heads, num_kv_heads), 2)
            elif packed.dim() not in (4, 5) or packed.shape[-3] != len(keys):
                expected = f"[..., {len(keys)}, num_heads, head_dim]"
                raise InvalidInputError(f"{name}: shape {list(packed.shape)}, expected {expected}")
            else:
                parts = packed.unbind(-3)
            for key, part in zip(keys, parts, strict=True):
                args.put(key, part, name)
    if "cu_seqlens" in args:
        for key in "cu_seqlens_q", "cu_seqlens_k":
            args.put(key, args.tensor("cu_seqlens"), "cu_seqlens")
        for key in "max_seqlen_q", "max_seqlen_k":
            args.put(key, args.integer("max_seqlen"), "max_seqlen")


def read_batch(args: Arguments) -> Batch:
    """Read queries and keys of any layout. Keys outside a cache are copied if their last stride is not 1.

    Queries are [batch, seqlen_q, num_q_heads, head_dim], or [total_q, ...] with cu_seqlens_q. Keys are blocks with a
    block table, [total_k, num_kv_heads, head_dim] with cu_seqlens_k, or [batch, seqlen_k, ...]. Without a table, a
    packed row becomes a block of one token, and a padded sequence becomes one block.
    """
    q = args.tensor("q")
    check_dtype("q", q, *FLOAT_DTYPES, torch.float8_e4m3fn)
    max_seqlen_q, max_seqlen_k = args.integer("max_seqlen_q"), args.integer("max_seqlen_k")
    if "cu_seqlens_q" in args:
        cu_seqlens_q = args.tensor("cu_seqlens_q")
        if q.dim() == 4:
            raise UnsupportedError("cu_seqlens_q: q has 4 axes, expected 3 with concatenated sequences")
        if q.dim() != 3:
            raise InvalidInputError(f"q: shape {list(q.shape)}, expected [total_q, num_q_heads, head_dim]")
        check_tensor("cu_seqlens_q", cu_seqlens_q, ("num_seqs + 1",), (torch.int32,), q.device)
        if cu_seqlens_q.shape[0] == 0:
            raise InvalidInputError("cu_seqlens_q: shape [0], expected [num_seqs + 1]")
        cu_seqlens_q, q = cu_seqlens_q.contiguous(), with_contiguous_rows(q)
        max_seqlen_q = len(q) if max_seqlen_q is None else min(max_seqlen_q, len(q))
    else:
        if q.dim() != 4:
            raise InvalidInputError(f"q: shape {list(q.shape)}, expected [batch, seqlen_q, num_q_heads, head_dim]")
        batch, seqlen = q.shape[:2]
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen
        max_seqlen_q, q = seqlen, with_contiguous_rows(q).flatten(0, 1)

    k, v, num_seqs = args.tensor("k_cache"), args.tensor("v_cache"), cu_seqlens_q.shape[0] - 1
    offsets = lengths(args, "cu_seqlens_k", num_seqs + 1, q.device)
    table, rows = args.optional_tensor("block_table"), args.optional_tensor("cache_batch_idx")
    _check_shapes(args, q, k, v, num_seqs, is_packed=table is None and offsets is not None)
    if rows is not None:
        check_tensor("cache_batch_idx", rows, (num_seqs,), (torch.int32, torch.int64), q.device)
    if not args.adds_keys:  # copying a cache would lose the appended keys
        k, v = with_contiguous_rows(k), with_contiguous_rows(v)
    longest = k.shape[1]
    if table is not None:
        num_rows = num_seqs if rows is None else "num_rows"
        check_tensor("block_table", table, (num_rows, "max_blocks_per_seq"), (torch.int32,), q.device)
        if rows is not None:
            check_within("cache_batch_idx", rows, 0, len(table) - 1, f"{len(table) - 1}, rows of block_table")
            table = table.index_select(0, rows)
        table, longest = with_contiguous_rows(table), table.shape[1] * k.shape[1]
    elif offsets is not None:
        longest = len(k) if max_seqlen_k is None else min(max_seqlen_k, len(k))
        k, v = k.unsqueeze(1), v.unsqueeze(1)
        table = offsets[:-1, None] + torch.arange(longest, dtype=torch.int32, device=q.device)
    else:
        if rows is None:
            rows = torch.arange(num_seqs, device=q.device)
        else:
            args.put("block_table", None, "cache_batch_idx")
        table = rows.to(torch.int32).unsqueeze(1)
        if longest == 0:  # no keys: make blocks of one token that no table refers to
            k = k.new_zeros(k.shape[0], 1, *k.shape[2:])
            v = v.new_zeros(v.shape[0], 1, *v.shape[2:])
            table = table[:, :0]
    seq_lens = _seq_lens(args, num_seqs, longest, offsets, q.device)
    if "block_table" not in args and offsets is not None and is_readable(seq_lens):
        check_offsets("cu_seqlens_k", offsets, len(k))
        check_within("seq_lens", seq_lens, 0, offsets.diff(), "the keys of each sequence in cu_seqlens_k")
        if num_seqs and int(seq_lens.max()) > longest:
            raise InvalidInputError(f"max_seqlen_k: {longest}, but the longest sequence has {int(seq_lens.max())}")
    return Batch(q, k, v, table, cu_seqlens_q, seq_lens, max_seqlen_q)


def by_token(batch: Batch, left_padding: torch.Tensor) -> Batch:
    """Return the keys in blocks of one token, without the first left_padding (int32 [num_seqs]) of each sequence.

    Raises:
        UnsupportedError: the blocks' stride is not a multiple of the tokens' stride.
    """
    k, v, table = batch.k_cache, batch.v_cache, batch.block_table
    num_blocks, block_size = k.shape[:2]
    ratio, remainder = divmod(k.stride(0), max(k.stride(1), 1))
    of_values = divmod(v.stride(0), max(v.stride(1), 1))
    if remainder or of_values != (ratio, remainder) or num_blocks * ratio >= 1 << 31:
        raise UnsupportedError(f"cache_leftpad: cannot cut a cache with strides {k.stride()}")
    size = 0
    if num_blocks:
        size = (num_blocks - 1) * ratio + block_size
    positions = torch.arange(batch.max_seqlen_k, device=k.device) + left_padding[:, None]
    positions = positions.clamp_(max=max(batch.max_seqlen_k - 1, 0))
    table = table.gather(1, positions // block_size) * ratio + positions % block_size
    k_tokens, v_tokens = _tokens_as_blocks(k, size), _tokens_as_blocks(v, size)
    return batch._replace(k_cache=k_tokens, v_cache=v_tokens, block_table=table.to(torch.int32))


def _tokens_as_blocks(cache: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the tokens of a cache as blocks of one token, [num_tokens, 1, num_kv_heads, head_dim]."""
    return cache.as_strided((num_tokens, 1, *cache.shape[2:]), (cache.stride(1), *cache.stride()[1:]))


def is_readable(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def check_offsets(name: str, offsets: torch.Tensor, total: int) -> None:
    """Raise InvalidInputError unless offsets ascend within 0 to `total`."""
    if not is_readable(offsets):
        return
    if int(offsets[0]) < 0 or int(offsets[-1]) > total or bool((offsets.diff() < 0).any()):
        raise InvalidInputError(f"{name}: {_few(offsets)}, expected ascending values from 0 to at most {total}")


def check_within(name: str, values: torch.Tensor, low: int, high: torch.Tensor | int, limit: str) -> None:
    """Raise InvalidInputError unless all of `values` lie in low..high; `limit` describes the upper limit."""
    if is_readable(values) and bool(((values < low) | (values > high)).any()):
        raise InvalidInputError(f"{name}: {_few(values)}, expected {low} to {limit}")


def check_lengths(batch: Batch, num_new: torch.Tensor | int) -> None:
    """Check lengths and block ids. num_new: number of keys to append to each sequence."""
    if is_readable(batch.seq_lens):
        room = batch.max_seqlen_k - num_new
        check_within("seq_lens", batch.seq_lens, 0, room, f"{_few(room)}, for which there is room")
        ids, (num_blocks, block_size) = (batch.block_table, batch.cu_seqlens_q), batch.k_cache.shape[:2]
        sizes = len(batch.q), num_blocks, block_size, batch.max_seqlen_q
        check_sequences_on_host(Sequences(*ids, batch.seq_lens + num_new, *sizes, window_left=1 << 30, keys_at_once=1))


def _few(values: torch.Tensor | int) -> str:
    if isinstance(values, int):
        return str(values)
    shown = ", ".join(map(str, values.flatten()[:8].tolist()))
    return f"[{shown}, ...]" if values.numel() > 8 else f"[{shown}]"


def _check_shapes(
    args: Arguments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_seqs: int, *, is_packed: bool
) -> None:
    num_q_heads, head_dim = q.shape[1:]
    is_paged = "block_table" in args
    if k.dim() == 3 and "cu_seqlens_q" in args and not is_packed and not is_paged:
        raise InvalidInputError("cu_seqlens_k: None, expected one for k_cache of 3 axes")
    rows: tuple[int | str, ...] = (num_seqs, "seqlen_k")
    if is_paged:
        rows = "num_blocks", "block_size"
    elif is_packed:
        rows = ("total_k",)
    elif "cache_batch_idx" in args or (args.adds_keys and k.dim() == 4 and k.shape[0] > num_seqs):
        rows = "batch_cache", "seqlen_cache"  # without cache_batch_idx, sequence i uses row i
    dtypes = q.dtype, torch.float8_e4m3fn
    check_tensor("k_cache", k, (*rows, "num_kv_heads", head_dim), dtypes, q.device)
    check_tensor("v_cache", v, (*k.shape[:-1], "v_head_dim"), (k.dtype,), q.device)
    for name, size in (("q", head_dim), ("v_cache", v.shape[-1])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise InvalidInputError(f"{name}: head_dim {size}, expected 1 to {MAX_HEAD_DIM}")
    if k.shape[-2] == 0 or num_q_heads == 0 or num_q_heads % k.shape[-2]:
        heads = f"{num_q_heads} heads, expected a multiple of the keys' {k.shape[-2]}"
        raise InvalidInputError(f"q: {heads}")
    if not is_packed and k.shape[1] == 0 and (is_paged or "key" in args):
        raise InvalidInputError("k_cache: capacity for 0 tokens, expected at least 1")


def _seq_lens(
    args: Arguments, num_seqs: int, max_seqlen: int, offsets: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Return the number of keys of each sequence: as given, else from the offsets, else all."""
    seq_lens = args.get("seq_lens")
    if args.names.get("seq_lens") == "cache_seqlens" and seq_lens is not None and getattr(seq_lens, "ndim", 0) == 0:
        length = as_int("cache_seqlens", seq_lens)
        if length > max_seqlen:
            raise InvalidInputError(f"cache_seqlens: {length}, expected at most {max_seqlen}, the cache's capacity")
        max_seqlen = length
    elif (seq_lens := lengths(args, "seq_lens", num_seqs, device)) is not None:
        return seq_lens
    elif offsets is not None:
        args.put("seq_lens", None, args.names["cu_seqlens_k"])
        return offsets.diff()
    return torch.full((num_seqs,), max_seqlen, dtype=torch.int32, device=device)
