"""The card of attention over a window and compressed entries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from paged.bench.bounds import attention as bounds
from paged.bench.cards.card import Card, Edge, Row, defined, named, same
from paged.bench.cards.draw import Draw
from paged.bench.compilation.cases import compressed as compiled
from paged.bench.limits import Cost
from paged.bench.mla.compressed_problem import PROBLEMS, Problem, call_of
from paged.bench.problems.arguments import Arguments, num_bytes
from paged.kernels.attention import compressed_definition
from paged.kernels.attention.plan import AttentionPlan
from paged.kernels.cache.latent_cache import MXFP8_BYTES, NVFP4_BYTES, RECORD_BYTES

# DeepSeek-V4-Flash: a window of 128, all entries of 128 positions, or 512 chosen ones of 4.
_SIZES = {"heads": same(64), "dim": same(512), "rotary": same(64), "window": same(128)}
_ALL = {**_SIZES, "pool": same(128)}
_CHOSEN = {**_SIZES, "pool": same(4), "chosen": (512, 512, 40)}
_DECODES = ([(1, 1 << 20)], [(1, 1 << 15)], [(1, 1500), (1, 100)])
_PROMPTS = ([(2048, 8192)], [(64, 1024)], [(3, 200)])
_ODD_LENGTHS = (((1, 1),), ((0, 5), (1, 33)), ((40, 40),), ((1, 20), (3, 3), (9, 20)))


def _step(
    draw: Draw,
    *,
    lengths: list[tuple[int, int]],
    heads: int,
    dim: int,
    rotary: int,
    window: int,
    pool: int,
    chosen: int = 0,
    record_bytes: int = 0,
) -> Arguments:
    """Draw a step. pool: 0 for a window alone."""
    problem = Problem(
        "",
        tuple(lengths),
        heads,
        dim,
        rotary,
        window,
        pool,
        chosen * (pool > 0),
        block_size=128,
        dtype=draw.dtype,
        record_bytes=record_bytes,
    )
    if draw.is_odd:
        problem = replace(problem, block_size=5, entry_block_size=3, padding_rows=1)
    elif pool:
        problem = replace(problem, entry_block_size=128 // pool)
    arguments = call_of(problem, draw.device)
    del arguments["out"], arguments["return_lse"], arguments["deterministic"]
    lengths_of_step = arguments["cu_seqlens_q"], arguments["seq_lens"]
    longest = max(seq_len for _, seq_len in lengths)
    plan = AttentionPlan(*lengths_of_step, max_seqlen_q=arguments["max_seqlen_q"], max_seqlen_k=longest)
    return {**arguments, "plan": plan}


def _option(problem: Problem, draw: Draw) -> Iterator[Arguments]:
    yield call_of(replace(problem, dtype=draw.dtype), draw.device)


def _cost(_: Card, arguments: Arguments) -> Cost:
    """Count 4 head_dim operations for a query, a head and a key. Rows and entries that any query sees are read once."""
    q, cache, window, pool = (arguments[name] for name in ("q", "kv_cache", "sliding_window", "pool_size"))
    q_lens, seq_lens = arguments["cu_seqlens_q"].diff().tolist(), arguments["seq_lens"].tolist()
    indices = arguments.get("indices")
    pairs = num_rows = num_entries = 0
    for q_len, seq_len in zip(q_lens, seq_lens, strict=True):
        ends = torch.arange(seq_len - q_len + 1, seq_len + 1)
        pairs += int(ends.clamp(max=window).sum())
        num_rows += min(seq_len, window + q_len - 1)
        if indices is None:
            pairs += int((ends // pool).sum())
            num_entries += seq_len // pool
    moved = num_bytes(q) * 2 + num_rows * cache[0, 0].nbytes
    if indices is not None:
        pairs += int((indices >= 0).sum())
        most_entries = sum(seq_len // pool for seq_len in seq_lens)
        num_entries = min(most_entries, int((indices >= 0).sum()))
        moved += num_bytes(indices)
    return Cost(4 * q.shape[1] * q.shape[2] * pairs, moved + num_entries * cache[0, 0].nbytes)


CARDS = (
    Card(
        "paged_compressed_attention",
        _step,
        defined(compressed_definition.paged_compressed_attention, "out", "lse"),
        named("out", "lse"),
        errors=bounds.compressed_attention,
        cost=_cost,
        rows=(
            Row({**_ALL, "lengths": _DECODES}, "decode"),
            Row({**_CHOSEN, "lengths": _DECODES}, "chosen"),
            Row({**_CHOSEN, "lengths": _PROMPTS}, "prompt"),
            Row({**_ALL, "lengths": _DECODES, "record_bytes": same(RECORD_BYTES)}, "decode records"),
            Row({**_CHOSEN, "lengths": _DECODES, "record_bytes": same(RECORD_BYTES)}, "chosen records"),
            Row({**_CHOSEN, "pool": same(1), "lengths": _DECODES, "record_bytes": same(MXFP8_BYTES)}, "V4.1 records"),
            Row({**_CHOSEN, "lengths": _DECODES, "record_bytes": same(NVFP4_BYTES)}, "NVFP4 records"),
        ),
        edges=tuple(Edge(case.name, partial(_option, case), case.name == "chosen entries") for case in PROBLEMS),
        odd={
            "lengths": _ODD_LENGTHS,
            "heads": (3, 1),
            "dim": (48, 16),
            "rotary": (16, 2),
            "window": (7, 64),
            "pool": (4, 1, 0),
            "chosen": (0, 7),
        },
        compiled=compiled.cases,
    ),
)
