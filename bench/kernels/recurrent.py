"""The work of recurrent layers: decode or verify rows beside rings half full, or scans of prompts."""

from __future__ import annotations

from typing import Any

import torch

import paged
from paged.bench.kernels.work import Draw, Work, plain_work
from paged.bench.limits import Cost

_RING = 16


def causal_conv1d(draw: Draw, **sizes: Any) -> Work:
    """The taps and their products are few: rows in and out, and those of the slots."""
    state, batch, x, _ = _layer(draw, **sizes)
    arguments = {"x": x, "weight": draw.normal(x.shape[1], 4), "bias": None, "state": state, "batch": batch}
    num_rows = 3 * x.shape[0] + 3 * batch.starts.numel()
    return Work("causal_conv1d", arguments, Cost(0, num_rows * x[:1].nbytes))


def gated_delta_rule(draw: Draw, **sizes: Any) -> Work:
    state, batch, mixed, gates = _layer(draw, **sizes)
    a, b, (a_log, dt_bias, _) = gates
    arguments = {"mixed": mixed, "a": a, "b": b, "A_log": a_log, "dt_bias": dt_bias}
    options = {"state": state, "batch": batch, "num_k_heads": sizes["heads"][0]}
    return _scan_work("gated_delta_rule", arguments | options, sizes, corrected=True)


def mamba2_scan(draw: Draw, **sizes: Any) -> Work:
    state, batch, mixed, gates = _layer(draw, **sizes)
    dt, _, (a_log, dt_bias, d) = gates
    arguments = {"mixed": mixed, "dt": dt, "A_log": a_log, "dt_bias": dt_bias, "D": d}
    options = {"state": state, "batch": batch, "num_groups": sizes["heads"][0]}
    return _scan_work("mamba2_scan", arguments | options, sizes, corrected=False)


def gated_rms_norm(draw: Draw, *, tokens: int, heads: int, dim: int) -> Work:
    x, z = draw.normals(2, tokens, heads, dim)
    return plain_work("gated_rms_norm", x, z, draw.floats(dim), norm_first=True)


def _layer(
    draw: Draw, *, sequences: int, tokens: int, heads: tuple[int, int], dims: tuple[int, int]
) -> tuple[Any, Any, torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Slots, a batch of sequences of so many tokens, rows and gates that forget slowly; (HK, HV) heads of (K, V)."""
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    channels, num_slots = 2 * key_heads * key_dim + value_heads * value_dim, 2 * sequences + 1
    keys = torch.nn.functional.normalize(draw.floats(num_slots, _RING, key_heads, key_dim), dim=-1)
    state = paged.RecurrentState(
        draw.normal(num_slots, 3 + _RING, channels),
        draw.floats(num_slots, value_heads, value_dim, key_dim),
        keys,
        draw.floats(num_slots, _RING, value_heads, value_dim),
        -draw.floats(num_slots, _RING, value_heads).abs(),
    )
    read_slots = torch.arange(1, sequences + 1)
    write_slots, cursor = read_slots, _RING // 2
    if tokens > _RING // 2:  # a scan
        write_slots, cursor = read_slots + sequences, 0
    columns = (
        torch.arange(sequences + 1) * tokens,
        torch.full((sequences,), 64),
        read_slots,
        write_slots,
        torch.full((sequences,), cursor),
        torch.full((sequences,), -1),
        torch.zeros(sequences),
    )
    batch = paged.RecurrentBatch(*(column.int().to(draw.device) for column in columns), tokens, _RING // 2)
    a, b = draw.normals(2, sequences * tokens, value_heads)
    return state, batch, draw.normal(sequences * tokens, channels), (a, b, draw.floats(3, value_heads) - 2)


def _scan_work(name: str, arguments: dict[str, Any], sizes: dict[str, Any], *, corrected: bool) -> Work:
    """Products of the chunked form (Yang et al., 2024) for scans, and of the recurrence for decodes; rows, gates and
    the output once, the states that are read or written, and half of the ring."""
    (_, value_heads), (key_dim, value_dim) = sizes["heads"], sizes["dims"]
    num_tokens, is_scan = sizes["sequences"] * sizes["tokens"], sizes["tokens"] > _RING // 2
    state, mixed = arguments["state"], arguments["mixed"]
    products = 64 * (2 * key_dim + value_dim) + 2 * key_dim * value_dim
    if corrected:
        products = 64 * (3 * key_dim + 2 * value_dim) + 3 * key_dim * value_dim
    slots = sizes["sequences"] * sum(ring[0].nbytes for ring in (state.ring_k, state.ring_u, state.ring_g)) // 2
    states = sizes["sequences"] * state.state[0].nbytes
    if is_scan:  # reads and writes them
        states *= 2
    moved = mixed.nbytes + num_tokens * value_heads * value_dim * mixed.element_size()
    return Work(name, arguments, Cost(2 * num_tokens * value_heads * products, moved + states + slots))
