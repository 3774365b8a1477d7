"""Every code block of the README and of docs/ runs as it stands, those of a page one after the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _blocks(page: Path) -> list[tuple[str, str]]:
    """Language and code of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def _run(command: list[str], folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_have_a_language_that_runs(page: Path) -> None:
    assert {language for language, _ in _blocks(page)} <= {"python", "bash"}


@pytest.mark.parametrize(
    ("page", "language"),
    [(page, language) for page in PAGES for language in sorted({language for language, _ in _blocks(page)})],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_blocks_run(page: Path, language: str, tmp_path: Path) -> None:
    """In a folder with the bundled checkpoint. Python from a file, as Triton reads the source of kernels."""
    code = "\n\n".join(code for found, code in _blocks(page) if found == language)
    (tmp_path / "models").symlink_to(ROOT / "models")
    if language == "python":
        (tmp_path / "page.py").write_text(code)
        _run([sys.executable, "page.py"], tmp_path)
    else:
        _run(["bash", "-euc", f'paged() {{ "{sys.executable}" -m paged "$@"; }}\n{code}'], tmp_path)


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)#:]+)\)", prose):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
