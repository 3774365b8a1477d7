"""stdout and stderr that are full, closed or read no more."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

# The interpreter would take minutes.
TORCH_BACKEND = {"PAGED_BACKEND": "torch"}


def run_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -m paged` with these."""
    command = [sys.executable, "-m", "paged", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **options)


@pytest.mark.parametrize("arguments", [["--help"], ["bench"], ["bench", "--json"], ["info"]])
@pytest.mark.parametrize("is_buffered", [True, False])
def test_a_full_disk(arguments: list[str], is_buffered: bool) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": "" if is_buffered else "1"}
    with open("/dev/full", "w") as full:
        result = run_process(*arguments, stdout=full, env=environment)
    assert (result.returncode, result.stderr) == (1, "paged: OSError: No space left on device\n")


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams(closed: tuple[int, ...]) -> None:
    """What is not there is not written to, be it by a progress bar."""
    code = (
        f"import os, sys; [os.close(one) for one in {closed}]; "
        "os.execv(sys.executable, [sys.executable, '-m', 'paged', 'generate', '--count', '1'])"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | TORCH_BACKEND)
    assert result.returncode == 0
    assert (result.stdout == "") == (1 in closed)
    assert "Traceback" not in result.stderr


def test_a_reader_that_has_gone() -> None:
    receiver, sender = os.pipe()
    os.close(receiver)
    result = run_process("bench", "--json", stdout=sender)
    os.close(sender)
    assert (result.returncode, result.stderr) == (0, "")
    assert run_process("bench", "--json", stdout=subprocess.DEVNULL).returncode == 0
