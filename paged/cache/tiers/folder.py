"""Cache folder: block files that several processes share, within a size limit."""

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
# File names: a subfolder for each digest, with files of blocks and temporary files of unfinished writes.
_FOLDER_NAME = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(rf"[0-9a-f]{{64}}-\d{{1,9}}{re.escape(SUFFIX)}(\.[0-9a-f]+{re.escape(_PART_SUFFIX)})?")
# The process of a file that is unfinished after this time has ended. If a file's last use lies further than this in the
# future, the clock was set back.
_ABANDONED_S = 3600.0
# Fraction of the limit that remains after a clean-up, so that not every write needs one.
_KEPT_FRACTION = 0.9


class CacheFile(NamedTuple):
    """A file in the folder: path, size in bytes, time of last use in seconds since the epoch."""

    path: Path
    num_bytes: int
    used_at: float

    @property
    def is_part(self) -> bool:
        """Whether the file is unfinished: being written, or left by a process that ended."""
        return self.path.suffix == _PART_SUFFIX


class CacheFolder(BlockStore):
    """Reads and writes blocks in a folder. Errors of the file system are raised as OSError.

    Files are written under a temporary name and renamed, so that no process sees half a file. With a limit, a lock file
    holds the total size, and a process adds a file to it before writing the file. If the limit is exceeded, the least
    recently used files of all models are removed.

    Other content of the folder is neither changed nor counted. Only regular files are opened for reading. A pipe,
    device or link under a block's name is an error; links are not followed.
    """

    def __init__(self, path: Path, limit_bytes: int | None) -> None:
        """Create the folder if it is missing. limit_bytes: limit for all files together; None for no limit."""
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
            BlockFileError: its size differs from the header, or exceeds any block of this cache.
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
                with contextlib.suppress(OSError):  # the folder may be read-only
                    os.utime(file)
                return content
        except FileNotFoundError:
            return None

    def verify(self, name: str) -> tuple[BlockKey, int]:
        """Return the key and the number of tokens of a block's file, after checking all of it.

        Raises:
            BlockFileError: see `block_file.verify`.
        """
        with self._opened(name) as file, os.fdopen(os.dup(file), "rb") as opened:
            return verify(opened, os.fstat(file).st_size)

    def remove(self, name: str) -> bool:
        (self.path / name).unlink(missing_ok=True)
        return True

    def complete(self) -> None:
        """Do nothing, because a file is visible to other processes once it is renamed."""

    def store(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists; return False if it does not fit into the limit."""
        if self.limit_bytes is None:
            self._write(name, content)
            return True
        if len(content) > self.limit_bytes:
            return False
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked() as lock:  # held during the write, so that a clean-up sees every counted file
            if self._has(name):
                return True
            if not self._reserve(lock, len(content), self.limit_bytes):
                return False
            self._write(name, content)
        return True

    def files(self) -> list[CacheFile]:
        """Return all block files, unfinished ones included, least recently used first."""
        return sorted(self._files(), key=lambda file: file.used_at)

    def foreign(self) -> list[Path]:
        """Return paths that have a block file's name but are no regular files."""
        return [Path(entry.path) for entry in self._entries() if not entry.is_file(follow_symlinks=False)]

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """Yield the entries with the name of a block file or of a temporary file."""
        with os.scandir(self.path) as folders:
            for folder in folders:
                if not _FOLDER_NAME.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                    continue
                with contextlib.suppress(OSError), os.scandir(folder.path) as entries:  # removed or not readable
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
        """Return whether a block has a readable file. A write replaces anything else of that name."""
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
            OSError: it is no regular file. Pipes are not waited for, and devices are not read.
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
        """Add the bytes of a new file to the total and remove old files if needed; False if it still does not fit."""
        text = os.pread(lock, 32, 0)
        # If the total is unknown, force a clean-up, which counts the files.
        total = int(text) if text.isdigit() else limit
        if total + num_bytes > limit:
            total = self._clean_up(max(0, int(limit * _KEPT_FRACTION) - num_bytes))
        has_room = total + num_bytes <= limit
        if has_room:
            total += num_bytes
        os.pwrite(lock, b"%032d" % total, 0)
        return has_room

    def _clean_up(self, num_kept_bytes: int) -> int:
        """Remove files until at most `num_bytes` remain; return the remaining bytes."""
        now = time.time()
        # Remove files with a time in the future first; otherwise they would outlive every new file.
        files = sorted(self._files(), key=lambda file: (file.used_at <= now + _ABANDONED_S, file.used_at))
        total = sum(file.num_bytes for file in files)
        for file in files:
            is_abandoned = file.is_part and abs(now - file.used_at) > _ABANDONED_S
            is_surplus = not file.is_part and total > num_kept_bytes
            if is_abandoned or is_surplus:
                with contextlib.suppress(OSError):  # another user's file, or a read-only folder
                    file.path.unlink(missing_ok=True)
                    total -= file.num_bytes
        return total

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the folder's lock, and yield the lock file."""
        import fcntl  # missing on systems without fork

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
    """Open a regular file of an open folder, without waiting for pipes and without following links.

    Raises:
        OSError: it is not a regular file.
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
    """Return the first bytes of a file, fewer if it is shorter."""
    pieces: list[bytes] = []
    num_read = 0
    while num_read < num_bytes and (piece := os.pread(file, num_bytes - num_read, num_read)):
        pieces.append(piece)
        num_read += len(piece)
    return b"".join(pieces)
