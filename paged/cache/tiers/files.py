"""File tier of the prefix cache: keeps blocks of the host tier in a folder beyond the life of the process."""

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
from paged.cache.tiers.shelf import HostShelf, Place, Write

_LOG = logging.getLogger("paged")

# How long a prompt may wait for files, so that its first token is delayed by less than 50 ms, see limits.md.
PATIENCE_S = 0.045
# Lower bound for the assumed prefill rate in tokens per second: the rate of an 8B model on a GPU. A measured rate is
# too low if the machine is busy or if steps behind cache hits run few tokens. A low rate makes waits too long.
_LEAST_PREFILL_RATE = 8_000.0
# Interval at which the progress of other ranks is polled.
_POLL_S = 0.002
# Capacity of the write queue in blocks; further blocks are dropped.
_MOST_WAITING = 256
# After this time a call of the store counts as hung, and another thread takes over. The time doubles with each hung
# thread, so a dead folder costs few threads and a folder that recovers is noticed.
HANG_S = 1.0
_MOST_HUNG = 16
# Number of faults that are remembered, so that each is logged once.
_MOST_LOGGED = 256


class Position(NamedTuple):
    """One block of a prompt: its chained hash and its token ids."""

    hash: bytes
    token_ids: list[int]


def longest_wait_s(num_tokens: int, prefill_rate: float) -> float:
    """Return how long a prompt may wait for files after `num_tokens` of it have been read.

    A forward would compute these tokens in `num_tokens / prefill_rate` seconds. Therefore a prompt that waits this time
    plus PATIENCE_S has its first token at most about PATIENCE_S later than without files.
    """
    return PATIENCE_S + num_tokens / prefill_rate


