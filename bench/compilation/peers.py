"""vLLM's Triton attention kernel as compile cases, with the tiles its own launcher chooses: rows to read ours beside.

Needs vLLM's Python files on the path (0.33.0 was tried).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from paged.bench.compilation.case import TARGETS, CompileCase, kernel_case
from paged.bench.vllm_files import jit_functions, vllm_folder

_FILES = ("triton_attention_helpers.py", "triton_unified_attention.py")
_HEAD_DIM, _BLOCK_SIZE, _NUM_Q_HEADS, _NUM_KV_HEADS = 128, 16, 32, 8
_GROUP = _NUM_Q_HEADS // _NUM_KV_HEADS
# vLLM's triton_attn.py cuts every sequence in 16 where no query is longer than 8 tokens and the batch is small.
_SEGMENTS = 16
_POINTERS = {
    **dict.fromkeys(("output_ptr", "query_ptr", "key_cache_ptr", "value_cache_ptr"), "*bf16"),
    **dict.fromkeys(("block_tables_ptr", "seq_lens_ptr", "rswa_prefix_lens_ptr", "query_start_len_ptr"), "*i32"),
    **dict.fromkeys(("k_scale", "v_scale"), "*fp32"),
}
_SEGMENT_POINTERS = dict.fromkeys(("segm_output_ptr", "segm_max_ptr", "segm_expsum_ptr"), "*fp32")
_STRIDES = (
    *("query_stride_0", "query_stride_1", "output_stride_0", "output_stride_1", "qq_bias_stride_0"),
    *("stride_k_cache_0", "stride_k_cache_1", "stride_k_cache_2"),
    *("stride_v_cache_0", "stride_v_cache_1", "stride_v_cache_2"),
)
_SCALARS = {
    **dict.fromkeys(("block_table_stride", *_STRIDES), "i64"),
    **dict.fromkeys(("scale", "out_scale", "softcap"), "fp32"),
    "num_seqs": "i32",
}


def peer_cases() -> list[CompileCase]:
    """The kernel as launched for prefill and mixed batches, and as launched for decode, with every sequence split.

    bf16, 32 query heads on 8 KV heads, head_dim 128, block_size 16. Warps and stages are Triton's defaults: 4, and 3 on
    NVIDIA, 2 on AMD.

    Raises:
        FileNotFoundError: vLLM's files are not on the path.
    """
    functions = _functions()
    kernel, tile_size = functions["kernel_unified_attention"], functions["_get_tile_size"]
    variants = {"prefill": 1, "decode": _SEGMENTS}
    return [
        _case(kernel, kind, tile_size(_HEAD_DIM, 0, 2, is_prefill=kind == "prefill"), variants[kind], target)
        for target in TARGETS
        for kind in variants
    ]


def _functions() -> dict[str, Any]:
    """vLLM's jit functions, and those that choose its tile, by name."""
    folder = vllm_folder() / "v1/attention/ops"
    names: dict[str, Any] = {
        "__name__": "vllm.v1.attention.ops",  # Triton wants to know a function's module
        "tl": tl,
        "triton": triton,
        "float8_info": torch.finfo(torch.float8_e4m3fn),
    }
    for name in _FILES:
        jit_functions(folder / name, names, others=("_get_tile_size", "_is_gemma3_attention"))
    return names


def _case(kernel: Any, kind: str, tile_size: int, segments: int, target: str) -> CompileCase:
    is_split = segments > 1
    types = _POINTERS | _SCALARS | (_SEGMENT_POINTERS if is_split else {})
    values = {
        "num_query_heads": _NUM_Q_HEADS,
        "num_queries_per_kv": _GROUP,
        "BLOCK_SIZE": _BLOCK_SIZE,
        "TILE_SIZE": tile_size,
        "HEAD_SIZE": _HEAD_DIM,
        "HEAD_SIZE_PADDED": _HEAD_DIM,
        "SLIDING_WINDOW": 0,
        "USE_CAUSAL": True,
        "MAX_MM_RANGES": 0,
        "R_SWA_WINDOW": 0,
        "stride_k_cache_3": 1,
        "stride_v_cache_3": 1,
        "BLOCK_Q": 16 // _GROUP,
        "BLOCK_M": 16,
        "NUM_SEGMENTS_PER_SEQ": segments,
        "IS_3D": is_split,
    }
    # What is left is off: features by their flag, the tensors they would take by None.
    rest = [parameter for parameter in kernel.params if parameter.name not in types | values]
    defaults = {
        parameter.name: parameter.default
        if parameter.has_default
        else (False if parameter.name.startswith("USE_") else None)
        for parameter in rest
    }
    name, num_stages = f"vllm unified attention {kind} D={_HEAD_DIM} bf16", 2 if target.startswith("gfx") else 3
    constexprs = values | defaults
    return kernel_case(name, kernel, constexprs, types, aligned=_STRIDES, num_stages=num_stages, targets=(target,))
