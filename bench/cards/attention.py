"""Cards of attention over a paged cache: keys and values, latents, chosen keys, shared prefixes, merges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from paged.bench.attention import problem as attention_problem
from paged.bench.attention.cases import AttentionCase, attention_cost
from paged.bench.attention.problem import Problem
from paged.bench.attention.problems import PROBLEMS
from paged.bench.bounds import attention as bounds
from paged.bench.cards.card import Card, Edge, Row, defined, named, same
from paged.bench.cards.draw import BLOCK_SIZE, Draw
from paged.bench.cards.layers import COMPILED_HEADS, COMPILED_TOKENS, HEAD_DIM, HEADS, TOKENS
from paged.bench.compilation.cases import attention as compiled
from paged.bench.compilation.cases import mla as compiled_latents
from paged.bench.compilation.cases.case import CompileCase
from paged.bench.compilation.cases.launches import empty, single_case
from paged.bench.limits import Cost
from paged.bench.mla import problem as mla_problem
from paged.bench.problems.arguments import Arguments, num_bytes
from paged.kernels.attention import definition, latent_definition
from paged.kernels.attention.cascade_attention import cascade_plans
from paged.kernels.attention.merge_attn_states import merge_attn_states
from paged.kernels.cache.latent_cache import NVFP4_LATENT_BYTES, encode_records
from paged.kernels.core.device import use_triton
from paged.kernels.core.dtypes import KV_KINDS, kv_kind

Lengths = Sequence[tuple[int, int]]
"""Query and key length of each sequence."""

_PREFILLS = ([(2048, 2048)] * 4, [(256, 256)] * 2, [(70, 70), (33, 33)])
_DECODES = ([(1, 4096)] * 32, [(1, 512)] * 8, [(1, 600), (1, 33), (1, 1)])
_MIXED = ([(2048, 4096), *[(1, 4096)] * 31], [(128, 256), *[(1, 512)] * 7], [(40, 100), (1, 600), (1, 17)])
_SIZES = {"heads": HEADS, "dim": HEAD_DIM}
# MiniMax-M3's attention: 16 blocks of 128 positions for each query and KV head.
_CHOSEN = {
    "lengths": ([(1, 1 << 17)], [(1, 1 << 13)], [(1, 3000), (3, 700)]),
    "heads": ((64, 4), (16, 2), (32, 2)),
    "dim": same(128),
    "chosen": same((128, 16)),
}
_CHOSEN_PROMPT = {
    **_CHOSEN,
    "lengths": ([(512, 1 << 17)], [(64, 1 << 13)], [(9, 2500), (1, 300), (3, 700)]),
    "kept": same(0.9),
}
_CASCADE = {"prefix": (32768, 1024, 64), "suffix": (512, 64, 20), "sequences": (64, 8, 3), **_SIZES}
# Latents of DeepSeek-V3 (DeepSeek-AI, 2024), with 64 decodes of 8k.
_LATENT_LENGTHS = ([(1, 8192)] * 64, [(1, 512)] * 4, [(1, 200), (1, 33)])
_LATENTS = {"lengths": _LATENT_LENGTHS, "heads": (128, 16, 4), "sizes": same((512, 64))}
_BLOCK_INDEX = {"lengths": _LATENT_LENGTHS, "dim": (128, 128, 32)}
_BY_HEAD = {"heads": same(4), "top_k": same(16), "size": same(128)}
_INDEXED = {"lengths": _LATENT_LENGTHS, "heads": (64, 16, 16), "dim": (128, 128, 32), "top_k": (2048, 128, 20)}
# Entries of DeepSeek-V4's compressed sparse attention.
_INDEXED_POOLS = {**_INDEXED, "top_k": (512, 128, 20), "pool": same(4)}
# Problems of a quick run, one for every option.
_QUICK = (
    "mixed batch",
    "split decodes",
    "left window",
    "softcap",
    "sinks",
    "ALiBi",
    "tree",
    "fp8 cache",
    "int8 cache",
    "chosen blocks",
    "coverage",
)
_QUICK_LATENTS = ("mixed batch", "chosen keys", "packed")
_KINDS = {kind.name: kind for kind in KV_KINDS.values()}
_ODD_LENGTHS = (((1, 1),), ((0, 5), (1, 33)), ((40, 40),), ((1, 20), (3, 3), (9, 20)))


def _step(
    draw: Draw,
    *,
    lengths: Lengths,
    heads: tuple[int, int],
    dim: int,
    cache: str = "",
    return_lse: bool = False,
    chosen: tuple[int, int] = (0, 0),
    kept: float = 0.0,
) -> Arguments:
    """Draw a step.

    cache: name of the caches' `KvKind` with scales; "" for the dtype of q.
    chosen: positions of a chosen block and blocks of a query; (0, 0) for all keys.
    kept: as in `Problem`.
    """
    groups = tuple((1, q_len, seq_len) for q_len, seq_len in lengths)
    chosen_block_size, count = chosen
    block_size = BLOCK_SIZE
    if count:
        block_size = 64
    case = AttentionCase("kernels", "lengths", groups, heads, block_size, dim)
    step, (layer,) = case.tensors(draw.device, draw.dtype, 1)
    arguments = {**vars(layer), **step.arguments, "plan": step.plan()}
    if return_lse:
        arguments["return_lse"] = True
    if count:
        blocks = attention_problem.draw_blocks(tuple(lengths), 0, heads[1], chosen_block_size, count)
        if kept:
            blocks = attention_problem.draw_similar_blocks(tuple(lengths), heads[1], chosen_block_size, count, kept)
        arguments |= {"chosen_blocks": blocks.to(draw.device), "chosen_block_size": chosen_block_size}
    if cache:
        for name in ("k", "v"):
            codes, scales = _KINDS[cache].encode(arguments[f"{name}_cache"], None)
            assert scales is not None
            # As in the cache: a head's scales lie side by side.
            scales = scales.transpose(1, 2).contiguous().transpose(1, 2)
            arguments |= {f"{name}_cache": codes, f"{name}_scale": scales}
    return arguments


def _lengths(arguments: Arguments) -> list[tuple[int, int]]:
    q_lens, seq_lens = arguments["cu_seqlens_q"].diff().tolist(), arguments["seq_lens"].tolist()
    return list(zip(q_lens, seq_lens, strict=True))


def _row_bytes(cache: torch.Tensor) -> int:
    """Return the bytes of a token in a cache of K or V, scales included."""
    kind = kv_kind(cache.dtype)
    return int(cache.shape[2] * kind.row_bytes(kind.width(cache)))


def _step_cost(_: Card, arguments: Arguments) -> Cost:
    q, k_cache, v_cache = (arguments[name] for name in ("q", "k_cache", "v_cache"))
    head_dims = q.shape[2], kv_kind(v_cache.dtype).width(v_cache)
    row_bytes = _row_bytes(k_cache) + _row_bytes(v_cache)
    lengths = _lengths(arguments)
    cost = attention_cost(lengths, q.shape[1], head_dims, q.itemsize, row_bytes, k_cache.shape[1])
    chosen = arguments.get("chosen_blocks")
    if chosen is None:
        return cost
    pairs, keys = chosen_keys(lengths, chosen, arguments["chosen_block_size"])
    num_kv_heads = k_cache.shape[2]
    unread = (sum(seq_len for _, seq_len in lengths) * num_kv_heads - keys) * row_bytes // num_kv_heads
    flops = 2 * q.shape[1] * sum(head_dims) * pairs // num_kv_heads
    return Cost(flops, cost.num_bytes - unread + chosen.nbytes)


def chosen_keys(lengths: Lengths, chosen: torch.Tensor, size: int) -> tuple[int, int]:
    """Count the keys of a KV head that all causal queries see, and those that any query of a sequence sees.

    Both counts are summed over KV heads. size: positions of a chosen block.
    """
    pairs = keys = row = 0
    for q_len, seq_len in lengths:
        blocks = chosen[row : row + q_len].cpu().long()  # [q_len, Hkv, k]
        row += q_len
        ends = torch.arange(seq_len - q_len + 1, seq_len + 1)[:, None, None]
        seen = (ends - blocks * size).clamp(0, size) * (blocks >= 0)
        pairs += int(seen.sum())
        longest = torch.zeros(blocks.shape[1], -(-seq_len // size) + 1, dtype=torch.long)
        last = longest.shape[1] - 1  # takes entries without a key
        places = blocks.where(blocks >= 0, last).clamp(max=last).transpose(0, 1).flatten(1)
        longest.scatter_reduce_(1, places, seen.transpose(0, 1).flatten(1), "amax")
        keys += int(longest.sum())
    return pairs, keys


def _option(problem: Problem, draw: Draw) -> Iterator[Arguments]:
    arguments = attention_problem.call_of(replace(problem, dtype=draw.dtype), draw.device)
    yield arguments
    if not use_triton(torch.empty(0, device=draw.device)):
        # Without the log-sum-exp, the PyTorch implementation takes another path.
        yield attention_problem.call_of(replace(problem, dtype=draw.dtype), draw.device) | {"return_lse": False}


def _cascade(draw: Draw, *, prefix: int, suffix: int, sequences: int, heads: tuple[int, int], dim: int) -> Arguments:
    """Draw a decode step of sequences with tokens of their own after a shared prefix."""
    case = AttentionCase("kernels", "cascade", ((sequences, 1, prefix + suffix),), heads, BLOCK_SIZE, dim)
    step, (layer,) = case.tensors(draw.device, draw.dtype, 1)
    num_blocks = prefix // BLOCK_SIZE
    step.block_table[:, :num_blocks] = step.block_table[0, :num_blocks].clone()
    lengths = {"shared_prefix_len": prefix, "max_seqlen_q": 1, "max_seqlen_k": step.max_seqlen_k}
    plan, prefix_plan = cascade_plans(step.cu_seqlens_q, step.seq_lens, num_tokens=sequences, **lengths)
    plans = {"plan": plan, "prefix_plan": prefix_plan, "shared_prefix_len": prefix}
    return {**vars(layer), **step.arguments, **plans}


def _cascade_cost(card: Card, arguments: Arguments) -> Cost:
    """Count K and V of the shared prefix once."""
    cost = _step_cost(card, arguments)
    row_bytes = _row_bytes(arguments["k_cache"]) + _row_bytes(arguments["v_cache"])
    repeated = (arguments["seq_lens"].numel() - 1) * arguments["shared_prefix_len"] * row_bytes
    return Cost(cost.flops, cost.num_bytes - repeated)


def _latents(
    draw: Draw, *, lengths: Lengths, heads: int, sizes: tuple[int, int], chosen: int = 0, record_bytes: int = 0
) -> Arguments:
    """Draw a step over latents.

    chosen: keys that a query sees, 0 for all. record_bytes: size of rows that are records, 0 for rows of numbers.
    """
    latent, rope = sizes
    groups = tuple((1, q_len, seq_len) for q_len, seq_len in lengths)
    case = AttentionCase("kernels", "latents", groups, (heads, 1), 64, latent + rope, latent, latent=True)
    step, (layer,) = case.tensors(draw.device, draw.dtype, 1)
    arguments = {"q": layer.q, "kv_cache": layer.k_cache[:, :, 0], **step.arguments, "plan": step.plan()}
    arguments |= {"softmax_scale": (latent + rope) ** -0.5, "v_head_dim": latent}
    if record_bytes:
        arguments["kv_cache"] = encode_records(arguments["kv_cache"], record_bytes)
    if chosen:
        first = torch.arange(len(layer.q), device=draw.device).remainder(7)[:, None]
        indices = (torch.arange(chosen, device=draw.device) * 3 + first).to(torch.int32)
        shortest = min(seq_len for _, seq_len in lengths)
        arguments["indices"] = torch.where(indices < shortest, indices, -1)
    return arguments


def _latent_cost(_: Card, arguments: Arguments) -> Cost:
    """Count as for keys that are values. Chosen keys take 2 (2 latent + rope) operations a head; others are unread."""
    q, cache, latent = arguments["q"], arguments["kv_cache"], arguments["v_head_dim"]
    lengths, row_bytes = _lengths(arguments), cache[0, 0].nbytes
    cost = attention_cost(lengths, q.shape[1], (q.shape[2], latent), q.itemsize, row_bytes, cache.shape[1])
    indices = arguments.get("indices")
    if indices is None:
        return cost
    num_seen = int((indices >= 0).sum())
    num_unread = max(sum(seq_len for _, seq_len in lengths) - num_seen, 0)
    flops = 2 * q.shape[1] * (latent + q.shape[2]) * num_seen
    return Cost(flops, cost.num_bytes - num_unread * row_bytes)


def _latent_option(problem: mla_problem.Problem, draw: Draw) -> Iterator[Arguments]:
    yield mla_problem.call_of(replace(problem, dtype=draw.dtype), draw.device)


def _scored_keys(
    draw: Draw,
    *,
    lengths: Lengths,
    heads: int,
    dim: int,
    top_k: int,
    is_packed: bool = True,
    pool: int = 1,
    candidates: int = 0,
    candidate_size: int = 64,
) -> Arguments:
    """Draw an indexer's step. candidates: blocks that each query chooses from, some of them unseen; 0 for all keys."""
    arguments = _index_arguments(draw, lengths, pool, (heads, 1), dim, block_size=64, is_packed=is_packed)
    if candidates:
        most_blocks = arguments["block_table"].shape[1] * 64 // candidate_size
        blocks = torch.rand(len(arguments["q"]), most_blocks).argsort(1)[:, :candidates]
        blocks[:, :1] = torch.where(torch.rand(len(blocks), 1) < 0.5, blocks[:, :1], -1)
        arguments |= {"candidates": blocks.sort().values.int().to(draw.device), "candidate_size": candidate_size}
    return {**arguments, "top_k": top_k, "pool_size": pool}


