"""Launching the kernels of scans: one for rows that are appended, two for those that are scanned in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..common.compat import triton
from ..common.device import device_of, loops_of, use_triton
from ..common.launch import Compute, Launch, strides
from .append_kernel import _append_kernel
from .chunk_kernels import _prepare_chunks_kernel, _scan_chunks_kernel
from .metadata import CHUNK_SIZE, RecurrentBatch, RecurrentState, Rings

# Columns of V of a program. With K = 128 S takes 32 registers of 128 threads, so that several programs share an SM; a
# prompt of Qwen3.5-35B-A3B has 128 programs then, one for each SM of an H200. With K = 256 half as many.
BLOCK_V = 32
# Columns of q, k and v that a program of the first kernel of a scan multiplies at once.
BLOCK_COLUMNS = 64


def precision(dtype: torch.dtype, arch: str) -> str:
    """Return how chunks multiply. NVIDIA's matrix units multiply float32 as three products of tf32, which together keep
    22 of 24 bits; by plain instructions the scan spilled 13,735 registers with K = V = 128."""
    return "tf32x3" if dtype == torch.float32 and arch.startswith("sm_") else "ieee"


def chunk_options(dtype: torch.dtype, arch: str, key_dim: int, *, is_corrected: bool) -> dict[str, int]:
    """Return the options of the kernels of chunks.

    Mamba-2 spilled 5 registers in the loop on sm_80 with 4 warps, and 189 on gfx942 with 8. Two stages of float32, or
    of K = 256, would need 90 to 131 KB where gfx942 has 64 KB. float32 spills on NVIDIA in any case: it is there to be
    right, 16 bits to be fast.
    """
    is_float32, is_long = dtype == torch.float32, key_dim > 128
    is_small = is_corrected and not (is_long or is_float32)
    num_warps = 4 if is_small or arch.startswith("gfx") else 8
    num_stages = 1 if is_float32 or is_long else 2
    return {"num_warps": num_warps, "num_stages": num_stages}


def constants(key_heads: int, value_heads: int, key_dim: int, value_dim: int, *, values_first: bool) -> dict[str, int]:
    """Return a layer's sizes, where q, k and v begin in a row, which holds q, k, v or v, k, q, and the tiles."""
    keys, values = key_heads * key_dim, value_heads * value_dim
    q, k, v = 0, keys, 2 * keys
    if values_first:
        q, k, v = values + keys, values, 0
    block_k, padded = (max(triton.next_power_of_2(size), 16) for size in (key_dim, value_dim))  # products take 16
    block_v = BLOCK_V if block_k <= 128 else 16
    return {
        "HV": value_heads,
        "HK": key_heads,
        "K": key_dim,
        "V": value_dim,
        "Q_FIRST": q,
        "K_FIRST": k,
        "V_FIRST": v,
        "CHUNK": CHUNK_SIZE,
        "BLOCK_K": block_k,
        "BLOCK_V": min(padded, block_v),
        "BLOCK": min(max(block_k, padded), BLOCK_COLUMNS),
    }


