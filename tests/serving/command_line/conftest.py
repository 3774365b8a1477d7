"""Commands run as `paged` runs them."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paged.serving.command_line import cli
from paged.serving.command_line.cli import RECALL

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """What a command prints with `--json`, or its error."""

    def call(*arguments: str, code: int = 0) -> dict[str, Any]:
        assert cli.main([*arguments, "--json"]) == code
        found = capsys.readouterr()
        return json.loads(found.out) if found.out else {"error": found.err}

    return call


@pytest.fixture
def inspect(run: Run) -> Run:
    return partial(run, "inspect")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The bundled checkpoint, in a folder of one's own."""
    return Path(shutil.copytree(RECALL, tmp_path / "mine", ignore=shutil.ignore_patterns("*.py", "__pycache__")))
