"""What a process does once, before the first step of a model on a CPU."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# How many pieces of memory glibc has from the system for themselves, which go back to it when they are freed, before
# and while there is a tensor of 16 MB.
SYSTEM_PIECES = """
import ctypes

import torch
from paged.models.warmup import keep_freed_memory

counts = ctypes.CDLL(None).mallinfo2


class Counts(ctypes.Structure):
    _fields_ = [("others", ctypes.c_size_t * 3), ("of_the_system", ctypes.c_size_t), ("more", ctypes.c_size_t * 6)]


counts.restype = Counts
if {keeps}:
    keep_freed_memory()
before = counts().of_the_system
tensor = torch.empty(4 << 20)
print(counts().of_the_system - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_freed_memory_is_kept() -> None:
    def system_pieces(keeps: bool) -> int:
        command = [sys.executable, "-c", SYSTEM_PIECES.format(keeps=keeps)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert (system_pieces(keeps=False), system_pieces(keeps=True)) == (1, 0)