def bind_scan(
    mixed: torch.Tensor,
    gates: Mapping[str, torch.Tensor],
    rings: Rings,
    batch: RecurrentBatch,
    numbers: Mapping[str, float],
) -> Callable[..., torch.Tensor] | None:
    """Return a function that runs a step and returns the output: it takes the operation's mixed, state and batch, and
    the layer's gates and weights by the kernels' names.

    None if PyTorch is to run it: on a CPU without numba, and where a sequence may be longer than `max_append`.

    gates: by the kernels' names, gate_ptr, and b_ptr or D_ptr, which tell the gated delta rule from Mamba-2. numbers:
    beta_scale, least, most, eps and scale of the kernels.
    """
    value_heads, value_dim, key_dim = rings.state.shape[1:]
    arch = device_of(mixed.device).arch
    is_corrected, has_scans = "b_ptr" in gates, batch.max_seqlen_q > batch.max_append
    fixed: dict[str, Any] = {
        "num_tokens": len(mixed),
        "num_seqs": batch.starts.numel(),
        "max_append": batch.max_append,
        **numbers,
        **strides("token", mixed=mixed, gate=gates["gate_ptr"], b=gates.get("b_ptr")),
        **strides("slot", state=rings.state, ring_k=rings.k, ring_u=rings.u, ring_g=rings.g),
        **constants(rings.k.shape[2], value_heads, key_dim, value_dim, values_first=not is_corrected),
        "RING": max(triton.next_power_of_2(rings.k.shape[1]), 16),
        "PRECISION": precision(mixed.dtype, arch),
    }
    by_triton = use_triton(mixed)
    if by_triton:
        options = chunk_options(mixed.dtype, arch, key_dim, is_corrected=is_corrected)
        compute = _launches(fixed, options, has_scans)
    else:
        gate_tensors = [gates[name] for name in ("gate_ptr", "b_ptr") if name in gates]
        loops = None
        if not has_scans and rings.state.dtype == torch.float32:
            loops = loops_of("recurrent.numba_ops.scan", mixed, *gate_tensors)
        if loops is None:
            return None
        compute = loops.prepare(mixed.dtype, {**fixed, "L": rings.k.shape[1]})

    def run(
        mixed: torch.Tensor,
        state: RecurrentState,
        batch: RecurrentBatch,
        gates: Mapping[str, torch.Tensor],
        weights: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        rings = state.rings()
        out: torch.Tensor = mixed.new_empty(fixed["num_tokens"], value_heads, value_dim)
        if out.numel():
            compute(
                {
                    "mixed_ptr": mixed,
                    "out_ptr": out,
                    **dict.fromkeys(("b_ptr", "w_ptr", "u_ptr", "D_ptr")),
                    **{name: _plain(weight, by_triton) for name, weight in weights.items()},
                    **gates,
                    **dict(zip(("state_ptr", "ring_k_ptr", "ring_u_ptr", "ring_g_ptr"), rings, strict=True)),
                    **batch.pointers(),
                }
            )
        return out

    return run


def _plain(weight: torch.Tensor, by_triton: bool) -> torch.Tensor:
    if not by_triton:
        weight = weight.float()
    return weight.contiguous()


def _launches(fixed: Mapping[str, Any], options: dict[str, int], has_scans: bool) -> Compute:
    def launch_of(kernel: Any, *grid: int, **options: Any) -> Launch:
        return Launch(kernel, grid, {name: fixed[name] for name in kernel.arg_names if name in fixed}, **options)

    value_heads, key_dim, value_dim, num_seqs = (fixed[name] for name in ("HV", "K", "V", "num_seqs"))
    programs = value_heads, triton.cdiv(value_dim, fixed["BLOCK_V"])
    append = launch_of(_append_kernel, num_seqs + 1, *programs)
    if not has_scans or num_seqs == 0:
        return append
    chunks = fixed["num_tokens"] // CHUNK_SIZE + 2 * num_seqs, value_heads
    prepare = launch_of(_prepare_chunks_kernel, *chunks, **options)
    scan = launch_of(_scan_chunks_kernel, num_seqs, *programs, **options)

    def compute(tensors: dict[str, Any]) -> None:
        append(tensors)
        mixed = tensors["mixed_ptr"]
        tensors["scales_ptr"] = mixed.new_empty(*chunks, 4, CHUNK_SIZE, dtype=torch.float32)
        tensors["scores_ptr"] = mixed.new_empty(*chunks, CHUNK_SIZE, CHUNK_SIZE)
        if tensors["b_ptr"] is not None:
            tensors["w_ptr"] = mixed.new_empty(*chunks, CHUNK_SIZE, key_dim)
            tensors["u_ptr"] = mixed.new_empty(*chunks, CHUNK_SIZE, value_dim)
        prepare(tensors)
        scan(tensors)

    return compute
