"""Error bounds of every operation's results, computed from one problem. docs/bounds.md derives every constant.

A bound is twice the first-order error: roundings of results and of documented intermediates, float32 sums, elementary
functions. Functions here return first-order errors of results by name, from arguments on the CPU and expected results.
A result without an error must be equal. Each card names its function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch

from paged.bench.cards.arguments import Arguments, Tensors, dtype_of, marked
from paged.kernels.core.dtypes import KV_KINDS, kv_kind
from paged.kernels.layers.definition import gated_activation
from paged.kernels.quantization import definition as quantization
from paged.kernels.quantization.packing import FP8_BLOCK, format_of, group_of
from paged.kernels.quantization.weight import QuantizedWeight
from paged.kernels.recurrent import definition as recurrent
from paged.kernels.recurrent.metadata import CHUNK_SIZE, Rings, Row

# Unit roundoff of float32.
U = 2.0**-24
# A sum of n independent errors exceeds this many root sums of squares once in 3e7 (Hoeffding).
LAMBDA = 6
# Roundings of an elementary function, of a division or of a root, beside its argument's.
ELEMENTARY = 4 * U
# Largest sigmoid that float32 may turn into 0: exp(-x) overflows, or the result is subnormal.
TINY = 2.0**-126
# Largest exponent's size that counts: float32 has no exp beyond it.
LARGEST_EXPONENT = 128
# Largest slope of an activation, gelu's. It multiplies the error of a gate, see docs/bounds.md.
SLOPE = 1.13


class Defined(Protocol):
    """What a bound needs of a card."""

    @property
    def name(self) -> str: ...

    @property
    def expected(self) -> Callable[[Arguments], Tensors]: ...


def gamma(num_terms: float) -> float:
    """Return the error of a float32 sum in any order, relative to the sum of magnitudes (Higham and Mary, 2019)."""
    return min(num_terms, LAMBDA * math.sqrt(num_terms)) * U


def unit(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a dtype of rows: 0 for float32, because its roundings are counted by `U`."""
    if dtype == torch.float32:
        return 0.0
    return torch.finfo(dtype).eps / 2


