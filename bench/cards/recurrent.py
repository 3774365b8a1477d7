"""Cards of recurrent layers: decode or verify rows beside half-full rings, or scans of prompts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import paged
from paged.bench.bounds import recurrent as bounds
from paged.bench.bounds.layers import gated_norm
from paged.bench.cards.card import Card, Masks, Row, defined, named, same
from paged.bench.cards.draw import Draw
from paged.bench.cards.layers import TOKENS
from paged.bench.compilation.cases.case import EVERY_CASE, TENSOR_CORES, CompileCase
from paged.bench.compilation.cases.launches import DTYPES, SeenLaunch, empty, launch_case, launches_of
from paged.bench.limits import Cost
from paged.bench.problems.arguments import Arguments, Tensors, map_tensors, marked
from paged.kernels.core.dtypes import KV_KINDS
from paged.kernels.recurrent import definition
from paged.kernels.recurrent.gated_rms_norm import gated_rms_norm

_RING = 16
_STATE = ("conv", "state", "ring_k", "ring_u", "ring_g")

# Heads of Qwen3.5-35B-A3B, then of Nemotron-H.
_DELTA = {"heads": ((16, 32), (2, 4), (1, 2)), "dims": ((128, 128), (64, 64), (16, 16))}
_MAMBA = {"heads": ((8, 128), (1, 4), (1, 2)), "dims": ((128, 64), (128, 64), (16, 16))}
_DECODES = {"lengths": ([1] * 64, [1] * 8, [2] * 3)}
_PROMPTS = {"lengths": ([8192], [512], [70, 70])}
# Heads of Kimi-Linear-48B, whose channels of a key decay by their own gates, and of RWKV-7 2.9B, with erase vectors.
_CHANNELS = {"heads": ((32, 32), (4, 4), (2, 2)), "dims": ((128, 128), (64, 64), (16, 16)), "decays": same("channels")}
_ERASING = {"heads": ((40, 40), (4, 4), (2, 2)), "dims": ((64, 64), (64, 64), (16, 16)), "decays": same("erasing")}
# Each combination is a mixed batch: scans, rows in place, and sequences without tokens.
_ODD = {"lengths": ([1], [70, 1], [9, 2, 1, 0]), "heads": ((2, 4), (1, 1), (1, 2)), "dims": ((8, 24), (16, 16))}


_ODD_DELTA = _ODD | {"decays": ("erasing", "channels", "bounded", "heads"), "state": ("fp32", "i8")}


def _layer(
    draw: Draw,
    *,
    lengths: Sequence[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    decays: str = "heads",
    state: str = "fp32",
) -> tuple[Arguments, torch.Tensor, dict[str, torch.Tensor]]:
    """Return state and batch, rows, and slowly forgetting gates of sequences; (HK, HV) heads of (K, V).

    decays: "heads", or "channels", "bounded" and "erasing" with gates of channels. state: dtype of states, "fp32",
    "bf16" or "i8".

    A sequence of more than half a ring is scanned and written to another slot. Others append to a half-full ring; if
    the draw is odd, every second one in another slot, and scans take a snapshot at position 64.
    """
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    num_seqs, num_tokens, max_append = len(lengths), sum(lengths), _RING // 2
    channels, num_slots = 2 * key_heads * key_dim + value_heads * value_dim, 3 * num_seqs + 1
    gate_size: tuple[int, ...] = (value_heads,)
    if decays != "heads":
        gate_size = value_heads, key_dim
    num_entries = _RING
    if decays == "erasing":
        num_entries = 2 * _RING
    keys = torch.nn.functional.normalize(draw.floats(num_slots, num_entries, key_heads, key_dim), dim=-1)
    S, scale = draw.floats(num_slots, value_heads, value_dim, key_dim), None
    if state == "i8":
        S, scale = KV_KINDS[torch.int8].encode(S, None)
    states = paged.RecurrentState(
        draw.normal(num_slots, 3 + _RING, channels).contiguous(),
        S.to(DTYPES[state]),
        keys,
        draw.floats(num_slots, num_entries, value_heads, value_dim),
        -draw.floats(num_slots, _RING, *gate_size).abs(),
        scale,
    )
    rows = []
    for seq, length in enumerate(lengths):
        start, read_slot, snapshot_slot, snapshot_len = 64, seq + 1, -1, 0
        write_slot, cursor = read_slot, max_append
        if length > max_append:
            write_slot, cursor = read_slot + num_seqs, 0
            if draw.is_odd:
                start, snapshot_slot, snapshot_len = 60, read_slot + 2 * num_seqs, 64
        elif draw.is_odd and seq % 2:
            write_slot = read_slot + num_seqs
        rows.append((start, read_slot, write_slot, cursor, snapshot_slot, snapshot_len))
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=draw.device)
    columns = torch.tensor(rows, dtype=torch.int32, device=draw.device).T.contiguous()
    batch = paged.RecurrentBatch(offsets, *columns, max(lengths), max_append)
    a = draw.normal(num_tokens, math.prod(gate_size)).unflatten(1, gate_size)
    b = draw.normal(num_tokens, value_heads)
    a_log, d = draw.floats(2, value_heads) - 2
    dt_bias = draw.floats(*gate_size) - 2
    gates = {"a": a, "b": b, "A_log": a_log, "dt_bias": dt_bias, "D": d}
    return {"state": states, "batch": batch}, draw.normal(num_tokens, channels), gates


def _convolution(draw: Draw, **sizes: Any) -> Arguments:
    step, x, _ = _layer(draw, **sizes)
    # By tap in memory, as models keep them.
    return {"x": x, "weight": draw.normal(4, x.shape[1]).t(), "bias": None, **step}


def _delta_rule(draw: Draw, **sizes: Any) -> Arguments:
    decays, (key_heads, value_heads), key_dim = sizes.get("decays", "heads"), sizes["heads"], sizes["dims"][0]
    if decays == "erasing":
        key_heads = value_heads
    step, mixed, gates = _layer(draw, **sizes | {"heads": (key_heads, value_heads)})
    taken: Arguments = {name: gates[name] for name in ("a", "b", "A_log", "dt_bias")}
    arguments = {"mixed": mixed, **taken, **step, "num_k_heads": key_heads}
    if decays == "bounded":
        arguments["lower_bound"] = -5.0
    if decays == "erasing":
        arguments |= _erase_vectors(draw, mixed, value_heads, key_dim) | {"b": None, "lower_bound": -0.6065}
    return arguments


def _erase_vectors(draw: Draw, mixed: torch.Tensor, heads: int, key_dim: int) -> Arguments:
    """Return vectors of RWKV-7: S is read by one of length 1, and a part of each channel is written back. Scale k."""
    num_tokens, size = len(mixed), heads * key_dim
    k = mixed[:, size : 2 * size].unflatten(1, (heads, key_dim))
    k /= k.float().norm(dim=-1, keepdim=True).to(k.dtype)
    read = torch.nn.functional.normalize(draw.floats(num_tokens, heads, key_dim), dim=-1)
    write = -read * draw.floats(num_tokens, heads, key_dim).sigmoid()
    vectors = {}
    for name, values in (("erase_read", read), ("erase_write", write)):
        vectors[name] = draw.normal(num_tokens, size).unflatten(1, (heads, key_dim)).copy_(values)
    return vectors


def _mamba(draw: Draw, **sizes: Any) -> Arguments:
    step, mixed, gates = _layer(draw, **sizes)
    taken = {name: gates[name] for name in ("A_log", "dt_bias", "D")}
    return {"mixed": mixed, "dt": gates["a"], **taken, **step, "num_groups": sizes["heads"][0]}


def _norm(draw: Draw, *, tokens: int, heads: int, dim: int) -> Arguments:
    x, z = draw.normals(2, tokens, heads, dim)
    return {"x": x, "z": z, "weight": draw.floats(dim), "norm_first": True}


def _expected(rule: Callable[..., torch.Tensor]) -> Callable[[Arguments], Tensors]:
    def expected(arguments: Arguments) -> Tensors:
        state = map_tensors(torch.Tensor.double, arguments["state"])
        out = rule(**arguments | {"state": state})
        return _results({"state": state}, out)

    return expected


def _results(arguments: Arguments, out: Any) -> Tensors:
    """Return outputs with all heads of a token in one row, because the sum over K in one head may cancel to little."""
    results = {"out": out.flatten(1)}
    state = arguments["state"]
    if state.state_scale is not None:
        S = KV_KINDS[torch.int8].decode(state.state, state.state_scale, state.state_scale.dtype)
        state = replace(state, state=S)
    for part in _STATE:
        tensor = getattr(state, part)
        if tensor is not None:
            results[part] = tensor
    return results


def _written_slots(arguments: Arguments, fields: tuple[str, ...]) -> Masks:
    """Return masks of the slots that sequences write."""
    batch, state = arguments["batch"], arguments["state"]
    mask = marked(len(state.conv), torch.cat([batch.write_slots, batch.snapshot_slots]))
    return {f"state.{field}": mask for field in fields}


def _scan_writes(arguments: Arguments) -> Masks:
    fields = ["state", "ring_k", "ring_u", "ring_g"]
    if arguments["state"].state_scale is not None:
        fields.append("state_scale")
    return _written_slots(arguments, tuple(fields))


def _convolution_cost(_: Card, arguments: Arguments) -> Cost:
    """Count rows and slots, which move; the products are few."""
    x, batch = arguments["x"], arguments["batch"]
    num_rows = 3 * x.shape[0] + 3 * batch.starts.numel()
    return Cost(0, num_rows * x[:1].nbytes)


def _scan_cost(arguments: Arguments, *, products: int) -> Cost:
    """Count products for a token and value head. Rows, gates and outputs move once, and half of the ring.

    Decodes read states; scans also write them.
    """
    state, mixed, batch = arguments["state"], arguments["mixed"], arguments["batch"]
    num_seqs, (value_heads, value_dim) = batch.starts.numel(), state.state.shape[1:3]
    slots = num_seqs * sum(ring[0].nbytes for ring in (state.ring_k, state.ring_u, state.ring_g)) // 2
    states = num_seqs * state.state[0].nbytes
    if state.state_scale is not None:
        states += num_seqs * state.state_scale[0].nbytes
    if batch.max_seqlen_q > batch.max_append:
        states *= 2
    moved = mixed.nbytes + len(mixed) * value_heads * value_dim * mixed.element_size()
    for name in ("a", "erase_read", "erase_write"):
        tensor = arguments.get(name)
        if tensor is not None and tensor.dim() == 3:  # gates of heads are few
            moved += tensor.nbytes
    return Cost(2 * len(mixed) * value_heads * products, moved + states + slots)


def _delta_cost(_: Card, arguments: Arguments) -> Cost:
    """Count the products of chunks of 64 (Yang et al., 2024)."""
    value_dim, key_dim = arguments["state"].state.shape[2:]
    return _scan_cost(arguments, products=64 * (3 * key_dim + 2 * value_dim) + 3 * key_dim * value_dim)


def _mamba_cost(_: Card, arguments: Arguments) -> Cost:
    """Count the products of chunks of 64, without a correction."""
    value_dim, key_dim = arguments["state"].state.shape[2:]
    return _scan_cost(arguments, products=64 * (2 * key_dim + value_dim) + 2 * key_dim * value_dim)


# Key heads, value heads, key dim and value dim of Qwen3.5-35B-A3B, Nemotron-H-8B and Falcon-H1-34B.
_DELTA_HEADS, _MAMBA_HEADS, _WIDE_HEADS = (16, 32, 128, 128), (8, 128, 128, 64), (2, 32, 256, 128)
# The same of Kimi-Linear-48B, GLM-5.3-Flash and RWKV-7 2.9B, by their decays.
_CHANNEL_HEADS = {"channels": (32, 32, 128, 128), "bounded": (64, 64, 128, 128), "erasing": (40, 40, 64, 64)}
# Number of a prompt's tokens, enough to be computed by a scan.
_PROMPT = 64


def _launches(
    operation: str,
    heads: tuple[int, int, int, int],
    dtype: str,
    tokens: int,
    target: str = EVERY_CASE[0],
    *,
    bias: bool = False,
    state_dtype: str = "fp32",
    decays: str = "heads",
) -> list[SeenLaunch]:
    """Return the launches of a sequence of this many tokens."""
    draw = Draw(torch.device("cpu"), DTYPES[dtype])
    (card,) = (card for card in CARDS if card.name == operation)
    arguments = card.draw(draw, lengths=[tokens], heads=heads[:2], dims=heads[2:], decays=decays, state=state_dtype)
    if bias:
        arguments["bias"] = empty(dtype, arguments["x"].shape[1])
    return launches_of(target, card.operation, **arguments)


def _conv(heads: tuple[int, int, int, int], dtype: str, longest: int, *, bias: bool = False) -> CompileCase:
    (launch,) = _launches("causal_conv1d", heads, dtype, longest, bias=bias)
    name = "causal_conv1d {CHANNELS} {dtype} rows={BLOCK_ROWS}".format(dtype=dtype, **launch.arguments)
    aligned = ("stride_x_token", "stride_weight_tap", "stride_conv_slot")
    return launch_case(name, launch, ("stride_weight_channel",), aligned=aligned)


def _norm_case(group: int, activation: str, is_first: bool) -> CompileCase:
    x, weight_size, order = empty("bf16", 1, 32, 128), 4096, "gate first"
    if is_first:
        weight_size, order = 128, "norm first"
    options: dict[str, Any] = {"norm_first": is_first, "group_size": group, "activation": activation}
    (launch,) = launches_of("sm_90", gated_rms_norm, x, x, empty("bf16", weight_size), **options)
    return launch_case(f"gated_rms_norm group={group} {activation} {order}", launch, ("stride_x_dim", "stride_z_dim"))


def _append(
    operation: str, heads: tuple[int, int, int, int], dtype: str, state_dtype: str = "fp32", decays: str = "heads"
) -> CompileCase:
    (launch,) = _launches(operation, heads, dtype, 1, state_dtype=state_dtype, decays=decays)
    words = [_name(operation, "append", heads, dtype, decays)]
    if state_dtype != "fp32":
        words.append(f"{state_dtype} state")
    return launch_case(" ".join(words), launch)


def _scans(
    operation: str, heads: tuple[int, int, int, int], dtype: str, decays: str = "heads", state_dtype: str = "fp32"
) -> list[CompileCase]:
    """Return the cases of all kernels; without those that do not depend on it if the states are not float32."""
    cases = [_append(operation, heads, dtype, state_dtype, decays)]
    for targets in (("sm_80", "sm_90", "sm_100"), ("gfx942",)):
        _, prepare, scan = _launches(
            operation, heads, dtype, _PROMPT, targets[0], decays=decays, state_dtype=state_dtype
        )
        for name, launch in (("prepare", prepare), ("scan", scan)):
            if state_dtype != "fp32":
                if name == "prepare":
                    continue
                name = f"{state_dtype} states, {name}"
            options: dict[str, Any] = {"targets": targets}
            if dtype == "fp32":
                # float32 operands of three products exceed NVIDIA's registers. A tile of half as many columns would
                # spill nearly as much, see bench/limits.md.
                options["may_spill"] = targets[0] != "gfx942"
            else:
                options["expect"] = {target: (TENSOR_CORES[target],) for target in targets}
            cases.append(launch_case(_name(operation, f"{name} chunks", heads, dtype, decays), launch, **options))
    return cases


def _name(operation: str, kernel: str, heads: tuple[int, int, int, int], dtype: str, decays: str) -> str:
    _, value_heads, key_dim, value_dim = heads
    name = f"{operation} {kernel} {value_heads} x {key_dim} x {value_dim} {dtype}"
    if decays != "heads":
        name += f" {decays}"
    return name


def _convolution_cases() -> list[CompileCase]:
    return [
        _conv(_DELTA_HEADS, "bf16", 1),
        _conv(_DELTA_HEADS, "bf16", _PROMPT),
        _conv(_DELTA_HEADS, "fp32", 1),
        _conv(_DELTA_HEADS, "fp32", _PROMPT),
        _conv(_MAMBA_HEADS, "bf16", 1, bias=True),
        _conv(_MAMBA_HEADS, "bf16", _PROMPT, bias=True),
    ]


def _delta_cases() -> list[CompileCase]:
    return [
        *_scans("gated_delta_rule", _DELTA_HEADS, "bf16"),
        *_scans("gated_delta_rule", _DELTA_HEADS, "fp32"),
        _append("gated_delta_rule", _DELTA_HEADS, "bf16", "bf16"),
        *_scans("gated_delta_rule", _CHANNEL_HEADS["channels"], "fp32", decays="channels"),
        *(
            case
            for decays, heads in _CHANNEL_HEADS.items()
            for case in _scans("gated_delta_rule", heads, "bf16", decays=decays)
        ),
        _append("gated_delta_rule", _CHANNEL_HEADS["bounded"], "bf16", "bf16", decays="bounded"),
        *_scans("gated_delta_rule", _DELTA_HEADS, "bf16", state_dtype="i8"),
        *_scans("gated_delta_rule", _CHANNEL_HEADS["bounded"], "bf16", decays="bounded", state_dtype="i8"),
    ]


def _mamba_cases() -> list[CompileCase]:
    return [
        *_scans("mamba2_scan", _MAMBA_HEADS, "bf16"),
        *_scans("mamba2_scan", _WIDE_HEADS, "bf16"),
        *_scans("mamba2_scan", _WIDE_HEADS, "fp32"),
    ]


def _norm_cases() -> list[CompileCase]:
    """Return norms of heads and of groups, before and after the gate."""
    return [_norm_case(128, "silu", True), _norm_case(128, "sigmoid", True), _norm_case(1024, "silu", False)]


CARDS = (
    Card(
        "causal_conv1d",
        _convolution,
        _expected(definition.causal_conv1d),
        _results,
        errors=bounds.convolution,
        writes=partial(_written_slots, fields=("conv",)),
        cost=_convolution_cost,
        rows=(Row(_DECODES | _DELTA, "decode"), Row(_PROMPTS | _DELTA, "prefill")),
        odd=_ODD,
        compiled=_convolution_cases,
    ),
    Card(
        "gated_delta_rule",
        _delta_rule,
        _expected(definition.gated_delta_rule),
        _results,
        errors=bounds.scan,
        writes=_scan_writes,
        cost=_delta_cost,
        rows=(
            Row(_DECODES | _DELTA, "decode"),
            Row(_PROMPTS | _DELTA, "prefill"),
            Row(_DECODES | _CHANNELS, "channels decode"),
            Row(_PROMPTS | _CHANNELS, "channels prefill"),
            Row(_DECODES | _ERASING, "erasing decode"),
            Row(_PROMPTS | _ERASING, "erasing prefill"),
            Row(_DECODES | _CHANNELS | {"state": same("i8")}, "int8 decode"),
            Row(_PROMPTS | _DELTA | {"state": same("i8")}, "int8 prefill"),
        ),
        odd=_ODD_DELTA,
        compiled=_delta_cases,
    ),
    Card(
        "mamba2_scan",
        _mamba,
        _expected(definition.mamba2_scan),
        _results,
        errors=bounds.scan,
        writes=_scan_writes,
        cost=_mamba_cost,
        rows=(Row(_DECODES | _MAMBA, "decode"), Row(_PROMPTS | _MAMBA, "prefill")),
        odd=_ODD,
        compiled=_mamba_cases,
    ),
    Card(
        "gated_rms_norm",
        _norm,
        defined(definition.gated_rms_norm, "out"),
        named("out"),
        errors=gated_norm,
        rows=(Row({"tokens": TOKENS, "heads": (32, 8, 2), "dim": same(128)}),),
        odd={"tokens": (0, 1, 5), "heads": (1, 3), "dim": (130, 24, 8)},
        compiled=_norm_cases,
    ),
)
