"""Recurrent layers: Qwen3.5's gated delta nets, Mamba-2 as in Nemotron-H and Falcon-H1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from paged.bench.compilation.case import EVERY_CASE, TENSOR_CORES, CompileCase
from paged.bench.compilation.launches import DTYPES, SeenLaunch, empty, launch_case, launches_of
from paged.bench.kernels import recurrent
from paged.bench.kernels.work import Draw
from paged.kernels.recurrent.gated_rms_norm import gated_rms_norm

# HK, HV, K, V of Qwen3.5-35B-A3B; of Nemotron-H-8B; and of Falcon-H1-34B.
DELTA, MAMBA, WIDE = (16, 32, 128, 128), (8, 128, 128, 64), (2, 32, 256, 128)
# Rows of a prompt, which is scanned.
_PROMPT = 64


def cases() -> list[CompileCase]:
    """Decodes and prompts, in 2 bytes and 4; states of 4 bytes and 2; norms before and after the gate, of heads and
    of groups."""
    return [
        _conv(DELTA, "bf16", 1),
        _conv(DELTA, "bf16", _PROMPT),
        _conv(DELTA, "fp32", 1),
        _conv(DELTA, "fp32", _PROMPT),
        _conv(MAMBA, "bf16", 1, bias=True),
        _conv(MAMBA, "bf16", _PROMPT, bias=True),
        _norm(128, "silu", True),
        _norm(128, "sigmoid", True),
        _norm(1024, "silu", False),
        *_scans("gated_delta_rule", DELTA, "bf16"),
        *_scans("mamba2_scan", MAMBA, "bf16"),
        *_scans("mamba2_scan", WIDE, "bf16"),
        *_scans("gated_delta_rule", DELTA, "fp32"),
        *_scans("mamba2_scan", WIDE, "fp32"),
        _append("gated_delta_rule", DELTA, "bf16", "bf16"),
    ]


def _launches(
    operation: str,
    heads: tuple[int, int, int, int],
    dtype: str,
    tokens: int,
    target: str = EVERY_CASE[0],
    *,
    bias: bool = False,
    state_dtype: str = "fp32",
) -> list[SeenLaunch]:
    """Return what a sequence of so many tokens launches."""
    draw = Draw(torch.device("cpu"), DTYPES[dtype])
    work = getattr(recurrent, operation)(draw, sequences=1, tokens=tokens, heads=heads[:2], dims=heads[2:])
    state = work.arguments["state"]
    work.arguments["state"] = replace(state, state=state.state.to(DTYPES[state_dtype]))
    if bias:
        work.arguments["bias"] = empty(dtype, work.arguments["x"].shape[1])
    return launches_of(target, work.call)


def _conv(heads: tuple[int, int, int, int], dtype: str, longest: int, *, bias: bool = False) -> CompileCase:
    (launch,) = _launches("causal_conv1d", heads, dtype, longest, bias=bias)
    name = "causal_conv1d {CHANNELS} {dtype} rows={BLOCK_ROWS}".format(dtype=dtype, **launch.arguments)
    return launch_case(name, launch, ("stride_weight_tap",), aligned=("stride_x_token", "stride_conv_slot"))


def _norm(group: int, activation: str, is_first: bool) -> CompileCase:
    x, weight_size, order = empty("bf16", 1, 32, 128), 4096, "gate first"
    if is_first:
        weight_size, order = 128, "norm first"
    options: dict[str, Any] = {"norm_first": is_first, "group_size": group, "activation": activation}
    (launch,) = launches_of("sm_90", gated_rms_norm, x, x, empty("bf16", weight_size), **options)
    return launch_case(f"gated_rms_norm group={group} {activation} {order}", launch, ("stride_x_dim", "stride_z_dim"))


def _append(operation: str, heads: tuple[int, int, int, int], dtype: str, state_dtype: str = "fp32") -> CompileCase:
    (launch,) = _launches(operation, heads, dtype, 1, state_dtype=state_dtype)
    words = [_name(operation, "append", heads, dtype)]
    if state_dtype == "bf16":
        words.append("bf16 state")
    return launch_case(" ".join(words), launch)


def _scans(operation: str, heads: tuple[int, int, int, int], dtype: str) -> list[CompileCase]:
    cases = [_append(operation, heads, dtype)]
    for targets in (("sm_80", "sm_90", "sm_100"), ("gfx942",)):
        _, prepare, scan = _launches(operation, heads, dtype, _PROMPT, targets[0])
        for name, launch in (("prepare", prepare), ("scan", scan)):
            options: dict[str, Any] = {"targets": targets}
            if dtype == "fp32":
                # Operands of three products fill NVIDIA's registers: on sm_90 320 of 3,218 instructions in the loop are
                # spills, and 216 of 2,764 with half as many columns.
                options["may_spill"] = targets[0] != "gfx942"
            else:
                options["expect"] = {target: (TENSOR_CORES[target],) for target in targets}
            cases.append(launch_case(_name(operation, f"{name} chunks", heads, dtype), launch, **options))
    return cases


def _name(operation: str, kernel: str, heads: tuple[int, int, int, int], dtype: str) -> str:
    _, value_heads, key_dim, value_dim = heads
    return f"{operation} {kernel} {value_heads} x {key_dim} x {value_dim} {dtype}"
