"""Move the weights of a CPU to pages of 2 MiB.

In pages of 4 KiB, a decode step waits for address translations, more so in a virtual machine: a float model takes up to
a fifth longer. See models/limits.md.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from paged.kernels.cpu.products import packed_address

_PAGE = 2 << 20
# Advice to Linux: use huge pages for pages that are touched from now on; move existing pages to huge pages at once. The
# second exists since Linux 6.1, see models/limits.md.
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


class _Span(NamedTuple):
    """Memory from `start` to before `end`, in bytes."""

    start: int
    end: int


def move_to_huge_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Move tensors on a CPU to pages of 2 MiB, as far as Linux has them; addresses stay.

    A system without huge pages leaves everything unchanged.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    spans = [_span_of(tensor) for tensor in tensors]
    for span in _joined(spans):
        memory = ctypes.c_void_p(span.start), ctypes.c_size_t(span.end - span.start)
        libc.madvise(*memory, _MADV_HUGEPAGE)
        libc.madvise(*memory, _MADV_COLLAPSE)


def _span_of(tensor: torch.Tensor) -> _Span:
    """Return all pages that a tensor's memory touches; none if its address is unknown."""
    if tensor.is_mkldnn:
        address = packed_address(tensor)
        if address is None:
            return _Span(0, 0)
        start, num_bytes = address, tensor.nbytes
    else:
        storage = tensor.untyped_storage()
        start, num_bytes = storage.data_ptr(), storage.nbytes()
    return _Span(start // _PAGE * _PAGE, -(-(start + num_bytes) // _PAGE) * _PAGE)


def _joined(spans: Sequence[_Span]) -> list[_Span]:
    """Return the spans in order, and join spans that overlap or touch: small weights share pages."""
    joined: list[_Span] = []
    for span in sorted(spans):
        if joined and span.start <= joined[-1].end:
            joined[-1] = _Span(joined[-1].start, max(span.end, joined[-1].end))
        else:
            joined.append(span)
    return joined
