"""Find why a result of paged attention is wrong: a mistake that would give the same numbers."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from paged.bench.check import Result
from paged.bench.problems.arguments import Arguments, on_cpu
from paged.kernels.attention.definition import paged_attention

_INT32 = 2**31
# Largest number of a sequence's blocks that are replaced one by one. Each replacement takes a millisecond, because the
# reference computes a row anew.
_MAX_REPLACED = 64
_TENSORS = ("q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seq_lens")
# Argument that a kernel may ignore by mistake -> value with which the argument has no effect.
_IDLE: Arguments = {
    "softcap": 0.0,
    "window_size": (-1, -1),
    "attention_chunk_size": 0,
    "sinks": None,
    "alibi_slopes": None,
    "k_scale": None,
    "v_scale": None,
    "mask": None,
    "chosen_blocks": None,
}


def explain(arguments: Arguments, result: Result, index: tuple[int, ...]) -> str | None:
    """Return the mistake that explains this wrong element of `paged_attention`, "as if ..."; None if none is known.

    The call is repeated for the element's sequence and head alone. arguments: arguments of the call, by name.
    """
    if result.name != "out":
        return None
    row, head = index[:2]
    offsets = arguments["cu_seqlens_q"].tolist()
    seq = bisect_right(offsets, row) - 1
    if row >= offsets[-1]:
        return "as if a row of padding had a sequence"
    alone = _alone(arguments, seq, head)
    got = result.got[row, head].double().cpu()
    if got.isnan().any():
        if not result.want[row, head].any():
            return "as if a row that sees no key were 0 / 0"
        return "as if a block of another sequence, or a slot without a token, which holds NaN, were read"
    query = row - offsets[seq]
    assert result.bound is not None
    bound = 2 * result.bound[row, head]
    for reason, changed in chain(_mistakes(alone), _stale_blocks(arguments, seq, head, query)):
        want = paged_attention(**changed)[0][min(query, len(changed["q"]) - 1), 0]
        if float(Result(got, want, bound).shares().max()) <= 1:
            return f"as if {reason}"
    return _wrapped(arguments, seq)


def _alone(arguments: Arguments, seq: int, head: int) -> Arguments:
    """Return the reference's arguments for one head of a sequence, over the blocks that it reads, numbered from 0."""
    q, k_cache, v_cache, table, offsets, seq_lens = (arguments[name] for name in _TENSORS)
    first, last = offsets[seq : seq + 2].tolist()
    num_blocks = -(-int(seq_lens[seq]) // k_cache.shape[1])
    block_ids = table[seq, :num_blocks].long()
    kv_head = head // (q.shape[1] // k_cache.shape[2])
    alone: Arguments = {
        "q": q[first:last, head : head + 1],
        "k_cache": k_cache[block_ids, :, kv_head : kv_head + 1],
        "v_cache": v_cache[block_ids, :, kv_head : kv_head + 1],
        "block_table": torch.arange(num_blocks)[None],
        "cu_seqlens_q": torch.tensor([0, last - first]),
        "seq_lens": seq_lens[seq : seq + 1],
        "causal": arguments.get("causal", True),
        "softmax_scale": arguments.get("softmax_scale"),
    }
    for name, idle in _IDLE.items():
        alone[name] = arguments.get(name, idle)
    if isinstance(alone["causal"], torch.Tensor) and alone["causal"].dim():
        alone["causal"] = bool(alone["causal"][seq])
    if alone["mask"] is not None:
        alone["mask"] = alone["mask"][first:last]
    if alone["chosen_blocks"] is not None:
        alone["chosen_blocks"] = alone["chosen_blocks"][first:last, kv_head : kv_head + 1]
    alone["chosen_block_size"] = arguments.get("chosen_block_size", 0)
    for name in ("sinks", "alibi_slopes"):
        if alone[name] is not None:
            alone[name] = alone[name][head : head + 1]
    for name in ("k_scale", "v_scale"):
        scale = alone[name]
        if scale is not None and scale.dim() == 3:
            alone[name] = scale[block_ids, :, kv_head : kv_head + 1]
        elif scale is not None and scale.numel() > 1:
            alone[name] = scale[kv_head : kv_head + 1]
    return on_cpu(alone)


def _mistakes(alone: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Yield mistakes and the arguments with which the reference makes them; unused options are skipped."""
    for name, idle in _IDLE.items():
        value = alone[name]
        is_idle = not isinstance(value, torch.Tensor) and value == idle
        if not is_idle:
            yield f"{name} were ignored", {**alone, name: idle}
    window_left, window_right = alone["window_size"]
    if alone["causal"]:
        yield "queries saw the keys after them", {**alone, "causal": False}
        yield "queries saw the next key", {**alone, "causal": False, "window_size": (window_left, 1)}
    shorter = (alone["seq_lens"] - 1).clamp(min=0)
    yield "queries did not see their own key", {**alone, "seq_lens": shorter}
    for change in (-1, 1):
        if window_left >= 0:
            size = (window_left + change, window_right)
            yield f"the left window were {window_left + change}", {**alone, "window_size": size}
    head_dim = alone["q"].shape[2]
    scale = alone["softmax_scale"]
    if scale is None:
        scale = head_dim**-0.5
    for wrong in (1.0, 1 / head_dim, head_dim**-0.5, scale**2, scale * math.log2(math.e), scale * math.log(2)):
        if not math.isclose(wrong, scale):
            yield f"softmax_scale were {wrong:.6g}, not {scale:.6g}", {**alone, "softmax_scale": wrong}


def _stale_blocks(arguments: Arguments, seq: int, head: int, query: int) -> Iterator[tuple[str, Arguments]]:
    """Yield the sequence with one block of its table replaced: by another of its blocks, block 0, or a neighbour."""
    table = arguments["block_table"]
    block_ids = table[seq].tolist()
    cache: Any = arguments["k_cache"]
    block_size, pool = cache.shape[1], cache.shape[0]
    num_blocks = -(-int(arguments["seq_lens"][seq]) // block_size)
    if num_blocks > _MAX_REPLACED or arguments.get("causal", True) is not True or arguments.get("mask") is not None:
        return
    for column in range(num_blocks):
        block = block_ids[column]
        place = f"block {block}, column {column} of block_table"
        if block * cache.stride(0) >= _INT32:
            place += f", whose offset, {block * cache.stride(0):,} elements, does not fit 32 bits"
        for other in sorted({0, block - 1, block + 1, *block_ids[:num_blocks]} - {block}):
            if 0 <= other < pool:
                wrong_table = table.clone()
                wrong_table[seq, column] = other
                changed = _alone({**arguments, "block_table": wrong_table}, seq, head)
                # Make the row the last of its sequence, so that the reference computes only this row.
                num_later = len(changed["q"]) - query - 1
                changed["q"] = changed["q"][query : query + 1]
                if changed["chosen_blocks"] is not None:
                    changed["chosen_blocks"] = changed["chosen_blocks"][query : query + 1]
                changed["seq_lens"] = changed["seq_lens"] - num_later
                changed["cu_seqlens_q"] = torch.tensor([0, 1])
                yield f"block {other} were read in place of {place}", changed


def _wrapped(arguments: Arguments, seq: int) -> str | None:
    """Return a message if an offset of the sequence's blocks does not fit 32 bits, else None."""
    cache: Any = arguments["k_cache"]
    num_blocks = -(-int(arguments["seq_lens"][seq]) // cache.shape[1])
    for block in arguments["block_table"][seq, :num_blocks].tolist():
        offset = block * cache.stride(0)
        if offset >= _INT32:
            return f"as if the offset of block {block}, {offset:,} elements, were computed in 32 bits"
    return None
