"""A step's sequences and the states of recurrent layers, as the operations of this folder take them.

A slot holds the state of one sequence at one position. The position is the slot's base position plus the number of
valid entries in its ring, the cursor. In a step a sequence reads one slot and writes one.

If both are the same slot, the step's tokens are appended to the ring at the cursor, and earlier entries do not change.
If they differ, the read slot does not change. A sequence of up to `max_append` tokens copies the state to the written
slot, whose ring then holds the step's tokens. A longer one is scanned: the written slot holds the state after the
tokens, and its ring is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..core.checks import (
    FLOAT_DTYPES,
    check_contiguous,
    check_device,
    check_is_tensor,
    check_last_dim_contiguous,
    check_tensor,
    check_writable,
)
from ..core.dtypes import KV_KINDS
from ..core.errors import InvalidInputError, as_int, shown

# Chunks of a scan start at multiples of this position of the sequence, so that a prompt gives the same bits in any
# batch. Gated DeltaNet inverts matrices of this size (Yang et al., 2024).
CHUNK_SIZE = 64
# Dtypes of states. int8 has a float32 scale for each row of S.
STATE_DTYPES = torch.float32, torch.bfloat16, torch.int8


class Row(NamedTuple):
    """One sequence of a step, on the host. `first` is the row of its first token."""

    first: int
    length: int
    start: int
    read_slot: int
    write_slot: int
    cursor: int
    snapshot_slot: int
    snapshot_len: int


@dataclass(frozen=True, eq=False)
class RecurrentBatch:
    """Slots that the sequences of a step read and write; int32 on the layers' device, contiguous.

    Attributes:
        cu_seqlens_q: [num_seqs + 1], offsets of each sequence's tokens, from 0. A sequence without tokens is skipped.
        starts: [num_seqs], position of each sequence's first token of this step.
        read_slots: [num_seqs]; -1 for a sequence without a state, which starts from zero.
        write_slots: [num_seqs]. No slot appears twice, except slot 0 for padding.
        cursors: [num_seqs], valid entries in the read slot's ring.
        snapshot_slots: [num_seqs], slot that also gets a state from within the step's tokens; -1 for none. Scans only.
        snapshot_lens: [num_seqs], tokens of the sequence before the snapshot, a multiple of 64.
        max_seqlen_q: upper bound of the tokens of a sequence.
        max_append: sequences of up to this many tokens append to the ring, longer ones are scanned.
        runs: calls that a `Bound` has bound to this batch.

    Raises:
        InvalidInputError: a shape, dtype, device or number does not fit.
    """

    cu_seqlens_q: torch.Tensor
    starts: torch.Tensor
    read_slots: torch.Tensor
    write_slots: torch.Tensor
    cursors: torch.Tensor
    snapshot_slots: torch.Tensor
    snapshot_lens: torch.Tensor
    max_seqlen_q: int
    max_append: int
    runs: dict[Any, dict[Any, Any]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_is_tensor("starts", self.starts)
        num_seqs, device = self.starts.numel(), self.starts.device
        for name, tensor in self.tensors().items():
            shape = (num_seqs + 1,) if name == "cu_seqlens_q" else (num_seqs,)
            check_tensor(name, tensor, shape, (torch.int32,), device)
            check_contiguous(name, tensor)
        object.__setattr__(self, "max_seqlen_q", as_int("max_seqlen_q", self.max_seqlen_q))
        object.__setattr__(self, "max_append", as_int("max_append", self.max_append))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        return {
            "cu_seqlens_q": self.cu_seqlens_q,
            "starts": self.starts,
            "read_slots": self.read_slots,
            "write_slots": self.write_slots,
            "cursors": self.cursors,
            "snapshot_slots": self.snapshot_slots,
            "snapshot_lens": self.snapshot_lens,
        }

    def pointers(self) -> dict[str, torch.Tensor]:
        """Return the tensors as arguments of kernels."""
        return {f"{name}_ptr": tensor for name, tensor in self.tensors().items()}

    def rows(self) -> Iterator[Row]:
        """Return the sequences that have tokens; wait for the device."""
        offsets, *columns = (tensor.tolist() for tensor in self.tensors().values())
        for first, end, *row_values in zip(offsets, offsets[1:], *columns, strict=False):
            if end > first:
                yield Row(first, end - first, *row_values)

    def check(self, num_tokens: int, num_slots: int, ring_len: int) -> None:
        """Raise InvalidInputError for a row that does not fit a layer. Values on a GPU are trusted, not read."""
        if self.max_append > ring_len:
            raise InvalidInputError(f"max_append: {self.max_append}, expected at most {ring_len}, entries of the ring")
        if not self.starts.is_cpu:
            return
        offsets, *columns = (tensor.tolist() for tensor in self.tensors().values())
        if offsets[0] != 0:
            raise InvalidInputError(f"cu_seqlens_q[0]: {offsets[0]}, expected 0")
        written: set[int] = set()
        slots, room = f"to {num_slots - 1}", f"room for the tokens in {ring_len} entries"
        slot_or_none, slot, entries = f"-1 {slots}", f"0 {slots}", f"0 to {ring_len}"
        of_grid = f"a multiple of {CHUNK_SIZE} within a scan"
        for at, row in enumerate(zip(offsets, offsets[1:], *columns, strict=False)):
            first, end, start, read, write, cursor, snapshot, stop = row
            length, in_place = end - first, read == write
            if not 0 <= end <= num_tokens:
                raise InvalidInputError(f"cu_seqlens_q[{at + 1}]: {end}, expected 0 to {num_tokens}")
            if not 0 <= length <= self.max_seqlen_q:
                raise InvalidInputError(f"tokens of sequence[{at}]: {length}, expected 0 to {self.max_seqlen_q}")
            if length == 0:
                continue
            is_scan, begin = length > self.max_append, cursor if in_place else 0
            is_snapshot = is_scan and start < stop <= start + length and stop % CHUNK_SIZE == 0
            rules = (
                ("starts", start, start >= 0, "0 or more"),
                ("read_slots", read, -1 <= read < num_slots, slot_or_none),
                ("write_slots", write, 0 <= write < num_slots, slot),
                ("write_slots", write, not (is_scan and in_place), "another slot than is read by a scan"),
                ("cursors", cursor, 0 <= cursor <= ring_len, entries),
                ("cursors", cursor, read >= 0 or cursor == 0, "0 where no slot is read"),
                ("cursors", cursor, is_scan or begin + length <= ring_len, room),
                ("snapshot_slots", snapshot, -1 <= snapshot < num_slots, slot_or_none),
                ("snapshot_lens", stop, snapshot < 0 or is_snapshot, of_grid),
            )
            for name, value, is_right, expected in rules:
                if not is_right:
                    raise InvalidInputError(f"{name}[{at}]: {value}, expected {expected}")
            for slot_id in (write, snapshot):
                if slot_id in written:
                    raise InvalidInputError(f"write_slots: slot {slot_id} is written twice, expected once at most")
                if slot_id > 0:
                    written.add(slot_id)


@dataclass(frozen=True, eq=False)
class RecurrentState:
    """Slots of one layer; each tensor is contiguous. A layer with only a convolution has only `conv`.

    Attributes:
        conv: [num_slots, W - 1 + L, channels], inputs of the convolution (width W), in the model's dtype: the W - 1
            rows before the base position, then the rows of the ring's L tokens.
        state: [num_slots, HV, V, K], S at the base position, float32, bfloat16 or int8.
        ring_k: float32 [num_slots, R L, HK, K], k of each token, normalised. The rank R is 2 with erase vectors: a
            token then has two entries, `erase_write` and k.
        ring_u: float32 [num_slots, R L, HV, V], u of each entry: S grows by u k^T.
        ring_g: float32 [num_slots, L, HV], logarithm of each token's decay, or [num_slots, L, HV, K] if each channel of
            a key has its own.
        state_scale: float32 [num_slots, HV, V], by which int8 rows of S are multiplied, their largest magnitude / 127;
            None for other dtypes.
    """

    conv: torch.Tensor
    state: torch.Tensor | None = None
    ring_k: torch.Tensor | None = None
    ring_u: torch.Tensor | None = None
    ring_g: torch.Tensor | None = None
    state_scale: torch.Tensor | None = None

    def check_conv(self, x: torch.Tensor, width: int) -> int:
        """Return the length of the ring; raise InvalidInputError unless `conv` fits rows x [num_tokens, channels]."""
        check_tensor("conv", self.conv, ("num_slots", "rows", x.shape[1]), (x.dtype,), x.device)
        _check_slots("conv", self.conv)
        if self.conv.shape[1] < width - 1:
            raise InvalidInputError(f"conv: {self.conv.shape[1]} rows a slot, expected at least {width - 1}")
        return self.conv.shape[1] - (width - 1)

    def rings(self) -> Rings:
        """Return the tensors of a scan. Raise InvalidInputError if one is None."""
        if self.state is None or self.ring_k is None or self.ring_u is None or self.ring_g is None:
            raise InvalidInputError("state: of a convolution alone, expected state, ring_k, ring_u and ring_g")
        return Rings(self.state, self.ring_k, self.ring_u, self.ring_g, self.state_scale)


class Rings(NamedTuple):
    """The tensors of a `RecurrentState` without `conv`; none but `scale` is None."""

    state: torch.Tensor
    k: torch.Tensor
    u: torch.Tensor
    g: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        """Entries of a token in `k` and `u`."""
        return self.k.shape[1] // self.g.shape[1]

    def pointers(self) -> dict[str, torch.Tensor | None]:
        """Return the tensors as arguments of kernels."""
        return {
            "state_ptr": self.state,
            "state_scale_ptr": self.scale,
            "ring_k_ptr": self.k,
            "ring_u_ptr": self.u,
            "ring_g_ptr": self.g,
        }

    def read_state(self, slot: int, dtype: torch.dtype) -> torch.Tensor:
        """Return S of a slot, [HV, V, K]."""
        if self.scale is None:
            return self.state[slot].to(dtype)
        return self.state[slot].to(dtype) * self.scale[slot].to(dtype).unsqueeze(-1)

    def write_state(self, slot: int, S: torch.Tensor) -> None:
        """Round S [HV, V, K] to the slots' dtype."""
        if self.scale is None:
            self.state[slot] = S
            return
        codes, scale = KV_KINDS[torch.int8].encode(S, None)
        assert scale is not None
        self.state[slot], self.scale[slot] = codes.to(self.state.dtype), scale.to(self.scale.dtype)


