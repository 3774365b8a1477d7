"""Check ids that kernels follow: on the host if this does not wait for a device, else on request.

Ids in CPU tensors are always checked, by their minimum and maximum. On a GPU, ids are trusted unless PAGED_CHECK=1.
With it, each operation first launches a kernel that looks for ids out of range. The next checked call, or `check_ids`,
raises the error. `check_ids` waits for the device.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, NoReturn

import torch

from .compat import HAS_TRITON, tl, triton
from .device import backend
from .errors import InvalidInputError
from .launch import launch, wait_for_inputs


@triton.jit
def _note(fault_ptr, ticket_ptr, is_wrong, operation, argument, row, column, value, low, high):
    """Store a fault unless there is one already. The first field is written last and marks the fault as complete."""
    if is_wrong:
        is_first = tl.atomic_cas(ticket_ptr, 0, 1) == 0
        tl.store(fault_ptr + 1, argument, mask=is_first)
        tl.store(fault_ptr + 2, row, mask=is_first)
        tl.store(fault_ptr + 3, column, mask=is_first)
        tl.store(fault_ptr + 4, value, mask=is_first)
        tl.store(fault_ptr + 5, low, mask=is_first)
        tl.store(fault_ptr + 6, high, mask=is_first)
        tl.store(fault_ptr, operation, mask=is_first)


@triton.jit
def _note_first(fault_ptr, ticket_ptr, is_wrong, operation, argument, row, first_column, values, low, high):
    """Store the fault of the first lane that is wrong."""
    lanes = tl.arange(0, is_wrong.shape[0])
    first = tl.min(tl.where(is_wrong, lanes, is_wrong.shape[0]), 0)
    value = tl.sum(tl.where(lanes == first, values, 0), 0)
    found = first < is_wrong.shape[0]
    _note(fault_ptr, ticket_ptr, found, operation, argument, row, first_column + first, value, low, high)


@triton.jit
def _check_some_ids(
    ids_ptr, num_ids, low, high, argument, operation, fault_ptr, ticket_ptr, LANES: tl.constexpr
):  # fmt: skip
    """Check LANES ids a program. A pointer of None has no ids to check."""
    if ids_ptr is not None:
        first = tl.program_id(0).to(tl.int64) * LANES
        offs = first + tl.arange(0, LANES)
        ids = tl.load(ids_ptr + offs, mask=offs < num_ids, other=0).to(tl.int64)
        is_wrong = (offs < num_ids) & ((ids < low) | (ids > high))
        _note_first(fault_ptr, ticket_ptr, is_wrong, operation, argument, -1, first, ids, low, high)


_BOUNDS = (
    *("operation", "num_0", "low_0", "high_0"),
    *("num_1", "low_1", "high_1", "num_2", "low_2", "high_2"),
)


@triton.jit(do_not_specialize=_BOUNDS)
def _check_ids_kernel(
    ids_0_ptr,  # [num_0] int32 or int64
    ids_1_ptr,  # [num_1], or None
    ids_2_ptr,  # [num_2], or None
    fault_ptr,  # [7] int64
    ticket_ptr,  # [1] int32
    operation,
    num_0,
    low_0,  # the lowest and highest valid id of ids_0
    high_0,
    num_1,
    low_1,
    high_1,
    num_2,
    low_2,
    high_2,
    LANES: tl.constexpr,
):
    """Check up to three arrays of ids, each with its own range. A program takes LANES ids of each array."""
    wait_for_inputs()
    _check_some_ids(ids_0_ptr, num_0, low_0, high_0, 0, operation, fault_ptr, ticket_ptr, LANES)
    _check_some_ids(ids_1_ptr, num_1, low_1, high_1, 1, operation, fault_ptr, ticket_ptr, LANES)
    _check_some_ids(ids_2_ptr, num_2, low_2, high_2, 2, operation, fault_ptr, ticket_ptr, LANES)


# Faults of sequences: the argument numbers that `_note` stores, in the order of the checks.
CU_SEQLENS, DESCENDING, TOO_LONG, SEQ_LENS, BLOCK_TABLE = (tl.constexpr(code) for code in range(5))


_SIZES = ("num_tokens", "num_blocks", "block_size", "width", "max_seqlen_q", "left", "chunk_size", "stride_table_seq")


@triton.jit(do_not_specialize=["operation", *_SIZES])
def _check_sequences_kernel(
    block_table_ptr,  # [num_seqs, width] int32
    cu_seqlens_q_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    fault_ptr,  # [7] int64
    ticket_ptr,  # [1] int32
    operation,
    num_tokens,
    num_blocks,
    block_size,
    width,
    max_seqlen_q,
    left,  # keys before a query that the query sees
    chunk_size,  # a query sees only keys of its own chunk
    stride_table_seq,
    KEYS_AT_ONCE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Check one sequence a program: the range of its queries, its length, and the blocks that its queries read."""
    wait_for_inputs()
    seq = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_seqlens_q_ptr + seq).to(tl.int64)
    end = tl.load(cu_seqlens_q_ptr + seq + 1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + seq).to(tl.int64)
    longest = width.to(tl.int64) * block_size
    most_tokens = tl.where(seq == 0, 0, num_tokens)  # the first sequence starts at 0
    is_outside = (start < 0) | (start > most_tokens)
    _note(fault_ptr, ticket_ptr, is_outside, operation, CU_SEQLENS, -1, seq, start, 0, most_tokens)
    is_beyond = (end < 0) | (end > num_tokens)
    _note(fault_ptr, ticket_ptr, is_beyond, operation, CU_SEQLENS, -1, seq + 1, end, 0, num_tokens)
    _note(fault_ptr, ticket_ptr, end < start, operation, DESCENDING, -1, seq + 1, end, start, num_tokens)
    is_long = end - start > max_seqlen_q
    _note(fault_ptr, ticket_ptr, is_long, operation, TOO_LONG, -1, seq, max_seqlen_q, end - start, num_tokens)
    is_no_length = (seq_len < 0) | (seq_len > longest)
    _note(fault_ptr, ticket_ptr, is_no_length, operation, SEQ_LENS, -1, seq, seq_len, 0, longest)
    if (is_outside | is_beyond | is_no_length) | (end <= start):
        return
    first_query = tl.maximum(seq_len - (end - start), 0)
    first_key = tl.maximum(first_query - left, first_query // chunk_size * chunk_size) // KEYS_AT_ONCE * KEYS_AT_ONCE
    last_block = (seq_len + block_size - 1) // block_size
    for first in range(first_key // block_size, last_block, LANES):
        columns = first + tl.arange(0, LANES)
        is_read = columns < last_block
        blocks = tl.load(block_table_ptr + seq * stride_table_seq + columns, mask=is_read, other=0).to(tl.int64)
        is_wrong = is_read & ((blocks < 0) | (blocks >= num_blocks))
        _note_first(
            fault_ptr, ticket_ptr, is_wrong, operation, BLOCK_TABLE, seq, first, blocks, 0, num_blocks.to(tl.int64) - 1
        )


_INT64_MIN = -(2**63)
# Ids that a program checks at once: the blocks of one sequence, if a table has up to 1,024 columns.
LANES = 1024
# Names of arguments that hold ids, by operation. A kernel stores an argument's number in this order.
_ARGUMENTS = {
    "paged_attention": ("cu_seqlens_q", "cu_seqlens_q", "max_seqlen_q", "seq_lens", "block_table"),
    "reshape_and_cache": ("slot_mapping",),
    "qk_norm_rope_and_cache": ("slot_mapping", "positions"),
    "rotary_embedding": ("positions",),
    "concat_and_cache_mla": ("slot_mapping",),
    "write_pooled_entries": ("row_slots", "entry_slots", "positions"),
    "mla_norm_rope_and_cache": ("slot_mapping", "positions"),
    "copy_blocks": ("block_pairs",),
    "add_lora": ("rows", "slots", "ranks"),
    "sample_tokens": ("penalties.rows",),
    "write_canaries": ("slot_mapping", "cu_seqlens_q"),
    "paged_compressed_attention": ("seq_lens",),
}
_OPERATIONS = ("", *_ARGUMENTS)
# Fields of `Sequences` that the kernel takes as arguments.
_NUMBERS = ("num_tokens", "num_blocks", "block_size", "max_seqlen_q", "chunk_size")


class Ids(NamedTuple):
    """Ids of any shape and their valid range, low to high; `low` is None if there is no lower limit."""

    name: str
    ids: torch.Tensor
    low: int | None
    high: int


def checks_on_host(tensor: torch.Tensor, *, by_triton: bool) -> bool:
    """Return whether ids can be checked without a wait: on a CPU, or in PyTorch implementations, which wait anyway."""
    return tensor.is_cpu or not by_triton


def checks_on_device() -> bool:
    """Return whether PAGED_CHECK=1 asks for checks of ids on the device."""
    choice = backend().checks
    if choice not in ("", "0", "1"):
        raise InvalidInputError(f"PAGED_CHECK={choice!r}: expected '1' or '0'")
    return choice == "1" and HAS_TRITON


def checks_ids(tensor: torch.Tensor) -> bool:
    """Return whether ids are checked before a kernel is launched on this tensor's device."""
    return checks_on_host(tensor, by_triton=True) or checks_on_device()


def check_all_ids(operation: str, *arrays: Ids, by_triton: bool) -> None:
    """Raise InvalidInputError for the first id out of range. On a GPU, a later call raises it."""
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


def check_rising_on_host(name: str, offsets: torch.Tensor, high: int) -> None:
    """Raise InvalidInputError if one of these offsets, which are at most `high`, is below the one before."""
    _lengths_between(name, offsets.cpu().numpy(), high)


def _lengths_between(name: str, offsets: Any, high: int) -> Any:
    """Return the differences of rising offsets, both NumPy arrays; it raises the error of `check_rising_on_host`."""
    lengths = offsets[1:] - offsets[:-1]
    if len(lengths) and lengths.min() < 0:
        index = int(lengths.argmin())
        _refuse(name, [index + 1], int(offsets[index + 1]), int(offsets[index]), high)
    return lengths


def check_ids_on_device(operation: str, *arrays: Ids) -> None:
    """Launch one check of up to three arrays. First raise the error of an earlier check that found a fault."""
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
    """Launch a check of ids. First raise the error of an earlier check that found a fault."""
    fault = _fault_of(device)
    fault.raise_if_found()
    if num_programs:
        places = {"fault_ptr": fault.fields, "ticket_ptr": fault.ticket}
        number = _OPERATIONS.index(operation)
        launch(kernel, (num_programs,), **arguments, **places, operation=number, LANES=LANES, num_warps=4)


class Sequences(NamedTuple):
    """Arguments that decide which cache blocks `paged_attention` reads.

    Attributes:
        window_left: keys before a query that the query sees.
        keys_at_once: size of a tile of keys. A tile is read whole if a query sees one of its keys.
        chunk_size: queries see only keys of their own chunk; larger than any position if there are no chunks.
        table_name: the argument's name, for errors of a check on the host.
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
    table_name: str = "block_table"


def check_sequences(sequences: Sequences) -> None:
    """Check before the Triton kernel runs: on a CPU on the host, on a GPU only with PAGED_CHECK=1."""
    if checks_on_host(sequences.block_table, by_triton=True):
        check_sequences_on_host(sequences)
    elif checks_on_device():
        check_sequences_on_device(sequences)


def check_sequences_on_host(sequences: Sequences) -> None:
    """Raise InvalidInputError if queries, lengths or blocks lie outside of their tensors.

    Block table entries that no query reads may hold any value.
    """
    # NumPy reads the few numbers of a step faster than PyTorch's dispatcher.
    table, offsets, lengths = (ids.cpu().numpy() for ids in sequences[:3])
    num_tokens, num_blocks, block_size = sequences.num_tokens, sequences.num_blocks, sequences.block_size
    max_seqlen_q, chunk_size, keys_at_once = sequences.max_seqlen_q, sequences.chunk_size, sequences.keys_at_once
    if offsets.min() < 0 or offsets.max() > num_tokens:
        check_ids_on_host("cu_seqlens_q", sequences.cu_seqlens_q, 0, num_tokens)
    if offsets[0]:
        _refuse("cu_seqlens_q", [0], int(offsets[0]), 0, 0)
    if not len(lengths):
        return
    q_lens = _lengths_between("cu_seqlens_q", offsets, num_tokens)
    if q_lens.max() > max_seqlen_q:
        raise _too_short(max_seqlen_q, int(q_lens.max()), int(q_lens.argmax()))
    width = table.shape[1]
    if lengths.min() < 0 or lengths.max() > width * block_size:
        check_ids_on_host("seq_lens", sequences.seq_lens, 0, width * block_size)
    # If the whole table is in range, there is no need to check it entry by entry.
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
        _refuse(sequences.table_name, list(index), int(table[index]), 0, num_blocks - 1)


def check_sequences_on_device(sequences: Sequences) -> None:
    """Launch the checks of `check_sequences_on_host`. First raise the error of an earlier check that found a fault."""
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
    """Wait for a device and raise the first error that PAGED_CHECK=1 found there.

    Args:
        device: None for the current device.

    Raises:
        InvalidInputError: an operation had an id out of range. The message names the operation, the argument, the value
            and the range. The error is raised once.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    _fault_of(torch.empty(0, device=device).device).wait()  # a tensor's device has an index, "cuda" has none


class _Fault:
    """Memory in which the kernels of one device store the first id out of range.

    fields: int64 [7] in pinned memory: operation or 0, argument, row or -1, column, value, range. Kernels write the
    fields. The host can read them at any time, even after the faulty id has ended the device's context.
    ticket: int32 [1] on the device, 1 once there is a fault.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.fields = torch.zeros(7, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)

    def raise_if_found(self) -> None:
        """Raise the error of a stored fault. Wait for the device only if there is one."""
        if int(self.fields[0]):
            self.wait()

    def wait(self) -> None:
        """Wait for the device and raise the error of the fault, if there is one."""
        failure = None
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            failure = error
        operation, *fault = self.fields.tolist()
        if not operation:
            if failure is not None:
                raise failure
            return
        if failure is None:
            self.ticket.zero_()
        self.fields.zero_()
        try:
            _raise_fault(_OPERATIONS[operation], *fault)
        except InvalidInputError as error:
            raise error from failure


def _raise_fault(operation: str, argument: int, row: int, column: int, value: int, low: int, high: int) -> NoReturn:
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
def _fault_of(device: torch.device) -> _Fault:
    return _Fault(device)
