"""Commands run as `paged` runs them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paged.executors.command_line import cli
from paged.executors.command_line.cli import RECALL
from paged.models.recall.task import RecallPrompt, sample_prompts
from tests.executors.command_line.commands import Generate


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str]) -> Generate:
    """What `paged generate --json` prints; its errors with exit code 1."""

    def run(*arguments: str, code: int = 0) -> dict[str, Any]:
        assert cli.main(["generate", *arguments, "--json"]) == code
        found = capsys.readouterr()
        return json.loads(found.out) if code == 0 else {"error": found.err}

    return run


@pytest.fixture
def prompt() -> RecallPrompt:
    return sample_prompts(3, 1)[0]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The bundled checkpoint, in a folder of one's own."""
    return Path(shutil.copytree(RECALL, tmp_path / "mine", ignore=shutil.ignore_patterns("*.py", "__pycache__")))
