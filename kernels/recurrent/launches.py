"""Launch the kernels of scans: one kernel for tokens that are appended, two for those that are scanned in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..core.compat import triton
from ..core.device import device_of, takes_numba, use_triton
from ..core.launch import Compute, Launch, strides
from .append_kernel import _append_kernel
from .channel_kernels import _prepare_channels_kernel
from .chunk_kernels import _prepare_chunks_kernel, _scan_chunks_kernel
from .metadata import CHUNK_SIZE, RecurrentBatch, RecurrentState, Rings

# Columns of V of a program. With K = 128, S takes 32 registers a thread, so several programs share an SM. K = 256 takes
# half as many columns. See limits.md.
BLOCK_V = 32
# Tensors of the kernels that not every layer has.
_OPTIONAL = ("b_ptr", "D_ptr", "erase_read_ptr", "erase_write_ptr")
# Columns of q, k and v that a program of the first scan kernel multiplies at once. Decays of channels take more
# registers, see limits.md.
BLOCK_COLUMNS = 64
BLOCK_CHANNELS = 32


def precision(dtype: torch.dtype, arch: str) -> str:
    """Return how products of chunks multiply.

    NVIDIA's matrix units multiply float32 as three products of tf32, which keep 22 of 24 bits. Plain instructions would
    spill thousands of registers, see limits.md.
    """
    return "tf32x3" if dtype == torch.float32 and arch.startswith("sm_") else "ieee"


def chunk_options(dtype: torch.dtype, arch: str, key_dim: int, *, is_corrected: bool) -> dict[str, int]:
    """Return the compiler options of the chunk kernels.

    The choice of warps avoids spills, see limits.md. Two stages of float32, or of K = 256, would not fit the 64 KB of
    gfx942. float32 spills on NVIDIA in any case: it serves correctness, 16-bit dtypes serve speed.
    """
    is_float32, is_long = dtype == torch.float32, key_dim > 128
    is_small = is_corrected and not (is_long or is_float32)
    num_warps = 4 if is_small or arch.startswith("gfx") else 8
    num_stages = 1 if is_float32 or is_long else 2
    return {"num_warps": num_warps, "num_stages": num_stages}


def channel_options(options: dict[str, int], arch: str, rank: int) -> dict[str, int]:
    """Return the compiler options of the kernel that prepares chunks with decays of channels; see limits.md.

    options: of the other chunk kernels. AMD's warps have 64 threads, so 4 of them are as many threads.
    """
    num_warps = 4 if arch.startswith("gfx") else 8
    num_stages = 1 if rank == 2 else options["num_stages"]
    return {"num_warps": num_warps, "num_stages": num_stages}


def constants(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, *, values_first: bool, decays_channels: bool = False
) -> dict[str, int]:
    """Return a layer's sizes, where q, k and v begin in a row (a row holds q, k, v or v, k, q), and the tiles."""
    keys, values = key_heads * key_dim, value_heads * value_dim
    q, k, v = 0, keys, 2 * keys
    if values_first:
        q, k, v = values + keys, values, 0
    block_k, padded = (max(triton.next_power_of_2(size), 16) for size in (key_dim, value_dim))  # tiles have 16 or more
    block_v = BLOCK_V if block_k <= 128 else 16
    block = BLOCK_CHANNELS if decays_channels else BLOCK_COLUMNS
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
        "BLOCK": min(max(block_k, padded), block),
    }


