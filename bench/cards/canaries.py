"""Cards of canaries, which tell what the slots of the KV cache hold."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from paged.bench.bounds import first_order
from paged.bench.cards.card import Card, Edge, Masks, Row, defined, named
from paged.bench.cards.draw import BLOCK_SIZE, Draw
from paged.bench.compilation.cases.case import CompileCase
from paged.bench.compilation.cases.launches import empty, single_case
from paged.bench.limits import Cost
from paged.bench.problems.arguments import Arguments, Tensors, marked, num_bytes
from paged.kernels.cache import definition
from paged.kernels.cache.canaries import check_canaries, write_canaries

# A decode step beside a few long prompts.
_STEP = {"num_seqs": (256, 16, 5), "context": (4096, 512, 1100)}


def _numbers(draw: Draw, *shape: int) -> torch.Tensor:
    """Return random int64."""
    return torch.randint(-(2**63), 2**63 - 1, shape, device=draw.device)


def _lengths(draw: Draw, num_seqs: int, longest: int) -> torch.Tensor:
    """Return random lengths from 0, and the longest once, int32 [num_seqs]."""
    lengths = torch.randint(0, longest + 1, (num_seqs,), device=draw.device, dtype=torch.int32)
    lengths[:1] = longest
    return lengths


def _writes(draw: Draw, *, num_seqs: int, context: int) -> Arguments:
    """Draw new tokens behind old ones, a slot for each, and a row of padding."""
    counts = _lengths(draw, num_seqs, context)
    offsets = torch.zeros(num_seqs + 1, device=draw.device, dtype=torch.int32)
    offsets[1:] = counts.cumsum(0)
    tokens = int(offsets[-1]) + 1
    num_blocks, slots = draw.slots(tokens)
    slots[-1] = -1
    return {
        "canaries": _numbers(draw, num_blocks, BLOCK_SIZE),
        "token_ids": torch.randint(0, 2**31, (tokens,), device=draw.device),
        "slot_mapping": slots,
        "cu_seqlens_q": offsets,
        "seq_lens": counts + _lengths(draw, num_seqs, context),
        "sums": _numbers(draw, num_seqs),
    }


def _checks(draw: Draw, *, num_seqs: int, context: int) -> Arguments:
    """Draw sequences with right canaries, and damage the slots of some."""
    width = -(-context // BLOCK_SIZE) + 1
    num_blocks = num_seqs * width
    table = draw.permutation(num_blocks).int().view(num_seqs, width)
    lengths = _lengths(draw, num_seqs, context)
    offsets = torch.zeros(num_seqs + 1, device=draw.device, dtype=torch.int32)
    offsets[1:] = lengths.cumsum(0)
    canaries = torch.zeros(num_blocks, BLOCK_SIZE, dtype=torch.int64, device=draw.device)
    slots: list[torch.Tensor] = [table.new_empty(0).long()]
    for blocks, length in zip(table.long(), lengths.tolist(), strict=True):
        positions = torch.arange(length, device=draw.device)
        slots.append(blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
    mapping = torch.cat(slots)
    sums = _numbers(draw, num_seqs)
    token_ids = torch.randint(0, 2**31, mapping.shape, device=draw.device)
    ends = definition.write_canaries(canaries, token_ids, mapping, offsets, lengths, sums)
    damaged = mapping[torch.rand(mapping.shape, device=draw.device) < 0.3 / max(context, 1)]
    canaries.view(-1)[damaged] ^= 1 << 40
    return {
        "canaries": canaries,
        "block_table": table,
        "seq_lens": lengths,
        "firsts": torch.zeros_like(lengths),
        "sums": sums,
        "ends": ends,
    }


def _hostile_tables(draw: Draw) -> Iterator[Arguments]:
    """Draw blocks that do not exist, tables that are too narrow, and sequences that are not checked."""
    arguments = _checks(draw, num_seqs=6, context=70)
    table = arguments["block_table"].clone()
    table[0, 1], table[1, 0], table[2, 2] = -1, len(arguments["canaries"]), 2**31 - 1
    yield {**arguments, "block_table": table}
    yield {**arguments, "block_table": table[:, :2]}
    yield {**arguments, "firsts": torch.tensor([0, -1, 16, -1, 0, 33], device=draw.device, dtype=torch.int32)}


def _written_slots(arguments: Arguments) -> Masks:
    canaries = arguments["canaries"]
    return {"canaries": marked(canaries.numel(), arguments["slot_mapping"]).view(canaries.shape)}


def _written(arguments: Arguments) -> Tensors:
    """Return the expected sums and canaries; a definition of a write changes its cache."""
    canaries = arguments["canaries"].clone()
    return {"ends": definition.write_canaries(**{**arguments, "canaries": canaries}), "canaries": canaries}


def _check_cost(_: Card, arguments: Arguments) -> Cost:
    """Count a canary of each position, and the numbers of each sequence."""
    of_sequences = [arguments[name] for name in ("block_table", "seq_lens", "firsts", "sums", "ends")]
    return Cost(0, 8 * int(arguments["seq_lens"].sum()) + num_bytes(*of_sequences))


def _write_cost(_: Card, arguments: Arguments) -> Cost:
    """Count the id, the slot and the canary of each token, and the numbers of each sequence."""
    ids = [arguments[name] for name in ("token_ids", "slot_mapping", "token_ids")]
    return Cost(0, num_bytes(*ids, arguments["seq_lens"], arguments["sums"], arguments["sums"]))


def _cases() -> dict[str, list[CompileCase]]:
    sequences = empty("i64", 4, 16), empty("i32", 8), empty("i64", 8)
    canaries, lengths, sums = sequences
    tokens = empty("i64", 64)
    write = single_case("write_canaries", write_canaries, canaries, tokens, tokens, empty("i32", 9), lengths, sums)
    table = empty("i32", 8, 4)
    check = single_case("check_canaries", check_canaries, canaries, table, lengths, lengths, sums, sums)
    return {"write": [write], "check": [check]}


CARDS = (
    Card(
        "write_canaries",
        _writes,
        _written,
        lambda arguments, ends: {"ends": ends, "canaries": arguments["canaries"]},
        errors=first_order.equal,
        writes=_written_slots,
        cost=_write_cost,
        rows=(Row(_STEP),),
        odd={"num_seqs": (0, 1, 3), "context": (0, 1, 40)},
        compiled=lambda: _cases()["write"],
    ),
    Card(
        "check_canaries",
        _checks,
        defined(definition.check_canaries, "wrong"),
        named("wrong"),
        errors=first_order.equal,
        cost=_check_cost,
        rows=(Row(_STEP),),
        edges=(Edge("hostile tables", _hostile_tables),),
        odd={"num_seqs": (0, 1, 3), "context": (0, 1, 40)},
        compiled=lambda: _cases()["check"],
    ),
)
