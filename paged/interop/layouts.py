"""Queries and keys in every layout that FlashAttention knows, as rows, offsets and a block table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from paged.errors import InvalidInputError, UnsupportedError
from paged.interop.arguments import Arguments
from paged.kernels.attention.config import MAX_HEAD_DIM
from paged.kernels.common.checks import FLOAT_DTYPES, check_dtype, check_last_dim_contiguous, check_tensor


@dataclass(frozen=True)
class Queries:
    """rows: [num_tokens, num_q_heads, head_dim]. cu_seqlens: int32 [num_seqs + 1], rows of each sequence.

    max_seqlen: at least the longest.
    """

    rows: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int

    @property
    def num_seqs(self) -> int:
        return self.cu_seqlens.shape[0] - 1


@dataclass(frozen=True)
class Keys:
    """k, v: [num_blocks, block_size, num_kv_heads, head_dim], each of its own head_dim. block_table: int32 [num_seqs,
    max_blocks_per_seq].

    seq_lens: int32 [num_seqs], keys that are there before any are added. max_seqlen: that the table has room for.
    offsets: int32 [num_seqs + 1], of packed keys alone, where a sequence's begin.
    """

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    max_seqlen: int
    offsets: torch.Tensor | None


def lengths(args: Arguments, key: str, size: int, device: torch.device) -> torch.Tensor | None:
    """A contiguous int32 [size] argument on `device`, or None."""
    tensor = args.optional_tensor(key)
    if tensor is not None:
        check_tensor(args.name(key), tensor, (size,), (torch.int32,), device)
        tensor = tensor.contiguous()
    return tensor


def with_contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def unpack(args: Arguments) -> None:
    """Put q, k and v for a caller's packed qkv or kv, and both offsets for its one."""
    if args.has("qkv"):
        qkv, num_q_heads = args.tensor("qkv"), args.integer("num_heads_q")
        if num_q_heads is not None and qkv.dim() == 4:
            num_kv_heads, odd = divmod(qkv.shape[-2] - num_q_heads, 2)
            if odd or num_kv_heads <= 0 or not num_q_heads or num_q_heads % num_kv_heads:
                raise InvalidInputError(
                    f"num_heads_q: {num_q_heads} of {qkv.shape[-2]} heads, expected a multiple of half the others"
                )
            parts: tuple[torch.Tensor, ...] = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], -2)
        else:
            parts = _unbound("qkv", qkv, 3)
        for key, part in zip(("q", "k_cache", "v_cache"), parts, strict=True):
            args.put(key, part, "qkv")
    if args.has("kv"):
        for key, part in zip(("k_cache", "v_cache"), _unbound("kv", args.tensor("kv"), 2), strict=True):
            args.put(key, part, "kv")
    if args.has("cu_seqlens"):
        args.put("cu_seqlens_q", args.tensor("cu_seqlens"), "cu_seqlens")
        args.put("cu_seqlens_k", args.tensor("cu_seqlens"), "cu_seqlens")
    if args.has("max_seqlen"):
        args.put("max_seqlen_q", args.integer("max_seqlen"), "max_seqlen")
        args.put("max_seqlen_k", args.integer("max_seqlen"), "max_seqlen")


