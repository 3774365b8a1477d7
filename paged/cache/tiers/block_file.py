"""The file of one block: a header, the token ids, the K/V and a checksum of all of it."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import NamedTuple

MAGIC = b"paged-kv"
VERSION = 1
SUFFIX = ".kv"
# Magic, version, index of the table, digest of the layout, chained hash, bytes of the ids, bytes of the K/V.
_HEADER = struct.Struct("<8sII32s32sQQ")
_CHECKSUM_BYTES = 32
# A chained hash in messages to other ranks, which hold numbers of 64 bits.
HASH_WORDS = struct.Struct("<4q")


class BlockFileError(Exception):
    """A file is not a whole block, or not the one that was asked for; the message says what is wrong."""


class BlockKey(NamedTuple):
    """What a block is known by.

    Attributes:
        digest: of the weights and the layout, 32 bytes.
        hash: chained hash of the block's position, 32 bytes.
        column: index of its block table.
    """

    digest: bytes
    hash: bytes
    column: int

    @property
    def name(self) -> str:
        """The block's name in a store, the file's path in a folder."""
        return f"{self.digest.hex()[:32]}/{self.hash.hex()}-{self.column}{SUFFIX}"


@dataclass(frozen=True, eq=False, slots=True)
class StoredBlock:
    """A block as a file holds it: its key, its token ids, and its K/V in the order of the host tier."""

    key: BlockKey
    token_ids: list[int]
    data: bytes | memoryview

    def encode(self) -> bytes:
        """Return the bytes of its file."""
        key, ids = self.key, json.dumps(self.token_ids).encode()
        header = _HEADER.pack(MAGIC, VERSION, key.column, key.digest, key.hash, len(ids), len(self.data))
        content = b"".join((header, ids, self.data))
        return content + hashlib.sha256(content).digest()


def decode(content: bytes, expected: BlockKey | None = None) -> StoredBlock:
    """Return the block of a file, after checking all of it.

    expected: the key that it must have; None for any.

    Raises:
        BlockFileError: the file is cut, changed, of another version, or of another block.
    """
    if len(content) < _HEADER.size + _CHECKSUM_BYTES:
        raise BlockFileError(f"{len(content)} bytes, expected at least {_HEADER.size + _CHECKSUM_BYTES}")
    magic, version, column, digest, hash_, num_id_bytes, num_data_bytes = _HEADER.unpack_from(content)
    if magic != MAGIC:
        raise BlockFileError(f"begins with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise BlockFileError(f"version {version}, expected {VERSION}")
    size = _HEADER.size + num_id_bytes + num_data_bytes + _CHECKSUM_BYTES
    if len(content) != size:
        raise BlockFileError(f"{len(content)} bytes, expected {size} by its header")
    if hashlib.sha256(memoryview(content)[:-_CHECKSUM_BYTES]).digest() != content[-_CHECKSUM_BYTES:]:
        raise BlockFileError("the checksum differs")
    key = BlockKey(digest, hash_, column)
    if expected is not None and key != expected:
        raise BlockFileError(f"holds block {key.name}, expected {expected.name}")
    start = _HEADER.size + num_id_bytes
    token_ids = json.loads(content[_HEADER.size : start])
    return StoredBlock(key, token_ids, memoryview(content)[start:-_CHECKSUM_BYTES])
