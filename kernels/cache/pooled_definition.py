"""Pooled entries as formulas; see `kernels.layers.definition` for what a definition is."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..layers import definition as layers
from .definition import with_rows, write_rows
from .latent_cache import (
    decode_records,
    encode_index_keys,
    encode_records,
    index_keys,
    record_form,
)


class Finish(NamedTuple):
    """What follows the pooling of an entry, as in `write_pooled_entries`."""

    norm_weight: torch.Tensor | None = None
    eps: float = 1e-6
    cos_sin_cache: torch.Tensor | None = None
    interleaved: bool = False
    rotates_last: bool = False

    def __call__(self, pooled: torch.Tensor, firsts: torch.Tensor | None) -> torch.Tensor:
        """Normalise and rotate entries [m, head_dim]. firsts: positions of their first tokens, int64 [m]."""
        entries = pooled
        if self.norm_weight is not None:
            entries = layers.rms_norm(entries, self.norm_weight, self.eps, compute=pooled.dtype)
        if self.cos_sin_cache is not None and firsts is not None:
            first_rotated = 0
            if self.rotates_last:
                first_rotated = entries.shape[1] - self.cos_sin_cache.shape[1]
            rotated = layers.rotate(
                entries[:, None, first_rotated:],
                firsts,
                self.cos_sin_cache,
                interleaved=self.interleaved,
                compute=pooled.dtype,
            )
            entries = torch.cat([entries[:, :first_rotated], rotated[:, 0]], 1)
        return entries


def pool_rows(rows: torch.Tensor, position_bias: torch.Tensor | None) -> torch.Tensor:
    """Return the entry of each pool, [m, head_dim]. rows: [m, slots, row_size], a value, then a gate beside a bias."""
    if position_bias is None:
        return rows.mean(1)
    values, gates = rows.chunk(2, -1)
    weights = (gates + position_bias.to(rows.dtype)).softmax(1)
    return (weights * values).sum(1)


def closing_tokens(row_slots: torch.Tensor, entry_slots: torch.Tensor, pool_size: int) -> torch.Tensor:
    """Return the tokens of a step that close a pool, int64 [m]."""
    is_closing = (row_slots >= 0) & (entry_slots >= 0) & (entry_slots % pool_size == pool_size - 1)
    (closing,) = torch.where(is_closing)
    return closing


def pooled_entries(
    row_cache: torch.Tensor,
    row_slots: torch.Tensor,
    entry_slots: torch.Tensor,
    *,
    pool_size: int,
    position_bias: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    row_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    in_rings: bool = False,
    compute: torch.dtype,
    **finish: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots of entries that a step closes, int64 [m], and the entries, [m, head_dim]."""
    closing = closing_tokens(row_slots, entry_slots, pool_size)  # [m]
    offsets = torch.arange(1 - pool_size, 1, device=row_slots.device)
    slots = row_slots[closing, None] + offsets  # [m, pool]
    if in_rings:
        ring_size = row_cache.shape[1]
        slots = row_slots[closing, None] // ring_size * ring_size + slots % ring_size
    rows = _rows_at(row_cache, slots).to(compute)  # [m, pool, row_size]
    firsts = None
    if positions is not None:
        firsts = positions[closing] - pool_size + 1
    if row_table is not None and cu_seqlens_q is not None and firsts is not None and position_bias is not None:
        before = firsts[:, None] + offsets - 1  # [m, pool], positions of the pool before
        starts_before = slots[:, 0] - pool_size  # [m]
        # The pool before the first one of a block lies at the end of another.
        block_size = row_cache.shape[1]
        (of_blocks,) = torch.where((slots[:, 0] % block_size == 0) & (firsts > 0))
        seqs = torch.searchsorted(cu_seqlens_q.long(), closing[of_blocks], right=True) - 1
        blocks = row_table.long()[seqs, firsts[of_blocks] // block_size - 1]
        starts_before[of_blocks] = (blocks + 1) * block_size - pool_size
        slots_before = starts_before[:, None] + offsets + pool_size - 1
        rows_before = _rows_at(row_cache, slots_before.clamp(min=0)).to(compute)
        rows, position_bias = _joined(rows_before, rows, before >= 0, position_bias.to(compute))
    entries = Finish(**finish)(pool_rows(rows, position_bias), firsts)
    return entry_slots[closing] // pool_size, entries


def _rows_at(row_cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    block_size = row_cache.shape[1]
    return row_cache[slots // block_size, slots % block_size]


def _joined(
    before: torch.Tensor, rows: torch.Tensor, is_there: torch.Tensor, position_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of entries over two pools, [m, 2 * pool, 2 * head_dim], and their bias [2 * pool, head_dim].

    before, rows: [m, pool, 4 * head_dim] of the pool before and of the pool. is_there: bool [m, pool], whether the
    position before exists.
    """
    first_values, _, first_gates, _ = before.chunk(4, -1)
    _, values, _, gates = rows.chunk(4, -1)
    first_values = torch.where(is_there.unsqueeze(-1), first_values, 0.0)
    first_gates = torch.where(is_there.unsqueeze(-1), first_gates, -torch.inf)
    joined = torch.cat([torch.cat([first_values, first_gates], -1), torch.cat([values, gates], -1)], 1)
    return joined, torch.cat(position_bias.chunk(2, -1))


def write_pooled_entries(
    row_cache: torch.Tensor,
    entry_cache: torch.Tensor,
    row_slots: torch.Tensor,
    entry_slots: torch.Tensor,
    *,
    compute: torch.dtype = torch.float64,
    **options: Any,
) -> torch.Tensor:
    """Return the numbers of the cache of entries afterwards, [num_blocks, entries, head_dim], before they are rounded.

    An entry is the sum of softmax(gate + position_bias) * value over the rows of a pool, for every channel, or their
    mean; then follow norm and rotation.
    """
    slots, entries = pooled_entries(row_cache, row_slots, entry_slots, compute=compute, **options)
    numbers = numbers_of_form(entries, entry_cache)
    return with_rows(decode_entries(entry_cache, entries.shape[1], compute), slots, numbers)


def write_entries(
    row_cache: torch.Tensor,
    entry_cache: torch.Tensor,
    row_slots: torch.Tensor,
    entry_slots: torch.Tensor,
    **options: Any,
) -> None:
    """`kernels.cache.write_pooled_entries`. It raises before it writes."""
    slots, entries = pooled_entries(row_cache, row_slots, entry_slots, compute=torch.float32, **options)
    write_rows(slots, (entry_cache, encode_entries(entries, entry_cache)))


def numbers_of_form(entries: torch.Tensor, entry_cache: torch.Tensor) -> torch.Tensor:
    """Return what the form of a cache rounds: entries, or NaN where a scale is NaN because a number is not finite."""
    if entry_cache.dtype != torch.uint8:
        return entries
    form = record_form(entry_cache, entries.shape[1])
    if form is None:
        return entries + (entries * 0.0).sum(-1, keepdim=True)
    return torch.cat([form.numbers(entries), entries[:, form.num_codes :]], -1)


def encode_entries(entries: torch.Tensor, entry_cache: torch.Tensor) -> torch.Tensor:
    """Return entries [m, head_dim] in the form of a cache."""
    if entry_cache.dtype != torch.uint8:
        return entries.to(entry_cache.dtype)
    form = record_form(entry_cache, entries.shape[1])
    if form is not None:
        return encode_records(entries, form.num_bytes)
    return encode_index_keys(entries)


def decode_entries(entry_cache: torch.Tensor, head_dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the entries of a cache as numbers of a float dtype, [..., head_dim]."""
    if record_form(entry_cache, head_dim) is not None:
        return decode_records(entry_cache, dtype)
    return index_keys(entry_cache, head_dim, dtype)
