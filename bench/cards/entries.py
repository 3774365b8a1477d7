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
from paged.kernels.cache.latent_cache import INDEX_SCALE_BYTES, RECORD_BYTES, RECORD_DIM

# Pools of GLM-5.3's indexer (Z.ai, 2026).
_POOLED = {"tokens": (8192, 512, 100), "dim": (128, 128, 32), "pool": same(16), "is_packed": (True, True, False)}


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
    **options: Any,
) -> Arguments:
    """Draw rows in blocks of 4 pools, the slots of a prompt in a random order of blocks, and blocks of entries.

    is_packed: entries are keys of an indexer in 8 bits, or records if dim is that of records.
    """
    block_size = 4 * pool
    num_blocks = -(-2 * tokens // block_size) + 1
    within = torch.arange(block_size, device=draw.device)
    row_slots, entry_slots = ((draw.permutation(num_blocks)[:, None] * block_size + within).flatten() for _ in range(2))
    row_slots, entry_slots = row_slots[:tokens].clone(), entry_slots[:tokens].clone()
    if draw.is_odd:
        row_slots[torch.rand(tokens, device=draw.device) < 0.2] = -1
    entry_cache = draw.normal(num_blocks, 4, dim)
    if is_packed:
        size = RECORD_BYTES if dim == RECORD_DIM else dim + INDEX_SCALE_BYTES
        entry_cache = torch.zeros(num_blocks, 4, size, dtype=torch.uint8, device=draw.device)
    arguments: Arguments = {
        "row_cache": draw.normal(num_blocks, block_size, dim),
        "entry_cache": entry_cache,
        "row_slots": row_slots,
        "entry_slots": entry_slots,
        "pool_size": pool,
        **options,
    }
    if has_gates:
        arguments["row_cache"] = draw.normal(num_blocks, block_size, 2 * dim)
        arguments["position_bias"] = draw.normal(pool, dim)
    if is_normed:
        arguments["norm_weight"] = draw.normal(dim)
    if rotary_dim:
        angles = draw.floats(tokens + pool, rotary_dim // 2)
        arguments["cos_sin_cache"] = torch.cat([angles.cos(), angles.sin()], 1)
        arguments["positions"] = pool - 1 + draw.permutation(tokens)
    return arguments


def _options(draw: Draw) -> Iterator[Arguments]:
    """Draw means and sums, each with a norm, a rotation and a form of entries."""
    yield _pooled(draw, tokens=40, dim=64, pool=4, has_gates=False, is_normed=True, rotary_dim=32)
    yield _pooled(draw, tokens=40, dim=32, pool=3, rotary_dim=32, interleaved=True, is_packed=True)
    yield _pooled(
        draw,
        tokens=40,
        dim=512,
        pool=4,
        is_normed=True,
        rotary_dim=64,
        interleaved=True,
        rotates_last=True,
        is_packed=True,
    )


def _written(arguments: Arguments) -> Tensors:
    head_dim = arguments["row_cache"].shape[2]
    if arguments.get("position_bias") is not None:
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
    others = [value for name, value in arguments.items() if isinstance(value, torch.Tensor) and "cache" not in name]
    return Cost(2 * num_rows * row.numel(), num_rows * row.nbytes + len(slots) * entry.nbytes + num_bytes(*others))


CARDS = (
    Card(
        "write_pooled_entries",
        _pooled,
        defined(pooled_definition.write_pooled_entries, "entries"),
        lambda arguments, _: _written(arguments),
        errors=bounds.pooled_write,
        writes=_places,
        cost=_cost,
        rows=(Row(_POOLED),),
        edges=(Edge("options", _options),),
        odd={
            "tokens": (0, 1, 5, 33),
            "dim": (24, 16),
            "pool": (3, 16, 1, 4),
            "has_gates": (False, True),
            "is_packed": (True, False),
            "rotary_dim": (0, 8),
            "interleaved": (True, False),
        },
        compiled=compiled_latents.pool_cases,
    ),
)
