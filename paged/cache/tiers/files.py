"""File tier of the prefix cache: blocks of the host tier in a folder, which outlive the process."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Condition, Thread
from time import monotonic
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from paged.cache.tiers.block_file import HASH_WORDS, BlockFileError, BlockKey, StoredBlock, decode, most_file_bytes
from paged.cache.tiers.block_store import BlockStore

_LOG = logging.getLogger("paged")

# How long files may hold a prompt up. Its first token may come 50 ms later, and waking up and a step take 1.4 ms more.
PATIENCE_S = 0.045
# Prompt tokens that a forward runs in a second, at least: those of an 8B model on a GPU. Where steps are slower, a wait
# that trusts their rate is too long: behind hits they run few tokens each, and one of a busy machine tells little.
_LEAST_PREFILL_RATE = 8_000.0
# Interval between two questions how far other ranks have read.
_POLL_S = 0.002
# Blocks that wait to be written; more are dropped.
_MOST_WAITING = 256
# A call of the store that has not returned for so long hangs, and another thread reads on. If that hangs too, the next
# one begins after twice the time, and so on: then a dead folder has a few threads, and one that is back is found.
HANG_S = 1.0
_MOST_HUNG = 16
# Faults that were logged, of which none is logged again.
_MOST_LOGGED = 256


class Position(NamedTuple):
    """A position of a prompt: its chained hash, and its token ids."""

    hash: bytes
    token_ids: list[int]


class Write(NamedTuple):
    """A block or a state to write, and its place in host memory.

    read: copies it. is_there: whether its place still holds it. Whoever writes to a place makes it false before, so a
    copy is whole if this is still true after it.
    """

    host: int
    key: BlockKey
    token_ids: list[int]
    read: Callable[[], bytes]
    is_there: Callable[[], bool]


def longest_wait_s(num_tokens: int, prefill_rate: float) -> float:
    """Return how long a prompt waits until `num_tokens` of it have come from files.

    A forward computes them in `num_tokens / prefill_rate` seconds. A prompt that waits as long, and PATIENCE_S, and
    then computes the rest, has its first token little more than PATIENCE_S later than a prompt that begins cold.
    """
    return PATIENCE_S + num_tokens / prefill_rate


class FileRead:
    """Blocks that a prompt continues with, on their way from files.

    number: of the read, by which other ranks know it.
    positions: to read, in this order. digest: of the weights and the layout.
    blocks: those that have come so far, by index of the position and of the table.
    num_positions: how many positions they are of; with several ranks, how many all ranks have.
    begun_at: when the folder was first asked.
    is_over: whether no more blocks come here, because all are there or the files are too slow.
    is_late: whether it was given up.
    is_shared: whether all ranks have all of `blocks`.
    """

    def __init__(self, tier: FileTier, number: int, positions: Sequence[Position], digest: bytes) -> None:
        self.number, self.positions, self.digest = number, positions, digest
        self.blocks: dict[tuple[int, int], StoredBlock] = {}
        self.num_positions = 0
        self.begun_at = monotonic()
        self.is_over = not positions
        self.is_late = False
        self.is_shared = not positions or tier.compare is None
        self._tier = tier

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait until a prompt should begin with the blocks that are there; False if that is later than `timeout_s`."""
        return self._tier.wait(self, timeout_s)


class Reader:
    """A thread that reads files.

    read: what it reads; None while it waits for work. name, asked_at: of the block that the store has been asked for,
    and when that was; infinity while the store has answered.
    """

    def __init__(self) -> None:
        self.read: FileRead | None = None
        self.name = ""
        self.asked_at = math.inf


