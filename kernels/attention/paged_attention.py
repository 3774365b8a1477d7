"""Varlen paged attention: prefill chunks, decode steps and verify rows in one call."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..core.checks import (
    FLOAT_DTYPES,
    MAX_HEAD_DIM,
    check_cache,
    check_choice,
    check_last_dim_contiguous,
    check_scale,
    check_sequences_fit,
    check_strided_out,
    check_table_scale,
    check_tensor,
)
from ..core.custom_ops import Arguments
from ..core.device import use_triton
from ..core.dtypes import KV_KINDS, kv_kind
from ..core.errors import InvalidInputError, as_bool, as_float, as_int
from ..core.operation import Run, operation
from . import launches, without_triton
from .call import AttentionCall, bind_steps, checked_window, returned_results
from .keys import NO_LIMIT
from .plan import AttentionPlan

# Most positions of a chosen block, which is an entry of `chosen_blocks`.
MAX_CHOSEN_BLOCK = 256


def _encode(arguments: Arguments) -> None:
    causal = arguments.get("causal", True)
    if isinstance(causal, torch.Tensor):
        arguments |= {"causal": False, "is_causal": causal}


def decode_causal(arguments: Arguments) -> None:
    """Turn the custom op's arguments back into those of the operation."""
    arguments["return_lse"] = True
    is_causal = arguments.pop("is_causal", None)
    if is_causal is not None:
        arguments["causal"] = is_causal


