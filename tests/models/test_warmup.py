"""What a process does once, before the first step of a model on a CPU."""

import ctypes
import subprocess
import sys
from unittest import mock

import pytest
import torch

from paged.models.registry import load_model
from paged.serving.command_line.cli import RECALL
from tests.backends import needs_numba

# How many pieces of memory glibc has from the system for themselves, which go back to it when they are freed: more with
# a tensor of 16 MB than without. A process of its own for each, as what was freed before counts.
SYSTEM_PIECES = """
import ctypes, os

import torch
from paged.models.warmup import keep_freed_memory

counts = ctypes.CDLL(None).mallinfo2


class Counts(ctypes.Structure):
    _fields_ = [("others", ctypes.c_size_t * 3), ("of_the_system", ctypes.c_size_t), ("more", ctypes.c_size_t * 6)]


counts.restype = Counts
for keeps in (False, True):
    if os.fork() == 0:
        if keeps:
            keep_freed_memory()
        before = counts().of_the_system
        tensor = torch.empty(4 << 20)
        print(counts().of_the_system - before, flush=True)
        os._exit(0)
    os.wait()
"""


@needs_numba
@pytest.mark.thorough
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8,int4"])
def test_no_step_compiles(kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither prompts nor decodes, over a plain cache and over one of two formats."""
    import numba

    model = load_model(RECALL, dtype=torch.bfloat16, kv_cache_dtype=kv_cache_dtype, cuda_graphs=False)
    model.pack()
    monkeypatch.setattr(numba, "cfunc", mock.Mock(side_effect=AssertionError("a step compiles")))
    with model.network.computing():
        model.prefill("a", list(range(40)))
        model.decode("a", 1, 40)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.thorough
def test_freed_memory_is_kept() -> None:
    done = subprocess.run([sys.executable, "-c", SYSTEM_PIECES], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0"]