def bind_scan(
    mixed: torch.Tensor,
    gates: Mapping[str, torch.Tensor],
    rings: Rings,
    batch: RecurrentBatch,
    numbers: Mapping[str, float | None],
    *,
    values_first: bool = False,
) -> Callable[..., torch.Tensor] | None:
    """Return a function that runs a step and returns the output.

    The function takes the operation's mixed, state and batch, and the layer's gates and weights by the kernels' names.
    The result is None if PyTorch runs the step: on a CPU without numba, and if a sequence may be longer than
    `max_append`.

    gates: by the kernels' names: gate_ptr, b_ptr (gated delta rule), erase_read_ptr and erase_write_ptr.
    numbers: beta_scale, least, most, lower_bound, eps and scale of the kernels.
    values_first: whether v lies before k and q in a row of mixed.
    """
    value_heads, value_dim, key_dim = rings.state.shape[1:]
    arch = device_of(mixed.device).arch
    is_corrected, has_scans = not values_first, batch.max_seqlen_q > batch.max_append
    decays_channels = rings.g.dim() == 4
    erase_strides: dict[str, int | None] = {"stride_erase_read_token": None, "stride_erase_write_token": None}
    if "erase_read_ptr" in gates:
        erase_strides.update(strides("token", erase_read=gates["erase_read_ptr"], erase_write=gates["erase_write_ptr"]))
    fixed: dict[str, Any] = {
        "num_tokens": len(mixed),
        "num_seqs": batch.starts.numel(),
        "max_append": batch.max_append,
        **numbers,
        **strides("token", mixed=mixed, gate=gates["gate_ptr"], b=gates.get("b_ptr")),
        **erase_strides,
        **strides("slot", state=rings.state, state_scale=rings.scale),
        **strides("slot", ring_k=rings.k, ring_u=rings.u, ring_g=rings.g),
        **constants(
            *(rings.k.shape[2], value_heads, key_dim, value_dim),
            values_first=values_first,
            decays_channels=decays_channels,
        ),
        "RING": max(triton.next_power_of_2(rings.k.shape[1]), 16),
        "CHANNELS": decays_channels,
        "RANK": rings.rank,
        "HALVINGS": CHUNK_SIZE.bit_length() - 1,
        "PRECISION": precision(mixed.dtype, arch),
    }
    by_triton = use_triton(mixed)
    if by_triton:
        options = chunk_options(mixed.dtype, arch, key_dim, is_corrected=is_corrected)
        prepare_options = channel_options(options, arch, rings.rank) if decays_channels else options
        compute = _launches(fixed, options, prepare_options, has_scans)
    else:
        # Prompts of layers whose heads have one decay are faster in the definition's chunks.
        has_kernel = decays_channels or not has_scans
        if not has_kernel or not takes_numba(mixed, *gates.values()):
            return None
        if numbers["lower_bound"] is not None and not decays_channels:
            return None
        from ..cpu.recurrent import scan as numba_scan

        compute = numba_scan.launch_for(mixed.dtype, rings.state.dtype, {**fixed, "L": rings.g.shape[1]})

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
                    **dict.fromkeys(_OPTIONAL),
                    **{name: _plain(weight, by_triton) for name, weight in weights.items()},
                    **gates,
                    **rings.pointers(),
                    **batch.pointers(),
                }
            )
        return out

    return run


def _plain(weight: torch.Tensor, by_triton: bool) -> torch.Tensor:
    if not by_triton:
        weight = weight.float()
    return weight.contiguous()


def _launches(
    fixed: Mapping[str, Any], options: dict[str, int], prepare_options: dict[str, int], has_scans: bool
) -> Compute:
    def launch_of(kernel: Any, *grid: int, **options: Any) -> Launch:
        return Launch(kernel, grid, {name: fixed[name] for name in kernel.arg_names if name in fixed}, **options)

    value_heads, key_dim, value_dim, num_seqs = (fixed[name] for name in ("HV", "K", "V", "num_seqs"))
    programs = value_heads, triton.cdiv(value_dim, fixed["BLOCK_V"])
    append = launch_of(_append_kernel, num_seqs + 1, *programs)
    if not has_scans or num_seqs == 0:
        return append
    decays_channels, is_corrected = fixed["CHANNELS"], fixed["Q_FIRST"] == 0
    chunks = fixed["num_tokens"] * fixed["RANK"] // CHUNK_SIZE + 2 * num_seqs, value_heads
    kernel = _prepare_channels_kernel if decays_channels else _prepare_chunks_kernel
    prepare = launch_of(kernel, *chunks, **prepare_options)
    scan = launch_of(_scan_chunks_kernel, num_seqs, *programs, **options)

    def compute(tensors: dict[str, Any]) -> None:
        append(tensors)
        mixed = tensors["mixed_ptr"]
        of_keys, of_values = (*chunks, CHUNK_SIZE, key_dim), (*chunks, CHUNK_SIZE, value_dim)
        tensors |= dict.fromkeys(("w_ptr", "u_ptr", "scales_ptr", "q_ptr", "k_ptr", "decay_ptr"))
        tensors["scores_ptr"] = mixed.new_empty(*chunks, CHUNK_SIZE, CHUNK_SIZE)
        if decays_channels:
            tensors["q_ptr"] = mixed.new_empty(of_keys)
            tensors["k_ptr"] = mixed.new_empty(of_keys)
            tensors["decay_ptr"] = mixed.new_empty(*chunks, key_dim, dtype=torch.float32)
        else:
            tensors["scales_ptr"] = mixed.new_empty(*chunks, 4, CHUNK_SIZE, dtype=torch.float32)
        if is_corrected:
            tensors["w_ptr"] = mixed.new_empty(of_keys)
            tensors["u_ptr"] = mixed.new_empty(of_values)
        prepare(tensors)
        scan(tensors)

    return compute