def new_output(
    q: torch.Tensor, v_cache: torch.Tensor, device: Any = None, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty tensors for out and lse."""
    device = device or q.device
    out = torch.empty(*q.shape[:2], kv_kind(v_cache.dtype).width(v_cache), dtype=q.dtype, device=device)
    return out, torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=device)


ATTENTION_OP: dict[str, Any] = {
    "results": "Tensor out, Tensor lse",
    "decode": decode_causal,
    "finish": returned_results,
}


@operation(
    new_output,
    arguments={"causal": "bool causal=True, Tensor? is_causal=None", "plan": "", "return_lse": ""},
    encode=_encode,
    step="plan",
    **ATTENTION_OP,
)
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    causal: bool | torch.Tensor = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_table_scale: torch.Tensor | None = None,
    v_table_scale: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    attention_chunk_size: int = 0,
    chosen_blocks: torch.Tensor | None = None,
    chosen_block_size: int = 0,
    deterministic: bool = False,
    plan: AttentionPlan | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Run[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    """Compute attention over a paged KV cache, for prompts, chunks, decode steps and verify rows in one call.

    Returns softmax(scores) @ v for every query. Scores, softmax and sums are float32. The queries of a sequence are its
    last positions: query i of n has position seq_len - n + i. A decode step is a sequence with one query, a prompt one
    with as many queries as keys. A row that sees no key gives 0 and a log-sum-exp of -inf, or with sinks that of the
    sink.

    The score of a query at position i and a key at position j is softcap(softmax_scale * q k) - slope * |i - j|.

    Args:
        q: [num_tokens, num_q_heads, head_dim], float32, float16 or bfloat16, last dimension contiguous. head_dim and
            v_head_dim are 1 to 512. Rows beyond cu_seqlens_q[-1] are padding and give 0 and -inf.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim], dtype of q or one of 8 or 4 bits, see
            `reshape_and_cache`, last dimension contiguous. num_q_heads is a multiple of num_kv_heads. Query head h
            reads KV head h // (num_q_heads // num_kv_heads).
        v_cache: [num_blocks, block_size, num_kv_heads, v_head_dim], one of these dtypes, last dimension contiguous. May
            be a view of k_cache. If it begins at the same element and both head sizes round up to one power of two, K
            and V are read once.
        block_table: int32 [num_seqs, max_blocks_per_seq]. Entries beyond a sequence's last block are never read.
        cu_seqlens_q: int32 [num_seqs + 1], query offsets, rising from 0.
        seq_lens: int32 [num_seqs], KV lengths, new tokens included.
        max_seqlen_q: upper bound of the longest query. On a GPU lengths are not checked: a sequence with more queries,
            and all after it, give 0 and -inf.
        softmax_scale: 0 to 1e30; None for 1 / sqrt(head_dim).
        causal: whether position i sees only positions <= i; a bool tensor [num_seqs] chooses for each sequence.
        window_size: (left, right), positions seen on each side besides the own one; -1 for no limit.
        softcap: 1e-6 to 1000, or 0 for none. Scores become softcap * tanh(score / softcap) (Gemma 2, 2024), with an
            error up to softcap * 1e-7.
        sinks: [num_q_heads], any float dtype: for each row of a head the score of one more key with value 0 (Xiao et
            al., 2023). Not scaled, as in gpt-oss. The log-sum-exp includes it.
        alibi_slopes: [num_q_heads], any float dtype (Press et al., 2021).
        k_scale, v_scale: float32, one value or [num_kv_heads]; K is k_cache * k_scale, V likewise. int8 caches need a
            scale for each row, [num_blocks, block_size, num_kv_heads], any strides, and so do bits8 caches. int4 caches
            need bfloat16 scales [num_blocks, block_size, num_kv_heads, groups] and NVFP4 caches float8_e4m3fn scales;
            see `reshape_and_cache`. In 16 bits, keys and values of int4 caches are rounded to the dtype of q after they
            are scaled; those of NVFP4 caches are exact.
        k_table_scale, v_table_scale: float32 [] or [1], one more scale of an NVFP4 cache; None for 1.
        mask: bool [num_tokens, at least the longest query]. False at column j hides new key j of the same sequence, for
            example the branches of a tree of draft tokens. Older keys are not masked; all other limits still apply.
        attention_chunk_size: position i sees position j only if j // attention_chunk_size equals i //
            attention_chunk_size (Llama 4, 2025); 0 for no limit.
        chosen_blocks: int32 [num_tokens, num_kv_heads, k], last dimension contiguous: the blocks of positions that the
            heads of a KV head see; all other limits still apply. A negative id chooses none. Each entry counts, so ids
            of a row should be distinct.
        chosen_block_size: positions of a chosen block, 1 to 256: block i is positions i * chosen_block_size to (i + 1)
            * chosen_block_size - 1. It need not fit the cache's block_size. 0 without chosen_blocks.
        deterministic: whether a sequence's results have the same bits in every batch. Slower if few long sequences run
            beside many short ones.
        plan: the step's `AttentionPlan`, to share between layers; None makes one for this call.
        out: [num_tokens, num_q_heads, v_head_dim], dtype of q, last dimension contiguous; None makes one.
        return_lse: whether to also return the log-sum-exp.

    Returns:
        out; with return_lse (out, lse), lse float32 [num_q_heads, num_tokens], the natural log-sum-exp of the scores.

    Numbers may be NumPy's, or tensors without dimensions. Lengths, offsets and the block ids that queries read are
    checked on a CPU, and on a GPU with PAGED_CHECK=1; see `check_ids`.

    Raises:
        InvalidInputError: a shape, dtype, device or value does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    is_causal: torch.Tensor | None = None  # for each sequence; None if it is one value for all
    if isinstance(causal, torch.Tensor) and causal.dim():
        is_causal = causal
    window_left, window_right = checked_window(window_size)
    if is_causal is None and as_bool("causal", causal):
        window_right = 0
    softcap = as_float("softcap", softcap, 0.0, 1000.0)
    if 0.0 < softcap < 1e-6:
        raise InvalidInputError(f"softcap: {softcap}, expected 0 or 1e-06 to 1000.0")
    check_attention_tensors(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens)
    v_head_dim = kv_kind(v_cache.dtype).width(v_cache)
    check_strided_out(out, (*q.shape[:2], v_head_dim), q)
    scale = 1 / math.sqrt(q.shape[2])
    if softmax_scale is not None:
        scale = as_float("softmax_scale", softmax_scale, 0.0, 1e30)
    call = AttentionCall(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        max_seqlen_q=as_int("max_seqlen_q", max_seqlen_q),
        is_causal=is_causal,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        k_table_scale=k_table_scale,
        v_table_scale=v_table_scale,
        mask=mask,
        chosen_blocks=chosen_blocks,
        chosen_block_size=check_chosen_blocks(chosen_blocks, chosen_block_size, q, k_cache),
        softmax_scale=scale,
        window=(window_left, window_right),
        chunk_size=as_int("attention_chunk_size", attention_chunk_size, 0, NO_LIMIT),
        softcap=softcap,
        deterministic=as_bool("deterministic", deterministic),
        return_lse=as_bool("return_lse", return_lse),
        out=out,
        v_head_dim=v_head_dim,
    )
    _check_options(call)
    return bind_steps(call, launches.bind if use_triton(q) else without_triton.bind)