def _check_slots(name: str, tensor: torch.Tensor) -> None:
    check_writable(name, tensor)
    _check_each_contiguous(name, tensor, "slot")


def _check_each_contiguous(name: str, tensor: torch.Tensor, unit: str) -> None:
    """Raise InvalidInputError unless each index of the first axis is contiguous memory."""
    if not tensor[:1].squeeze(0).is_contiguous():
        raise InvalidInputError(f"{name}: strides {tensor.stride()}, expected every {unit} contiguous")


def check_weights(device: torch.device, shape: tuple[int, ...], **weights: torch.Tensor) -> None:
    """Raise InvalidInputError unless weights have this shape and a float dtype."""
    for name, weight in weights.items():
        check_tensor(name, weight, shape, FLOAT_DTYPES, device)


def check_step(state: RecurrentState, batch: RecurrentBatch, x: torch.Tensor) -> None:
    """Raise InvalidInputError unless state and batch have the right types and lie on the device of x."""
    if not (isinstance(state, RecurrentState) and isinstance(batch, RecurrentBatch)):
        arguments = f"{shown(state)}, {shown(batch)}"
        raise InvalidInputError(f"state, batch: {arguments}, expected RecurrentState and RecurrentBatch")
    check_is_tensor("x", x)
    for name, tensor in vars(state).items():
        if tensor is not None or name == "conv":
            check_tensor(name, tensor, None, None, x.device)
    check_device("batch", batch.starts, x.device)


