"""File format of one block: header, token ids, K/V, checksum of all before it."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

MAGIC = b"paged-kv"
VERSION = 1
SUFFIX = ".kv"
# Magic, version, index of the table, digest of weights and layout, chained hash, bytes of the ids, bytes of the K/V.
_HEADER = struct.Struct("<8sII32s32sQQ")
HEADER_BYTES = _HEADER.size
_CHECKSUM_BYTES = 32
_PIECE_BYTES = 1 << 20
# Longest token id in JSON with comma and space; ids of embeddings have 128 bits.
_MOST_ID_BYTES = 42
# A chained hash as four integers, because messages to other ranks hold integers of 64 bits.
HASH_WORDS = struct.Struct("<4q")


class BlockFileError(Exception):
    """A file is damaged or holds another block; the message gives the reason."""


class BlockKey(NamedTuple):
    """Identity of a block.

    Attributes:
        digest: hash of the weights and the layout, 32 bytes.
        hash: chained hash of the block's position, 32 bytes.
        column: index of its block table.
    """

    digest: bytes
    hash: bytes
    column: int

    @property
    def name(self) -> str:
        """Name of the block in a store; in a folder, the relative path of its file."""
        return f"{self.digest.hex()[:32]}/{self.hash.hex()}-{self.column}{SUFFIX}"


@dataclass(frozen=True, eq=False, slots=True)
class StoredBlock:
    """Content of a block file: key, token ids, and K/V in the order of the host tier."""

    key: BlockKey
    token_ids: list[int]
    data: bytes | memoryview

    def encode(self) -> bytes:
        """Return the bytes of the block's file."""
        key, ids = self.key, json.dumps(self.token_ids).encode()
        header = _HEADER.pack(MAGIC, VERSION, key.column, key.digest, key.hash, len(ids), len(self.data))
        content = b"".join((header, ids, self.data))
        return content + hashlib.sha256(content).digest()


class BlockHeader(NamedTuple):
    """Header of a block file: the block's key, the bytes of the ids and of the K/V."""

    key: BlockKey
    num_id_bytes: int
    num_data_bytes: int

    @property
    def file_bytes(self) -> int:
        """Size of the whole file in bytes."""
        return HEADER_BYTES + self.num_id_bytes + self.num_data_bytes + _CHECKSUM_BYTES


def most_file_bytes(block_size: int, num_data_bytes: int) -> int:
    """Return the largest possible size of a block file in bytes."""
    return BlockHeader(BlockKey(b"", b"", 0), 2 + block_size * _MOST_ID_BYTES, num_data_bytes).file_bytes


def read_header(content: bytes) -> BlockHeader:
    """Return the header at the beginning of a file.

    Raises:
        BlockFileError: the file is cut, or has another format or version.
    """
    if len(content) < HEADER_BYTES:
        raise BlockFileError(f"{len(content)} bytes, expected at least {HEADER_BYTES + _CHECKSUM_BYTES}")
    magic, version, column, digest, hash_, num_id_bytes, num_data_bytes = _HEADER.unpack_from(content)
    if magic != MAGIC:
        raise BlockFileError(f"begins with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise BlockFileError(f"version {version}, expected {VERSION}")
    return BlockHeader(BlockKey(digest, hash_, column), num_id_bytes, num_data_bytes)


def decode(content: bytes, expected: BlockKey | None = None) -> StoredBlock:
    """Return the block in a file's bytes, after checking all of them.

    expected: the key that the block must have; None for any.

    Raises:
        BlockFileError: the file is cut or changed, or has another version or block.
    """
    key, num_id_bytes, _ = header = read_header(content)
    if len(content) != header.file_bytes:
        raise BlockFileError(f"{len(content)} bytes, expected {header.file_bytes} by its header")
    if hashlib.sha256(memoryview(content)[:-_CHECKSUM_BYTES]).digest() != content[-_CHECKSUM_BYTES:]:
        raise BlockFileError("the checksum differs")
    if expected is not None and key != expected:
        raise BlockFileError(f"holds block {key.name}, expected {expected.name}")
    start = HEADER_BYTES + num_id_bytes
    return StoredBlock(key, _ids_of(content[HEADER_BYTES:start]), memoryview(content)[start:-_CHECKSUM_BYTES])


def verify(file: BinaryIO, size: int) -> tuple[BlockKey, int]:
    """Return the key and the number of token ids of a file, after checking all of it piece by piece.

    Raises:
        BlockFileError: see `decode`.
    """
    start = file.read(HEADER_BYTES)
    header = read_header(start)
    if size != header.file_bytes or header.num_id_bytes > _MOST_ID_BYTES << 20:
        raise BlockFileError(f"{size} bytes, expected {header.file_bytes} by its header")
    ids = file.read(header.num_id_bytes)
    checksum = hashlib.sha256(start + ids)
    num_left = header.num_data_bytes
    while num_left and (piece := file.read(min(num_left, _PIECE_BYTES))):
        checksum.update(piece)
        num_left -= len(piece)
    if file.read(_CHECKSUM_BYTES) != checksum.digest():
        raise BlockFileError("the checksum differs")
    return header.key, len(_ids_of(ids))


def _ids_of(text: bytes) -> list[int]:
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BlockFileError(f"its token ids are not JSON: {error}") from error
    if not isinstance(ids, list):
        raise BlockFileError("its token ids are not a list")
    return ids