def check_attention_tensors(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Raise InvalidInputError unless these arguments of `paged_attention` fit together."""
    check_tensor("q", q, ("num_tokens", "num_q_heads", "head_dim"), FLOAT_DTYPES)
    _, num_q_heads, head_dim = q.shape
    cache_shape = ("num_blocks", "block_size", "num_kv_heads")
    check_cache("k_cache", k_cache, cache_shape, head_dim, (q.dtype, *KV_KINDS), q.device)
    check_cache("v_cache", v_cache, k_cache.shape[:3], "v_head_dim", (q.dtype, *KV_KINDS), q.device)
    num_kv_heads = k_cache.shape[2]
    if num_kv_heads == 0 or num_q_heads == 0 or num_q_heads % num_kv_heads:
        raise InvalidInputError(f"q: {num_q_heads} heads, expected a multiple of the cache's {num_kv_heads}")
    for name, size in (("q: head_dim", head_dim), ("v_cache: v_head_dim", kv_kind(v_cache.dtype).width(v_cache))):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise InvalidInputError(f"{name} {size}, expected 1 to {MAX_HEAD_DIM}")
    if k_cache.shape[1] == 0:
        raise InvalidInputError("k_cache: block_size 0, expected a positive one")
    check_sequences_fit(block_table, cu_seqlens_q, seq_lens, q.device)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_last_dim_contiguous(name, tensor)


def check_chosen_blocks(
    chosen_blocks: torch.Tensor | None, chosen_block_size: int, q: torch.Tensor, k_cache: torch.Tensor
) -> int:
    """Return chosen_block_size as an int.

    Raises:
        InvalidInputError: it does not fit `chosen_blocks`, or these do not fit q and k_cache.
    """
    size = as_int("chosen_block_size", chosen_block_size, 0, MAX_CHOSEN_BLOCK)
    if chosen_blocks is None:
        if size:
            raise InvalidInputError(f"chosen_block_size: {size}, expected 0 without chosen_blocks")
        return size
    if size == 0:
        raise InvalidInputError(f"chosen_block_size: 0, expected 1 to {MAX_CHOSEN_BLOCK} with chosen_blocks")
    check_choice("chosen_blocks", chosen_blocks, (len(q), k_cache.shape[2], "k"), q, "block")
    return size


def _check_options(call: AttentionCall) -> None:
    """Raise InvalidInputError unless masks, scales and numbers of heads fit q and the caches."""
    q, is_causal, mask = call.q, call.is_causal, call.mask
    num_tokens, num_q_heads, _ = q.shape
    if is_causal is not None:
        check_tensor("causal", is_causal, call.seq_lens.shape, (torch.bool,), q.device)
        check_last_dim_contiguous("causal", is_causal)
    for name, value in (("sinks", call.sinks), ("alibi_slopes", call.alibi_slopes)):
        if value is not None:
            check_tensor(name, value, (num_q_heads,), FLOAT_DTYPES, q.device)
    check_scale("k_scale", call.k_scale, call.k_cache)
    check_scale("v_scale", call.v_scale, call.v_cache)
    check_table_scale("k_table_scale", call.k_table_scale, call.k_cache)
    check_table_scale("v_table_scale", call.v_table_scale, call.v_cache)
    if mask is not None:
        check_tensor("mask", mask, (num_tokens, "longest query"), (torch.bool,), q.device)
        check_last_dim_contiguous("mask", mask)
        longest = min(call.max_seqlen_q, num_tokens)
        if mask.shape[1] < longest:
            raise InvalidInputError(f"mask: {mask.shape[1]} columns, expected at least {longest}")
