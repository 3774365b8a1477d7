"""Attention of sequences that share a cached prefix, whose keys are read once for all sequences."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import InvalidInputError, as_bool, as_int
from ..core.operation import Run, operation
from .merge_attn_states import merge_attn_states
from .paged_attention import ATTENTION_OP, check_attention_tensors, new_output, paged_attention
from .plan import AttentionPlan


@operation(new_output, arguments=dict.fromkeys(("plan", "prefix_plan", "return_lse"), ""), **ATTENTION_OP)
def cascade_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    shared_prefix_len: int,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_table_scale: torch.Tensor | None = None,
    v_table_scale: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    deterministic: bool = False,
    plan: AttentionPlan | None = None,
    prefix_plan: AttentionPlan | None = None,
    return_lse: bool = False,
) -> Run[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    """Compute causal `paged_attention` over sequences that share their first `shared_prefix_len` tokens.

    All queries attend to the prefix as one sequence, then each sequence to its own tokens. The two parts are merged by
    their log-sum-exps (Juravsky et al., "Hydragen", 2024). B sequences over P shared and S own tokens read P + B S
    tokens instead of B (P + S), so it pays if many sequences share a long prefix.

    Args:
        shared_prefix_len: length of the prefix, a multiple of the block size. The first shared_prefix_len / block_size
            entries of all rows of `block_table` are equal. All queries come after the prefix.
        plan, prefix_plan: result of `cascade_plans` for this step, to share between layers; None makes them for this
            call.

    The other arguments, the result and the errors are those of `paged_attention`. Windows, chunks and ALiBi are not
    supported: they depend on the distance between query and key.

    Raises:
        InvalidInputError: shared_prefix_len is not a multiple of the block size or exceeds the table; on a CPU also if
            a sequence with a query does not hold the prefix.
    """
    check_attention_tensors(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens)
    shared_prefix_len, return_lse = as_int("shared_prefix_len", shared_prefix_len), as_bool("return_lse", return_lse)
    num_tokens, block_size = len(q), k_cache.shape[1]
    longest = block_table.shape[1] * block_size
    if shared_prefix_len % block_size or not 0 <= shared_prefix_len <= longest:
        raise InvalidInputError(
            f"shared_prefix_len: {shared_prefix_len}, expected a multiple of {block_size} from 0 to {longest}"
        )
    num_blocks = shared_prefix_len // block_size
    if block_table.device.type == "cpu":
        _check_prefix(block_table, cu_seqlens_q, seq_lens, shared_prefix_len, num_blocks)
    if plan is None or prefix_plan is None:
        sizes = {"num_tokens": num_tokens, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": longest}
        plan, prefix_plan = cascade_plans(cu_seqlens_q, seq_lens, shared_prefix_len=shared_prefix_len, **sizes)
    plans, has_prefix = (plan, prefix_plan), bool(num_blocks and seq_lens.numel())
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": softcap, "deterministic": deterministic}

    def run(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        block_table: torch.Tensor,
        sinks: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        k_table_scale: torch.Tensor | None = None,
        v_table_scale: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        scales |= {"k_table_scale": k_table_scale, "v_table_scale": v_table_scale}
        shared: dict[str, Any] = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **scales, **options}

        def attend(plan: AttentionPlan, **arguments: Any) -> Any:
            lengths: Any = {"cu_seqlens_q": plan.cu_seqlens_q, "seq_lens": plan.seq_lens}
            return paged_attention(**shared, **lengths, plan=plan, return_lse=True, **arguments)

        suffix = {"sinks": sinks, "mask": mask, "max_seqlen_q": max_seqlen_q}
        states = attend(plans[0], block_table=block_table[:, num_blocks:], **suffix)
        if has_prefix:
            prefix = {"block_table": block_table[:1, :num_blocks], "max_seqlen_q": num_tokens, "causal": False}
            states = merge_attn_states(*attend(plans[1], **prefix), *states)
        if return_lse:
            return states
        return states[0]

    return run


def _check_prefix(
    block_table: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, length: int, num_blocks: int
) -> None:
    """Raise InvalidInputError unless the prefix precedes all queries, in the same blocks as in row 0 of the table."""
    q_lens = cu_seqlens_q.diff()
    contexts = torch.where(q_lens > 0, seq_lens.long() - q_lens, length)
    if len(contexts) and int(contexts.min()) < length:
        seq = int(contexts.argmin())
        raise InvalidInputError(
            f"shared_prefix_len: {length}, expected at most {int(contexts[seq])}, the keys before the queries of "
            f"sequence {seq}"
        )
    is_other = (block_table[:, :num_blocks] != block_table[:1, :num_blocks]) & (q_lens > 0)[:, None]
    if is_other.any():
        seq, column = is_other.nonzero()[0].tolist()
        raise InvalidInputError(
            f"block_table[{seq}, {column}]: {int(block_table[seq, column])}, expected {int(block_table[0, column])}, "
            "the shared block that row 0 names"
        )


def cascade_plans(
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    shared_prefix_len: int,
    num_tokens: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> tuple[AttentionPlan, AttentionPlan]:
    """Return the plans of `cascade_attention`: for the tokens after the prefix, and for the prefix.

    Args:
        cu_seqlens_q: int32 [num_seqs + 1].
        seq_lens: int32 [num_seqs], prefix included.
        num_tokens: rows of q.
        max_seqlen_q, max_seqlen_k: upper bounds known to the host.
    """
    shared_prefix_len = as_int("shared_prefix_len", shared_prefix_len)
    max_seqlen_k = as_int("max_seqlen_k", max_seqlen_k, shared_prefix_len)
    suffix_plan = AttentionPlan(
        cu_seqlens_q,
        (seq_lens - shared_prefix_len).clamp_(min=0),  # a sequence without queries may be shorter than the prefix
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k - shared_prefix_len,
    )
    first_and_last = torch.nn.functional.pad(cu_seqlens_q[-1:], (1, 0))  # padding rows belong to no sequence
    length = torch.full_like(first_and_last[:1], shared_prefix_len)
    prefix_plan = AttentionPlan(first_and_last, length, max_seqlen_q=num_tokens, max_seqlen_k=shared_prefix_len)
    return suffix_plan, prefix_plan
