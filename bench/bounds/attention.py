"""First-order errors of attention and of merged parts. docs/bounds.md derives them."""

from __future__ import annotations

import torch

from paged.bench.bounds.first_order import ELEMENTARY, Defined, U, gamma, independent, rounding, unit
from paged.bench.problems.arguments import Arguments, Tensors
from paged.kernels.cache.latent_cache import latent_kind, stored_rows
from paged.kernels.core.dtypes import kv_kind


def attention(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    q = arguments["q"].double()  # [T, Hq, D]
    u = unit(arguments["q"].dtype)
    k, v = (_cache_numbers(arguments, name) for name in ("k", "v"))
    plain = {**arguments, "k_cache": k, "v_cache": v, "out": None}
    plain |= dict.fromkeys(("k_scale", "v_scale", "k_table_scale", "v_table_scale"))
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
    cache, scale = arguments[f"{name}_cache"], arguments.get(f"{name}_scale")
    kind = kv_kind(cache.dtype)
    numbers = kind.decode(cache, scale, torch.float64)
    if kind.has_scales:
        scale = arguments.get(f"{name}_table_scale")
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
    squares = torch.zeros(shape, dtype=torch.float64)  # largest sum of q^2 k^2
    lengths = torch.zeros(shape[1], dtype=torch.float64)
    for seq, seq_len in enumerate(arguments["seq_lens"].tolist()):
        rows = slice(offsets[seq], offsets[seq + 1])
        if seq_len == 0 or rows.start == rows.stop:
            continue
        positions = torch.arange(seq_len)
        keys = k[arguments["block_table"][seq].long()[positions // block_size], positions % block_size]
        largest = keys.abs().nan_to_num(posinf=0).amax(0).repeat_interleave(num_heads // k.shape[2], 0)  # [Hq, D]
        products[:, rows] = (q[rows].abs() * largest).sum(-1).T
        squares[:, rows] = (q[rows] * largest).square().sum(-1).T
        lengths[rows] = seq_len
    error: torch.Tensor = abs(scale) * products * (gamma(head_dim) + 2 * ELEMENTARY)
    if kv_kind(arguments["k_cache"].dtype).group_size:  # scaled keys are rounded
        error = error + abs(scale) * unit(arguments["q"].dtype) * independent(products, squares)
    sizes = torch.full_like(products, 1 + arguments.get("softcap", 0.0))
    if arguments.get("alibi_slopes") is not None:
        sizes += arguments["alibi_slopes"].double().abs()[:, None] * lengths
    if arguments.get("sinks") is not None:
        sizes += arguments["sinks"].double().abs()[:, None]
    return error + 2 * ELEMENTARY * sizes


def latent_attention(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    q, scale, size = arguments["q"].double(), arguments["softmax_scale"], arguments["v_head_dim"]
    u, is_packed = unit(arguments["q"].dtype), latent_kind(arguments["kv_cache"]) == "packed"
    cache = _latent_numbers(arguments)
    sinks, block_size = arguments.get("sinks"), cache.shape[1]
    offsets = arguments["cu_seqlens_q"].tolist()
    error = rounding(want["out"], arguments["q"].dtype)  # [T, H, Dv]
    lse_error = torch.zeros(q.shape[1], q.shape[0], dtype=torch.float64)
    for seq, seq_len in enumerate(arguments["seq_lens"].tolist()):
        table = arguments["block_table"][seq].long()
        for row in range(offsets[seq], offsets[seq + 1]):
            position = seq_len - offsets[seq + 1] + row
            window_left, window_right = arguments.get("window_size", (-1, -1))
            first, end = 0, seq_len
            if window_left >= 0:
                first = max(position - window_left, 0)
            if window_right >= 0:
                end = min(end, position + window_right + 1)
            if arguments.get("causal", True):
                end = min(end, position + 1)
            keys = torch.arange(first, max(end, first))
            if arguments.get("indices") is not None:
                chosen = arguments["indices"][row].long()
                keys = chosen[(chosen >= 0) & (chosen < end)]
            if not len(keys):
                continue
            latents = cache[table[keys // block_size], keys % block_size]  # [n, D]
            row_error, lse_error[:, row] = _row_errors(q[row], latents, latents[:, :size], scale, sinks, u, is_packed)
            error[row] += row_error
    return {"out": error, "lse": lse_error}


def _row_errors(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    u: float,
    is_rounded: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the errors of a query's output before it is rounded, [H, Dv], and of its log-sum-exps, [H].

    q: [H, D]. keys: [n, D]. values: [n, Dv]. is_rounded: whether keys are scaled and then rounded to units of u.
    """
    scores = q @ keys.T * scale  # [H, n]
    products = q.abs() @ keys.abs().nan_to_num(posinf=0).T  # [H, n]
    score = abs(scale) * products * (gamma(q.shape[1]) + 2 * ELEMENTARY)
    if is_rounded:
        score = score + abs(scale) * u * independent(products, q.square() @ keys.square().T)
    score = score.amax(1) + 2 * ELEMENTARY  # [H]
    all_scores = scores
    if sinks is not None:
        score = score + 2 * ELEMENTARY * sinks.double().abs()
        all_scores = torch.cat([scores, sinks.double()[:, None]], 1)
    lse = all_scores.logsumexp(1)
    weights = (scores - lse[:, None]).exp()  # [H, n]
    magnitude = weights @ values.abs()
    roundings = u * independent(magnitude, weights.square() @ values.square())
    error = (1 + is_rounded) * roundings
    error = error + magnitude * (2 * gamma(len(keys)) + 2 * score[:, None] + 2 * ELEMENTARY)
    return error, _lse_error(lse, score, len(keys))


def compressed_attention(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    q, scale, sinks = arguments["q"].double(), arguments["softmax_scale"], arguments.get("sinks")
    u = unit(arguments["q"].dtype)
    offsets = arguments["cu_seqlens_q"].tolist()
    error = torch.zeros_like(q)  # [T, H, D]
    lse_error = 2 * ELEMENTARY * (1 + want["lse"].abs().nan_to_num(posinf=0))  # of rows that see their sink alone
    for seq, seq_len in enumerate(arguments["seq_lens"].tolist()):
        for row in range(offsets[seq], offsets[seq + 1]):
            position = seq_len - offsets[seq + 1] + row
            keys = _keys_of_window_and_entries(arguments, seq, row, position)
            if not len(keys):
                continue
            row_error, lse_error[:, row] = _row_errors(q[row], keys, keys, scale, sinks, u, False)
            table = arguments.get("cos_sin_cache")
            if table is not None:
                _rotate_error(row_error, keys.abs().amax(0), table[position].double())
            error[row] = row_error
    return {"out": error + rounding(want["out"], arguments["q"].dtype), "lse": lse_error}


def _keys_of_window_and_entries(arguments: Arguments, seq: int, row: int, position: int) -> torch.Tensor:
    """Return the numbers of all keys that a query sees, [n, D]."""
    cache, entries = arguments["kv_cache"], arguments.get("entry_cache")
    positions = torch.arange(max(position - arguments["sliding_window"] + 1, 0), max(position + 1, 0))
    blocks = arguments["block_table"][seq].long()[positions // cache.shape[1]]
    keys = stored_rows(cache[blocks, positions % cache.shape[1]], torch.float64)
    if entries is None:
        return keys
    num_entries = max(position + 1, 0) // arguments["pool_size"]
    ids = torch.arange(num_entries)
    if arguments.get("indices") is not None:
        ids = arguments["indices"][row].long()
        ids = ids[(ids >= 0) & (ids < num_entries)]
    blocks = arguments["entry_table"][seq].long()[ids // entries.shape[1]]
    return torch.cat([keys, stored_rows(entries[blocks, ids % entries.shape[1]], torch.float64)])


def _rotate_error(error: torch.Tensor, largest: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Add up the errors of pairs that a rotation mixes, and its own of three roundings, in place.

    error: [H, D]. largest: [D], the largest value of each dimension. cos_sin: [rotary_dim].
    """
    rotary_dim = len(cos_sin)
    cos, sin = cos_sin.abs().chunk(2)
    bound = error + 3 * U * largest
    a, b = bound[:, -rotary_dim:].unflatten(-1, (-1, 2)).unbind(-1)  # [H, rotary_dim / 2]
    error[:, -rotary_dim:] = torch.stack([a * cos + b * sin, b * cos + a * sin], -1).flatten(-2)


def _latent_numbers(arguments: Arguments) -> torch.Tensor:
    """Return the numbers of a latent cache, [num_blocks, block_size, D]."""
    cache, scale = arguments["kv_cache"], arguments.get("k_scale")
    numbers = stored_rows(cache, torch.float64)
    if scale is not None:
        numbers = numbers * scale.double()
    return numbers


def merged_states(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    absolute = {**arguments, "out_a": arguments["out_a"].abs(), "out_b": arguments["out_b"].abs()}
    magnitude = card.expected(absolute)["out"]
    sizes = (arguments["lse_a"].double() - arguments["lse_b"].double()).abs()
    sizes = sizes.nan_to_num(posinf=0).clamp(max=100)  # beyond, the smaller part's weight is 0 in float32
    out = rounding(want["out"], arguments["out_a"].dtype)
    out += magnitude * (2 * ELEMENTARY + U * sizes).T.unsqueeze(-1)
    return {"out": out, "lse": 2 * ELEMENTARY * (1 + want["lse"].abs().nan_to_num(posinf=0))}