class FileRead:
    """A read of a prompt's blocks from files, in progress or done.

    number: id of the read in messages to other ranks.
    positions: positions to read, in order. digest: hash of the weights and the layout.
    blocks: blocks read so far.
    num_positions: number of positions read so far; with several ranks, the number that all ranks have read.
    begun_at: time of the first request to the folder.
    is_over: whether this rank reads no more blocks, because all are read or the files are too slow.
    is_late: whether the read was given up.
    is_shared: whether all ranks have all of `blocks`.
    """

    def __init__(self, tier: FileTier, number: int, positions: Sequence[Position], digest: bytes) -> None:
        self.number, self.positions, self.digest = number, positions, digest
        self.blocks: dict[Place, StoredBlock] = {}
        self.num_positions = 0
        self.begun_at = monotonic()
        self.is_over = not positions
        self.is_late = False
        self.is_shared = not positions or tier.compare is None
        self._tier = tier

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait until the prompt should start with the blocks read so far; return False after `timeout_s`."""
        return self._tier.wait(self, timeout_s)


class Reader:
    """State of a thread that reads files.

    read: the current read; None while the thread waits for work.
    name, asked_at: block that the thread waits for, and time of the request; infinity if no request is pending.
    """

    def __init__(self) -> None:
        self.read: FileRead | None = None
        self.name = ""
        self.asked_at = math.inf


class FileTier:
    """Reads and writes blocks of a folder in two background threads.

    A fault of the folder raises no error: it is logged, counts as a miss, and increases `num_faults`. Reads run one
    after the other. If a read takes longer than `longest_wait_s`, it and all waiting reads are given up. Until the
    folder answers, further reads are given up at once. If a call of the store does not return for `HANG_S`, another
    thread takes over, so a single hung file costs one thread and is a miss from then on. While threads hang, each
    further thread starts after twice the time, up to `_MOST_HUNG` hung threads.

    With several ranks, each rank reads and writes its own part of a block. Rank 0 uses the blocks that all ranks have.

    shelves: host memory of each column: the tables, then the kinds with memory of their own.
    tell: queues a call of `FollowerFiles` on the other ranks. compare: returns the `progress` of a read on all ranks.
    Both are None with one rank.
    prefill_rate: highest measured number of prompt tokens per second, at least 8,000.
    num_read, num_written: numbers of blocks. num_late: number of reads given up. num_dropped: number of blocks not
    written, because the queue was full, their memory was reused, or the folder's limit is too small.
    """

    tell: Callable[[str, tuple[Any, ...]], None] | None = None
    compare: Callable[[FileRead], Sequence[Any]] | None = None

    def __init__(
        self, store: BlockStore, layout: str, block_size: int, shelves: Sequence[HostShelf], num_whole: int
    ) -> None:
        """layout: description of all properties that decide the meaning of a block's bytes.

        num_whole: number of tables, counted from the first, of which every position needs a block.
        """
        self.store = store
        self.num_read = self.num_written = self.num_faults = self.num_late = self.num_dropped = 0
        self.digest = b""
        self.prefill_rate = _LEAST_PREFILL_RATE
        self.shelves: list[HostShelf] = []
        for shelf in shelves:
            self.shelves += [shelf] * len(shelf.columns)
        self._layout, self._num_whole, self._block_size = layout, num_whole, block_size
        self._changed = Condition()
        self._reader = Reader()
        self._hung: list[Reader] = []
        self._num_tries = 0  # readers started in place of hung ones since the last answer
        self._logged: deque[str] = deque(maxlen=_MOST_LOGGED)
        self._numbers = itertools.count()
        self._reads: deque[FileRead] = deque()
        self._writes: deque[Write] = deque()
        self._is_writing = self._is_closed = False
        self._pid = 0
        self.identify(b"")
        store.expect_blocks(most_file_bytes(block_size, max(shelf.num_file_bytes for shelf in shelves)))

    def identify(self, fingerprint: bytes) -> None:
        """Use only files of these weights from now on."""
        self.digest = hashlib.sha256(self._layout.encode() + b"\0" + fingerprint).digest()

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note the duration of a step with `num_tokens` prompt tokens."""
        self.prefill_rate = max(self.prefill_rate, num_tokens / seconds)

    def read(self, positions: Sequence[Position]) -> FileRead:
        """Start to read, on every rank, the positions that the folder has without a gap."""
        read = FileRead(self, next(self._numbers), positions, self.digest)
        if self.tell is not None and positions:
            hashes = [HASH_WORDS.unpack(position.hash) for position in positions]
            self.tell("read_files", (read.number, hashes))
            # Other ranks keep their parts until this read is garbage collected.
            finalize(read, self.tell, "drop_files", (read.number,)).atexit = False
        if not self._is_running():
            read.is_over = True
        if read.is_over:
            return read
        with self._changed:
            self._replace_reader()
            if self._current is not None and self._current.is_late:  # the folder still has not answered
                read.is_over = True
                self.num_late += 1
            else:
                self._reads.append(read)
                self._changed.notify_all()
        return read

    @property
    def _current(self) -> FileRead | None:
        """The read in progress."""
        return self._reader.read

    def _replace_reader(self) -> None:
        """Start another reader thread if a call of the store hangs; the caller holds the lock."""
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
            if not isinstance(error, RuntimeError):  # RuntimeError: the system is out of threads, so try again later
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
        """Implement `FileRead.wait`."""
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
        """End a read and return its blocks; none if the weights have changed."""
        with self._changed:
            read.is_over = True
            if read.digest != self.digest:
                return {}
            return read.blocks

    def progress(self, read: FileRead) -> NDArray[np.int64]:
        """Return a flat array: whether the read is over, then for each position and table whether its block is read."""
        with self._changed:
            present = np.zeros((len(read.positions), len(self.shelves)), np.int64)
            for place in read.blocks:
                present[place] = 1
            return np.append(int(read.is_over), present)

    def _share(self, read: FileRead) -> None:
        """Compare the progress of all ranks. Once no common position can follow, keep the blocks of all ranks."""
        assert self.compare is not None
        try:
            progress = np.stack(self.compare(read))
        except Exception as error:  # a rank has failed; the next step reports it
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
        """Return when a read is given up; if it has not started, when the current read is given up."""
        if self._current is not None and read in self._reads:
            read = self._current
        return read.begun_at + longest_wait_s(read.num_positions * self._block_size, self.prefill_rate)

    def write(self, writes: Sequence[Write]) -> None:
        """Queue blocks for writing on every rank; drop blocks that exceed the queue."""
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
        """Write these blocks instead of the queued ones, for at most `timeout_s`, then stop using the folder."""
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
            except Exception as error:  # the store may be other people's code
                self._count_fault(error)

    def _is_running(self) -> bool:
        """Start the threads at the first use. A forked process lacks the threads and uses no files."""
        if self._is_closed:
            return False
        if not self._pid:
            try:
                for target in (partial(self._read_files, self._reader), self._write_blocks):
                    Thread(target=target, name="paged-cache-folder", daemon=True).start()
                self._pid = os.getpid()
            except BaseException as error:
                with self._changed:
                    self._is_closed = True  # neither of the two threads can work without the other
                    self._changed.notify_all()
                if not isinstance(error, RuntimeError):  # RuntimeError: the system is out of threads
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
            except Exception as error:  # may come from the store's own code
                self._count_fault(error)
            reader.read.is_over = True

    def _run(self, read: FileRead, reader: Reader) -> None:
        """Read positions in order, until one lacks a needed block."""
        for index, position in enumerate(read.positions):
            if read.is_over:
                return
            row: dict[Place, StoredBlock] = {}
            for column in range(len(self.shelves)):
                block = self._read_block(BlockKey(read.digest, position.hash, column), position, reader)
                if block is not None:
                    row[index, column] = block
                elif column < self._num_whole:
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
        num_bytes = self.shelves[key.column].num_file_bytes
        if len(block.data) != num_bytes:
            raise BlockFileError(f"{key.name}: {len(block.data)} bytes, expected {num_bytes}")
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
            except Exception as error:  # may come from the store's own code
                self._count_fault(error)

    def _count_fault(self, error: Exception) -> None:
        """Count a fault, and log it once, so that a full disk does not log a line for each block."""
        text = str(error)
        with self._changed:
            self.num_faults += 1
            is_new = text not in self._logged
            if is_new:
                self._logged.append(text)
        if is_new:
            _LOG.warning("%s: %s", self.store, text)
