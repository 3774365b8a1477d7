"""Calls of attention without Triton: numba kernels, or the definitions in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from ..core.device import takes_numba
from ..core.dtypes import KV_KINDS
from ..core.ids import Sequences, check_ids_on_host, check_sequences_on_host
from ..core.operation import Run
from ..cpu.recording import recording
from . import compressed_definition, definition, latent_definition
from .call import AttentionCall, CompressedCall, MlaCall, tensor_names
from .keys import NO_LIMIT
from .plan import AttentionPlan, outputs, reference_to

# Most pairs of a query and a key whose groups all layers share, a byte each. Every layer makes those of longer prompts.
_MAX_KEPT = 1 << 28


@cache
def _one() -> torch.Tensor:
    """Return the scale of 8-bit floats without one; made by the first call, so that importing makes no tensor."""
    return torch.ones(1)


def bind(call: AttentionCall, plan: AttentionPlan | None) -> Run[Any]:
    """Return a function that computes calls of `paged_attention` like this one in the plan's step.

    Numba kernels read the caches in place. On one core of a Xeon with AMX they take 0.3 to 0.5 of the time for 32
    prompts of 512 tokens in bfloat16, 0.5 to 0.6 in float32, because no keys are gathered to be masked.
    """
    is_masked = call.mask is not None or call.is_causal is not None
    is_scaled = call.k_scale is not None or call.v_scale is not None
    head_numbers = call.sinks, call.alibi_slopes
    if not is_masked and not is_scaled and takes_numba(call.q, call.k_cache, call.v_cache, weights=head_numbers):
        return _bind_numba(call, plan)
    if not is_masked and _takes_codes(call):
        return _bind_numba(call, plan)
    has_flags, return_lse = call.is_causal is not None, call.return_lse
    window, chunk_size, deterministic = call.window, call.chunk_size, call.deterministic
    options: dict[str, Any] = {"softmax_scale": call.softmax_scale, "softcap": call.softcap}
    has_scores = definition.needs_scores(return_lse, *head_numbers, call.softcap, call.chosen_blocks)
    chosen_block_size = call.chosen_block_size

    def run(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        max_seqlen_q: int,
        causal: Any = True,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        k_table_scale: torch.Tensor | None = None,
        v_table_scale: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        chosen_blocks: torch.Tensor | None = None,
        plan: AttentionPlan | None = None,
        out: torch.Tensor | None = None,
        **_: object,
    ) -> Any:
        _note_read("paged_attention")
        lengths: dict[str, Any] = {"block_table": block_table, "cu_seqlens_q": cu_seqlens_q, "seq_lens": seq_lens}
        # The window of causal calls is 0 on the right.
        limits: dict[str, Any] = {
            "causal": causal if has_flags else False,
            "window_size": window,
            "attention_chunk_size": chunk_size,
            "mask": mask,
            "chosen_blocks": chosen_blocks,
            "chosen_block_size": chosen_block_size,
        }
        groups_of_step: dict[Any, Any] = {}
        if plan is not None:
            groups_of_step = plan.query_groups
        tensors = block_table, causal if has_flags else None, mask
        cut: dict[str, Any] = {"has_scores": has_scores, "deterministic": deterministic}
        rules = window, chunk_size, chosen_block_size, has_scores, deterministic
        key = *rules, q.shape, k_cache.shape, v_cache.shape, *map(id, tensors)
        groups: Iterable[definition.QueryGroup]
        if key in groups_of_step:
            groups, _ = groups_of_step[key]
        else:
            _check(q, k_cache, block_table, cu_seqlens_q, seq_lens, max_seqlen_q, window[0], chunk_size)
            groups = definition.group_queries(q, k_cache, v_cache, **lengths, **limits, **cut)
            num_pairs = int(cu_seqlens_q.diff().long() @ seq_lens.long())
            if num_pairs <= _MAX_KEPT and chosen_blocks is None:  # layers choose other blocks
                groups = list(groups)
                # Keep the tensors with their groups, so that no other tensors get the same ids.
                groups_of_step[key] = groups, tensors
        results = definition.paged_attention(
            q, k_cache, v_cache, **lengths, **limits, **options, sinks=sinks, alibi_slopes=alibi_slopes,
            k_scale=k_scale, v_scale=v_scale, k_table_scale=k_table_scale, v_table_scale=v_table_scale, groups=groups,
            needs_lse=return_lse, compute=torch.float32,
        )  # fmt: skip
        return _rounded(results, q.dtype, out, return_lse=return_lse)

    return run


def _takes_codes(call: AttentionCall) -> bool:
    """Return whether numba kernels read the call's keys or values in 4 or 8 bits."""
    if call.chosen_blocks is not None:
        return False
    if call.k_cache.dtype not in KV_KINDS and call.v_cache.dtype not in KV_KINDS:
        return False
    if not takes_numba(call.q, weights=(call.sinks, call.alibi_slopes)):
        return False
    from ..cpu.attention import paged_attention as numba_attention

    return numba_attention.takes_codes(call)


