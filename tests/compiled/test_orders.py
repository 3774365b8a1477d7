"""Kernels with atomics in every order of their CTAs, in processes whose kernels are compiled."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_TICKETS = """
import torch
import triton
import triton.language as tl

from paged.bench.compiled.device import CompiledDevice
from paged.bench.compiled.orders import in_every_order


@triton.jit
def _ticket_kernel(ticket_ptr, out_ptr):
    tl.store(out_ptr + tl.program_id(0), tl.atomic_add(ticket_ptr, 1, sem="acq_rel"))


def tickets():
    ticket, out = torch.zeros(1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    _ticket_kernel[(3,)](ticket, out)
    return tuple(out.tolist())


with CompiledDevice("sm_90") as device:
    runs = [run.result for run in in_every_order(device, tickets) if run.kernel]
    print(len(runs), len(set(runs)), device.report.lines())
"""


def _run(*arguments: str) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.thorough
def test_kernels_with_atomics_in_every_order() -> None:
    lines = _run("-m", "paged.bench.compiled.orders").splitlines()
    counts = {}
    for line in lines:
        kernel, num_orders, num_wrong = re.fullmatch(r".*: _(\w+)_kernel, (\d+) orders, (\d+) wrong", line).groups()
        counts[kernel] = int(num_orders), int(num_wrong)
    assert counts == {"check_ids": (6, 0), "route_and_align": (24, 0), "collect": (6, 0), "count_bins": (6, 0)}


@pytest.mark.thorough
def test_a_result_of_the_order_is_seen_in_every_order(tmp_path: Path) -> None:
    """A kernel whose result is the order of its tickets has all six."""
    path = tmp_path / "tickets.py"
    path.write_text(_TICKETS)
    assert _run(str(path)) == "6 6 []\n"
