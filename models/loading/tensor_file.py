"""Read a safetensors file into memory, not by a memory map.

If another process truncates or rewrites the file meanwhile, reading raises an error; a memory map would crash.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from paged.errors import CheckpointError
from paged.models.loading.checkpoint_files import regular_size
from paged.models.loading.files_read import note_file, stamp_of
from paged.tools.printable import one_line

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
# Limit of a file's header, enough for 100,000 tensors. The format itself allows headers that take seconds to parse.
_MAX_HEADER_BYTES = 16 << 20
# Size of the reused buffer for tensors that are converted, sent to a device, or cut by columns.
_PIECE_BYTES = 4 << 20
# Least bytes that a thread reads: smaller tensors are read by fewer threads.
_LEAST_SHARE = 1 << 20
# Runs of contiguous bytes that are shorter than this are read together with the gaps between them.
_LEAST_RUN = 4096


class TensorFile:
    """An open safetensors file.

    tensors: name -> (dtype as safetensors names it, shape, first byte, end). stamp: changes when the file does.

    Raises:
        CheckpointError: the file is missing, unreadable or truncated, or its header is inconsistent.
    """

    def __init__(self, file: Path) -> None:
        self.file, size = file, regular_size(file)
        self._opened = file.open("rb", buffering=0)
        self._threads = ThreadPoolExecutor(torch.get_num_threads())
        try:
            self.stamp = self._stamp()
            note_file(file, self.stamp)
            header_size = int.from_bytes(self._opened.read(min(size, 8)), "little")
            if size < 8 or header_size > min(size, _MAX_HEADER_BYTES):  # files in /proc have size 0 and may block
                raise self.wrong(f"a header of {header_size} bytes")
            self._start = 8 + header_size
            self.tensors = self._entries(self._opened.read(header_size), size - self._start)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._threads.shutdown()
        self._opened.close()

    def wrong(self, problem: str) -> CheckpointError:
        """Return an error that names the file."""
        return CheckpointError(f"{self.file}: missing, unreadable or truncated ({problem})")

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in its own memory."""
        return self._read(name, torch.empty(self.tensors[name][1], dtype=self._dtype(name)), 0)

    def get_part(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Return entries `start` to `stop` of a dimension."""
        dtype, shape = self._dtype(name), self.tensors[name][1]
        rows, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        part = torch.empty((*shape[:dim], stop - start, *shape[dim + 1 :]), dtype=dtype)
        row_bytes, skipped = shape[dim] * inner * part.itemsize, start * inner * part.itemsize
        runs = part.view(rows, part.numel() // max(rows, 1))
        if rows > 1 and part.nbytes // rows < _LEAST_RUN:
            count = max(_PIECE_BYTES // max(row_bytes, 1), 1)
            buffer = torch.empty((min(count, rows), shape[dim] * inner), dtype=dtype)
            for row in range(0, rows, count):
                piece = self._read(name, buffer[: rows - row], row * row_bytes)
                runs[row : row + count].copy_(piece[:, start * inner : stop * inner])
            return part
        for row, run in enumerate(runs):
            self._read(name, run, row * row_bytes + skipped)
        return part

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Read a tensor into `out` of the same shape, directly if possible, else piece by piece through a buffer."""
        dtype, shape = self._dtype(name), self.tensors[name][1]
        if out.dtype == dtype and out.is_cpu and out.is_contiguous():
            self._read(name, out.detach(), 0)
            return
        rows = out.detach()
        if not shape:
            rows = rows.unsqueeze(0)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        count = min(max(_PIECE_BYTES // max(row_bytes, 1), 1), len(rows))
        buffer = torch.empty((count, *shape[1:]), dtype=dtype)
        for row in range(0, len(rows), max(count, 1)):
            piece = buffer[: len(rows) - row]
            rows[row : row + count].copy_(self._read(name, piece, row * row_bytes))

    def checksum(self, name: str, pieces: int, piece_bytes: int) -> int:
        """Return a checksum of evenly spaced pieces of a tensor, both ends included; of a small tensor's every byte."""
        _, _, begin, end = self.tensors[name]
        begin, end = self._start + begin, self._start + end
        last, checksum = max(begin, end - piece_bytes), 0
        for piece in range(pieces):
            at = begin + (last - begin) * piece // (pieces - 1)
            data = bytearray(min(piece_bytes, end - at))
            self._read_bytes(memoryview(data), at)
            checksum = zlib.crc32(data, checksum)
        return checksum

    def _dtype(self, name: str) -> torch.dtype:
        stored = self.tensors[name][0]
        if stored not in DTYPES:
            raise self.wrong(f"a tensor of {one_line(stored, 20)}, known are {', '.join(DTYPES)}")
        return DTYPES[stored]

    def _read(self, name: str, out: torch.Tensor, offset: int) -> torch.Tensor:
        """Fill contiguous memory with a tensor's bytes, beginning at an offset."""
        offset += self._start + self.tensors[name][2]
        if out.nbytes:
            # `Tensor.numpy` would fix the size of the storage, which `DeviceMemory` changes.
            data = memoryview((ctypes.c_char * out.nbytes).from_address(out.data_ptr())).cast("B")
            # Each torch thread reads one part, because a single thread reads half as fast.
            count = min(torch.get_num_threads(), -(-out.nbytes // _LEAST_SHARE))
            size = -(-out.nbytes // count)
            parts = []
            for start in range(size, out.nbytes, size):
                parts.append(self._threads.submit(self._read_bytes, data[start : start + size], offset + start))
            self._read_bytes(data[:size], offset)
            for part in parts:
                part.result()
        if self._stamp() != self.stamp:
            raise self.wrong("the file changed during the read")
        return out

    def _read_bytes(self, data: memoryview, offset: int) -> None:
        while data:
            count = os.preadv(self._opened.fileno(), [data], offset)
            if not count:
                raise self.wrong("the file ends within a tensor")
            data, offset = data[count:], offset + count

    def _stamp(self) -> tuple[int, ...]:
        return stamp_of(os.fstat(self._opened.fileno()))

    def _entries(self, header: bytes, size: int) -> dict[str, tuple[str, list[int], int, int]]:
        """Return the entries of a header; raise unless its tensors fill `size` bytes without gaps."""
        try:
            values: dict[str, Any] = json.loads(header)
            values.pop("__metadata__", None)
            spans = []
            entries: dict[str, tuple[str, list[int], int, int]] = {}
            for name, entry in values.items():
                dtype, shape, (start, stop) = str(entry["dtype"]), list(entry["shape"]), entry["data_offsets"]
                if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
                    raise ValueError(f"{name}: the shape or offsets are not sizes")
                if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != stop - start:
                    raise ValueError(f"{name}: {stop - start} bytes for shape {shape} of {dtype}")
                spans.append((start, stop))
                entries[name] = dtype, shape, start, stop
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self.wrong(f"not a safetensors header: {one_line(repr(error), 200)}") from error
        end = 0
        for start, stop in sorted(spans):
            if start != end:
                raise self.wrong(f"gap or overlap of tensors at byte {start}")
            end = stop
        if end != size:
            raise self.wrong(f"{size} bytes of tensors, expected {end} from the header")
        return entries
