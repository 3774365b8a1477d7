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
    found = [
        _case("greedy_argmax chunk", _greedy_argmax_chunk_kernel, BLOCK_TOKENS, plain),
        _case("greedy_argmax chunk masked penalised", _greedy_argmax_chunk_kernel, BLOCK_TOKENS, ()),
        _case("greedy_argmax reduce", _greedy_argmax_reduce_kernel, 64, ()),
    ]
    for given in ((), ("top_k_ptr",), ("top_p_ptr",), ("log_min_p_ptr",), _FILTERS):
        has_cuts = bool({"top_k_ptr", "top_p_ptr"} & set(given))
        missing = {name for name in _FILTERS if name not in given} | set(() if has_cuts else _CUTS)
        name = f"sample_tokens {' '.join(each.removesuffix('_ptr') for each in given) or 'plain'}"
        parts = [("best of chunk", passes._best_of_chunk_kernel)]
        if has_cuts:
            parts.append(("count bins", passes._count_bins_kernel))
            found.append(_case(f"{name}: bound", thresholds._bound_kernel, 2 * NUM_BINS.value, missing))
        if given:
            parts.append(("collect", passes._collect_kernel))
        for part, kernel in parts:
            size = BLOCK_TOKENS if part == "count bins" else 2 * BLOCK_TOKENS
            found.append(_case(f"{name}: {part}", kernel, size, missing | set(_PENALTIES)))
            if given in ((), _FILTERS):
                found.append(_case(f"{name}: {part} penalised", kernel, size, missing))
        found.append(_case(f"{name}: choose", thresholds._choose_kernel, BLOCK_LIST * PROBES // 2, missing))
    return found


def _case(name: str, kernel: Any, num_elements: int, missing: Any) -> CompileCase:
    """A case with the warps of a program of `num_elements`; `missing` arguments are None."""
    sizes = {
        "BLOCK_TOKENS": BLOCK_TOKENS,
        "BLOCK_CHUNKS": 64,
        "BLOCK_LIST": BLOCK_LIST,
        "PROBES": PROBES,
    }
    constexprs = {
        each: None if each in missing else sizes[each] for each in kernel.arg_names if each in sizes or each in missing
    }
    return kernel_case(name, kernel, constexprs, KINDS, dtype="fp32", num_warps=num_warps(num_elements))
