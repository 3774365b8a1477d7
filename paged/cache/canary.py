"""Canaries of the cache, with PAGED_CANARY=1: before every forward, the slots that it reads are checked.

Each slot has 8 bytes, a hash of namespace, block table, position and the chain of token ids. They are written with K
and V, and lie in memory that is copied, swapped and stored with the blocks. So a canary tells what a slot really holds.
What it should hold is counted apart from all blocks, in a record of each sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paged.cache.kinds.kind import CacheParts, Kind
from paged.cache.token_chain import Hash, to_int32
from paged.errors import CanaryError
from paged.kernels.cache.canaries import check_canaries, write_canaries
from paged.kernels.cache.definition import canaries_of, canary_terms
from paged.step.staging import HostCopy, to_device

if TYPE_CHECKING:
    from paged.cache.slot_reservation import SequenceState
    from paged.step.step import Step

_MASK = (1 << 64) - 1
# Odd, so that the canaries of a token in different tables differ.
_TABLE_STEP = 0x9E3779B97F4A7C15


class Known(NamedTuple):
    """Record of a sequence: the tokens whose canaries are in its slots, from position 0 on.

    Attributes:
        token_ids: ids of 32 bits, of which the first `length` count.
        sums: at index i the sum of the namespace's number and of the first i tokens' terms, modulo 2^64.
    """

    token_ids: list[int]
    sums: list[int]
    length: int

    @classmethod
    def nothing(cls, root: Hash) -> Known:
        """Return the record of an empty sequence. root: hash of its namespace."""
        return cls([], [_number(root)], 0)

    def cut(self, num_tokens: int) -> Known:
        """Return a record of the first tokens, in lists of its own."""
        return Known(self.token_ids[:num_tokens], self.sums[: num_tokens + 1], num_tokens)

    def extended(self, token_ids: Sequence[int]) -> Known:
        """Return a record with further tokens. It takes over the lists; this record keeps its first `length` tokens."""
        del self.token_ids[self.length :], self.sums[self.length + 1 :]
        self.sums.extend(_running_sums(self.sums[-1], token_ids, self.length))
        self.token_ids.extend(token_ids)
        return self._replace(length=len(self.token_ids))

    def canaries(self, column: int, start: int) -> torch.Tensor:
        """Return the canaries of the tokens from `start` on in a block table, int64 [length - start]."""
        return _canaries(self.sums[start + 1 : self.length + 1], self.token_ids[start : self.length], column)


class Canaries(Kind):
    """Writes and checks canaries. As a kind of the cache, it hears of every change of a sequence.

    It knows a token from its forward, from a prefix hit or from a commit with token ids. If a sequence has an unknown
    token before those of a step, the step does not check this sequence.
    """

    empty: Known | None = None

    def __init__(self, parts: CacheParts) -> None:
        super().__init__(None, range(0), parts)
        assert parts.tensors.canaries is not None
        self._guard, self._host = parts.guard, parts.tensors.host
        self._canaries = parts.tensors.canaries
        self._tables = parts.config.tables
        # Tables of kinds that others define are left out: a token's keys may not lie at its position there.
        self._columns = [column for column, table in enumerate(self._tables) if table.kind is None]

    # Forwards.

    def before_forward(self, step: Step) -> None:
        """Write the canaries of a step's tokens, then check all canaries in the slots that they see. Wait for this.

        Raises:
            CanaryError: a slot holds another token, or the same token of another sequence, namespace or position.
        """
        if not self._columns:
            return
        starts = (step.seq_lens - np.diff(step.cu_seqlens_q)).tolist()
        with self._guard:
            records = [self._record(handle._state) for handle in step.handles]
        token_ids = self._token_ids(step)
        slots = torch.cat([step.metadata.table(column)[1] for column in self._columns])
        slots = slots.clamp(0, self._canaries.numel() - 1)  # tokens without a slot overwrite none of a sequence
        overwritten = self._canaries.view(-1)[slots]
        wrong = HostCopy(self._write_and_check(step, token_ids, records, starts))  # [tables, num_seqs]
        new_ids = HostCopy(token_ids).numpy().tolist()
        spans = [slice(*span) for span in pairwise(step.cu_seqlens_q.tolist())]
        for row, seq in np.argwhere(wrong.numpy() >= 0).tolist():
            record = records[seq].cut(starts[seq]).extended(new_ids[spans[seq]])
            error = self._error_of(step, seq, record, self._columns[row], starts[seq])
            # The forward will not run, so the slots keep K and V of their earlier tokens, maybe of other sequences.
            self._canaries.view(-1)[slots] = overwritten
            raise error
        with self._guard:
            for handle, record, start, span in zip(step.handles, records, starts, spans, strict=True):
                if record.length == start:
                    self.put(handle._state, record.extended(new_ids[span]))

    def warm_up(self) -> None:
        """Compile the kernels: write no token of one sequence, and check nothing of it."""
        ints = torch.zeros(2, dtype=torch.int32, device=self._canaries.device)
        longs = torch.zeros(1, dtype=torch.int64, device=self._canaries.device)
        ends = write_canaries(self._canaries, longs[:0], longs[:0], ints, ints[:1], longs)
        check_canaries(self._canaries, ints[:1].view(1, 1), ints[:1], ints[:1], longs, ends)

    def _write_and_check(
        self, step: Step, token_ids: torch.Tensor, records: Sequence[Known], starts: Sequence[int]
    ) -> torch.Tensor:
        """Return the results of `check_canaries` for each table, int32 [tables, num_seqs]."""
        metadata, count = step.metadata, len(self._columns)
        firsts = np.full((count, len(records)), -1, np.int32)
        seen_sums, new_sums = np.zeros((2, count, len(records)), np.uint64)
        for row, column in enumerate(self._columns):
            for seq, (record, start) in enumerate(zip(records, starts, strict=True)):
                if record.length == start:
                    first = self._first_seen(column, start)
                    firsts[row, seq] = first
                    seen_sums[row, seq] = _in_table(record.sums[first], column)
                    new_sums[row, seq] = _in_table(record.sums[start], column)
        arrays = firsts, seen_sums.view(np.int64), new_sums.view(np.int64)
        begins, before_seen, before_new = to_device(arrays, self._canaries.device)
        ends: list[torch.Tensor] = []
        for row, column in enumerate(self._columns):
            _, slots = metadata.table(column)
            lengths = metadata.cu_seqlens_q, metadata.seq_lens
            ends.append(write_canaries(self._canaries, token_ids, slots, *lengths, before_new[row]))
        wrong: list[torch.Tensor] = []
        for row, column in enumerate(self._columns):  # after all writes, because one may hit another sequence's slot
            table, _ = metadata.table(column)
            sums = before_seen[row], ends[row]
            wrong.append(check_canaries(self._canaries, table, metadata.seq_lens, begins[row], *sums))
        return torch.stack(wrong)

    def _token_ids(self, step: Step) -> torch.Tensor:
        """Return the ids of a step's tokens on the device, int64 [num_tokens]; of embedding rows content ids."""
        token_ids = step.input_ids
        num_unknown = 0 if step.device_ids is None else len(step.device_ids)
        for index, (item, begin) in enumerate(zip(step.items, step.cu_seqlens_q.tolist(), strict=False)):
            if item.embeds is not None and index >= num_unknown:
                named = to_int32(list(item.embeds.ids(item.q_tokens, item.pos_offset)))
                if token_ids is step.input_ids:
                    token_ids = token_ids.clone()
                token_ids[begin : begin + len(named)] = torch.tensor(named)
        return token_ids

    def _first_seen(self, column: int, start: int) -> int:
        """Return the first position that a token at `start` sees, rounded down to whole blocks."""
        return self._tables[column].first_seen_block(start, self._block_size) * self._block_size

    def _error_of(self, step: Step, seq: int, record: Known, column: int, start: int) -> CanaryError:
        """Return the error of a sequence whose check has failed. It reads the slots again, on the host.

        record: with the tokens of the step. start: the position of the first of them.
        """
        table, _ = step.metadata.table(column)
        blocks, first = table[seq].tolist(), self._first_seen(column, start)
        name = repr(step.handles[seq].cache_id)
        held = self._read(blocks, first, record.length)
        error = _difference(name, column, blocks, first, self._block_size, held, record.canaries(column, first))
        return error or CanaryError(f"{name}: table {column} held another token, which has changed since")

    # Changes of sequences.

    def begin(self, state: SequenceState, matched: Sequence[int], prompt_len: int) -> None:
        nothing = Known.nothing(self._index.root_hash(state.namespace))
        self.put(state, nothing.extended(to_int32(state.chain.ids[: state.num_tokens])))

    def fork(self, source: SequenceState, target: SequenceState) -> None:
        record = self._record(source)
        self.put(target, record.cut(min(record.length, target.num_tokens)))

    def truncate(self, state: SequenceState, num_tokens: int) -> None:
        self._forget(state, num_tokens)

    def commit(self, states: Sequence[SequenceState]) -> None:
        self.cancel(states)

    def cancel(self, states: Sequence[SequenceState]) -> None:
        for state in states:
            self._forget(state, state.num_tokens)

    def keep(self, states: Sequence[SequenceState]) -> None:
        """Write the canaries of tokens whose ids a commit names, if no forward of an executor has written them."""
        for state in states:
            record = self._record(state)
            start, end = record.length, min(len(state.chain.ids), state.num_tokens)
            if start >= end:
                continue
            record = record.extended(to_int32(state.chain.ids[start:end]))
            self.put(state, record)
            for column in self._columns:
                slots = self._slots(state.blocks[column :: self._num_tables], start, end)
                is_held = slots >= self._block_size  # block 0 stands for one that is gone
                written = record.canaries(column, start)[is_held].to(self._canaries.device)
                flat, index = self._canaries.view(-1), (slots[is_held].to(self._canaries.device),)
                self._rollback.append((flat.index_put_, index, flat[index]))
                flat.index_put_(index, written)

    def _record(self, state: SequenceState) -> Known:
        record: Known | None = self.get(state)
        if record is None:
            return Known.nothing(self._index.root_hash(state.namespace))
        return record

    def _forget(self, state: SequenceState, num_tokens: int) -> None:
        """Forget the tokens from `num_tokens` on."""
        record = self.get(state)
        if record is not None and record.length > num_tokens:
            self.put(state, record._replace(length=num_tokens))

    # The sweep of `check_integrity`.

    def check(self, states: Sequence[SequenceState]) -> None:
        """Raise CanaryError if a slot of a sequence or of a published block holds another token."""
        for state in states:
            for column in self._columns:
                self._check_sequence(state, column)
        for block, token_ids, total, start in self._published():
            sums = _running_sums(total, token_ids, start)
            for column, held_block in enumerate(self._index.rows[block].tolist()):
                if held_block and column in self._columns:
                    held = self._canaries[held_block].cpu()
                    name, blocks = "a published prefix", {start // self._block_size: held_block}
                    error = _difference(
                        name, column, blocks, start, self._block_size, held, _canaries(sums, token_ids, column)
                    )
                    if error is not None:
                        raise error

    def _check_sequence(self, state: SequenceState, column: int) -> None:
        """Check what a sequence holds in a table, on the device or swapped out."""
        record = self._record(state)
        expected = record.canaries(column, 0)
        blocks = state.blocks[column :: self._num_tables]
        for index, first in enumerate(range(0, record.length, self._block_size)):
            host_block = (state.host_blocks or {}).get(index * self._num_tables + column)
            if host_block is not None:
                held = self._on_host(host_block)
            elif blocks[index]:
                held = self._canaries[blocks[index]].cpu()
            else:
                continue
            name, end = repr(state.seq_id), first + self._block_size
            error = _difference(name, column, blocks, first, self._block_size, held, expected[first:end])
            if error is not None:
                raise error

    def _published(self) -> Iterable[tuple[int, list[int], int, int]]:
        """Yield each published block that a prompt can find: its token ids, the sum before them, and their position."""
        known: dict[int, tuple[int, int]] = {}  # serial number of a publication -> its sum and end
        for block, serial, parent, root in self._index.publications():
            before = known.get(parent)
            if root is not None:
                before = _number(root), 0
            if before is not None:
                token_ids = to_int32(self._index.ids_of(block))
                total, start = before
                yield block, token_ids, total, start
                known[serial] = _running_sums(total, token_ids, start)[-1], start + len(token_ids)

    def _slots(self, blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Return the slots of positions start..end, int64 [end - start]."""
        positions = torch.arange(start, end)
        ids = torch.tensor(blocks, dtype=torch.int64)[positions // self._block_size]
        return ids * self._block_size + positions % self._block_size

    def _read(self, blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Return the canaries in positions start..end, int64 [end - start]; 0 in blocks that do not exist."""
        slots = self._slots(blocks, start, end)
        is_slot = (slots >= 0) & (slots < self._canaries.numel())
        held = self._canaries.view(-1)[slots.where(is_slot, 0).to(self._canaries.device)].cpu()
        return held.where(is_slot, 0)

    def _on_host(self, host_block: int) -> torch.Tensor:
        """Return the canaries of a host block, int64 [block_size]: the last of its bytes."""
        num_bytes = self._canaries[0].nbytes
        return torch.frombuffer(bytearray(self._host.read(host_block)[-num_bytes:]), dtype=torch.int64)


def _difference(
    name: str,
    column: int,
    blocks: Sequence[int] | dict[int, int],
    first: int,
    block_size: int,
    held: torch.Tensor,
    expected: torch.Tensor,
) -> CanaryError | None:
    """Return the error of the first wrong slot; None if all are right.

    held, expected: canaries from position `first` on, int64 [n] each; `held` may have more. blocks: by index in a
    table.
    """
    different = (held[: len(expected)] != expected).nonzero()
    if not len(different):
        return None
    row = int(different[0])
    position = first + row
    block = blocks[position // block_size]
    held_canary, expected_canary = int(held[row]), int(expected[row])
    holds = f"token {held_canary & 0xFFFFFFFF}"
    if held_canary == 0:
        holds = "no token"
    elif (held_canary ^ expected_canary) & 0xFFFFFFFF == 0:
        holds += " of another sequence, namespace or position"
    slot = f"block {block}, offset {position % block_size} of table {column}"
    return CanaryError(
        f"{name}: position {position} ({slot}) holds {holds}, expected token {expected_canary & 0xFFFFFFFF}"
    )


def _number(root: Hash) -> int:
    """Return the number of 64 bits with which the sums of a namespace begin."""
    if isinstance(root, bytes):
        return int.from_bytes(root[:8], "little")
    return root & _MASK


def _in_table(total: int, column: int) -> int:
    """Return a sum as canaries of a block table have it."""
    return (total + column * _TABLE_STEP) & _MASK


def _running_sums(total: int, token_ids: Sequence[int], start: int) -> list[int]:
    """Return the sum behind each of the tokens from position `start` on. total: the sum before them."""
    ids = torch.tensor(token_ids, dtype=torch.int64)
    terms = canary_terms(ids, torch.arange(start, start + len(token_ids))).tolist()
    return list(accumulate(terms, lambda before, term: (before + term) & _MASK, initial=total))[1:]


def _canaries(sums: Sequence[int], token_ids: Sequence[int], column: int) -> torch.Tensor:
    """Return the canaries of tokens in a block table, int64 [n]. sums: the sum behind each token."""
    of_table: NDArray[np.uint64] = np.array([_in_table(total, column) for total in sums], np.uint64)
    return canaries_of(torch.from_numpy(of_table.view(np.int64)), torch.tensor(token_ids, dtype=torch.int64))
