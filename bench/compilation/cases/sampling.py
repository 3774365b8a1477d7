"""The choice of tokens out of 151,936: the best one, and the passes that filter and draw."""

from __future__ import annotations

from typing import Any

from paged.bench.compilation.case import CompileCase, kernel_case
from paged.kernels.common.launch import num_warps
from paged.kernels.sampling import passes, thresholds
from paged.kernels.sampling.greedy_argmax import BLOCK_TOKENS, _greedy_argmax_chunk_kernel, _greedy_argmax_reduce_kernel
from paged.kernels.sampling.row_functions import NUM_BINS
from paged.kernels.sampling.sample_tokens import BLOCK_LIST, PROBES

# Arguments that are neither constexprs, int32 scalars, float32 tensors nor the logits.
KINDS = {
    "logits_ptr": "*bf16",
    "token_mask_ptr": "*i1",
    "token_ptr": "*i32",
    "table_rows_ptr": "*i64",
    "counts_ptr": "*i32",
    "seen_ptr": "*i1",
    "keys_ptr": "*i64",
    "top_k_ptr": "*i64",
    "histogram_ptr": "*i32",
    "bounds_ptr": "*i32",
    "sums_ptr": "*i64",
    "listed_token_ptr": "*i32",
    "out_ptr": "*i64",
}
_PENALTIES = ("table_rows_ptr", "counts_ptr", "seen_ptr", "penalties_ptr")
_FILTERS = ("top_k_ptr", "top_p_ptr", "log_min_p_ptr")
_CUTS = ("bounds_ptr", "histogram_ptr", "sums_ptr", "listed_z_ptr", "listed_token_ptr")


def cases() -> list[CompileCase]:
    """With and without masks and penalties; no filter, each alone, all of them."""
    plain = ("token_mask_ptr", "repetition_penalty_ptr")
    cases = [
        _case("greedy_argmax chunk", _greedy_argmax_chunk_kernel, BLOCK_TOKENS, plain),
        _case("greedy_argmax chunk masked penalised", _greedy_argmax_chunk_kernel, BLOCK_TOKENS, ()),
        _case("greedy_argmax reduce", _greedy_argmax_reduce_kernel, 64, ()),
    ]
    for filters, text in (
        ((), "plain"),
        (("top_k_ptr",), "top_k"),
        (("top_p_ptr",), "top_p"),
        (("log_min_p_ptr",), "log_min_p"),
        (_FILTERS, "top_k top_p log_min_p"),
    ):
        name = f"sample_tokens {text}"
        missing = set(_FILTERS) - set(filters)
        parts = [("best of chunk", passes._best_of_chunk_kernel, 2 * BLOCK_TOKENS)]
        if "top_k_ptr" in filters or "top_p_ptr" in filters:
            parts.append(("count bins", passes._count_bins_kernel, BLOCK_TOKENS))
            cases.append(_case(f"{name}: bound", thresholds._bound_kernel, 2 * NUM_BINS.value, missing))
        else:
            missing |= set(_CUTS)
        if filters:
            parts.append(("collect", passes._collect_kernel, 2 * BLOCK_TOKENS))
        for part, kernel, size in parts:
            cases.append(_case(f"{name}: {part}", kernel, size, missing | set(_PENALTIES)))
            if filters in ((), _FILTERS):
                cases.append(_case(f"{name}: {part} penalised", kernel, size, missing))
        cases.append(_case(f"{name}: choose", thresholds._choose_kernel, BLOCK_LIST * PROBES // 2, missing))
    return cases


def _case(name: str, kernel: Any, num_elements: int, missing: Any) -> CompileCase:
    """A case with the warps of a program of `num_elements`; `missing` arguments are None."""
    sizes = {
        "BLOCK_TOKENS": BLOCK_TOKENS,
        "BLOCK_CHUNKS": 64,
        "BLOCK_LIST": BLOCK_LIST,
        "PROBES": PROBES,
    }
    constexprs: dict[str, Any] = {}
    for argument in kernel.arg_names:
        if argument in missing:
            constexprs[argument] = None
        elif argument in sizes:
            constexprs[argument] = sizes[argument]
    return kernel_case(name, kernel, constexprs, KINDS, dtype="fp32", num_warps=num_warps(num_elements))
