"""A cache folder: files of blocks that several processes write and read, within a limit of bytes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from paged.cache.tiers.block_file import HEADER_BYTES, SUFFIX, BlockFileError, BlockKey, read_header, verify
from paged.cache.tiers.block_store import BlockStore

_LOCK_NAME = ".lock"
_PART_SUFFIX = ".part"
# Names that this class gives: a folder for each digest, and files of blocks, or of parts of them, there.
_FOLDER_NAME = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(rf"[0-9a-f]{{64}}-\d{{1,9}}{re.escape(SUFFIX)}(\.[0-9a-f]+{re.escape(_PART_SUFFIX)})?")
# A file that is still being written after an hour is of a process that has ended. A file that was used an hour from now
# was used before the clock went back.
_ABANDONED_S = 3600.0
# Of the limit: what remains after a clean-up, so that not every write needs one.
_KEPT_FRACTION = 0.9


class CacheFile(NamedTuple):
    """A file in the folder: its path, its bytes, and the seconds since the epoch when it was last used."""

    path: Path
    num_bytes: int
    used_at: float

    @property
    def is_part(self) -> bool:
        """Whether it is still being written, or was when its process ended."""
        return self.path.suffix == _PART_SUFFIX


class CacheFolder(BlockStore):
    """Reads and writes blocks in a folder. Methods raise OSError where the file system does.

    Files are written under a temporary name and renamed, so that no process sees half a file. With a limit, a lock
    file holds the sum of their bytes: a process counts a file there before it writes it. The least recently used files
    of all models go first.

    Whatever else lies in the folder is left alone and not counted. Only regular files are opened for reading; pipes,
    devices, and links, which are not followed, are errors in the place of a block.
    """

    def __init__(self, path: Path, limit_bytes: int | None) -> None:
        """limit_bytes: of all files together; None for no limit. The folder is made if there is none."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self.limit_bytes = limit_bytes
        self._most_bytes: int | None = None

    def __str__(self) -> str:
        return f"cache folder {self.path}"

    def expect_blocks(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes

    def lookup(self, names: Sequence[str]) -> int:
        count = 0
        while count < len(names) and self._has(names[count]):
            count += 1
        return count

    def load(self, name: str) -> bytes | None:
        """Return the bytes of a block's file.

        Raises:
            BlockFileError: its size is not that of its header, or that of no block of this cache.
        """
        try:
            with self._opened(name) as file:
                size = os.fstat(file).st_size
                expected = read_header(_read(file, HEADER_BYTES)).file_bytes
                if size != expected:
                    raise BlockFileError(f"{name}: {size} bytes, expected {expected} by its header")
                if self._most_bytes is not None and size > self._most_bytes:
                    raise BlockFileError(f"{name}: {size} bytes, expected at most {self._most_bytes}")
                content = _read(file, size)
                with contextlib.suppress(OSError):  # a folder that is only read
                    os.utime(file)
                return content
        except FileNotFoundError:
            return None

    def verify(self, name: str) -> tuple[BlockKey, int]:
        """Return the key and the number of tokens of a block's file, after checking all of it.

        Raises:
            BlockFileError: as `block_file.verify`.
        """
        with self._opened(name) as file, os.fdopen(os.dup(file), "rb") as opened:
            return verify(opened, os.fstat(file).st_size)

    def remove(self, name: str) -> bool:
        (self.path / name).unlink(missing_ok=True)
        return True

    def complete(self) -> None:
        """Do nothing: a file is there for others as soon as it has its name."""

    def store(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists; False if the limit leaves no room for it."""
        if self.limit_bytes is None:
            self._write(name, content)
            return True
        if len(content) > self.limit_bytes:
            return False
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked() as lock:  # to the end, so that a clean-up finds all files that are counted
            if self._has(name):
                return True
            if not self._reserve(lock, len(content), self.limit_bytes):
                return False
            self._write(name, content)
        return True

    def files(self) -> list[CacheFile]:
        """Return all files of blocks, those that are being written included, least recently used first."""
        return sorted(self._files(), key=lambda file: file.used_at)

    def foreign(self) -> list[Path]:
        """Return what has the name of a block's file, but is no regular file."""
        return [Path(entry.path) for entry in self._entries() if not entry.is_file(follow_symlinks=False)]

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """Yield what has the name of a block's file or of a part of one."""
        with os.scandir(self.path) as folders:
            for folder in folders:
                if not _FOLDER_NAME.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                    continue
                with contextlib.suppress(OSError), os.scandir(folder.path) as entries:  # gone, or not to be read
                    for entry in entries:
                        if _FILE_NAME.fullmatch(entry.name):
                            yield entry

    def _files(self) -> Iterator[CacheFile]:
        for entry in self._entries():
            with contextlib.suppress(OSError):  # removed meanwhile
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield CacheFile(Path(entry.path), status.st_size, status.st_mtime)

    def _has(self, name: str) -> bool:
        """Return whether a block has a file that can be read; whatever else has its name is replaced by a write."""
        path = self.path / name
        try:
            is_regular = stat.S_ISREG(path.lstat().st_mode)
        except FileNotFoundError:
            return False
        return is_regular and os.access(path, os.R_OK)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """Open a block's file for reading.

        Raises:
            OSError: it is no regular file; a pipe is not waited for, a device not read.
        """
        folder_name, _, file_name = name.rpartition("/")
        folder = os.open(self.path / folder_name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            file = _open_regular(file_name, os.O_RDONLY, folder)
        finally:
            os.close(folder)
        try:
            yield file
        finally:
            os.close(file)

    def _write(self, name: str, content: bytes) -> None:
        folder_name, _, file_name = name.rpartition("/")
        path = self.path / folder_name
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            part = f"{file_name}.{secrets.token_hex(8)}{_PART_SUFFIX}"
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                with os.fdopen(file, "wb") as opened:
                    opened.write(content)
                os.replace(part, file_name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=folder)
                raise
        finally:
            os.close(folder)

    def _reserve(self, lock: int, num_bytes: int, limit: int) -> bool:
        """Count the bytes of a new file, and remove others if there are too many; False if too many remain."""
        text = os.pread(lock, 32, 0)
        total = int(text) if text.isdigit() else limit  # unknown: look
        if total + num_bytes > limit:
            total = self._clean_up(max(0, int(limit * _KEPT_FRACTION) - num_bytes))
        has_room = total + num_bytes <= limit
        if has_room:
            total += num_bytes
        os.pwrite(lock, b"%032d" % total, 0)
        return has_room

    def _clean_up(self, num_kept_bytes: int) -> int:
        """Remove files until at most so many bytes remain; return how many do."""
        now = time.time()
        # Files from the future go first: each new file would be older and go in their place.
        files = sorted(self._files(), key=lambda file: (file.used_at <= now + _ABANDONED_S, file.used_at))
        total = sum(file.num_bytes for file in files)
        for file in files:
            is_abandoned = file.is_part and abs(now - file.used_at) > _ABANDONED_S
            is_surplus = not file.is_part and total > num_kept_bytes
            if is_abandoned or is_surplus:
                with contextlib.suppress(OSError):  # another user's, or of a folder that is only read
                    file.path.unlink(missing_ok=True)
                    total -= file.num_bytes
        return total

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the folder's lock, and yield the lock file."""
        import fcntl  # which systems without fork lack

        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock = _open_regular(_LOCK_NAME, os.O_RDWR | os.O_CREAT, folder)
        finally:
            os.close(folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)


def _open_regular(name: str, flags: int, folder: int) -> int:
    """Open a regular file of an open folder, without waiting for a pipe's other end and without following links.

    Raises:
        OSError: it is something else.
    """
    try:
        file = os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # a link, a socket, a folder
            raise OSError(error.errno, "not a regular file", name) from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return file


def _read(file: int, num_bytes: int) -> bytes:
    """Return the first bytes of a file, fewer if it ends before."""
    pieces: list[bytes] = []
    num_read = 0
    while num_read < num_bytes and (piece := os.pread(file, num_bytes - num_read, num_read)):
        pieces.append(piece)
        num_read += len(piece)
    return b"".join(pieces)
