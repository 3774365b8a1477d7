"""`paged` itself: help, versions and interrupts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

import paged
from paged.executors.command_line import cli


def test_help_and_version_take_no_torch() -> None:
    for argument, expected in (("--version", f"paged {paged.__version__}\n"), ("--help", "generate")):
        code = (
            f"import sys; from paged.executors.command_line.cli import main\ntry: main(['{argument}'])\n"
            "except SystemExit as end: assert not end.code and 'torch' not in sys.modules"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert expected in result.stdout


@pytest.mark.parametrize("command", cli._COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert "--json" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--no-such-option"])
    assert end.value.code == 2


@pytest.mark.parametrize("wait_s", [0.0, 0.05, 0.2, 0.5, 1.0, 2.0])
def test_an_interrupt_at_any_moment(wait_s: float) -> None:
    """From the first import of ours on: before it Python itself starts."""
    code = (
        "import sys, paged.__main__ as entry; print('here', flush=True); "
        "sys.argv = ['paged', 'generate', '--count', '99999']; sys.exit(entry.main())"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "here\n"
        time.sleep(0.02 + wait_s)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert "Traceback" not in process.stderr.read()
