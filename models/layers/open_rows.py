"""Rows of open pools in a step: read those before the step, pool them with the step's, keep the newest."""

from __future__ import annotations

from typing import NamedTuple

import torch

from paged.kernels.cache.copy_blocks import BlockCopy
from paged.kernels.cache.latent_cache import write_index_keys
from paged.models.layers.attention_config import CompressedConfig
from paged.step.metadata import AttentionMetadata

# Fewest rows of a step's memory. Operations are bound for its shape, and where pools overlap, the kernel is compiled
# for it. So it is a power of two: few steps need another one.
_FEWEST_ROWS = 1024


class RowPlaces(NamedTuple):
    """Where the rows of a step's T tokens and S sequences are read and written. Slots are -1 for no place.

    Memory of a step has a region for each sequence, which begins with a pool: up to E rows before the step, then those
    of its tokens.

    Attributes:
        shape: blocks and rows of a block of the step's memory.
        step_slots: int64 [T], slots of tokens in it.
        kept_slots: int64 [T], slots of tokens in the cache of open rows, whose blocks are the slots of sequences.
        border_slots: int64 [T], slots of tokens at the borders of their blocks.
        earlier_slots: int64 [S * E], slots of rows before the step in its memory.
        earlier_rows: int64 [S * E], where the cache of open rows has them.
        earlier_borders: int64 [S * E], where the borders have them.
        is_border: bool [S * E, 1], whether the border has it.
        copies: int64 [S, 2], slots that rows of a sequence move from and to; slot 0 twice, which is unused, for none.
        table: int32 [S, 1], unused blocks before those of the step's memory.
    """

    shape: tuple[int, int]
    step_slots: torch.Tensor
    kept_slots: torch.Tensor
    border_slots: torch.Tensor
    earlier_slots: torch.Tensor
    earlier_rows: torch.Tensor
    earlier_borders: torch.Tensor
    is_border: torch.Tensor
    copies: torch.Tensor
    table: torch.Tensor


class SharedPlaces:
    """The places of layers with equal pools and one block table of windows; the first of them finds them."""

    places: RowPlaces

    def find(
        self,
        sizes: CompressedConfig,
        metadata: AttentionMetadata,
        *,
        num_kept: int,
        block_size: int,
        window_table: int,
        entry_table: int,
    ) -> None:
        """Set `places` for a step. num_kept: rows of a slot."""
        batch, pool, positions = metadata.recurrent, sizes.pool_size, metadata.positions
        assert batch is not None
        table, window_slots = metadata.table(window_table)
        _, entry_slots = metadata.table(entry_table)
        device, num_tokens, num_seqs = positions.device, len(positions), len(batch.starts)
        offsets, starts, ends = batch.cu_seqlens_q.long(), batch.starts.long(), metadata.seq_lens.long()
        read_slots, write_slots = batch.read_slots.long(), batch.write_slots.long()  # [S]
        is_token = entry_slots >= 0  # [T]
        tokens = torch.arange(num_tokens, device=device)
        seqs = torch.searchsorted(offsets[1:], tokens, right=True).clamp(max=num_seqs - 1)  # [T]

        # Regions. n tokens touch up to n // pool + 2 pools; the first pool of the memory is for rows without a place.
        num_more = 2 + sizes.overlaps
        regions = (offsets[:-1] // pool + num_more * torch.arange(num_seqs, device=device) + 1) * pool  # [S]
        firsts = starts // pool * pool - pool * sizes.overlaps  # [S], position of a region's first row
        num_rows = (num_tokens // pool + num_more * num_seqs + 1) * pool
        num_rows = max(_FEWEST_ROWS, 1 << (num_rows - 1).bit_length())
        shape = -(-num_rows // pool), pool
        if sizes.overlaps:  # a pool lies behind the one before, so no table is read
            shape = 1, -(-num_rows // pool) * pool
        step_slots = torch.where(is_token, (regions - firsts)[seqs] + positions, -1)

        # Rows that are kept: the newest of each sequence, and those at the end of a block.
        is_kept = is_token & (positions >= ends[seqs] - num_kept)
        kept_slots = torch.where(is_kept, write_slots[seqs] * num_kept + positions % num_kept, -1)
        is_at_border = (window_slots >= 0) & (positions % block_size >= block_size - pool)
        border_slots = torch.where(is_at_border, window_slots // block_size * pool + positions % pool, -1)

        # Rows before the step.
        num_earlier = sizes.num_earlier_rows
        earlier = starts[:, None] - num_earlier + torch.arange(num_earlier, device=device)  # [S, E]
        is_needed = earlier >= firsts.clamp(min=0)[:, None]
        earlier_slots = torch.where(is_needed, (regions - firsts)[:, None] + earlier, -1)
        earlier = earlier.clamp(min=0)
        blocks = table.long().gather(1, earlier // block_size)  # [S, E]
        is_copied = (read_slots > 0) & (read_slots != write_slots)
        self.places = RowPlaces(
            shape=shape,
            step_slots=step_slots,
            kept_slots=kept_slots,
            border_slots=border_slots,
            earlier_slots=earlier_slots.flatten(),
            earlier_rows=(read_slots.clamp(min=0)[:, None] * num_kept + earlier % num_kept).flatten(),
            earlier_borders=(blocks * pool + earlier % pool).flatten(),
            is_border=(earlier // block_size < starts[:, None] // block_size).view(-1, 1),
            copies=torch.where(is_copied[:, None], torch.stack([read_slots, write_slots], 1), 0),
            table=torch.zeros(num_seqs, 1, dtype=torch.int32, device=device),
        )


def rows_of_step(
    rows: torch.Tensor,
    places: RowPlaces,
    open_rows: torch.Tensor,
    copy_slots: BlockCopy,
    borders: torch.Tensor | None,
    columns: torch.Tensor | None,
) -> torch.Tensor:
    """Return the step's memory with all rows of pools that it may close, and keep the rows that later steps need.

    Args:
        rows: float32 [T, size], of the step's tokens.
        open_rows: float32 [num_slots + 1, kept rows, size], of which slot 0 is for none.
        copy_slots: copies slots of open_rows.
        borders: float32 [num_blocks, pool_size, numbers of a border], for pools that overlap.
        columns: int64, which numbers of a row a border has.

    Returns:
        float32 [*places.shape, size].
    """
    size = rows.shape[1]
    memory = rows.new_empty(*places.shape, size)
    earlier = open_rows.flatten(0, 1)[places.earlier_rows]  # [S * E, size]
    if borders is not None and columns is not None:
        at_borders = borders[
            places.earlier_borders // borders.shape[1], places.earlier_borders % borders.shape[1]
        ]  # [S * E, numbers of a border]
        earlier[:, columns] = torch.where(places.is_border, at_borders, earlier[:, columns])
        write_index_keys(rows[:, columns], borders, places.border_slots)
    write_index_keys(earlier, memory, places.earlier_slots)
    write_index_keys(rows, memory, places.step_slots)
    keep_rows(rows, places, open_rows, copy_slots)
    return memory


def keep_rows(rows: torch.Tensor, places: RowPlaces, open_rows: torch.Tensor, copy_slots: BlockCopy) -> None:
    """Keep the newest rows of each sequence, as `rows_of_step` does.

    A step that keeps all its rows has whole pools there, so pools that do not overlap need no memory of the step.
    """
    copy_slots(places.copies)
    write_index_keys(rows, open_rows, places.kept_slots)