def bind_latent(call: MlaCall, plan: AttentionPlan | None) -> Run[Any]:
    """Return a function that computes calls of `paged_mla_attention` like this one."""
    numbers = [call.q]
    if call.kv_cache.dtype not in (torch.uint8, torch.float8_e4m3fn):
        numbers.append(call.kv_cache)
    if takes_numba(*numbers, weights=(call.sinks,)):
        from ..cpu.attention import latent_attention

        if latent_attention.reads(call):
            return _bind_latent_numba(call, plan)
    return _bind_definition(
        call,
        latent_definition.paged_mla_attention,
        _check_latent,
        v_head_dim=call.v_head_dim,
        softmax_scale=call.softmax_scale,
        causal=call.causal,
        window_size=call.window,
    )


def bind_compressed(call: CompressedCall, plan: AttentionPlan | None) -> Run[Any]:
    """Return a function that computes calls of `paged_compressed_attention` like this one."""
    numbers = [call.q]
    if call.kv_cache.dtype != torch.uint8:
        numbers.append(call.kv_cache)
    if takes_numba(*numbers, weights=(call.sinks,)):
        from ..cpu.attention import compressed_attention

        if compressed_attention.reads(call):
            return _bind_compressed_numba(call, plan)
    return _bind_definition(
        call,
        compressed_definition.paged_compressed_attention,
        _check_compressed,
        softmax_scale=call.softmax_scale,
        sliding_window=call.sliding_window,
        pool_size=call.pool_size,
    )


def _bind_definition(
    call: MlaCall | CompressedCall, definition: Callable[..., Any], check: Callable[[Any], None], **options: Any
) -> Run[Any]:
    """Return a function that checks the ids of a call and computes its definition in float32."""
    names = [name for name in tensor_names(call) if name != "out"]

    def run(*positional: torch.Tensor, max_seqlen_q: int, out: torch.Tensor | None = None, **arguments: Any) -> Any:
        _note_read(definition.__name__)
        arguments |= zip(call._fields, positional, strict=False)
        tensors: dict[str, Any] = {name: arguments.get(name) for name in names}
        check(call._replace(max_seqlen_q=max_seqlen_q, **tensors))
        results = definition(**tensors, **options, compute=torch.float32)
        return _rounded(results, call.q.dtype, out, return_lse=call.return_lse)

    return run


def _check_latent(call: MlaCall) -> None:
    """Raise InvalidInputError for lengths, offsets or blocks out of range."""
    lengths = call.block_table, call.cu_seqlens_q, call.seq_lens, call.max_seqlen_q
    _check(call.q, call.kv_cache, *lengths, call.window[0])


def _check_compressed(call: CompressedCall) -> None:
    """Raise InvalidInputError for lengths, offsets, blocks or positions out of range."""
    lengths = call.block_table, call.cu_seqlens_q, call.seq_lens, call.max_seqlen_q
    _check(call.q, call.kv_cache, *lengths, call.sliding_window - 1)
    entry_ids = call.entry_ids()
    if entry_ids is not None:
        check_sequences_on_host(entry_ids)
    if call.cos_sin_cache is not None:
        check_ids_on_host("seq_lens", call.seq_lens, 0, len(call.cos_sin_cache))


def _check(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_q: int,
    window_left: int = NO_LIMIT,
    chunk_size: int = 0,
) -> None:
    """Raise InvalidInputError for lengths, offsets or blocks out of range."""
    num_blocks, block_size = cache.shape[:2]
    longest = min(int(max_seqlen_q), len(q))
    sizes = len(q), num_blocks, block_size, longest, window_left, 1, chunk_size or NO_LIMIT
    check_sequences_on_host(Sequences(block_table, cu_seqlens_q, seq_lens, *sizes))


def _note_read(operation: str) -> None:
    """Note that a definition reads lengths, so a recording cannot repeat it."""
    active_recording = recording()
    if active_recording is not None:
        active_recording.note_read(f"{operation}, which no numba kernel computes here")


def _rounded(
    results: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype, out: torch.Tensor | None, *, return_lse: bool
) -> Any:
    attended, lse = results
    if out is None:
        out = attended.to(dtype)
    else:
        out.copy_(attended)
    if return_lse:
        return out, lse.contiguous()
    return out


