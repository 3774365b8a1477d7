"""`paged` itself: help, versions, interrupts, and streams that are full, closed or read no more."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

import paged
from tests.deadline import HANG_S

PAGED = (sys.executable, "-m", "paged")
# Runs a command that takes minutes, and says so as soon as it has its first handler of interrupts.
INTERRUPTED = """
import signal, sys
import paged.__main__ as entry

install = signal.signal


def say(*arguments):
    signal.signal = install
    handler = install(*arguments)
    print("here", flush=True)
    return handler


signal.signal = say
sys.argv = ["paged", "generate", "--count", "99999"]
sys.exit(entry.main())
"""


def run_process(*command: str, stdout: Any = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | environment
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, env=env)


def test_help_and_version_take_no_torch() -> None:
    for argument, expected in (("--version", f"paged {paged.__version__}\n"), ("--help", "generate")):
        code = (
            f"import sys; from paged.serving.command_line.cli import main\ntry: main(['{argument}'])\n"
            "except SystemExit as end: assert not end.code and 'torch' not in sys.modules"
        )
        result = run_process(sys.executable, "-c", code)
        assert result.returncode == 0, result.stderr
        assert expected in result.stdout


@pytest.mark.parametrize(
    "wait_s", [0.0, 0.2, *(pytest.param(wait_s, marks=pytest.mark.thorough) for wait_s in (0.05, 0.5, 1.0, 2.0))]
)
def test_an_interrupt_at_any_moment(wait_s: float) -> None:
    """From the moment on when our handler of interrupts is there: before it Python itself starts."""
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout.readline() == "here\n"
        time.sleep(wait_s)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 130
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "arguments", ["--help", "bench", "bench --json", pytest.param("info", marks=pytest.mark.thorough)]
)
def test_a_full_disk(arguments: str, unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        result = run_process(*PAGED, *arguments.split(), stdout=full, PYTHONUNBUFFERED=unbuffered)
    assert (result.returncode, result.stderr) == (1, "paged: OSError: No space left on device\n")


@pytest.mark.thorough
@pytest.mark.parametrize("closed", [(0, 1, 2), (0,), (1,), (2,)])
def test_closed_streams(closed: tuple[int, ...]) -> None:
    """What is not there is not written to, be it by a progress bar."""
    code = (
        f"import os, sys; [os.close(one) for one in {closed}]; "
        "os.execv(sys.executable, [sys.executable, '-m', 'paged', 'generate', '--count', '1'])"
    )
    result = run_process(sys.executable, "-c", code, PAGED_BACKEND="torch")  # the interpreter would take minutes
    assert result.returncode == 0
    assert (result.stdout == "") == (1 in closed)
    assert "Traceback" not in result.stderr


def test_a_reader_that_has_gone() -> None:
    receiver, sender = os.pipe()
    os.close(receiver)
    result = run_process(*PAGED, "bench", "--json", stdout=sender)
    os.close(sender)
    assert (result.returncode, result.stderr) == (0, "")
    assert run_process(*PAGED, "bench", "--json", stdout=subprocess.DEVNULL).returncode == 0