class FileTier:
    """Reads and writes blocks of a folder in two threads of its own.

    No fault of the folder goes further than here: it is a miss, a line in the log and a count in `num_faults`. Reads
    run one after the other. One that takes longer than `longest_wait_s` is given up, as are those that wait behind it.
    Until the folder has answered, further ones are given up at once. If a call of the store does not return for
    `HANG_S`, another thread takes over: a single file that hangs costs one thread, and is a miss from then on. While
    several threads hang, a new one is tried after twice as long each time, up to `_MOST_HUNG`.

    With several ranks, each reads and writes its own part of a block, and rank 0 begins with the blocks that all have.

    tell: queues a call of `FollowerFiles` on the other ranks. compare: returns the `progress` of a read on all ranks.
    Both are None on one rank alone.
    prefill_rate: prompt tokens that a forward runs in a second; the highest that was measured, at least 8,000.
    num_read, num_written: blocks. num_late: reads that were given up. num_dropped: blocks that were not written because
    too many waited, their memory was used again, or the limit of the folder is too small.
    """

    tell: Callable[[str, tuple[Any, ...]], None] | None = None
    compare: Callable[[FileRead], Sequence[Any]] | None = None

    def __init__(
        self, store: BlockStore, layout: str, block_size: int, num_bytes: Sequence[int], is_needed: Sequence[bool]
    ) -> None:
        """layout: all that decides what the bytes of a block mean.

        num_bytes, is_needed: for each table, the bytes of a block, and whether the table has no window. States of
        recurrent layers, which few positions have, are behind the tables.
        """
        self.store = store
        self.num_read = self.num_written = self.num_faults = self.num_late = self.num_dropped = 0
        self.digest = b""
        self.prefill_rate = _LEAST_PREFILL_RATE
        self._layout, self._num_bytes, self._is_needed = layout, num_bytes, is_needed
        self._block_size = block_size
        self._changed = Condition()
        self._reader = Reader()
        self._hung: list[Reader] = []
        self._num_tries = 0  # readers in the place of hung ones since the store has answered
        self._logged: deque[str] = deque(maxlen=_MOST_LOGGED)
        self._numbers = itertools.count()
        self._reads: deque[FileRead] = deque()
        self._writes: deque[Write] = deque()
        self._is_writing = self._is_closed = False
        self._pid = 0
        self.identify(b"")
        store.expect_blocks(most_file_bytes(block_size, max(num_bytes)))

    def identify(self, fingerprint: bytes) -> None:
        """Use files of these weights from now on."""
        self.digest = hashlib.sha256(self._layout.encode() + b"\0" + fingerprint).digest()

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record how long a step with so many prompt tokens took."""
        self.prefill_rate = max(self.prefill_rate, num_tokens / seconds)

    def read(self, positions: Sequence[Position]) -> FileRead:
        """Begin to read the longest run of positions that the folder has, on every rank."""
        read = FileRead(self, next(self._numbers), positions, self.digest)
        if self.tell is not None and positions:
            hashes = [HASH_WORDS.unpack(position.hash) for position in positions]
            self.tell("read_files", (read.number, hashes))
            # Other ranks keep their parts as long as this read may be taken.
            finalize(read, self.tell, "drop_files", (read.number,)).atexit = False
        if not self._is_running():
            read.is_over = True
        if read.is_over:
            return read
        with self._changed:
            self._replace_reader()
            if self._current is not None and self._current.is_late:  # still not answered
                read.is_over = True
                self.num_late += 1
            else:
                self._reads.append(read)
                self._changed.notify_all()
        return read

    @property
    def _current(self) -> FileRead | None:
        """The read that runs."""
        return self._reader.read

    def _replace_reader(self) -> None:
        """Let another thread read on if a call of the store hangs; the caller holds the lock."""
        seconds = monotonic() - self._reader.asked_at
        if len(self._hung) == _MOST_HUNG or seconds < HANG_S * 2**self._num_tries:
            return
        hung, reader = self._reader, Reader()
        assert hung.read is not None
        self._hung.append(hung)
        self._reader = reader
        try:
            Thread(target=self._read_files, args=(reader,), name="paged-cache-folder", daemon=True).start()
        except BaseException as error:
            self._hung.remove(hung)
            self._reader = hung
            if not isinstance(error, RuntimeError):  # the system has no more threads: later, perhaps
                raise
            return
        hung.read.is_over = hung.read.is_late = True
        self._num_tries += 1
        self.num_faults += 1
        limit = ""
        if len(self._hung) == _MOST_HUNG:
            limit = "; after this one the folder is not used until one of them returns"
        _LOG.warning(
            "%s: no answer to %s for %.1f s; %d of at most %d threads hang%s",
            self.store, hung.name, seconds, len(self._hung), _MOST_HUNG, limit,
        )  # fmt: skip

    def wait(self, read: FileRead, timeout_s: float) -> bool:
        """`FileRead.wait`."""
        end = monotonic() + timeout_s
        while True:
            poll_s = math.inf
            if not read.is_shared:
                self._share(read)
                poll_s = _POLL_S
            with self._changed:
                if read.is_over and read.is_shared:
                    return True
                now = monotonic()
                late_at = self._late_at(read)
                if now >= late_at:
                    _LOG.warning("%s: too slow, computing the rest", self.store)
                    read.is_over = read.is_late = True
                    self.num_late += 1
                elif now >= end:
                    return False
                else:
                    self._changed.wait(min(end, late_at, now + poll_s) - now)

    def take(self, read: FileRead) -> dict[tuple[int, int], StoredBlock]:
        """Return the blocks of a read that was waited for, and expect no more; none if the weights have changed."""
        with self._changed:
            read.is_over = True
            if read.digest != self.digest:
                return {}
            return read.blocks

    def progress(self, read: FileRead) -> NDArray[np.int64]:
        """Return whether a read is over, then for each position and table whether its block is there, in one axis."""
        with self._changed:
            present = np.zeros((len(read.positions), len(self._is_needed)), np.int64)
            for place in read.blocks:
                present[place] = 1
            return np.append(int(read.is_over), present)

    def _share(self, read: FileRead) -> None:
        """Ask all ranks how far a read is. If no further position can come on all of them, keep the common blocks."""
        assert self.compare is not None
        try:
            progress = np.stack(self.compare(read))
        except Exception as error:  # a rank has failed; the next step tells
            self._count_fault(error)
            read.blocks, read.is_over, read.is_shared = {}, True, True
            return
        present = progress[:, 1:].reshape(len(progress), len(read.positions), -1)
        counts = present[:, :, 0].sum(1)
        with self._changed:
            read.num_positions = int(counts.min())
            ends_here = (progress[:, 0] == 1) & (counts == read.num_positions)
            if read.is_late or ends_here.any():
                common = set(map(tuple, np.argwhere(present.min(0)).tolist()))
                read.blocks = {place: read.blocks[place] for place in read.blocks if place in common}
                read.is_over = read.is_shared = True

    def _late_at(self, read: FileRead) -> float:
        """Return when a read is given up: if it has not begun, with the one that runs."""
        if self._current is not None and read in self._reads:
            read = self._current
        return read.begun_at + longest_wait_s(read.num_positions * self._block_size, self.prefill_rate)

    def write(self, writes: Sequence[Write]) -> None:
        """Write blocks later, on every rank; those that are too many are dropped."""
        if not writes or not self._is_running():
            return
        if self.tell is not None:
            rows = [(write.host, write.key.column, *HASH_WORDS.unpack(write.key.hash)) for write in writes]
            self.tell("write_files", (rows,))
        with self._changed:
            room = max(0, _MOST_WAITING - len(self._writes))
            self._writes += writes[:room]
            self.num_dropped += len(writes[room:])
            self._changed.notify_all()

    def close(self, writes: Sequence[Write], timeout_s: float) -> None:
        """Write these blocks in place of those that wait, at most for `timeout_s`, and use the folder no more."""
        if not self._is_running():
            return
        with self._changed:
            self._writes.clear()
            self._writes += writes
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._writes and not self._is_writing, timeout_s)
            if self._writes:
                _LOG.warning("%s: %d blocks dropped", self.store, len(self._writes))
            self.num_dropped += len(self._writes)
            self._writes.clear()
            for read in self._reads:
                read.is_over = True
            self._reads.clear()
            self._is_closed = True
            self._changed.notify_all()
        if not self._is_writing:
            try:
                self.store.complete()
            except Exception as error:  # of others' code
                self._count_fault(error)

    def _is_running(self) -> bool:
        """Start the threads at the first use. A forked process has none of them, and uses no files."""
        if self._is_closed:
            return False
        if not self._pid:
            try:
                for target in (partial(self._read_files, self._reader), self._write_blocks):
                    Thread(target=target, name="paged-cache-folder", daemon=True).start()
                self._pid = os.getpid()
            except BaseException as error:
                with self._changed:
                    self._is_closed = True  # one of them would wait for ever for the other's work
                    self._changed.notify_all()
                if not isinstance(error, RuntimeError):  # which tells that the system has no more threads
                    raise
                self._count_fault(error)
                return False
        return self._pid == os.getpid()

    def _read_files(self, reader: Reader) -> None:
        while True:
            with self._changed:
                reader.read = None
                self._changed.notify_all()
                if reader in self._hung:  # another thread has taken over
                    self._hung.remove(reader)
                    return
                self._changed.wait_for(lambda: self._reads or self._is_closed)
                if not self._reads:
                    return
                reader.read = self._reads.popleft()
                reader.read.begun_at = monotonic()
            try:
                self._run(reader.read, reader)
            except Exception as error:  # also of others' code
                self._count_fault(error)
            reader.read.is_over = True

    def _run(self, read: FileRead, reader: Reader) -> None:
        """Read position by position, until one lacks a block that it needs."""
        for index, position in enumerate(read.positions):
            if read.is_over:
                return
            row: dict[tuple[int, int], StoredBlock] = {}
            for column, is_needed in enumerate(self._is_needed):
                block = self._read_block(BlockKey(read.digest, position.hash, column), position, reader)
                if block is not None:
                    row[index, column] = block
                elif is_needed or column == 0:
                    return
            with self._changed:
                if read.is_over:
                    return
                read.blocks |= row
                if self.compare is None:
                    read.num_positions += 1
                self.num_read += len(row)

    def _read_block(self, key: BlockKey, position: Position, reader: Reader) -> StoredBlock | None:
        with self._changed:
            if any(key.name == hung.name for hung in self._hung):
                return None
            reader.name, reader.asked_at = key.name, monotonic()
        try:
            content = self.store.load(key.name)
            if content is None:
                return None
            block = decode(content, key)
        except BlockFileError:
            self.store.remove(key.name)
            raise
        finally:
            with self._changed:
                reader.asked_at = math.inf
                self._num_tries = 0
        if block.token_ids != position.token_ids:
            raise BlockFileError(f"{key.name}: other token ids than the prompt's")
        if len(block.data) != self._num_bytes[key.column]:
            raise BlockFileError(f"{key.name}: {len(block.data)} bytes, expected {self._num_bytes[key.column]}")
        return block

    def _write_blocks(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._writes or self._is_closed)
                if not self._writes:
                    return
                write = self._writes.popleft()
                self._is_writing = True
            try:
                if self.store.lookup([write.key.name]):
                    continue
                block = StoredBlock(write.key, write.token_ids, write.read())
                if write.is_there() and self.store.store(write.key.name, block.encode()):
                    self.num_written += 1
                else:
                    self.num_dropped += 1
            except Exception as error:  # also of others' code
                self._count_fault(error)

    def _count_fault(self, error: Exception) -> None:
        """Count a fault, and log it unless it was logged before: a full disk is one line, not one for each block."""
        text = str(error)
        with self._changed:
            self.num_faults += 1
            is_new = text not in self._logged
            if is_new:
                self._logged.append(text)
        if is_new:
            _LOG.warning("%s: %s", self.store, text)
