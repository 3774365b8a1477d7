"""Checks of ids that kernels follow: on the host if that does not wait for a device, else on request.

Ids in CPU tensors are always checked, by their extremes. On a GPU ids are trusted unless PAGED_CHECK=1. Then each
operation first launches a kernel that looks for ids out of range. The next checked call that finds a record raises the
error, or `check_ids`, which waits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, NoReturn

import torch

from .compat import HAS_TRITON, triton
from .device import backend
from .errors import InvalidInputError
from .id_check_kernels import TOO_LONG, _check_ids_kernel, _check_sequences_kernel
from .launch import launch

_INT64_MIN = -(2**63)
# Ids a program; a batch of 256 decodes over tables of 1,024 blocks is 256 programs of one step.
LANES = 1024
# Arguments that hold ids, by operation, in the order in which the kernels number them.
_ARGUMENTS = {
    "paged_attention": ("cu_seqlens_q", "cu_seqlens_q", "max_seqlen_q", "seq_lens", "block_table"),
    "reshape_and_cache": ("slot_mapping",),
    "qk_norm_rope_and_cache": ("slot_mapping", "positions"),
    "rotary_embedding": ("positions",),
    "concat_and_cache_mla": ("slot_mapping",),
    "mla_norm_rope_and_cache": ("slot_mapping", "positions"),
    "copy_blocks": ("block_pairs",),
    "add_lora": ("rows", "slots", "ranks"),
    "sample_tokens": ("penalties.rows",),
}
_OPERATIONS = ("", *_ARGUMENTS)
# Fields of `Sequences` that are arguments of the kernel.
_NUMBERS = ("num_tokens", "num_blocks", "block_size", "max_seqlen_q", "chunk_size")


class Ids(NamedTuple):
    """Ids of any shape, with their range from low to high; None for no lower limit."""

    name: str
    ids: torch.Tensor
    low: int | None
    high: int


def checks_on_host(tensor: torch.Tensor, *, by_triton: bool) -> bool:
    """Return whether ids can be checked without a wait: on a CPU, or in PyTorch implementations, which wait anyway."""
    return tensor.is_cpu or not by_triton


def checks_on_device() -> bool:
    """Return whether PAGED_CHECK=1 asks for a check of ids on the device."""
    choice = backend().checks
    if choice not in ("", "0", "1"):
        raise InvalidInputError(f"PAGED_CHECK={choice!r}: expected '1' or '0'")
    return choice == "1" and HAS_TRITON


def checks_ids(tensor: torch.Tensor) -> bool:
    """Return whether ids are checked before a kernel is launched on this tensor's device."""
    return checks_on_host(tensor, by_triton=True) or checks_on_device()


def check_all_ids(operation: str, *arrays: Ids, by_triton: bool) -> None:
    """Raise InvalidInputError for the first id out of range; on a GPU later, see the module."""
    if checks_on_host(arrays[0].ids, by_triton=by_triton):
        for name, ids, low, high in arrays:
            check_ids_on_host(name, ids, low, high)
    elif checks_on_device():
        check_ids_on_device(operation, *arrays)


def check_ids_on_host(name: str, ids: torch.Tensor, low: int | None, high: int) -> None:
    """Raise InvalidInputError for the first of `ids` that is out of range."""
    if ids.numel() == 0:
        return
    lowest, highest = ids.aminmax()
    if int(highest) <= high and (low is None or int(lowest) >= low):
        return
    is_wrong = ids > high
    if low is not None:
        is_wrong |= ids < low
    index = is_wrong.nonzero()[0].tolist()
    _refuse(name, index, int(ids[tuple(index)]), low, high)


