"""Attention over a window and compressed entries: DeepSeek-V4's calls, for every target."""

from __future__ import annotations

from typing import Any

from paged.bench.compilation.cases.attention import planned_launch
from paged.bench.compilation.cases.case import TARGETS, TENSOR_CORES, CompileCase
from paged.bench.compilation.cases.launches import empty, launch_case
from paged.kernels.attention.compressed_kernel import _compressed_attention_kernel
from paged.kernels.attention.paged_compressed_attention import paged_compressed_attention
from paged.kernels.cache.latent_cache import MXFP8_BYTES, NVFP4_BYTES, RECORD_BYTES

# Strides in multiples of 16; those of records of 584 bytes are not.
_ALIGNED = ("q_token", "q_head", "out_token", "out_head")
_ALIGNED_ROWS = ("latent_block", "latent_slot", "entry_block", "entry_slot")
_ALIGNED_SCALES = ("scales_block", "scales_slot", "entry_scales_block", "entry_scales_slot")
_ALIGNED_ROPE = ("rope_block", "rope_slot", "entry_rope_block", "entry_rope_slot")
_HEAD_DIM = 512


def cases() -> list[CompileCase]:
    """Return all entries of 128 positions, chosen ones of 4, and a window alone, with each number of heads."""
    compiled = []
    for target in TARGETS:
        compiled += [
            _case(target, 64, pool_size=128),
            _case(target, 64, pool_size=4, is_chosen=True),
            _case(target, 64),
            _case(target, 8, pool_size=128),
            _case(target, 16, pool_size=4, is_chosen=True),
            _case(target, 32, pool_size=4, is_chosen=True),
            _case(target, 16, dtype="fp32", pool_size=4, is_chosen=True),
            _case(target, 64, pool_size=128, record_bytes=RECORD_BYTES),
            _case(target, 64, pool_size=4, is_chosen=True, record_bytes=RECORD_BYTES),
            _case(target, 64, pool_size=1, is_chosen=True, record_bytes=MXFP8_BYTES),
            _case(target, 64, pool_size=128, record_bytes=NVFP4_BYTES),
            _case(target, 64, pool_size=4, is_chosen=True, record_bytes=NVFP4_BYTES),
        ]
        if target.startswith("gfx"):  # other tiles than for 64 heads
            for heads in (16, 32):
                for record_bytes in (RECORD_BYTES, NVFP4_BYTES):
                    compiled.append(_case(target, heads, pool_size=4, is_chosen=True, record_bytes=record_bytes))
    return compiled


def _case(
    target: str,
    heads: int,
    *,
    dtype: str = "bf16",
    pool_size: int = 0,
    is_chosen: bool = False,
    record_bytes: int = 0,
) -> CompileCase:
    """Return a decode step of one token. pool_size: 0 for a window alone."""
    options: dict[str, Any] = {
        "block_table": empty("i32", 1, 8192),
        "cu_seqlens_q": empty("i32", 2),
        "seq_lens": empty("i32", 1),
        "max_seqlen_q": 1,
        "softmax_scale": 0.1,
        "sliding_window": 128,
        "sinks": empty("fp32", heads),
        "cos_sin_cache": empty("fp32", 1, 64),
        "return_lse": True,
    }
    words, element, size, aligned = [f"{heads} heads", dtype], dtype, _HEAD_DIM, [*_ALIGNED, *_ALIGNED_ROWS]
    if record_bytes:
        words.append("records in NVFP4" if record_bytes == NVFP4_BYTES else "records")
        element, size, aligned = "u8", record_bytes, [*_ALIGNED]
        if record_bytes % 16 == 0:
            aligned += [*_ALIGNED_ROWS, *_ALIGNED_SCALES]
        if record_bytes == NVFP4_BYTES:
            aligned += _ALIGNED_ROPE
    if pool_size:
        words.append(f"pools of {pool_size}")
        entries = empty(element, 4, 128 // pool_size, size)
        options |= {"entry_cache": entries, "entry_table": empty("i32", 1, 8192), "pool_size": pool_size}
    if is_chosen:
        words.append("chosen")
        options["indices"] = empty("i32", 1, 512)
    q, cache = empty(dtype, 1, heads, _HEAD_DIM), empty(element, 4, 128, size)
    launch, programs_per_sm = planned_launch(
        _compressed_attention_kernel, target, paged_compressed_attention, q, cache, **options
    )
    block_m, block_n = launch.arguments["BLOCK_M"], launch.arguments["BLOCK_N"]
    expect: dict[str, tuple[str, ...]] = {}
    if dtype != "fp32":
        expect[target] = (TENSOR_CORES[target],)
        if block_m != 64 and target.startswith("sm"):  # wgmma and tcgen05 need 64 rows
            expect[target] = ("HMMA",)
    return launch_case(
        f"paged_compressed_attention {' '.join(words)} {block_m} x {block_n} for {target}",
        launch,
        aligned=tuple(f"stride_{name}" for name in aligned),
        expect=expect,
        targets=(target,),
        programs_per_sm=programs_per_sm,
    )