def _unbound(name: str, packed: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    if packed.dim() not in (4, 5) or packed.shape[-3] != parts:
        raise InvalidInputError(f"{name}: shape {list(packed.shape)}, expected [..., {parts}, num_heads, head_dim]")
    return packed.unbind(-3)


def read_queries(args: Arguments) -> Queries:
    """[batch, seqlen_q, num_q_heads, head_dim], or [total_q, ...] with cu_seqlens_q."""
    q, name = args.tensor("q"), args.name("q")
    check_dtype(name, q, *FLOAT_DTYPES, torch.float8_e4m3fn)
    max_seqlen = args.integer("max_seqlen_q")
    if not args.has("cu_seqlens_q"):
        if q.dim() != 4:
            raise InvalidInputError(f"{name}: shape {list(q.shape)}, expected [batch, seqlen_q, num_q_heads, head_dim]")
        batch, seqlen = q.shape[:2]
        if max_seqlen is not None and max_seqlen < seqlen:
            raise InvalidInputError(f"{args.name('max_seqlen_q')}: {max_seqlen}, {name} has {seqlen} rows a sequence")
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen
        return Queries(with_contiguous_rows(q).flatten(0, 1), cu_seqlens, seqlen)
    if q.dim() == 4:
        raise UnsupportedError(f"{args.name('cu_seqlens_q')}: {name} has 4 axes, expected 3, sequence after sequence")
    if q.dim() != 3:
        raise InvalidInputError(f"{name}: shape {list(q.shape)}, expected [total_q, num_q_heads, head_dim]")
    cu_seqlens = args.tensor("cu_seqlens_q")
    check_tensor(args.name("cu_seqlens_q"), cu_seqlens, ("num_seqs + 1",), (torch.int32,), q.device)
    if cu_seqlens.shape[0] == 0:
        raise InvalidInputError(f"{args.name('cu_seqlens_q')}: shape [0], expected [num_seqs + 1]")
    longest = q.shape[0] if max_seqlen is None else min(max_seqlen, q.shape[0])
    return Queries(with_contiguous_rows(q), cu_seqlens.contiguous(), longest)


def read_keys(args: Arguments, queries: Queries) -> Keys:
    """Blocks with a block table, [total_k, num_kv_heads, head_dim] with cu_seqlens_k, or [batch, seqlen_k, ...].

    Without a table nothing is copied either: a row is then a block of one token, a padded sequence one block.
    """
    k, v, device, num_seqs = args.tensor("k_cache"), args.tensor("v_cache"), queries.rows.device, queries.num_seqs
    int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
    offsets, max_seqlen_k = lengths(args, "cu_seqlens_k", num_seqs + 1, device), args.integer("max_seqlen_k")
    table, rows = args.optional_tensor("block_table"), args.optional_tensor("cache_batch_idx")
    _check_shapes(args, queries, k, v, is_packed=table is None and offsets is not None)
    if table is not None:
        if rows is not None:
            raise UnsupportedError(f"cache_batch_idx: {args.function} takes it without {args.name('block_table')} only")
        check_tensor(args.name("block_table"), table, (num_seqs, "max_blocks_per_seq"), (torch.int32,), device)
        table, max_seqlen = with_contiguous_rows(table), table.shape[1] * k.shape[1]
        return Keys(k, v, table, _seq_lens(args, num_seqs, max_seqlen, offsets, device), max_seqlen, None)
    if offsets is not None:
        longest = k.shape[0] if max_seqlen_k is None else min(max_seqlen_k, k.shape[0])
        k, v = with_contiguous_rows(k).unsqueeze(1), with_contiguous_rows(v).unsqueeze(1)
        table = offsets[:-1, None] + torch.arange(longest, **int32)
        return Keys(k, v, table, _seq_lens(args, num_seqs, longest, offsets, device), longest, offsets)
    if rows is None:
        rows = torch.arange(num_seqs, **int32)
    else:
        check_tensor("cache_batch_idx", rows, (num_seqs,), (torch.int32, torch.int64), device)
        args.put("block_table", None, "cache_batch_idx")
    max_seqlen = k.shape[1]
    seq_lens = _seq_lens(args, num_seqs, max_seqlen, None, device)
    if max_seqlen == 0:  # no keys at all: a token that no query sees
        k, v = (x.new_zeros(x.shape[0], 1, *x.shape[2:]) for x in (k, v))
    return Keys(k, v, rows.to(torch.int32).unsqueeze(1), seq_lens, max_seqlen, None)


def by_token(args: Arguments, keys: Keys, left_padding: torch.Tensor) -> Keys:
    """The same keys in blocks of one token, without the first left_padding (int32 [num_seqs]) of each sequence.

    Raises:
        UnsupportedError: blocks do not begin at multiples of the distance between two tokens.
    """
    num_blocks, block_size = keys.k.shape[:2]
    (ratio, rest), of_values = (divmod(x.stride(0), max(x.stride(1), 1)) for x in (keys.k, keys.v))
    if rest or of_values != (ratio, rest) or num_blocks * ratio >= 1 << 31:
        raise UnsupportedError(f"{args.name('cache_leftpad')}: a cache of strides {keys.k.stride()} cannot be cut")
    size = (num_blocks - 1) * ratio + block_size if num_blocks else 0
    k, v = (x.as_strided((size, 1, *x.shape[2:]), (x.stride(1), *x.stride()[1:])) for x in (keys.k, keys.v))
    positions = torch.arange(keys.max_seqlen, device=k.device) + left_padding[:, None]
    positions = positions.clamp_(max=max(keys.max_seqlen - 1, 0))
    table = keys.block_table.gather(1, positions // block_size) * ratio + positions % block_size
    return replace(keys, k=k, v=v, block_table=table.to(torch.int32))


def _check_shapes(args: Arguments, queries: Queries, k: torch.Tensor, v: torch.Tensor, *, is_packed: bool) -> None:
    num_q_heads, head_dim = queries.rows.shape[1:]
    is_paged = args.has("block_table")
    if k.dim() == 3 and args.has("cu_seqlens_q") and not is_packed and not is_paged:
        raise InvalidInputError(f"cu_seqlens_k: None, expected one for {args.name('k_cache')} of 3 axes")
    rows: tuple[int | str, ...] = (queries.num_seqs, "seqlen_k")
    if is_paged:
        rows = "num_blocks", "block_size"
    elif is_packed:
        rows = ("total_k",)
    elif args.has("cache_batch_idx"):
        rows = "batch_cache", "seqlen_cache"
    elif args.function == "flash_attn_with_kvcache" and k.dim() == 4 and k.shape[0] > queries.num_seqs:
        rows = "batch_cache", "seqlen_cache"  # whose first rows are the sequences'
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise InvalidInputError(f"{args.name('q')}: head_dim {head_dim}, expected 1 to {MAX_HEAD_DIM}")
    dtypes = queries.rows.dtype, torch.float8_e4m3fn
    check_tensor(args.name("k_cache"), k, (*rows, "num_kv_heads", head_dim), dtypes, queries.rows.device)
    check_tensor(args.name("v_cache"), v, (*k.shape[:-1], "v_head_dim"), (k.dtype,), queries.rows.device)
    if not 1 <= v.shape[-1] <= MAX_HEAD_DIM:
        raise InvalidInputError(f"{args.name('v_cache')}: head_dim {v.shape[-1]}, expected 1 to {MAX_HEAD_DIM}")
    if k.shape[-2] == 0 or num_q_heads == 0 or num_q_heads % k.shape[-2]:
        raise InvalidInputError(
            f"{args.name('q')}: {num_q_heads} heads, expected a multiple of the keys' {k.shape[-2]}"
        )
    if not is_packed:
        for name, x in (("k_cache", k), ("v_cache", v)):
            check_last_dim_contiguous(args.name(name), x)
        if k.shape[1] == 0 and (is_paged or args.has("key")):
            raise InvalidInputError(f"{args.name('k_cache')}: room for 0 tokens, expected at least 1")


def _seq_lens(
    args: Arguments, num_seqs: int, max_seqlen: int, offsets: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """How many keys of each sequence count: so many, one number for all, those between the offsets, or all."""
    if args.is_number("seq_lens") and args.name("seq_lens") == "cache_seqlens":
        length = args.integer("seq_lens") or 0
        if length > max_seqlen:
            raise InvalidInputError(f"{args.name('seq_lens')}: {length}, there is room for {max_seqlen} keys")
        return torch.full((num_seqs,), length, dtype=torch.int32, device=device)
    seq_lens = lengths(args, "seq_lens", num_seqs, device)
    if seq_lens is None and offsets is not None:
        args.put("seq_lens", None, args.name("cu_seqlens_k"))
        return offsets.diff()
    return torch.full((num_seqs,), max_seqlen, dtype=torch.int32, device=device) if seq_lens is None else seq_lens