def rounding(want: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return half a unit in the last place, subnormal numbers included."""
    numbers = torch.finfo(dtype)
    return numbers.eps / 2 * want.abs() + numbers.smallest_normal * numbers.eps / 2


def independent(total: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """Return the size of a sum of independent errors, from the sums of their magnitudes and of their squares."""
    return torch.minimum(total, LAMBDA * squares.clamp(min=0).sqrt())


def product_in(dtype: torch.dtype, x: torch.Tensor, w: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return the error of x @ w^T whose scaled weights and sums of chunks are rounded to a dtype."""
    magnitude, squares = x.abs() @ w.abs().T, x.square() @ w.square().T
    return rounding(want, dtype) + 2 * unit(dtype) * independent(magnitude, squares) + gamma(x.shape[1]) * magnitude


def rounded_once(_: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    """Return the errors of floats that are rounded once, to the dtype of the first float argument."""
    errors = {}
    for name, result in want.items():
        errors[name] = rounding(result.double(), dtype_of(arguments)) + ELEMENTARY * result.double().abs()
    return errors


def equal(_card: Defined, _arguments: Arguments, _want: Tensors) -> Tensors:
    """Return no error for any result."""
    return {}


# Attention


def attention(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    q = arguments["q"].double()  # [T, Hq, D]
    u = unit(arguments["q"].dtype)
    k, v = (_cache_numbers(arguments, name) for name in ("k", "v"))
    plain = {**arguments, "k_cache": k, "v_cache": v, "k_scale": None, "v_scale": None, "out": None}
    expected = card.expected
    lse = want.get("lse")
    if lse is None:
        lse = expected(plain)["lse"]
    magnitude = expected({**plain, "v_cache": v.abs()})["out"]  # sum of p |v|, [T, Hq, Dv]
    squares = _squared_weights(card, plain, lse)  # sum of p^2 v^2
    score = _score_error(arguments, q, k, lse.shape)  # [Hq, T]
    longest = max([1, *arguments["seq_lens"].tolist()])
    roundings = u * independent(magnitude, squares)
    error = rounding(want["out"], arguments["q"].dtype) + roundings
    if kv_kind(arguments["v_cache"].dtype).has_scales:
        error = error + roundings
    if card.name == "cascade_attention":
        error = error + u * magnitude
    error = error + magnitude * (2 * gamma(longest) + 2 * score.T.unsqueeze(-1) + 2 * ELEMENTARY)
    return {"out": error, "lse": _lse_error(lse, score, longest)}


def _lse_error(lse: torch.Tensor, score: torch.Tensor, longest: int) -> torch.Tensor:
    return score + gamma(longest) + 2 * ELEMENTARY * (1 + lse.abs().nan_to_num(posinf=0))


def _cache_numbers(arguments: Arguments, name: str) -> torch.Tensor:
    """Return a cache's numbers, [num_blocks, block_size, Hkv, D]."""
    numbers: torch.Tensor = arguments[f"{name}_cache"].double()
    scale = arguments.get(f"{name}_scale")
    if scale is not None:
        numbers = numbers * scale.double().unsqueeze(-1)
    return numbers


def _squared_weights(card: Defined, plain: Arguments, lse: torch.Tensor) -> torch.Tensor:
    """Return the sum of p^2 v^2: a softmax of doubled scores has weights p^2 / sum(p^2)."""
    scale = plain.get("softmax_scale")
    if scale is None:
        scale = plain["q"].shape[2] ** -0.5
    doubled = {**plain, "v_cache": plain["v_cache"].square(), "softmax_scale": 2 * scale}
    doubled["softcap"] = 2 * plain.get("softcap", 0.0)
    for name in ("sinks", "alibi_slopes"):
        if plain.get(name) is not None:
            doubled[name] = 2 * plain[name].double()
    results = card.expected(doubled)
    factor: torch.Tensor = (results["lse"] - 2 * lse).exp().nan_to_num()  # 0 for rows that see no key
    return results["out"] * factor.T.unsqueeze(-1)


def _score_error(arguments: Arguments, q: torch.Tensor, k: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the largest absolute error of a row's scores, [Hq, T], which is the relative error of its weights."""
    scale = arguments.get("softmax_scale")
    if scale is None:
        scale = q.shape[2] ** -0.5
    num_heads, head_dim = q.shape[1:]
    offsets, block_size = arguments["cu_seqlens_q"].tolist(), k.shape[1]
    products = torch.zeros(shape, dtype=torch.float64)  # largest sum of |q| |k|
    lengths = torch.zeros(shape[1], dtype=torch.float64)
    for seq, seq_len in enumerate(arguments["seq_lens"].tolist()):
        rows = slice(offsets[seq], offsets[seq + 1])
        if seq_len == 0 or rows.start == rows.stop:
            continue
        positions = torch.arange(seq_len)
        keys = k[arguments["block_table"][seq].long()[positions // block_size], positions % block_size]
        largest = keys.abs().nan_to_num(posinf=0).amax(0).repeat_interleave(num_heads // k.shape[2], 0)  # [Hq, D]
        products[:, rows] = (q[rows].abs() * largest).sum(-1).T
        lengths[rows] = seq_len
    error: torch.Tensor = abs(scale) * products * (gamma(head_dim) + 2 * ELEMENTARY)
    sizes = torch.full_like(products, 1 + arguments.get("softcap", 0.0))
    if arguments.get("alibi_slopes") is not None:
        sizes += arguments["alibi_slopes"].double().abs()[:, None] * lengths
    if arguments.get("sinks") is not None:
        sizes += arguments["sinks"].double().abs()[:, None]
    return error + 2 * ELEMENTARY * sizes


def latent_attention(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    q, scale, size = arguments["q"].double(), arguments["softmax_scale"], arguments["v_head_dim"]
    u, is_packed = unit(arguments["q"].dtype), arguments["kv_cache"].dtype == torch.uint8
    cache = _latent_numbers(arguments)
    sinks, block_size = arguments.get("sinks"), cache.shape[1]
    offsets = arguments["cu_seqlens_q"].tolist()
    error = rounding(want["out"], arguments["q"].dtype)  # [T, H, Dv]
    lse_error = torch.zeros(q.shape[1], q.shape[0], dtype=torch.float64)
    for seq, seq_len in enumerate(arguments["seq_lens"].tolist()):
        table = arguments["block_table"][seq].long()
        for row in range(offsets[seq], offsets[seq + 1]):
            end = seq_len
            if arguments.get("causal", True):
                end = seq_len - offsets[seq + 1] + row + 1
            keys = torch.arange(max(end, 0))
            if arguments.get("indices") is not None:
                chosen = arguments["indices"][row].long()
                keys = chosen[(chosen >= 0) & (chosen < end)]
            if not len(keys):
                continue
            latents = cache[table[keys // block_size], keys % block_size]  # [n, D]
            values = latents[:, :size]
            scores = q[row] @ latents.T * scale  # [H, n]
            products = q[row].abs() @ latents.abs().nan_to_num(posinf=0).T  # [H, n]
            score = abs(scale) * products * (gamma(q.shape[2]) + 2 * ELEMENTARY)
            if is_packed:
                score = score + abs(scale) * u * independent(products, q[row].square() @ latents.square().T)
            score = score.amax(1) + 2 * ELEMENTARY  # [H]
            all_scores = scores
            if sinks is not None:
                score = score + 2 * ELEMENTARY * sinks.double().abs()
                all_scores = torch.cat([scores, sinks.double()[:, None]], 1)
            lse = all_scores.logsumexp(1)
            weights = (scores - lse[:, None]).exp()  # [H, n]
            magnitude = weights @ values.abs()
            roundings = u * independent(magnitude, weights.square() @ values.square())
            error[row] += (1 + is_packed) * roundings
            error[row] += magnitude * (2 * gamma(len(keys)) + 2 * score[:, None] + 2 * ELEMENTARY)
            lse_error[:, row] = _lse_error(lse, score, len(keys))
    return {"out": error, "lse": lse_error}


def _latent_numbers(arguments: Arguments) -> torch.Tensor:
    """Return the numbers of a latent cache, [num_blocks, block_size, D]."""
    cache, scale = arguments["kv_cache"], arguments.get("k_scale")
    if cache.dtype != torch.uint8:
        numbers: torch.Tensor = cache.double()
        if scale is not None:
            numbers = numbers * scale.double()
        return numbers
    codes, scales, rope = (part.contiguous() for part in cache.split((512, 16, 128), -1))
    latents = codes.view(torch.float8_e4m3fn).double() * scales.view(torch.float32).double().repeat_interleave(128, -1)
    return torch.cat([latents, rope.view(torch.bfloat16).double()], -1)


def merged_states(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    absolute = {**arguments, "out_a": arguments["out_a"].abs(), "out_b": arguments["out_b"].abs()}
    magnitude = card.expected(absolute)["out"]
    sizes = (arguments["lse_a"].double() - arguments["lse_b"].double()).abs()
    sizes = sizes.nan_to_num(posinf=0).clamp(max=100)  # beyond, the smaller part's weight is 0 in float32
    out = rounding(want["out"], arguments["out_a"].dtype)
    out += magnitude * (2 * ELEMENTARY + U * sizes).T.unsqueeze(-1)
    return {"out": out, "lse": 2 * ELEMENTARY * (1 + want["lse"].abs().nan_to_num(posinf=0))}


# Writes to the cache


def _stored(want: torch.Tensor, dtype: torch.dtype, before: torch.Tensor) -> torch.Tensor:
    """Return the error of rows in a cache of `dtype`. before: the error of the rows before they are rounded."""
    if kv_kind(dtype).has_scales:
        largest = want.abs().amax(-1, keepdim=True)
        return (0.5 / 127 + ELEMENTARY) * largest + before + before.amax(-1, keepdim=True)
    if dtype in KV_KINDS:
        return _distance_to_code(want, dtype) + before + ELEMENTARY * want.abs()
    return rounding(want, dtype) + before


def _distance_to_code(want: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return how far 8-bit floats are from the nearest code. A tie is as far from both of its codes."""
    return (want.to(dtype).double() - want).abs()


def _in_slots(error: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
    """Return the error of a cache [num_blocks, block_size, ...] in the slots that are written, and 0 elsewhere."""
    is_written = marked(error.shape[0] * error.shape[1], slot_mapping).view(error.shape[:2])
    return torch.where(is_written.view(*error.shape[:2], *[1] * (error.dim() - 2)), error, 0.0)


def _rotated_size(want: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    """Return the length of each element's pair after rotation, which bounds |a cos| + |b sin|; |x| beyond pairs."""
    rotary_dim = arguments["cos_sin_cache"].shape[1]
    pairs = want[..., :rotary_dim]
    if arguments.get("interleaved"):
        lengths = pairs.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
    else:
        lengths = pairs.unflatten(-1, (2, -1)).norm(dim=-2).repeat(*[1] * (want.dim() - 1), 2)
    return torch.cat([lengths, want[..., rotary_dim:].abs()], -1)


def _rotation(want: torch.Tensor, arguments: Arguments, norm_size: int = 0) -> torch.Tensor:
    """Return the float32 error of a rotation, after a norm of `norm_size` numbers."""
    relative = ELEMENTARY
    if norm_size:
        relative += _norm_error(norm_size)
    return relative * _rotated_size(want, arguments)


def _norm_error(size: int) -> float:
    """Return the relative error of a root mean square norm: half of the sum's, and a root, two products, a division."""
    return gamma(size) / 2 + 2 * ELEMENTARY


def cache_write(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    errors = {}
    for name in ("k_cache", "v_cache"):
        error = _stored(want[name], arguments[name].dtype, torch.zeros_like(want[name]))
        errors[name] = _in_slots(error, arguments["slot_mapping"])
    return errors


def qk_norm_write(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    errors = cache_write(card, arguments, want)
    sizes = {}
    for name in ("q", "k"):
        sizes[name] = arguments["q"].shape[-1] if arguments.get(f"{name}_weight") is not None else 0
    before = _rotation(want["k_cache"], arguments, sizes["k"])
    error = _stored(want["k_cache"], arguments["k_cache"].dtype, before)
    errors["k_cache"] = _in_slots(error, arguments["slot_mapping"])
    errors["q"] = rounding(want["q"], arguments["q"].dtype) + _rotation(want["q"], arguments, sizes["q"])
    return errors


def latent_write(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    is_normed = "latent_weight" in arguments
    size = arguments["latent"].shape[1]
    relative = ELEMENTARY
    if is_normed:
        relative += _norm_error(size)
    errors = {}
    if "kv_cache" in want:
        rows, dtype = want["kv_cache"], arguments["kv_cache"].dtype
        before = torch.zeros_like(rows)
        if is_normed:
            before[..., :size] = relative * rows[..., :size].abs()
            before[..., size:] = _rotation(rows[..., size:], arguments)
        errors["kv_cache"] = _stored(rows, dtype, before)
    else:
        # A code is relative to the largest latent, so it has the errors of both.
        errors["codes"] = _distance_to_code(want["codes"], torch.float8_e4m3fn) + 2 * relative * want["codes"].abs()
        errors["scales"] = rounding(want["scales"], torch.float32) + relative * want["scales"].abs()
        errors["rope"] = rounding(want["rope"], torch.bfloat16)
        if is_normed:
            errors["rope"] += _rotation(want["rope"], arguments)
    errors = {name: _in_slots(error, arguments["slot_mapping"]) for name, error in errors.items()}
    if "q_rope" in want:
        errors["q_rope"] = rounding(want["q_rope"], arguments["q_rope"].dtype)
        errors["q_rope"] += _rotation(want["q_rope"], arguments)
    return errors


# Layers


def rms_norm(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    x, out = arguments["x"], want["out"]
    return {"out": rounding(out, x.dtype) + _norm_error(x.shape[-1]) * out.abs()}


def fused_add_norm(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    x = want["x"]
    error = rounding(x, arguments["x"].dtype) + _norm_error(x.shape[-1]) * x.abs()
    return {"x": error, "residual": rounding(want["residual"], arguments["residual"].dtype)}


def rotary(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    errors = {}
    for name, rows in want.items():
        errors[name] = rounding(rows, arguments[name].dtype) + _rotation(rows, arguments)
    return errors


def _activation_error(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the float32 error of an activation of exact numbers: exp turns an argument's error into a relative one."""
    if activation == "silu":
        relative = 2 * ELEMENTARY + U * gate.abs()
        return relative * gated_activation(gate, up, activation).abs() + TINY * gate.abs() * up.abs()
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7), 1 + up.clamp(-7, 7).abs()
    # 1 + erf and 1 + tanh cancel for negative gates.
    return 2 * ELEMENTARY * gate.abs() * up.abs()


def silu_and_mul(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    x = arguments["x"]
    gate, up = x.double().chunk(2, -1)
    error = _activation_error(gate, up, arguments.get("activation", "silu"))
    return {"out": rounding(want["out"], x.dtype) + error}


def gated_norm(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    x, out, weight = arguments["x"], want["out"], arguments["weight"].double().abs()
    size = arguments.get("group_size") or x.shape[-1]
    exponents = gates = arguments["z"].double().abs()
    if not arguments["norm_first"]:
        groups = gates.flatten(1).unflatten(1, (-1, size))
        exponents = groups.amax(-1, keepdim=True).expand_as(groups).reshape(x.shape)
    relative = _norm_error(size) + 4 * ELEMENTARY + 2 * U * exponents.clamp(max=LARGEST_EXPONENT)
    # Largest result whose gate is 1: a root mean square is at least the root of eps.
    largest = x.double().abs().flatten(1).unflatten(1, (-1, weight.numel())) * weight
    largest = largest.view(x.shape) * (arguments.get("eps", 1e-6) + TINY) ** -0.5
    return {"out": rounding(out, x.dtype) + relative * out.abs() + TINY * gates.clamp(min=1) * largest}


# Products


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return the float32 error of x @ w^T."""
    return (gamma(x.shape[-1]) + ELEMENTARY) * (x.abs() @ w.abs().T)


def _spread(errors: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return the error of x @ w^T for independent errors of x."""
    return independent(errors @ w.abs().T, errors.square() @ w.square().T)


def lora(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    x, weights, batch = arguments["x"].double(), arguments["weights"], arguments["batch"]
    error = rounding(want["out"], arguments["out"].dtype) + ELEMENTARY * want["out"].abs()
    u = unit(weights.b.dtype)
    for block, adapter in enumerate(batch.slots.tolist()):
        rows = batch.rows[block]
        rows = rows[rows >= 0].long()
        end = 0
        for part, size in enumerate(weights.part_sizes):
            start, end = end, end + size
            rank = int(weights.ranks[adapter, part])
            if adapter < 0 or rank == 0:
                continue
            a = weights.a[adapter, part, :rank].double()  # [rank, K]
            b = weights.b[adapter, :rank, start:end].double().T  # [size, rank]
            shrunk = x[rows] @ a.T  # [rows, rank]
            inner = _product(x[rows], a)
            change = _spread(inner + u * shrunk.abs(), b) + _product(shrunk, b)
            error[rows, start:end] += weights.scales[adapter, part].double().abs() * change
    return {"out": error}


def quantized_linear(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    x, weight = arguments["x"], arguments["weight"]
    w, rows = quantization.dequantize(weight), quantization.input_of(x, weight)
    error = rounding(want["out"], x.dtype) + _product(rows, w)
    if arguments.get("bias") is not None:
        error += U * arguments["bias"].double().abs()
    if _is_short_int4(weight.values, weight.scale, weight.in_features):
        error += 2 * unit(x.dtype) * independent(rows.abs() @ w.abs().T, rows.square() @ w.square().T)
    if weight.quantizes_input:
        error += _input_steps(x, weight) @ w.abs().T
    return {"out": error}


def _is_short_int4(values: torch.Tensor, scale: torch.Tensor, num_columns: int) -> bool:
    """Return whether scale, and code times scale, are rounded to the dtype of rows. E2M1 codes times scales are exact.

    Codes in pairs are int4 whose scales multiply sums.
    """
    if values.dtype != torch.int32 or format_of(values, scale) != "int4":
        return False
    _, width = group_of("int4", scale.shape, num_columns)
    return width > 0 and width % 128 != 0


def _input_steps(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Return how far a rounded activation moves if float32 takes the other side of a tie."""
    numbers = x.double()
    if weight.input_order is not None:
        numbers = numbers.index_select(1, weight.input_order)
    group = numbers.shape[1]
    if weight.scale.dim() == 2:
        group = FP8_BLOCK
    return _steps(numbers, ELEMENTARY * numbers.abs(), weight.format, group, weight.input_scale)


def _steps(
    x: torch.Tensor, error: torch.Tensor, form: str, group: int, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return how far rounded groups of x move if x moves by `error`, with the scale of their largest number."""
    padding = (0, -x.shape[-1] % group)
    groups, errors = (torch.nn.functional.pad(t, padding).unflatten(-1, (-1, group)) for t in (x, error))
    codes, scales = quantization.round_rows(groups, form, scale)
    moved = ELEMENTARY * codes.abs() * scales
    if scale is None:
        largest = groups.abs().amax(-1, keepdim=True)
        is_largest = groups.abs() == largest
        of_largest = (errors * is_largest).amax(-1, keepdim=True)
        # A larger scale moves the sum by its own share, and every other number relative to the codes.
        moved = moved + of_largest / largest.clamp(min=1e-300) * codes.abs() * scales
        errors = torch.where(is_largest, 0.0, errors + of_largest / largest.clamp(min=1e-300) * groups.abs())
    high, _ = quantization.round_rows(groups + errors, form, scales)
    low, _ = quantization.round_rows(groups - errors, form, scales)
    moved = moved + (high - low).abs() * scales
    return moved.flatten(-2)[..., : x.shape[-1]]


# Experts


def _routing(logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the error of routing weights: scores by exp, twice if they are renormalised."""
    numbers = logits.double().nan_to_num(neginf=0, posinf=0)
    sizes = (numbers.amax(1) - numbers.amin(1)).maximum(numbers.abs().amax(1))
    return (2 * (U * sizes + ELEMENTARY + gamma(logits.shape[1])) + ELEMENTARY)[:, None] * weights.abs()


def routed(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    weights = want["topk_weights"]
    return {"topk_weights": rounding(weights, torch.float32) + _routing(arguments["router_logits"], weights)}


def _expert_weight(arguments: Arguments, name: str, expert: int, num_columns: int) -> tuple[torch.Tensor, bool]:
    """Return a projection's weights, and whether code times scale is rounded."""
    values, scale = arguments[name][expert], arguments.get(f"{name}_scale")
    if scale is None:
        return values.double(), False
    scales: list[torch.Tensor | None] = []
    for option in ("zeros", "tensor_scale"):
        tensor = arguments.get(f"{name}_{option}")
        scales.append(None if tensor is None else tensor[expert])
    w = quantization.dequantize_codes(values, scale[expert], *scales, num_columns=num_columns)
    return w, _is_short_int4(values, scale[expert], num_columns)


def _projected(
    arguments: Arguments, name: str, expert: int, x: torch.Tensor, errors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x @ w^T + bias of an expert, and its error. errors: independent errors of x.

    PyTorch rounds the product, and its sum with a bias, to the dtype of rows.
    """
    u = unit(arguments["hidden_states"].dtype)
    w, is_short = _expert_weight(arguments, name, expert, x.shape[1])
    if w.shape[1] != x.shape[1]:
        raise ValueError(f"{name}: {w.shape[1]} columns, expected {x.shape[1]}")
    if arguments[name].dtype == torch.float8_e4m3fn:
        errors = _steps(x, errors + ELEMENTARY * x.abs(), "e4m3", FP8_BLOCK)
        x = quantization.rounded_groups(x, "e4m3", FP8_BLOCK)
    product = x @ w.T
    error = _product(x, w) + _spread(errors, w) + u * product.abs()
    if is_short:
        error += 2 * u * independent(x.abs() @ w.abs().T, x.square() @ w.square().T)
    biases = arguments.get(f"{name}_bias")
    if biases is not None:
        product = product + biases[expert].double()
        error += (u + U) * product.abs()
    return product, error


def fused_moe(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    x, ids, weights = arguments["hidden_states"].double(), arguments["topk_ids"].long(), arguments["topk_weights"]
    u, activation = unit(arguments["hidden_states"].dtype), arguments.get("activation", "silu")
    num_experts = len(arguments["w1"])
    expert_map = arguments.get("expert_map")
    if expert_map is not None:
        is_known = (ids >= 0) & (ids < len(expert_map))
        ids = torch.where(is_known, expert_map.long()[ids.clamp(0, len(expert_map) - 1)], -1)
    error = rounding(want["out"], arguments["hidden_states"].dtype)
    for expert in range(num_experts):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        rows = x[tokens]
        hidden, hidden_error = _projected(arguments, "w1", expert, rows, torch.zeros_like(rows))
        activated, activated_error = _activated(hidden, hidden_error, activation, bool(arguments.get("interleaved")))
        activated_error = activated_error + u * activated.abs()
        part, part_error = _projected(arguments, "w2", expert, activated, activated_error)
        part_error += (u + gamma(ids.shape[1])) * part.abs()  # the weighted part, and the sum over experts
        error.index_add_(0, tokens, weights[tokens, places].double().abs()[:, None] * part_error)
    return {"out": error}


def _activated(
    hidden: torch.Tensor, error: torch.Tensor, activation: str, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if activation == "relu2":
        positive = hidden.clamp(min=0)
        return positive.square(), (2 * positive + error) * error + ELEMENTARY * positive.square()
    if interleaved:
        (gate, up), (gate_error, up_error) = (t.unflatten(-1, (-1, 2)).unbind(-1) for t in (hidden, error))
    else:
        (gate, up), (gate_error, up_error) = (t.chunk(2, -1) for t in (hidden, error))
    factor = up
    if activation == "swiglu_oai":
        factor = 1 + up.clamp(-7, 7)
    alone = gated_activation(gate, torch.full_like(up, float(activation != "swiglu_oai")), activation)
    moved = SLOPE * gate_error * factor.abs() + (alone.abs() + SLOPE * gate_error) * up_error
    return gated_activation(gate, up, activation), moved + _activation_error(gate, up, activation)


# Recurrent layers


def convolution(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    absolute = {**arguments, "activation": None}
    for name in ("x", "weight", "bias"):
        if arguments.get(name) is not None:
            absolute[name] = arguments[name].abs()
    state = arguments["state"]
    absolute["state"] = type(state)(state.conv.abs(), state.state, state.ring_k, state.ring_u, state.ring_g)
    magnitude = card.expected(absolute)["out"]  # sum of |x| |w|
    out = rounding(want["out"], arguments["x"].dtype)
    out += (SLOPE * gamma(arguments["weight"].shape[1] + 1) + 2 * ELEMENTARY + U * magnitude) * magnitude
    return {"out": out, "conv": rounding(want["conv"], state.conv.dtype)}


class _Tokens:
    """What a scan reads of its tokens: q, k [T, HV, K], v [T, HV, V] and gates, with relative errors.

    g and gate_error are [T, HV, 1], or [T, HV, K] for decays of channels; beta and delta_error are [T, HV]. erase has
    the vectors that read S and are written, [T, HV, K] each, or is empty.
    """

    def __init__(self, arguments: Arguments, is_corrected: bool) -> None:
        mixed = arguments["mixed"].double()
        _, num_heads, value_dim, key_dim = arguments["state"].rings().state.shape
        groups = arguments["num_k_heads"] if is_corrected else arguments["num_groups"]
        keys, values = groups * key_dim, num_heads * value_dim
        if is_corrected:
            q, k, v = mixed.split([keys, keys, values], 1)
        else:
            v, k, q = mixed.split([values, keys, keys], 1)
        q, k = (t.unflatten(1, (groups, key_dim)).repeat_interleave(num_heads // groups, 1) for t in (q, k))
        self.v = v.unflatten(1, (num_heads, value_dim))
        gate = arguments["a" if is_corrected else "dt"].double() + arguments["dt_bias"].double()
        gate = gate.view(len(gate), num_heads, -1)  # [T, HV, 1 or K]
        rate = arguments["A_log"].double().exp()[:, None]
        lower_bound = arguments.get("lower_bound")
        delta = torch.nn.functional.softplus(gate, threshold=40)
        self.beta = torch.ones_like(gate[:, :, 0])
        self.erase: list[torch.Tensor] = []
        if arguments.get("erase_read") is not None:
            self.erase = [arguments["erase_read"].double(), arguments["erase_write"].double()]
        elif is_corrected:
            eps = arguments.get("eps", 1e-6)
            q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + eps) for t in (q, k))
            q = q * key_dim**-0.5
            self.beta = arguments.get("beta_scale", 1.0) * arguments["b"].double().sigmoid()
        else:
            if arguments.get("dt_limits") is not None:
                delta = delta.clamp(*arguments["dt_limits"])
            self.v = delta * self.v
        self.q, self.k = q, k
        self.g = -delta * rate
        # softplus and exp of the sums of two numbers, whose errors exp makes relative.
        gate_error = 2 * ELEMENTARY + U * gate.abs().clamp(max=LARGEST_EXPONENT)
        self.delta_error = gate_error[:, :, 0]
        rate_error = 2 * ELEMENTARY + U * arguments["A_log"].double().abs().clamp(max=LARGEST_EXPONENT)[:, None]
        self.gate_error = gate_error + rate_error
        if lower_bound is not None:
            self.g = lower_bound * torch.sigmoid(rate * gate)
            exponent_error = (rate * gate).abs().clamp(max=LARGEST_EXPONENT) * (U + rate_error)
            self.gate_error = 2 * ELEMENTARY + exponent_error
        self.is_corrected = is_corrected and not self.erase


def scan(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    """Follow the norm of each row of the state, and of its error, token by token.

    exp(g) (I - beta k k^T) does not lengthen a row, because k has length 1 and beta is at most 2.
    """
    is_delta_rule = card.name == "gated_delta_rule"
    tokens, batch, rings = _Tokens(arguments, is_delta_rule), arguments["batch"], arguments["state"].rings()
    rank = rings.rank
    dtype = arguments["mixed"].dtype
    errors: Tensors = {}
    for name in ("conv", "state", "ring_k", "ring_u", "ring_g"):
        if name in want:
            errors[name] = rounding(want[name], getattr(arguments["state"], name).dtype)
    errors["out"] = rounding(want["out"], dtype)
    value_dim = tokens.v.shape[2]
    for row in batch.rows():
        is_scan = row.length > batch.max_append
        u = unit(dtype) if is_scan else 0.0
        S = recurrent.state_at(row, rings, torch.float64)  # [HV, V, K]
        start_error = _read_error(row, rings, S)
        if not is_scan and row.write_slot != row.read_slot:
            errors["state"][row.write_slot] += start_error.unsqueeze(-1)
        state_errors, out_error, u_error, k_error = _follow(tokens, row, S, start_error, u)
        span = slice(row.first, row.first + row.length)
        if not is_delta_rule:
            sizes = (
                arguments["D"].double().abs()[:, None]
                * arguments["mixed"][span, : tokens.v[0].numel()].double().view(row.length, -1, value_dim).abs()
            )
            out_error = out_error + ELEMENTARY * sizes
        errors["out"][span] += out_error.flatten(1)
        if is_scan:
            errors["state"][row.write_slot] += state_errors[-1].unsqueeze(-1)
            if row.snapshot_slot >= 0:
                errors["state"][row.snapshot_slot] += state_errors[row.snapshot_len - row.start - 1].unsqueeze(-1)
            continue
        base = row.cursor if row.write_slot == row.read_slot else 0
        at = row.write_slot, slice(rank * base, rank * (base + row.length))
        errors["ring_k"][at] += k_error * want["ring_k"][at].abs()
        errors["ring_u"][at] += u_error
        of_gates = errors["ring_g"][row.write_slot, base : base + row.length]
        of_gates += (tokens.gate_error[span] * tokens.g[span].abs()).view_as(of_gates)
    return errors


def _read_error(row: Row, rings: Rings, S: torch.Tensor) -> torch.Tensor:
    """Return the error of the state's rows [HV, V] after entries of a ring are added."""
    if row.read_slot < 0 or row.cursor == 0:
        return torch.zeros(S.shape[:2], dtype=torch.float64)
    entries = row.read_slot, slice(0, rings.rank * row.cursor)
    keys = rings.k[entries].double().norm(dim=-1).repeat_interleave(S.shape[0] // rings.k.shape[2], 1)  # [n, HV]
    size: torch.Tensor = rings.state[row.read_slot].double().norm(dim=-1)
    size = size + (rings.u[entries].double().abs() * keys.unsqueeze(-1)).sum(0)
    g = rings.g[row.read_slot, : row.cursor].double().view(row.cursor, len(S), -1)  # [cursor, HV, 1 or K]
    gates: torch.Tensor = 1 + g.abs().sum(0).amax(-1).clamp(max=LARGEST_EXPONENT)  # [HV]
    return (gamma(row.cursor) + 2 * ELEMENTARY) * gates[:, None] * size


def _follow(
    tokens: _Tokens, row: Row, S: torch.Tensor, start_error: torch.Tensor, u: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Return the errors of the rows of each token's state, of outputs and of u [length, HV, V], and of k.

    u: unit roundoff of the operands of a scan's products: rows of the inverse, u and w, the state, and weighted rows.
    """
    key_dim = S.shape[2]
    k_error = 0.0
    if tokens.is_corrected:
        k_error = _norm_error(key_dim)
    product = gamma(key_dim) + 2 * ELEMENTARY + k_error
    total, squares = torch.zeros_like(start_error), torch.zeros_like(start_error)
    largest = torch.zeros_like(start_error)
    states, outs, us = [], [], []
    chunk: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # k, u and decay since the chunk's start
    roundings = 4  # of the operands of a scan's products
    if tokens.g.shape[2] > 1:
        roundings = 6  # keys of both sides are scaled before they are multiplied
    for index in range(row.length):
        token = row.first + index
        q, k, v, g, beta = tokens.q[token], tokens.k[token], tokens.v[token], tokens.g[token], tokens.beta[token]
        decay, size = g.exp(), S.norm(dim=-1)  # [HV, 1 or K], [HV, V]
        # Key, u, and the size of the numbers whose sum u is, of each product that the token adds; [HV, K], [HV, V].
        updates: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        before = S
        S = S * decay.unsqueeze(1)
        if tokens.erase:
            read, write = tokens.erase[0][token], tokens.erase[1][token]
            read_size = read.norm(dim=-1)[:, None]
            updates = [(write, torch.einsum("hvk,hk->hv", before, read), size * read_size), (k, v, v.abs())]
        elif tokens.is_corrected:
            new = beta[:, None] * (v - torch.einsum("hvk,hk->hv", S, k))
            updates = [(k, new, beta[:, None] * (v.abs() + size))]
        else:
            updates = [(k, v, v.abs())]
        added = torch.zeros_like(v)
        for key, new, reach in updates:
            S = S + new.unsqueeze(-1) * key.unsqueeze(1)
            largest = largest.maximum(reach)
            added = added + reach * key.norm(dim=-1)[:, None]
        length = k.norm(dim=-1)[:, None]
        gates = tokens.gate_error[token].amax(-1, keepdim=True)
        # exp(g) moves by g times its relative error.
        moved = (g.abs().clamp(max=LARGEST_EXPONENT) * decay).amax(-1, keepdim=True) * size
        local = product * (added + S.norm(dim=-1)) + gates * (added + moved)
        local = local + roundings * u * largest * length
        faded = decay.amax(-1, keepdim=True)
        total, squares = faded * total + local, faded.square() * squares + local.square()
        state_error = independent(total, squares) + start_error
        states.append(state_error)
        if (row.start + index) % CHUNK_SIZE == 0:
            chunk = []
        chunk = [(key, entry, rest * decay) for key, entry, rest in chunk]
        chunk += [(key, new, torch.ones_like(decay)) for key, new, _ in updates]
        keys, entries, rests = (torch.stack(part) for part in zip(*chunk, strict=True))
        terms = keys * q * rests  # [n, HV, K]
        scores = terms.sum(-1, keepdim=True)
        inside = independent((scores * entries).abs().sum(0), (scores * entries).square().sum(0))
        if tokens.g.shape[2] > 1:
            spread = independent(terms.abs().sum(-1, keepdim=True), terms.square().sum(-1, keepdim=True)) * entries
            inside = inside + independent(spread.abs().sum(0), spread.square().sum(0))
        q_size = q.norm(dim=-1)[:, None]
        outs.append(q_size * (state_error + (2 * product + u) * S.norm(dim=-1) + u * size) + 2 * u * inside)
        for number, (_, _, reach) in enumerate(updates):
            if tokens.is_corrected:
                us.append((product + gates) * reach + beta[:, None] * state_error)
            elif not tokens.erase:
                us.append((tokens.delta_error[token] + 2 * ELEMENTARY)[:, None] * reach)
            elif number == 0:
                us.append(product * reach + read_size * state_error)
            else:
                us.append(torch.zeros_like(reach))
    return torch.stack(states), torch.stack(outs), torch.stack(us), k_error + ELEMENTARY
