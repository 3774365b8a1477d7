"""Every operation once more in float64, slow and obviously right: what tests, benchmarks and self-checks compare with.

Written with Python loops over the formula's own indices, never sharing code with the kernels or their PyTorch twins.
All functions return new float64 (or integer) tensors on the CPU and change nothing.
"""

from __future__ import annotations

import functools
import math

import torch

from paged.kernels.errors import InvalidInputError


def _f64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(device="cpu", dtype=torch.float64)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool | torch.Tensor = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query row over its own sequence's cached keys, one row and one head at a time.

    The queries of a sequence are its last positions: query i of n stands at position seq_len - n + i. It sees position
    j when j < seq_len, when causal (of all, or of its sequence) allows it (j <= position), when position - left <= j <=
    position + right for the window's edges that are not -1, and when its row of mask allows it, whose column 0 is the
    sequence's first query. A sink is one more score of each head, with a value of 0.

    Returns:
        out [num_tokens, num_q_heads, head_dim] and lse [num_q_heads, num_tokens], natural log; a row that sees nothing
        gives 0 and -inf, or its head's sink. Rows that belong to no sequence (beyond cu_seqlens_q[-1]) stay 0 and -inf.
    """
    q, k_cache, v_cache = _f64(q), _f64(k_cache), _f64(v_cache)
    if k_scale is not None:
        k_cache = k_cache * _f64(k_scale).view(-1, 1)
    if v_scale is not None:
        v_cache = v_cache * _f64(v_scale).view(-1, 1)
    num_tokens, num_q_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_q_heads // num_kv_heads
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    left, right = window_size
    out = torch.zeros_like(q)
    lse = torch.full((num_q_heads, num_tokens), -math.inf, dtype=torch.float64)
    offsets, lengths, table = cu_seqlens_q.tolist(), seq_lens.tolist(), block_table.tolist()
    for seq, seq_len in enumerate(lengths):
        first, last = offsets[seq], offsets[seq + 1]
        slots = [(table[seq][j // block_size], j % block_size) for j in range(seq_len)]
        for row in range(first, last):
            position = seq_len - (last - first) + (row - first)
            low = 0 if left < 0 else max(0, position - left)
            high = seq_len if right < 0 else min(seq_len, position + right + 1)
            if causal if isinstance(causal, bool) else causal[seq]:
                high = min(high, position + 1)
            new = seq_len - (last - first)  # position of the first query
            keys = [j for j in range(low, high) if mask is None or j < new or mask[row, j - new]]
            blocks = torch.tensor([slots[j][0] for j in keys], dtype=torch.int64)
            offs = torch.tensor([slots[j][1] for j in keys], dtype=torch.int64)
            for head in range(num_q_heads):
                scores = k_cache[blocks, offs, head // group] @ q[row, head] * scale
                if softcap > 0:
                    scores = softcap * torch.tanh(scores / softcap)
                if alibi_slopes is not None:
                    scores -= float(alibi_slopes[head]) * (position - torch.tensor(keys, dtype=torch.float64)).abs()
                if sinks is not None:
                    scores = torch.cat([scores, _f64(sinks)[head : head + 1]])
                if len(scores):
                    lse[head, row] = torch.logsumexp(scores, 0)
                    weights = torch.exp(scores - lse[head, row])
                    out[row, head] = weights[: len(keys)] @ v_cache[blocks, offs, head // group]
    return out, lse


def merge_attn_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets, from the outputs and log-sum-exps over each.

    lse = log(exp(lse_a) + exp(lse_b)); out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b; both empty: 0, -inf. An
    lse of inf is that of an empty side, too.
    out_* [num_tokens, num_heads, head_dim], lse_* [num_heads, num_tokens].
    """
    out_a, lse_a, out_b, lse_b = _f64(out_a), _f64(lse_a), _f64(out_b), _f64(lse_b)
    lse_a, lse_b = (torch.where(lse == math.inf, -math.inf, lse) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    out = torch.zeros_like(out_a)
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.where(part_lse == -math.inf, 0.0, torch.exp(part_lse - lse))
        out += torch.where(weight.T.unsqueeze(-1) == 0, 0.0, weight.T.unsqueeze(-1) * part)
    return out, lse


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the caches in which row t of key and value, divided by its head's scale, stands at slot_mapping[t].

    Negative slots are skipped. Scales have one element or one a head.
    """
    written = []
    for rows, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        copy, block_size = cache.clone(), cache.shape[1]
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                continue
            for head in range(cache.shape[2]):
                row = rows[token, head]
                if scale is not None:
                    row = _f64(row) / _f64(scale).flatten()[head if scale.numel() > 1 else 0]
                stored = to_e4m3(row) if cache.dtype == torch.float8_e4m3fn else row
                copy[slot // block_size, slot % block_size, head] = stored.to(copy)
        written.append(copy)
    return written[0], written[1]


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The float8_e4m3fn values nearest to x, of two equally near ones that with an even code; NaN stays NaN.

    A code holds a sign, 4 bits of exponent e and 3 of mantissa m: 2^-6 m / 8 where e = 0, else 2^(e - 7) (1 + m / 8).
    The last one, which would be 480, is NaN, so 448 stands for all beyond it (Micikevicius et al., 2022).
    """
    codes = torch.arange(127)
    values = torch.tensor(
        [2.0**-6 * code / 8 if code < 8 else 2.0 ** (code // 8 - 7) * (1 + code % 8 / 8) for code in codes.tolist()],
        dtype=torch.float64,
    )
    x = _f64(x)
    distances = (x.abs().clamp(max=values[-1]).unsqueeze(-1) - values).abs()
    is_nearest = distances == distances.amin(-1, keepdim=True)
    size = torch.where(x.isnan(), 127, (is_nearest * (2 - codes % 2)).argmax(-1))
    return (size + 128 * x.signbit()).to(torch.uint8).view(torch.float8_e4m3fn)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis (Zhang and Sennrich, 2019)."""
    x, weight = _f64(x), _f64(weight)
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotary embedding (Su et al., 2021) of x [num_tokens, num_heads, head_dim] at `positions` [num_tokens].

    cos_sin_cache [max_position, rotary_dim]: cosines of the rotary_dim / 2 frequencies, then their sines. Pair i is
    (x[i], x[i + rotary_dim / 2]), or (x[2i], x[2i + 1]) where interleaved; what lies beyond rotary_dim passes through.
    """
    x, cos_sin_cache = _f64(x), _f64(cos_sin_cache)
    half = cos_sin_cache.shape[1] // 2
    out = x.clone()
    for token, position in enumerate(positions.tolist()):
        for i in range(half):
            cos, sin = cos_sin_cache[position, i], cos_sin_cache[position, half + i]
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            out[token, :, a] = x[token, :, a] * cos - x[token, :, b] * sin
            out[token, :, b] = x[token, :, b] * cos + x[token, :, a] * sin
    return out


def silu_and_mul(x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """activation(gate) * up, where the first half of the last axis is the gate and the second half is up."""
    gate, up = x.chunk(2, dim=-1)
    return gated_activation(gate, up, activation)


def greedy_argmax(
    logits: torch.Tensor, *, token_mask: torch.Tensor | None = None, repetition_penalty: torch.Tensor | None = None
) -> torch.Tensor:
    """Index of the largest logit a row, ties to the smaller index; -1 where no token is left to choose.

    token_mask ([V] or [N, V], bool): False forbids a token. repetition_penalty ([V] or [N, V], above 0): factor a
    token, 1 for none; positive logits are divided by it, others multiplied (Keskar et al., 2019). NaN and -inf are
    never chosen.
    """
    logits = _f64(logits)
    rows, vocab_size = logits.shape
    chosen = torch.full((rows,), -1, dtype=torch.int64)
    for row in range(rows):
        best = -math.inf
        for token in range(vocab_size):
            value = float(logits[row, token])
            if token_mask is not None and not bool(token_mask.expand(rows, vocab_size)[row, token]):
                continue
            if repetition_penalty is not None:
                factor = float(repetition_penalty.expand(rows, vocab_size)[row, token])
                value = value / factor if value > 0 else value * factor
            if value > best:
                best, chosen[row] = value, token
    return chosen


def route_tokens(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    scoring: str = "softmax",
    correction_bias: torch.Tensor | None = None,
    num_expert_groups: int = 1,
    topk_groups: int = 1,
    routed_scaling_factor: float = 1.0,
    num_shared_experts: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k experts a token by score (softmax over the experts, or sigmoid), ties to the smaller index.

    correction_bias [num_experts] is added where experts are compared, never to a weight. With groups the experts come
    from the topk_groups groups with the best score each, or with a bias the best sum of two scores.

    Returns weights (times routed_scaling_factor, summing to it a row where renormalize) and ids, int32, by falling
    score, both [num_tokens, top_k + num_shared_experts]: shared experts follow the others in number, with weight 1. A
    row that holds NaN routes to no expert: ids -1, weights NaN.
    """
    if scoring not in ("softmax", "sigmoid"):
        raise InvalidInputError(f"scoring={scoring!r}: expected 'softmax' or 'sigmoid'")
    logits = _f64(router_logits)
    num_tokens, num_experts = logits.shape
    scores = torch.softmax(logits, -1) if scoring == "softmax" else 1 / (1 + torch.exp(-logits))
    bias = [0.0] * num_experts if correction_bias is None else _f64(correction_bias).tolist()
    weights = torch.full((num_tokens, top_k + num_shared_experts), math.nan, dtype=torch.float64)
    ids = torch.full(weights.shape, -1, dtype=torch.int32)
    size = num_experts // num_expert_groups
    for token, row in enumerate(scores.tolist()):
        if any(math.isnan(score) for score in row):
            continue
        choice = [score + shift for score, shift in zip(row, bias, strict=True)]
        groups = [range(start, start + size) for start in range(0, num_experts, size)]
        counted = 1 if correction_bias is None else 2
        groups.sort(key=lambda group: (-sum(sorted((choice[e] for e in group), reverse=True)[:counted]), group[0]))
        allowed = [expert for group in groups[:topk_groups] for expert in group]
        order = sorted(allowed, key=lambda expert: (-choice[expert], expert))[:top_k]
        total = sum(row[expert] for expert in order) if renormalize else 1.0
        routed = [row[expert] / total * routed_scaling_factor for expert in order]
        weights[token] = torch.tensor(routed + [1.0] * num_shared_experts, dtype=torch.float64)
        shared = range(num_experts, num_experts + num_shared_experts)
        ids[token] = torch.tensor([*order, *shared], dtype=torch.int32)
    return weights, ids


def moe_align_block_size(
    topk_ids: torch.Tensor, block_size: int, num_experts: int
) -> tuple[list[list[int]], list[int], int]:
    """The definition: for each expert in order, its entries of flattened topk_ids, rising, padded to whole blocks.

    Returns (blocks, expert_ids, num_tokens_post_padded): each block's block_size entries, filled up with
    topk_ids.numel(), each block's expert, and block_size times the number of blocks. Ids outside [0, num_experts)
    appear in no block.
    """
    flat = topk_ids.flatten().tolist()
    blocks: list[list[int]] = []
    expert_ids: list[int] = []
    for expert in range(num_experts):
        entries = [index for index, chosen in enumerate(flat) if chosen == expert]
        for start in range(0, len(entries), block_size):
            block = entries[start : start + block_size]
            blocks.append(block + [len(flat)] * (block_size - len(block)))
            expert_ids.append(expert)
    return blocks, expert_ids, block_size * len(blocks)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up for "silu", "gelu" and "gelu_tanh"; for "swiglu_oai" min(gate, 7) sigmoid(1.702 min(gate,
    7)) (1 + up), with up clamped to [-7, 7]."""
    gate, up = _f64(gate), _f64(up)
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if activation == "gelu":
        return gate * (1 + torch.erf(gate / math.sqrt(2))) / 2 * up
    if activation == "gelu_tanh":
        return gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2 * up
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate / (1 + torch.exp(-1.702 * gate)) * (1 + up)
    raise InvalidInputError(f"activation={activation!r}: expected 'silu', 'gelu', 'gelu_tanh' or 'swiglu_oai'")


def quantize_token_groups(x: torch.Tensor) -> torch.Tensor:
    """x [num_rows, size] with every 128 values of a row rounded to e4m3 times a scale that makes their largest 448.

    e4m3 numbers from 2^e to 2^(e + 1) are 2^(e - 3) apart, those below 2^-6 are 2^-9 apart (Micikevicius et al., 2022).
    """
    x = _f64(x)
    out = x.clone()
    for start in range(0, x.shape[1], 128):
        for row in range(x.shape[0]):
            values = x[row, start : start + 128]
            scale = float(values.abs().max()) / 448 or 1.0
            exponents = torch.floor(torch.log2((values / scale).abs().clamp(min=2.0**-6)))
            steps = scale * 2.0 ** (exponents - 3)
            out[row, start : start + 128] = torch.round(values / steps) * steps
    return out


def dequantize(w: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """One expert's weights [rows, columns] times their scale: one, one a row, or one a group of rows and columns.

    Groups of e4m3 are 128 x 128, those of int8 and of two 4-bit values plus 8 a byte (low bits first) one row each.
    """
    if scale is None:
        return _f64(w)
    if w.dtype == torch.uint8:
        low, high = _f64(w % 16) - 8, _f64(w // 16) - 8
        values = torch.zeros(w.shape[0], 2 * w.shape[1], dtype=torch.float64)
        values[:, 0::2], values[:, 1::2] = low, high
    else:
        values = _f64(w)
    scale = _f64(scale)
    if scale.dim() < 2:
        return values * scale.reshape(-1, 1)
    height, width = (128, 128) if w.dtype == torch.float8_e4m3fn else (1, values.shape[1] // scale.shape[1])
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            values[i * height : (i + 1) * height, j * width : (j + 1) * width] *= scale[i, j]
    return values


def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "silu",
    expert_map: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    interleaved: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """sum over a token's experts of weight * (w2[e] @ activation(w1[e] @ x + w1_bias[e]) + w2_bias[e]).

    Shapes as in the operation; w1's gate and up rows lie in halves or, where interleaved, alternate. expert_map
    [num_global_experts] gives each expert's row in w1 and w2, or -1 for experts that live elsewhere and contribute
    nothing. Scales make quantised weights numbers, see `dequantize`; what e4m3 weights multiply is rounded first, see
    `quantize_token_groups`. A token whose weights are NaN yields NaN.
    """
    x, weights = _f64(hidden_states), _f64(topk_weights)
    num_experts, hidden_size, _ = w2.shape
    rows = torch.arange(w1.shape[1])
    gate_rows, up_rows = (rows[0::2], rows[1::2]) if interleaved else rows.chunk(2)
    w1_bias = torch.zeros(num_experts, w1.shape[1]) if w1_bias is None else w1_bias
    w2_bias = torch.zeros(num_experts, hidden_size) if w2_bias is None else w2_bias

    @functools.cache
    def matrices(local: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = dequantize(w1[local], None if w1_scale is None else w1_scale[local])
        return first, dequantize(w2[local], None if w2_scale is None else w2_scale[local])

    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], topk_ids[token].tolist(), strict=True):
            if torch.isnan(weight):
                out[token] = math.nan
                continue
            local = expert if expert_map is None or expert < 0 else int(expert_map[expert])
            if local >= 0:
                first, second = matrices(local)
                given = quantize_token_groups(x[token, None])[0] if w1.dtype == torch.float8_e4m3fn else x[token]
                product = first @ given + _f64(w1_bias[local])
                activated = gated_activation(product[gate_rows], product[up_rows], activation)
                if w2.dtype == torch.float8_e4m3fn:
                    activated = quantize_token_groups(activated[None])[0]
                out[token] += weight * (second @ activated + _f64(w2_bias[local]))
    return out


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    adapters: list[dict[int, tuple[torch.Tensor, torch.Tensor, float]]],
    part_sizes: tuple[int, ...],
    row_slots: list[int],
) -> torch.Tensor:
    """out[row] + scale * B (A x[row]), where row_slots[row] is an index into `adapters`, or -1 for out[row] alone.

    An adapter maps the parts that it changes (runs of columns of out, part_sizes wide) to A [rank, in_features],
    B [part size, rank] and scale.
    """
    total, x = _f64(out).clone(), _f64(x)
    for row, slot in enumerate(row_slots):
        if slot < 0:
            continue
        for part, (a, b, scale) in adapters[slot].items():
            first = sum(part_sizes[:part])
            total[row, first : first + part_sizes[part]] += scale * (_f64(b) @ (_f64(a) @ x[row]))
    return total
