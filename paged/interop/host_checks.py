"""Checks of lengths, offsets and ids that lie on the host; on a device they are not read, as that would wait for it."""

from __future__ import annotations

import torch

from paged.errors import InvalidInputError
from paged.interop.arguments import Arguments
from paged.interop.layouts import Keys, Queries


def is_readable(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def check_offsets(name: str, offsets: torch.Tensor, total: int) -> None:
    """Raise InvalidInputError unless offsets rise within 0 to `total`."""
    if not is_readable(offsets):
        return
    if int(offsets[0]) < 0 or int(offsets[-1]) > total or bool((offsets.diff() < 0).any()):
        raise InvalidInputError(f"{name}: {_few(offsets)}, expected to rise from 0 to at most {total}")


def check_within(name: str, values: torch.Tensor, least: int, most: torch.Tensor | int, what: str) -> None:
    """Raise InvalidInputError unless all of `values` lie in least..most, which is what `what` says."""
    if is_readable(values) and bool(((values < least) | (values > most)).any()):
        raise InvalidInputError(f"{name}: {_few(values)}, expected {least} to {what}")


def check_queries(args: Arguments, queries: Queries) -> None:
    name, offsets = args.name("cu_seqlens_q"), queries.cu_seqlens
    if not args.has("cu_seqlens_q") or not is_readable(offsets):
        return
    check_offsets(name, offsets, queries.rows.shape[0])
    check_within(name, offsets[:1], 0, 0, "0, where the first sequence begins")
    check_longest(args.name("max_seqlen_q"), queries.max_seqlen, offsets.diff())


def check_longest(name: str, given: int, lens: torch.Tensor) -> None:
    if is_readable(lens) and lens.numel() and int(lens.max()) > given:
        raise InvalidInputError(f"{name}: {given}, the longest sequence has {int(lens.max())}")


def check_keys(args: Arguments, keys: Keys, num_new: torch.Tensor | int) -> None:
    """num_new: keys that are yet to be added to each sequence."""
    name = args.name("seq_lens")
    if keys.offsets is not None:
        packed = args.name("cu_seqlens_k")
        check_offsets(packed, keys.offsets, keys.k.shape[0])
        check_within(name, keys.seq_lens, 0, keys.offsets.diff(), f"the keys of each sequence in {packed}")
        check_longest(args.name("max_seqlen_k"), keys.max_seqlen, keys.seq_lens)
        return
    room = keys.max_seqlen - num_new
    check_within(name, keys.seq_lens, 0, room, f"{_few(room)}, for which there is room")
    if not is_readable(keys.block_table) or keys.max_seqlen == 0:
        return
    block_size, width = keys.k.shape[1], keys.block_table.shape[1]
    used_blocks = (keys.seq_lens + num_new + block_size - 1) // block_size
    used = keys.block_table[torch.arange(width)[None, :] < used_blocks[:, None]]
    check_within(args.name("block_table"), used, 0, keys.k.shape[0] - 1, f"{keys.k.shape[0] - 1}")


def _few(values: torch.Tensor | int) -> str:
    if isinstance(values, int) or not is_readable(values):
        return str(values) if isinstance(values, int) else "as many as"
    shown = ", ".join(map(str, values.flatten()[:8].tolist()))
    return f"[{shown}, ...]" if values.numel() > 8 else f"[{shown}]"