def _index_arguments(
    draw: Draw,
    lengths: Lengths,
    pool: int,
    heads: tuple[int, int],
    dim: int,
    *,
    is_packed: bool,
    **options: Any,
) -> Arguments:
    """Draw keys of pools, also that of a sequence's open pool, and the arguments of an indexer."""
    key_lengths = tuple((q_len, -(-seq_len // pool)) for q_len, seq_len in lengths)
    problem = Problem("", key_lengths, heads, dim, dtype=draw.dtype, **options)
    arguments = mla_problem.index_problem(problem, draw.device, is_packed=is_packed)
    arguments["seq_lens"] = torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32, device=draw.device)
    return arguments


def _scored_keys_option(draw: Draw, *, is_packed: bool, scales_last: bool = False) -> Iterator[Arguments]:
    problem = Problem("", ((1, 300), (3, 3), (9, 40)), (32, 1), 128, padding_rows=1, dtype=draw.dtype)
    arguments = mla_problem.index_problem(problem, draw.device, is_packed=is_packed, scales_last=scales_last)
    for top_k in (16, 2048):
        yield {**arguments, "top_k": top_k, "pool_size": 1}


def _scored_keys_cost(_: Card, arguments: Arguments) -> Cost:
    """Count 2 dim operations for a query, a key and a head. Keys are read once; scores are written and read."""
    q, candidates = arguments["q"], arguments.get("candidates")
    pairs = num_keys = num_queries = 0
    for q_len, seq_len in _lengths(arguments):
        ends = torch.arange(seq_len - q_len + 1, seq_len + 1)
        num_seen = ends // arguments["pool_size"]
        num_closed = seq_len // arguments["pool_size"]
        if candidates is not None:
            size = arguments["candidate_size"]
            blocks = candidates[num_queries : num_queries + q_len].cpu()
            num_seen = ((num_seen[:, None] - blocks * size).clamp(0, size) * (blocks >= 0)).sum(1)
            num_closed = min(num_closed, int(num_seen.sum()))
        pairs += int(num_seen.sum())
        num_keys += num_closed
        num_queries += q_len
    key_bytes = arguments["key_cache"][0, 0].nbytes
    moved = num_keys * key_bytes + 8 * pairs + num_bytes(q, arguments["weights"])
    return Cost(2 * q.shape[1] * q.shape[2] * pairs, moved)


def _scored_blocks(
    draw: Draw,
    *,
    lengths: Lengths,
    heads: int,
    dim: int,
    top_k: int,
    size: int,
    pool: int = 1,
    is_weighted: bool = False,
    is_packed: bool = False,
    reduction: str = "max",
    local_blocks: int = 1,
) -> Arguments:
    """Draw whole numbers, whose scores are exact and often equal; keys that no query sees would win.

    size, pool: `chosen_block_size` and `pool_size`.
    """
    arguments = _index_arguments(draw, lengths, pool, (heads, 1), dim, block_size=16, padding_rows=1, is_packed=False)
    keys = (1.5 * arguments["key_cache"]).round().clamp(-3, 3).nan_to_num(4.0)
    for seq, (_, seq_len) in enumerate(lengths):
        if seq_len % pool:  # the key of an open pool
            key = seq_len // pool
            keys[arguments["block_table"][seq, key // 16].long(), key % 16] = 4.0
    if is_packed:
        scales = 0.5 ** torch.randint(1, 3, (*keys.shape[:2], 1), device=draw.device).float()
        codes = (keys.float() / scales).to(torch.float8_e4m3fn)
        keys = torch.cat([part.contiguous().view(torch.uint8) for part in (codes, scales)], -1)
    arguments |= {"q": arguments["q"].round().clamp(-3, 3), "key_cache": keys}
    weights = arguments.pop("weights")
    if is_weighted:
        arguments["weights"] = weights.round()
    options = {"top_k": top_k, "chosen_block_size": size, "pool_size": pool}
    return {**arguments, **options, "reduction": reduction, "local_blocks": local_blocks}


def _scored_blocks_option(draw: Draw, **options: Any) -> Iterator[Arguments]:
    lengths = ((1, 300), (3, 3), (9, 40), (0, 5), (2, 130))
    for top_k in (1, 3, 40):
        yield _scored_blocks(draw, lengths=lengths, dim=32, top_k=top_k, **options)


def _scored_blocks_cost(_: Card, arguments: Arguments) -> Cost:
    """Count 2 dim operations for a query, a key and a head. Keys are read once, ranks written and read."""
    q, pool, size = arguments["q"], arguments["pool_size"], arguments["chosen_block_size"]
    pairs = num_keys = num_ranks = 0
    num_lists = q.shape[1]
    if arguments.get("weights") is not None:
        num_lists = 1
    for q_len, seq_len in _lengths(arguments):
        ends = torch.arange(seq_len - q_len + 1, seq_len + 1)
        pairs += int((ends // pool).sum())
        num_keys += seq_len // pool
        num_ranks += num_lists * int(((ends + size - 1) // size).sum())
    key_bytes = arguments["key_cache"][0, 0].nbytes
    moved = num_keys * key_bytes + 16 * num_ranks + num_bytes(q, arguments.get("weights"))
    return Cost(2 * q.shape[1] * q.shape[2] * pairs, moved)


def _states(draw: Draw, *, tokens: int, num_heads: int, dim: int) -> Arguments:
    out_a, out_b = draw.normals(2, tokens, num_heads, dim)
    lse_a, lse_b = draw.floats(2, num_heads, tokens)
    return {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}


def _empty_states(draw: Draw) -> Iterator[Arguments]:
    """Draw rows that saw no key, in one part or in both."""
    out_a, out_b = draw.normals(2, 7, 3, 80)
    lse_a, lse_b = 5 * draw.floats(2, 3, 7)
    lse_a[:, 1:4] = -math.inf
    lse_b[:, 3:6] = -math.inf
    yield {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}


def _merge_cases() -> list[CompileCase]:
    cases = []
    for head_dim, num_q_heads, _ in COMPILED_HEADS:
        out, lse = empty("bf16", COMPILED_TOKENS, num_q_heads, head_dim), empty("fp32", num_q_heads, COMPILED_TOKENS)
        cases.append(single_case(f"merge_attn_states head_dim={head_dim}", merge_attn_states, out, lse, out, lse))
    return cases


CARDS = (
    Card(
        "paged_attention",
        _step,
        defined(definition.paged_attention, "out", "lse"),
        named("out", "lse"),
        errors=bounds.attention,
        cost=_step_cost,
        rows=(
            Row({"lengths": _PREFILLS, **_SIZES}, "prefill"),
            Row({"lengths": _DECODES, **_SIZES}, "decode"),
            Row({"lengths": _DECODES, **_SIZES, "cache": same("int8")}, "decode int8"),
            Row({"lengths": _DECODES, **_SIZES, "cache": same("int4")}, "decode int4"),
            Row({"lengths": _DECODES, **_SIZES, "cache": same("nvfp4")}, "decode nvfp4"),
            Row({"lengths": _MIXED, **_SIZES}, "mixed"),
            Row(_CHOSEN, "chosen"),
            Row(_CHOSEN_PROMPT, "chosen prompt"),
        ),
        edges=tuple(Edge(case.name, partial(_option, case), case.name in _QUICK) for case in PROBLEMS),
        odd={
            "lengths": _ODD_LENGTHS,
            "heads": ((2, 2), (5, 1), (4, 2)),
            "dim": (80, 16),
            "cache": ("int8", "nvfp4", ""),
            "return_lse": (False, True),
            "chosen": ((24, 2), (16, 3), (0, 0)),
        },
        compiled=compiled.cases,
    ),
    Card(
        "cascade_attention",
        _cascade,
        defined(definition.paged_attention, "out", "lse"),
        named("out", "lse"),
        errors=bounds.attention,
        cost=_cascade_cost,
        rows=(Row(_CASCADE),),
        odd={
            "prefix": (16, 48),
            "suffix": (1, 20),
            "sequences": (1, 3),
            "heads": ((2, 2), (5, 1), (4, 2)),
            "dim": (80, 16),
        },
    ),
    Card(
        "merge_attn_states",
        _states,
        defined(definition.merge_attn_states, "out", "lse"),
        named("out", "lse"),
        errors=bounds.merged_states,
        rows=(Row({"tokens": TOKENS, "num_heads": (32, 8, 8), "dim": HEAD_DIM}),),
        edges=(Edge("empty rows", _empty_states),),
        odd={"tokens": (0, 1, 5), "num_heads": (1, 3), "dim": (80, 16)},
        compiled=_merge_cases,
    ),
    Card(
        "paged_mla_attention",
        _latents,
        defined(latent_definition.paged_mla_attention, "out", "lse"),
        named("out", "lse"),
        errors=bounds.latent_attention,
        cost=_latent_cost,
        rows=(
            Row(_LATENTS, "decode"),
            Row({**_LATENTS, "chosen": same(2048)}, "chosen"),
            Row({**_LATENTS, "record_bytes": same(NVFP4_LATENT_BYTES)}, "nvfp4"),
        ),
        edges=tuple(
            Edge(case.name, partial(_latent_option, case), case.name in _QUICK_LATENTS) for case in mla_problem.PROBLEMS
        ),
        odd={"lengths": _ODD_LENGTHS, "heads": (16, 1, 5), "sizes": ((64, 0), (32, 16)), "chosen": (0, 7)},
        compiled=compiled_latents.attention_cases,
    ),
    Card(
        "choose_keys",
        _scored_keys,
        defined(latent_definition.choose_keys, "indices"),
        named("indices"),
        cost=_scored_keys_cost,
        rows=(Row(_INDEXED), Row(_INDEXED_POOLS, "pooled"), Row({**_INDEXED, "candidates": (256, 4, 2)}, "candidates")),
        edges=(
            Edge("mixed batch", partial(_scored_keys_option, is_packed=False)),
            Edge("e4m3", partial(_scored_keys_option, is_packed=True)),
            Edge("e4m3, scales last", partial(_scored_keys_option, is_packed=True, scales_last=True)),
        ),
        odd={
            "lengths": _ODD_LENGTHS,
            "heads": (1, 5),
            "dim": (32, 16),
            "top_k": (1, 7),
            "is_packed": (False,),
            "pool": (1, 4),
        },
        compiled=compiled_latents.index_cases,
    ),
    Card(
        "choose_blocks",
        _scored_blocks,
        defined(latent_definition.choose_blocks, "chosen_blocks"),
        named("chosen_blocks"),
        cost=_scored_blocks_cost,
        rows=(
            Row({**_BLOCK_INDEX, **_BY_HEAD}, "by head"),
            Row({**_BLOCK_INDEX, **_BY_HEAD, "lengths": _CHOSEN["lengths"]}, "long context"),
            Row(
                {
                    **_BLOCK_INDEX,
                    "heads": (16, 4, 16),
                    "top_k": (128, 64, 9),
                    "size": same(16),
                    "pool": same(16),
                    "is_weighted": same(True),
                    "local_blocks": same(0),
                },
                "pooled",
            ),
        ),
        edges=(
            Edge("mean", partial(_scored_blocks_option, heads=2, size=24, reduction="mean")),
            Edge("pools of 4", partial(_scored_blocks_option, heads=5, size=4, pool=4, local_blocks=0)),
            Edge("e4m3", partial(_scored_blocks_option, heads=4, size=64, is_packed=True, is_weighted=True)),
        ),
        odd={
            "lengths": _ODD_LENGTHS,
            "heads": (1, 5),
            "dim": (32, 16),
            "top_k": (1, 7),
            "size": (16, 48, 8),
            "pool": (8, 1, 4),
            "is_weighted": (True, False),
            "reduction": ("mean", "max"),
            "local_blocks": (0, 1),
        },
        compiled=compiled_latents.block_index_cases,
    ),
)