def check_ids_on_device(operation: str, *arrays: Ids) -> None:
    """Launch one check of up to three arrays; first raise the error of an earlier check if it is recorded."""
    arguments: dict[str, torch.Tensor | int | None] = {}
    for index in range(3):
        arguments |= {f"ids_{index}_ptr": None, f"num_{index}": 0, f"low_{index}": 0, f"high_{index}": 0}
    for index, array in enumerate(arrays):
        arguments[f"ids_{index}_ptr"] = array.ids.reshape(-1)
        arguments[f"num_{index}"] = array.ids.numel()
        arguments[f"low_{index}"] = _INT64_MIN if array.low is None else array.low
        arguments[f"high_{index}"] = array.high
    longest = max(array.ids.numel() for array in arrays)
    _look(_check_ids_kernel, triton.cdiv(longest, LANES), arrays[0].ids.device, operation, **arguments)


def _look(kernel: Any, num_programs: int, device: torch.device, operation: str, **arguments: Any) -> None:
    """Launch a check of ids; first raise the error of an earlier one if it is recorded."""
    recorded = _recorded(device)
    recorded.raise_if_found()
    if num_programs:
        places = {"record_ptr": recorded.record, "ticket_ptr": recorded.ticket}
        number = _OPERATIONS.index(operation)
        launch(kernel, (num_programs,), **arguments, **places, operation=number, LANES=LANES, num_warps=4)


class Sequences(NamedTuple):
    """Arguments by which `paged_attention` reads the cache, for checks.

    Attributes:
        window_left: keys that a query sees before its own.
        keys_at_once: size of a tile of keys, read as a whole if one of them is seen.
        chunk_size: queries see keys of their own chunk; larger than any position if there are no chunks.
    """

    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    num_tokens: int
    num_blocks: int
    block_size: int
    max_seqlen_q: int
    window_left: int
    keys_at_once: int
    chunk_size: int = 1 << 30


def check_sequences(sequences: Sequences) -> None:
    """Check before the Triton kernel: on a CPU by `check_sequences_on_host`, on a GPU if PAGED_CHECK asks for it."""
    if checks_on_host(sequences.block_table, by_triton=True):
        check_sequences_on_host(sequences)
    elif checks_on_device():
        check_sequences_on_device(sequences)


