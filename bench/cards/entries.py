"""Cards of pooled entries of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from paged.bench.bounds import entries as bounds
from paged.bench.cards.card import Card, Edge, Masks, Row, defined, same
from paged.bench.cards.draw import Draw
from paged.bench.compilation.cases import mla as compiled_latents
from paged.bench.limits import Cost
from paged.bench.problems.arguments import Arguments, Tensors, marked, num_bytes
from paged.kernels.cache import pooled_definition
from paged.kernels.cache.latent_cache import INDEX_SCALE_BYTES, MXFP8_BYTES, NVFP4_BYTES, RECORD_BYTES, RECORD_DIM

# Pools of GLM-5.3's indexer (Z.ai, 2026).
_POOLED = {"tokens": (8192, 512, 100), "dim": (128, 128, 32), "pool": same(16), "is_packed": (True, True, False)}
# Entries of DeepSeek-V4 (DeepSeek-AI, 2026), in records.
_COMPRESSED = {
    "tokens": (8192, 512, 70),
    "dim": same(512),
    **{name: same(True) for name in ("is_normed", "interleaved", "rotates_last", "is_packed")},
    "rotary_dim": same(64),
}


def _pooled(
    draw: Draw,
    *,
    tokens: int,
    dim: int,
    pool: int,
    has_gates: bool = True,
    is_packed: bool = False,
    is_normed: bool = False,
    rotary_dim: int = 0,
    overlaps: bool = False,
    record_bytes: int = RECORD_BYTES,
    in_rings: bool = False,
    **options: Any,
) -> Arguments:
    """Draw two chunks of prompts, the first behind a block of 4 pools, with rows and entries in random blocks.

    in_rings: rows lie in rings that hold those of the step and of a pool before.
    is_packed: entries are keys of an indexer in 8 bits, or records if dim is that of records.
    """
    block_size = 4 * pool
    counts = torch.tensor([tokens - tokens // 3, tokens // 3])
    offsets = torch.tensor([0, int(counts[0]), tokens])
    seqs = torch.arange(2).repeat_interleave(counts)
    starts = torch.tensor([block_size, 0])
    positions = torch.arange(tokens) + (starts - offsets[:-1])[seqs]
    blocks_per_seq = tokens // block_size + 2
    num_blocks = 2 * blocks_per_seq + 1
    tables = torch.stack([1 + draw.permutation(num_blocks - 1).view(2, -1) for _ in range(2)]).cpu()
    row_slots, entry_slots = tables[:, seqs, positions // block_size] * block_size + positions % block_size
    if draw.is_odd:
        row_slots[torch.rand(tokens) < 0.2] = -1
    entry_cache = draw.normal(num_blocks, 4, dim)
    if is_packed:
        size = record_bytes if dim == RECORD_DIM else dim + INDEX_SCALE_BYTES
        entry_cache = torch.zeros(num_blocks, 4, size, dtype=torch.uint8, device=draw.device)
    num_halves = 2 if overlaps else 1
    row_size = 2 * num_halves * dim if has_gates else dim
    arguments: Arguments = {
        "row_cache": draw.normal(num_blocks, block_size, row_size),
        "entry_cache": entry_cache,
        "row_slots": row_slots.to(draw.device),
        "entry_slots": entry_slots.to(draw.device),
        "pool_size": pool,
        **options,
    }
    if has_gates:
        arguments["position_bias"] = draw.normal(pool, num_halves * dim)
    if is_normed:
        arguments["norm_weight"] = draw.normal(dim)
    if rotary_dim:
        angles = draw.floats(block_size + tokens, rotary_dim // 2)
        arguments["cos_sin_cache"] = torch.cat([angles.cos(), angles.sin()], 1)
    if in_rings:
        ring_size = pool - 1 + tokens
        row_slots = (1 + seqs) * ring_size + positions % ring_size
        arguments |= {"row_cache": draw.normal(3, ring_size, row_size), "row_slots": row_slots.to(draw.device)}
        arguments["in_rings"] = True
    if rotary_dim or overlaps:
        arguments["positions"] = positions.to(draw.device)
    if overlaps:
        arguments |= {"row_table": tables[0].int().to(draw.device), "cu_seqlens_q": offsets.int().to(draw.device)}
    return arguments


def _options(draw: Draw) -> Iterator[Arguments]:
    """Draw means and sums, each with a norm, a rotation and a form of entries, and a record for each position."""
    yield _pooled(draw, tokens=40, dim=64, pool=4, has_gates=False, is_normed=True, rotary_dim=32)
    yield _pooled(draw, tokens=40, dim=32, pool=3, rotary_dim=32, interleaved=True, is_packed=True)
    yield _pooled(draw, tokens=70, dim=24, pool=3, overlaps=True)
    compressed = {name: choices[-1] for name, choices in _COMPRESSED.items()}
    yield _pooled(draw, **{**compressed, "tokens": 40}, pool=4, overlaps=True)
    yield _pooled(draw, **{**compressed, "tokens": 40}, pool=1, has_gates=False)
    yield _pooled(draw, **{**compressed, "tokens": 40}, pool=2, record_bytes=MXFP8_BYTES)
    yield _pooled(draw, **{**compressed, "tokens": 40}, pool=3, record_bytes=NVFP4_BYTES)
    yield _pooled(draw, **{**compressed, "tokens": 40}, pool=24, in_rings=True)


def _written(arguments: Arguments) -> Tensors:
    head_dim = arguments["row_cache"].shape[2]
    if arguments.get("position_bias") is not None:
        head_dim //= 2
    if arguments.get("row_table") is not None:
        head_dim //= 2
    return {"entries": pooled_definition.decode_entries(arguments["entry_cache"], head_dim)}


def _closed(arguments: Arguments) -> torch.Tensor:
    """Return the slots of the entries that the step closes."""
    entry_slots: torch.Tensor = arguments["entry_slots"]
    closing = pooled_definition.closing_tokens(arguments["row_slots"], entry_slots, arguments["pool_size"])
    return entry_slots[closing] // int(arguments["pool_size"])


def _places(arguments: Arguments) -> Masks:
    cache = arguments["entry_cache"]
    return {"entry_cache": marked(cache.shape[0] * cache.shape[1], _closed(arguments)).view(cache.shape[:2])}


def _cost(_: Card, arguments: Arguments) -> Cost:
    """Count the rows of closed pools, read once, their entries, and 4 operations for each number of a row."""
    slots = _closed(arguments)
    num_rows = arguments["pool_size"] * len(slots)
    row, entry = arguments["row_cache"][0, 0], arguments["entry_cache"][0, 0]
    inputs = [value for name, value in arguments.items() if isinstance(value, torch.Tensor) and "cache" not in name]
    return Cost(2 * num_rows * row.numel(), num_rows * row.nbytes + len(slots) * entry.nbytes + num_bytes(*inputs))


CARDS = (
    Card(
        "write_pooled_entries",
        _pooled,
        defined(pooled_definition.write_pooled_entries, "entries"),
        lambda arguments, _: _written(arguments),
        errors=bounds.pooled_write,
        writes=_places,
        cost=_cost,
        rows=(
            Row(_POOLED),
            Row({**_COMPRESSED, "pool": same(4), "overlaps": same(True)}, "overlapping"),
            Row({**_COMPRESSED, "pool": (128, 128, 32)}, "heavy"),
            Row({**_COMPRESSED, "pool": same(1), "has_gates": same(False), "record_bytes": same(MXFP8_BYTES)}, "V4.1"),
            Row({**_COMPRESSED, "pool": same(4), "overlaps": same(True), "record_bytes": same(NVFP4_BYTES)}, "NVFP4"),
        ),
        edges=(Edge("options", _options),),
        odd={
            "tokens": (0, 1, 5, 33),
            "dim": (24, 16),
            "pool": (3, 16, 1, 4),
            "has_gates": (False, True),
            "is_packed": (True, False),
            "rotary_dim": (0, 8),
            "is_normed": (True, False),
            "interleaved": (True, False),
        },
        compiled=compiled_latents.pool_cases,
    ),
)