def _bind_numba(call: AttentionCall, plan: AttentionPlan | None) -> Run[Any]:
    """Return a function that checks lengths and blocks, and then runs numba kernels, which trust them."""
    from ..cpu.attention import chosen_blocks as numba_blocks
    from ..cpu.attention import paged_attention as numba_attention

    lengths = call.block_table, call.cu_seqlens_q, call.seq_lens, call.max_seqlen_q
    _check(call.q, call.k_cache, *lengths, call.window[0], call.chunk_size)
    bound_plan = reference_to(plan)
    if call.chosen_blocks is None:
        launch = numba_attention.launch_for(call)
    else:
        launch = numba_blocks.launch_for(call)
    return_lse, v_head_dim = call.return_lse, call.v_head_dim

    def run(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        k_table_scale: torch.Tensor | None = None,
        v_table_scale: torch.Tensor | None = None,
        chosen_blocks: torch.Tensor | None = None,
        plan: AttentionPlan | None = None,
        out: torch.Tensor | None = None,
        **_: object,
    ) -> Any:
        assert plan is bound_plan()
        out, lse = outputs(q, v_head_dim, out, return_lse=return_lse)
        launch(
            {
                "q": _apart(q, out),
                "k_cache": k_cache,
                "v_cache": v_cache,
                "out": out,
                "block_table": block_table,
                "cu_seqlens_q": cu_seqlens_q.contiguous(),
                "seq_lens": seq_lens.contiguous(),
                "sinks": None if sinks is None else sinks.contiguous(),
                "alibi_slopes": None if alibi_slopes is None else alibi_slopes.contiguous(),
                "lse": lse,
                "k_scale": _one() if k_scale is None else k_scale,
                "v_scale": _one() if v_scale is None else v_scale,
                "k_table_scale": _one() if k_table_scale is None else k_table_scale,
                "v_table_scale": _one() if v_table_scale is None else v_table_scale,
                "chosen_blocks": chosen_blocks,
            }
        )
        if lse is None:
            return out
        return out, lse

    return run


def _bind_latent_numba(call: MlaCall, plan: AttentionPlan | None) -> Run[Any]:
    """Return a function that runs a numba kernel, which trusts the lengths and blocks that are checked here."""
    from ..cpu.attention import latent_attention

    _check_latent(call)
    bound_plan = reference_to(plan)
    launch = latent_attention.launch_for(call)
    return_lse, v_head_dim = call.return_lse, call.v_head_dim

    def run(
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        *,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        sinks: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        plan: AttentionPlan | None = None,
        out: torch.Tensor | None = None,
        **_: object,
    ) -> Any:
        assert plan is bound_plan()
        out, lse = outputs(q, v_head_dim, out, return_lse=return_lse)
        scale = _one() if k_scale is None else k_scale
        launch(
            {
                "q": _apart(q, out),
                "kv_cache": kv_cache,
                "k_cache": kv_cache,
                "v_cache": kv_cache,
                "entry_cache": kv_cache,
                "out": out,
                "block_table": block_table,
                "entry_table": block_table,
                "cu_seqlens_q": cu_seqlens_q.contiguous(),
                "seq_lens": seq_lens.contiguous(),
                "indices": indices,
                "sinks": None if sinks is None else sinks.contiguous(),
                "alibi_slopes": None,
                "cos_sin_cache": None,
                "lse": lse,
                "k_scale": scale,
                "v_scale": scale,
                "k_table_scale": _one(),
                "v_table_scale": _one(),
            }
        )
        if lse is None:
            return out
        return out, lse

    return run


def _bind_compressed_numba(call: CompressedCall, plan: AttentionPlan | None) -> Run[Any]:
    """Return a function that runs a numba kernel, which trusts the lengths and blocks that are checked here."""
    from ..cpu.attention import compressed_attention

    _check_compressed(call)
    bound_plan = reference_to(plan)
    launch = compressed_attention.launch_for(call)
    return_lse = call.return_lse

    def run(
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        entry_cache: torch.Tensor | None = None,
        *,
        block_table: torch.Tensor,
        entry_table: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        indices: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        cos_sin_cache: torch.Tensor | None = None,
        plan: AttentionPlan | None = None,
        out: torch.Tensor | None = None,
        **_: object,
    ) -> Any:
        assert plan is bound_plan()
        out, lse = outputs(q, q.shape[2], out, return_lse=return_lse)
        launch(
            {
                "q": _apart(q, out),
                "kv_cache": kv_cache,
                "entry_cache": entry_cache,
                "out": out,
                "block_table": block_table,
                "entry_table": entry_table,
                "cu_seqlens_q": cu_seqlens_q.contiguous(),
                "seq_lens": seq_lens.contiguous(),
                "indices": indices,
                "sinks": None if sinks is None else sinks.contiguous(),
                "cos_sin_cache": cos_sin_cache,
                "lse": lse,
            }
        )
        if lse is None:
            return out
        return out, lse

    return run


def _apart(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the queries, a copy of them if `out` is `q`."""
    if q.data_ptr() == out.data_ptr():
        return q.clone()
    return q