def check_sequences_on_host(sequences: Sequences) -> None:
    """Raise InvalidInputError if queries, lengths or blocks lie outside of their tensors.

    Entries of the block table that no query reads may hold anything.
    """
    # NumPy looks at a step's few numbers faster than PyTorch's dispatcher.
    table, offsets, lengths = (ids.cpu().numpy() for ids in sequences[:3])
    num_tokens, num_blocks, block_size = sequences.num_tokens, sequences.num_blocks, sequences.block_size
    max_seqlen_q, chunk_size, keys_at_once = sequences.max_seqlen_q, sequences.chunk_size, sequences.keys_at_once
    if offsets.min() < 0 or offsets.max() > num_tokens:
        check_ids_on_host("cu_seqlens_q", sequences.cu_seqlens_q, 0, num_tokens)
    if offsets[0]:
        _refuse("cu_seqlens_q", [0], int(offsets[0]), 0, 0)
    if not len(lengths):
        return
    q_lens = offsets[1:] - offsets[:-1]
    if q_lens.min() < 0:
        seq = int(q_lens.argmin())
        _refuse("cu_seqlens_q", [seq + 1], int(offsets[seq + 1]), int(offsets[seq]), num_tokens)
    if q_lens.max() > max_seqlen_q:
        raise _too_short(max_seqlen_q, int(q_lens.max()), int(q_lens.argmax()))
    width = table.shape[1]
    if lengths.min() < 0 or lengths.max() > width * block_size:
        check_ids_on_host("seq_lens", sequences.seq_lens, 0, width * block_size)
    # A table without any id out of range need not be looked at in parts.
    if not table.size or (table.min() >= 0 and table.max() < num_blocks):
        return
    first_queries = (lengths - q_lens).clip(min=0)
    first_keys = (first_queries // chunk_size * chunk_size).clip(min=first_queries - sequences.window_left)
    first_keys = first_keys // keys_at_once * keys_at_once
    columns = torch.arange(width).numpy()
    is_read = (columns >= (first_keys // block_size)[:, None]) & (columns * block_size < lengths[:, None])
    is_read &= (q_lens > 0)[:, None]
    seqs, wrong_columns = (is_read & ((table < 0) | (table >= num_blocks))).nonzero()
    if len(seqs):
        index = int(seqs[0]), int(wrong_columns[0])
        _refuse("block_table", list(index), int(table[index]), 0, num_blocks - 1)


def check_sequences_on_device(sequences: Sequences) -> None:
    """Launch the checks of `check_sequences_on_host`; first raise the error of an earlier one if it is recorded."""
    table, cu_seqlens_q, seq_lens = sequences[:3]
    numbers = sequences._asdict()
    _look(
        _check_sequences_kernel,
        len(seq_lens),
        table.device,
        "paged_attention",
        block_table_ptr=table,
        cu_seqlens_q_ptr=cu_seqlens_q.contiguous(),
        seq_lens_ptr=seq_lens.contiguous(),
        **{name: numbers[name] for name in _NUMBERS},
        left=sequences.window_left,
        width=table.shape[1],
        stride_table_seq=table.stride(0),
        KEYS_AT_ONCE=sequences.keys_at_once,
    )


def check_ids(device: torch.device | str | int | None = None) -> None:
    """Wait for a device and raise the first error that PAGED_CHECK=1 has found there.

    Args:
        device: None for the current device.

    Raises:
        InvalidInputError: an operation had an id out of range. The message names the operation, the argument, the value
            and the range. The error is raised once.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    _recorded(torch.empty(0, device=device).device).wait()  # a tensor's device has an index


class _Recorded:
    """Memory in which the kernels of one device record the first id out of range.

    record: int64 [7] in pinned memory: operation or 0, argument, row or -1, column, value, range. Kernels write it and
    the host reads it at any time, even after a kernel that followed the id has ended the device's context. ticket:
    int32 [1] on the device, 1 once something is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.record = torch.zeros(7, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)

    def raise_if_found(self) -> None:
        """Raise an error that is already recorded; only then wait."""
        if int(self.record[0]):
            self.wait()

    def wait(self) -> None:
        """Wait for the device and raise the recorded error, if there is one."""
        failure = None
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            failure = error
        operation, *fault = self.record.tolist()
        if not operation:
            if failure is not None:
                raise failure
            return
        if failure is None:
            self.ticket.zero_()
        self.record.zero_()
        try:
            _raise_recorded(_OPERATIONS[operation], *fault)
        except InvalidInputError as error:
            raise error from failure


def _raise_recorded(operation: str, argument: int, row: int, column: int, value: int, low: int, high: int) -> NoReturn:
    name = _ARGUMENTS[operation][argument]
    if operation == "paged_attention" and argument == TOO_LONG.value:
        error = _too_short(value, low, column)
        raise InvalidInputError(f"{error} (found on the device, in {operation})")
    index = [row, column]
    if row < 0:
        index = [column]
    lowest = None if low == _INT64_MIN else low
    _refuse(name, index, value, lowest, high, f" (found on the device, in {operation})")


def _too_short(max_seqlen_q: int, longest: int, seq: int) -> InvalidInputError:
    return InvalidInputError(
        f"max_seqlen_q: {max_seqlen_q}, expected at least {longest}, the queries of sequence {seq}"
    )


def _refuse(name: str, index: list[int], value: int, low: int | None, high: int, where: str = "") -> NoReturn:
    position = ""
    if index:
        position = f"[{', '.join(map(str, index))}]"
    if high < (low or 0):
        expected = "there is none"
    elif low is None:
        expected = f"{high} at most"
    else:
        expected = f"{low} to {high}"
    raise InvalidInputError(f"{name}{position}: {value}, expected {expected}{where}")


@functools.cache
def _recorded(device: torch.device) -> _Recorded:
    return _Recorded(device)
