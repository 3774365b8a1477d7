"""The keys that a query sees."""

from __future__ import annotations

from paged.kernels.common.numba_ops.kernel import device_function


@device_function
def visible(position, length, left, right, chunk_size):
    """First and one past the last of them, as positions; as many as none where the first is not below the other."""
    first, end = max(0, position - left), max(0, min(length, position + right + 1))
    if chunk_size > 0:
        chunk = position // chunk_size * chunk_size
        first, end = max(first, chunk), max(0, min(end, chunk + chunk_size))
    return first, end