def check_scan(
    mixed: torch.Tensor,
    gates: Mapping[str, torch.Tensor],
    state: RecurrentState,
    batch: RecurrentBatch,
    num_key_heads: int,
    channel_gates: Mapping[str, torch.Tensor] | None = None,
    rank: int = 1,
) -> Rings:
    """Return the state of a scan. Raise InvalidInputError unless state, tokens and batch fit each other.

    gates: by name, [num_tokens, HV], any float dtype, last dimension contiguous.
    channel_gates: by name, [num_tokens, HV, K], any float dtype, each token contiguous; not empty if each channel of a
        key has a decay.
    rank: entries of a token in the ring.
    """
    check_step(state, batch, mixed)
    rings, device = state.rings(), mixed.device
    check_tensor("state", rings.state, ("num_slots", "HV", "V", "K"), STATE_DTYPES, device)
    num_slots, num_heads, value_dim, key_dim = rings.state.shape
    if num_heads % num_key_heads:
        raise InvalidInputError(
            f"key heads: {num_key_heads}, expected a divisor of {num_heads}, the heads of the state"
        )
    decays: tuple[int, ...] = (num_heads,)
    if channel_gates:
        decays = num_heads, key_dim
    check_tensor("ring_g", rings.g, (num_slots, "L", *decays), (torch.float32,), device)
    length = rings.g.shape[1]
    check_tensor("ring_k", rings.k, (num_slots, rank * length, num_key_heads, key_dim), (torch.float32,), device)
    check_tensor("ring_u", rings.u, (num_slots, rank * length, num_heads, value_dim), (torch.float32,), device)
    if rings.state.dtype == torch.int8 and rings.scale is None:
        raise InvalidInputError(
            f"state_scale: None, expected {list(rings.state.shape[:3])}, a scale for each row of int8"
        )
    if rings.scale is not None:
        check_tensor("state_scale", rings.scale, rings.state.shape[:3], (torch.float32,), device)
        check_tensor("state", rings.state, None, (torch.int8,), device)
    for name, tensor in rings.pointers().items():
        if tensor is not None:
            _check_slots(name.removesuffix("_ptr"), tensor)
    width = 2 * num_key_heads * key_dim + num_heads * value_dim
    check_tensor("mixed", mixed, ("num_tokens", width), FLOAT_DTYPES)
    check_last_dim_contiguous("mixed", mixed)
    for name, gate in gates.items():
        check_tensor(name, gate, (mixed.shape[0], num_heads), FLOAT_DTYPES, device)
        check_last_dim_contiguous(name, gate)
    for name, gate in (channel_gates or {}).items():
        check_tensor(name, gate, (mixed.shape[0], num_heads, key_dim), FLOAT_DTYPES, device)
        _check_each_contiguous(name, gate, "token")
    batch.check(mixed.shape[0], num_slots, length)
    return rings


def like_values(mixed: torch.Tensor, ring_u: torch.Tensor, **_: object) -> torch.Tensor:
    """Return a new tensor for the output of a scan, [num_tokens, HV, V]."""
    return mixed.new_empty((mixed.shape[0], *ring_u.shape[2:]))
