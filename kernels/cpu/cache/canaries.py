"""Numba kernels that write and check canaries; see `kernels.cache.canaries`."""

from __future__ import annotations

import numpy as np

from .. import kernel as nb
from ..launch import NumbaLaunch

_LOW_BITS = np.uint64(0xFFFFFFFF)
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_WORK_OF_A_TOKEN = 16


@nb.device_function
def _term(position, token_id):
    bits = (np.uint64(position) << np.uint64(32)) + token_id + _INCREMENT
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST_FACTOR
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND_FACTOR
    return bits ^ (bits >> np.uint64(31))


@nb.device_function
def _write(canaries, token_ids, slots, offsets, seq_lens, sums, ends, num_seqs):
    """Write the canaries of this thread's sequences."""
    first, last = nb.share(num_seqs)
    for seq in range(first, last):
        begin, end = np.int64(offsets[seq]), np.int64(offsets[seq + 1])
        before = np.int64(seq_lens[seq]) - end
        total = np.uint64(sums[seq])
        for row in range(begin, end):
            token_id = np.uint64(token_ids[row]) & _LOW_BITS
            total += _term(before + row, token_id)
            slot = slots[row]
            if slot >= 0:
                canaries[slot] = np.int64((total & ~_LOW_BITS) | token_id)
        ends[seq] = np.int64(total)


@nb.device_function
def _check(canaries, table, seq_lens, firsts, sums, ends, wrong, sizes):
    """Check the canaries of this thread's sequences."""
    num_seqs, num_blocks, width, table_stride, block_size = sizes
    first, last = nb.share(num_seqs)
    for seq in range(first, last):
        length, begin = np.int64(seq_lens[seq]), np.int64(firsts[seq])
        wrong[seq] = -1
        if begin < 0:
            continue
        total, first_wrong = np.uint64(sums[seq]), length
        for position in range(begin, length):
            column = position // block_size
            block = np.int64(-1)
            if column < width:
                block = np.int64(table[seq * table_stride + column])
            is_block = block >= 0 and block < num_blocks
            canary = np.uint64(0)
            if is_block:
                canary = np.uint64(canaries[block * block_size + position % block_size])
            total += _term(position, canary & _LOW_BITS)
            is_right = is_block and (total & ~_LOW_BITS) == (canary & ~_LOW_BITS)
            if not is_right and first_wrong == length:
                first_wrong = np.int64(position)
        if first_wrong < length or total != np.uint64(ends[seq]):
            wrong[seq] = np.int32(first_wrong)


@nb.Kernel
def _write_canaries(arguments):
    canaries, token_ids, slots, offsets, seq_lens, sums, ends, num_seqs = nb.unpack(arguments, 9)[1:]
    tokens = nb.int64s(token_ids), nb.int64s(slots)
    lengths = nb.int32s(offsets), nb.int32s(seq_lens)
    _write(nb.int64s(canaries), *tokens, *lengths, nb.int64s(sums), nb.int64s(ends), num_seqs)


@nb.Kernel
def _check_canaries(arguments):
    values = nb.unpack(arguments, 13)
    canaries, table, seq_lens, firsts, sums, ends, wrong = values[1:8]
    ids = nb.int32s(table), nb.int32s(seq_lens), nb.int32s(firsts)
    _check(nb.int64s(canaries), *ids, nb.int64s(sums), nb.int64s(ends), nb.int32s(wrong), values[8:])


def write_launch(num_tokens: int, num_seqs: int) -> NumbaLaunch:
    """Return a launch of `write_canaries`."""
    tensors = "canaries token_ids slot_mapping cu_seqlens_q seq_lens sums ends"
    arguments: tuple[int | str, ...] = (*(f"{name}_ptr" for name in tensors.split()), num_seqs)
    return NumbaLaunch(_write_canaries.address, num_tokens * _WORK_OF_A_TOKEN, arguments)


def check_launch(num_seqs: int, num_blocks: int, width: int, table_stride: int, block_size: int) -> NumbaLaunch:
    """Return a launch of `check_canaries`."""
    tensors = "canaries block_table seq_lens firsts sums ends wrong"
    sizes = num_seqs, num_blocks, width, table_stride, block_size
    arguments: tuple[int | str, ...] = (*(f"{name}_ptr" for name in tensors.split()), *sizes)
    return NumbaLaunch(_check_canaries.address, num_seqs * width * block_size * _WORK_OF_A_TOKEN, arguments)
