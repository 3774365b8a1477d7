"""Paged attention in PyTorch: one product for all sequences of similar shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...common.attention.plan import AttentionPlan, BindStep
from ...common.device import loops_of
from ...common.numba_ops.recording import recording
from ...common.torch_ops.linear import MULTIPLIES_BF16
from ..config import AttentionCall
from .batches import (
    BatchLayout,
    RowLayout,
    SequenceBatch,
    SharedBatches,
    check_step,
    make_batches,
)


def bind(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    window: tuple[int, int],
    chunk_size: int,
    deterministic: bool,
    *,
    is_plain: bool,
    head_numbers: Sequence[torch.Tensor | None],
    takes_loops: bool,
) -> BindStep[AttentionCall]:
    """Return what binds each step's calls like this one, in PyTorch or, if takes_loops, by numba kernels.

    Numba kernels read the caches in place. On one core of a Xeon with AMX they take 0.3 to 0.5 of the time for 32
    prompts of 512 tokens in bfloat16, 0.5 to 0.6 in float32, because no keys are gathered to be masked.

    is_plain: nothing needs the scores. head_numbers: sinks and slopes.
    """
    if takes_loops:
        loops = loops_of("attention.numba_ops.paged_attention", q, k_cache, v_cache, weights=head_numbers)
        if loops is not None:
            return partial(_bind_loops, loops)
    layout = BatchLayout.of(q, k_cache, v_cache, window, chunk_size, deterministic, keeps_scores=not is_plain)

    def bind_step(call: AttentionCall, plan: AttentionPlan | None) -> Callable[[AttentionCall], None]:
        batches: SharedBatches = {}
        if plan is not None:
            batches = plan.batches
        return partial(_compute, layout, batches, is_plain)

    return bind_step


def _bind_loops(loops: Any, call: AttentionCall, _: AttentionPlan | None) -> Callable[[AttentionCall], None]:
    """Bind a step to numba kernels, which trust lengths and blocks: they are checked here."""
    check_step(call)
    launch = loops.prepare(call)

    def compute(call: AttentionCall) -> None:
        launch(
            {
                "q": _queries_apart(call),
                "k_cache": call.k_cache,
                "v_cache": call.v_cache,
                "out": call.out,
                "block_table": call.block_table,
                "cu_seqlens_q": call.cu_seqlens_q.contiguous(),
                "seq_lens": call.seq_lens.contiguous(),
                "sinks": _contiguous(call.sinks),
                "alibi_slopes": _contiguous(call.alibi_slopes),
                "lse": call.lse,
            }
        )

    return compute


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _queries_apart(call: AttentionCall) -> torch.Tensor:
    """Return the queries, a copy of them if `out` is `q`."""
    if call.q.data_ptr() == call.out.data_ptr():
        return call.q.clone()
    return call.q


def _compute(layout: BatchLayout, shared: SharedBatches, is_plain: bool, call: AttentionCall) -> None:
    """Fill `out`, and `lse` if given; shared: batches of the step, which its layers share."""
    if (current := recording()) is not None:
        current.note_read("paged_attention, which no numba kernel computes here")
    # The tensors are kept, so that no others can get their ids.
    tensors = call.block_table, call.is_causal, call.mask
    key = layout, *map(id, tensors)
    if key not in shared:
        check_step(call)
        shared[key] = make_batches(call, layout), tensors
    batches, _ = shared[key]
    q, out, lse = _queries_apart(call), call.out, call.lse
    out.zero_()
    num_kv_heads, k_scale, v_scale = call.k_cache.shape[2], call.k_scale, call.v_scale
    if call.k_cache.dtype == torch.int8:  # these scale rows, see `GatheredProducts`
        k_scale = v_scale = None
    if lse is not None:
        lse.fill_(-math.inf)
        if call.sinks is not None:
            lse[:, : int(call.cu_seqlens_q[-1])] = call.sinks.float()[:, None]
    for batch in batches:
        num_seqs, _, num_queries, _ = batch.visible.shape
        is_fused = is_plain and batch.pairs is None
        queries = q.index_select(0, batch.rows)
        if not (is_fused and _stays_narrow(call)):
            queries = queries.float()
        if k_scale is not None:
            queries = (queries.unflatten(1, (num_kv_heads, -1)) * k_scale.reshape(-1, 1, 1)).flatten(1, 2)
        queries = queries.view(num_seqs, num_queries, *q.shape[1:]).transpose(1, 2)  # [n, Hq, Q, D]
        if is_fused:
            attended = _fused(call, batch, queries)
        else:
            attended, row_lse = _with_scores(call, batch, queries)
            if lse is not None and row_lse is not None:
                lse[:, batch.rows] = row_lse.transpose(0, 1).flatten(1)
        rows = attended.transpose(1, 2).reshape(-1, *out.shape[1:])  # [n * Q, Hq, Dv]
        if v_scale is not None:
            rows = (rows.unflatten(1, (num_kv_heads, -1)) * v_scale.reshape(-1, 1, 1)).flatten(1, 2)
        out.index_copy_(0, batch.rows, rows.to(out.dtype))
        if batch.blind_rows is not None:
            out.index_fill_(0, batch.blind_rows, 0.0)


def _stays_narrow(call: AttentionCall) -> bool:
    """Return whether products are bfloat16 with float32 sums, whose error is that of rounding the result.

    They take 0.4 of the time of a prompt's attention on a Xeon with AMX.
    """
    is_narrow = call.q.dtype == call.k_cache.dtype == torch.bfloat16 and call.head_scales == (None, None)
    return is_narrow and call.q.device.type == "cpu" and MULTIPLIES_BF16


def _fused(call: AttentionCall, batch: SequenceBatch, queries: torch.Tensor) -> torch.Tensor:
    """[n, Hq, Q, Dv]; NaN or anything where a row sees no key."""
    gathered = GatheredProducts(call, batch, queries.dtype)
    keys, values = gathered.keys, gathered.values
    is_decode = queries.shape[2] == 1
    if is_decode:  # the heads of a group as queries of one head: 15 % faster
        queries = queries.reshape(len(queries), keys.shape[1], -1, queries.shape[3])
    attended = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=batch.bias, scale=call.softmax_scale, enable_gqa=not is_decode
    )
    if is_decode:
        attended = attended.flatten(1, 2).unsqueeze(2)
    return attended


def _with_scores(
    call: AttentionCall, batch: SequenceBatch, queries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[n, Hq, Q, Dv], NaN or anything where a row sees no key; the log-sum-exp [n, Hq, Q] where call.lse is given."""
    products: GatheredProducts | ProductsInPlace
    if batch.pairs is None or batch.layout is None:
        products = GatheredProducts(call, batch)
    else:
        products = ProductsInPlace(call, batch.pairs, batch.layout)
    scores = products.scores(queries)
    if call.softcap > 0:
        scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
    if call.alibi_slopes is not None:
        scores -= call.alibi_slopes.float()[:, None, None] * batch.distance()
    scores += batch.bias
    if call.lse is None and call.sinks is None:
        return products.weighted(scores.softmax(-1)), None
    # The largest score, not the log-sum-exp, is what can be subtracted: that is rounded, by 2e-3 where it is 46,000.
    largest = scores.amax(-1, keepdim=True)
    if call.sinks is not None:
        sinks = call.sinks.float()[:, None, None]
        largest = largest.maximum(sinks)
    largest = largest.clamp_(min=torch.finfo(torch.float32).min)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    if call.sinks is not None:
        total += (sinks - largest).exp_()
    row_lse = total.log().add_(largest)
    # Rows that see no key have no weights, and 0 / 0 would be NaN.
    return products.weighted(weights).div_(total.masked_fill(total == 0, 1.0)), row_lse.squeeze(-1)


