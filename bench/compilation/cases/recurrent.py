"""Recurrent layers: Qwen3.5's gated delta nets, Mamba-2 as in Nemotron-H and Falcon-H1."""

from __future__ import annotations

from typing import Any

import torch

from paged.bench.compilation.case import EVERY_CASE, CompileCase, kernel_case
from paged.bench.compilation.cases.attention import TENSOR_CORES
from paged.kernels.common.launch import num_warps
from paged.kernels.recurrent.append_kernel import _append_kernel
from paged.kernels.recurrent.causal_conv1d import _causal_conv1d_kernel, conv_tile
from paged.kernels.recurrent.chunk_kernels import _prepare_chunks_kernel, _scan_chunks_kernel
from paged.kernels.recurrent.gated_rms_norm import _gated_rms_norm_kernel, norm_tile
from paged.kernels.recurrent.launches import chunk_options, constants, precision

_BATCH = ("cu_seqlens_q", "starts", "read_slots", "write_slots", "cursors", "snapshot_slots", "snapshot_lens")
_KINDS = dict.fromkeys((f"{name}_ptr" for name in _BATCH), "*i32")
_FLOATS = ("A_log_ptr", "dt_bias_ptr", "D_ptr", "ring_k_ptr", "ring_u_ptr", "ring_g_ptr", "scales_ptr")
_KINDS |= dict.fromkeys(_FLOATS, "*fp32") | dict.fromkeys(("beta_scale", "least", "most", "eps", "scale"), "fp32")
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# HK, HV, K, V of Qwen3.5-35B-A3B; of Nemotron-H-8B; and of Falcon-H1-34B.
DELTA, MAMBA, WIDE = (16, 32, 128, 128), (8, 128, 128, 64), (2, 32, 256, 128)


def cases() -> list[CompileCase]:
    """Decodes and prompts, in 2 bytes and 4; states of 4 bytes and 2; norms before and after the gate, of heads and
    of groups."""
    return [
        _conv(8192, "bf16", 1),
        _conv(8192, "bf16", 64),
        _conv(8192, "fp32", 1),
        _conv(8192, "fp32", 64),
        _conv(10240, "bf16", 1, bias=True),
        _conv(10240, "bf16", 64, bias=True),
        _norm(128, "silu", True),
        _norm(128, "sigmoid", True),
        _norm(1024, "silu", False),
        *_scans(DELTA, "bf16", True),
        *_scans(MAMBA, "bf16", False),
        *_scans(WIDE, "bf16", False),
        *_scans(DELTA, "fp32", True),
        *_scans(WIDE, "fp32", False),
        _append(DELTA, "bf16", True, state="bf16"),
    ]


def _conv(channels: int, dtype: str, longest: int, *, bias: bool = False) -> CompileCase:
    rows, columns = conv_tile(longest)
    sizes = {"CHANNELS": channels, "WIDTH": 4, "SILU": True, "BLOCK_ROWS": rows, "BLOCK_CHANNELS": columns}
    kinds: dict[str, str | None] = {**_KINDS, "bias_ptr": None}
    if bias:
        kinds["bias_ptr"] = f"*{dtype}"
    aligned = "stride_x_token", "stride_conv_slot"
    name = f"causal_conv1d {channels} {dtype} rows={rows}"
    sizes |= {"stride_weight_tap": 1}
    return kernel_case(name, _causal_conv1d_kernel, sizes, kinds, dtype=dtype, aligned=aligned)


def _norm(group: int, activation: str, is_first: bool) -> CompileCase:
    tile = norm_tile(group)
    weight_size, order = 4096, "gate first"
    if is_first:
        weight_size, order = 128, "norm first"
    sizes = {"HEADS": 32, "V": 128, "WEIGHT_SIZE": weight_size, "GROUP": group}
    flags = {"NORM_FIRST": is_first, "SILU": activation == "silu"}
    strides = {"stride_x_dim": 1, "stride_z_dim": 1}
    return kernel_case(
        f"gated_rms_norm group={group} {activation} {order}",
        _gated_rms_norm_kernel,
        {**sizes, **flags, **tile, **strides},
        {"eps": "fp32"},
        num_warps=num_warps(tile["BLOCK_GROUPS"] * tile["BLOCK_SIZE"]),
    )


def _scans(heads: tuple[int, int, int, int], dtype: str, corrected: bool) -> list[CompileCase]:
    cases = [_append(heads, dtype, corrected)]
    for name, kernel in (("prepare", _prepare_chunks_kernel), ("scan", _scan_chunks_kernel)):
        for targets in (("sm_80", "sm_90", "sm_100"), ("gfx942",)):
            options: dict[str, Any] = chunk_options(_DTYPES[dtype], targets[0], heads[2], is_corrected=corrected)
            if dtype == "fp32":
                # Operands of three products fill NVIDIA's registers: on sm_90 320 of 3,218 instructions in the loop are
                # spills, and 216 of 2,764 with half as many columns.
                options["may_spill"] = targets[0] != "gfx942"
            else:
                options["expect"] = {target: (TENSOR_CORES[target],) for target in targets}
            cases.append(_case(f"{name} chunks", kernel, heads, dtype, corrected, targets=targets, **options))
    return cases


def _append(heads: tuple[int, int, int, int], dtype: str, corrected: bool, state: str = "fp32") -> CompileCase:
    return _case("append", _append_kernel, heads, dtype, corrected, state=state)


def _case(
    name: str,
    kernel: Any,
    heads: tuple[int, int, int, int],
    dtype: str,
    corrected: bool,
    *,
    state: str = "fp32",
    targets: tuple[str, ...] = EVERY_CASE,
    **options: Any,
) -> CompileCase:
    key_heads, value_heads, key_dim, value_dim = heads
    sizes: dict[str, Any] = {
        **constants(key_heads, value_heads, key_dim, value_dim, values_first=not corrected),
        "RING": 16,
        "PRECISION": precision(_DTYPES[dtype], targets[0]),
    }
    operation, absent = "mamba2_scan", ["b_ptr", "w_ptr", "u_ptr"]
    if corrected:
        operation, absent = "gated_delta_rule", ["D_ptr"]
    kinds: dict[str, str | None] = {**_KINDS, "state_ptr": f"*{state}", **dict.fromkeys(absent)}
    words = [operation, name, f"{value_heads} x {key_dim} x {value_dim}", dtype]
    if state == "bf16":
        words.append("bf16 state")
    return kernel_case(
        " ".join(words),
        kernel,
        {size: value for size, value in sizes.items() if size in kernel.arg_names},
        {argument: kind for argument, kind in kinds.items() if argument in kernel.arg_names},
        dtype=dtype,
        targets=targets,
        **options,
    )