class GatheredProducts:
    """Matrix products of a group's queries with gathered keys and values, for n sequences of Q queries and L keys.

    `keys` and `values` are [n, Hkv, L, D] and [n, Hkv, L, Dv] of `dtype`.
    """

    def __init__(self, call: AttentionCall, batch: SequenceBatch, dtype: torch.dtype = torch.float32) -> None:
        self.softmax_scale = call.softmax_scale
        self.keys, self.values = (
            _gather(cache, batch, batch.layout).to(dtype) for cache in (call.k_cache, call.v_cache)
        )
        k_scale, v_scale = call.row_scales
        if k_scale is not None and v_scale is not None:
            self.keys *= _gather(k_scale.unsqueeze(-1), batch, None)
            self.values *= _gather(v_scale.unsqueeze(-1), batch, None)

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        """Return scaled scores, float32 [n, Hq, Q, D] -> [n, Hq, Q, L]."""
        num_queries = queries.shape[2]
        grouped = queries.unflatten(1, (self.keys.shape[1], -1)).flatten(2, 3)  # [n, Hkv, G * Q, D]
        scores = (grouped @ self.keys.transpose(-1, -2)).mul_(self.softmax_scale)
        return scores.unflatten(2, (-1, num_queries)).flatten(1, 2)

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        """Return weighted sums of values, float32 [n, Hq, Q, L] -> [n, Hq, Q, Dv]."""
        num_queries = weights.shape[2]
        attended = weights.unflatten(1, (self.values.shape[1], -1)).flatten(2, 3) @ self.values
        return attended.unflatten(2, (-1, num_queries)).flatten(1, 2)


class ProductsInPlace:
    """The same products by PyTorch's sparse operations, which read the cache by indices.

    Scores are a matrix product sampled at the pairs of a query and its keys. Weighted sums of values are an embedding
    bag.
    """

    def __init__(self, call: AttentionCall, pairs: torch.Tensor, layout: RowLayout) -> None:
        self.softmax_scale, self.pairs = call.softmax_scale, pairs
        k_size, v_size, num_rows = call.k_cache.shape[3], call.v_cache.shape[3], layout.num_rows
        self.k_rows = call.k_cache.as_strided((num_rows, k_size), (k_size, 1))
        self.v_rows = call.v_cache.as_strided((num_rows, v_size), (v_size, 1))

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        rows = queries.reshape(-1, queries.shape[-1])
        sampled = torch.sparse.sampled_addmm(self.pairs, rows, self.k_rows.T, beta=0.0, alpha=self.softmax_scale)
        return sampled.values().view(*queries.shape[:3], -1)

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = torch.embedding_bag(
            self.v_rows,
            self.pairs.col_indices(),
            self.pairs.crow_indices(),
            per_sample_weights=weights.flatten(),
            include_last_offset=True,
        )[0]
        return attended.view(*weights.shape[:3], -1)


def _gather(cache: torch.Tensor, batch: SequenceBatch, layout: RowLayout | None) -> torch.Tensor:
    """Return gathered rows of a cache, [n, Hkv, L, D]."""
    slots, block_size = batch.slots, cache.shape[1]
    if layout is not None and not cache.is_contiguous():
        index, size = batch.cache_rows, cache.shape[3]
        cache_rows = cache.as_strided((layout.num_rows, size), (size, 1))
        return cache_rows.index_select(0, index.flatten()).view(*index.shape, -1)
    if cache.is_contiguous():
        rows = cache.flatten(0, 1).index_select(0, slots.flatten())
    else:
        rows = cache[slots // block_size, slots % block_size]
    return rows.view(*slots.shape, *cache.shape[2:]).transpose(1, 2)
