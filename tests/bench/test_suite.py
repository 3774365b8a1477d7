"""Tests in many processes: one that crashes or hangs takes nothing from those in others, and nothing is left out."""

from pathlib import Path

import pytest

from paged.bench import suite
from paged.bench.suite import main

FILES = {
    "test_good.py": "def test_one(): pass\ndef test_two(): pass\n",
    "test_bad.py": "def test_three(): assert 1 == 2, 'said at once'\n",
    "test_crash.py": "import os\ndef test_four(): os.kill(os.getpid(), 11)\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of these files, where processes begin, without the plugins that they do not need."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_each_file_has_its_own_end() -> None:
    lines: list[str] = []
    assert main([".", "--processes", "2", "--rootdir", "."], lines.append) == 1
    said = "\n".join(lines)
    assert lines[-1] == "4 tests, 1 groups passed, 2 groups failed"
    for told in ("said at once", "good.py: exit code 0", "bad.py: exit code 1", "crash.py: exit code -11"):
        assert told in said
    assert "test_four" in said.partition("test_crash.py: exit code")[0], "which test it was"


def test_unreadable_file_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "run_group", lambda *_: (0, ""))
    (folder / "test_broken.py").write_text("import nowhere_to_be_found\n")
    lines: list[str] = []
    assert main(["test_good.py", "--rootdir", "."], lines.append) == 0
    assert main(["test_good.py", "test_broken.py", "--rootdir", "."], lines.append) == 1
    assert [line for line in lines if "nowhere_to_be_found" in line]
    assert lines[-1] == "2 tests, 1 groups passed, 0 groups failed"


def test_process_that_hangs_is_killed(folder: Path) -> None:
    """What it had not begun runs in another."""
    (folder / "test_hang.py").write_text("import time\ndef test_five(): time.sleep(3600)\ndef test_six(): pass\n")
    lines: list[str] = []
    code, text = suite.run_group(["test_hang.py::test_five", "test_hang.py::test_six"], 10.0, lines.append)
    assert "".join(lines) == text
    assert code == -9
    assert "test_six PASSED" in text


def test_what_passed_is_not_run_again(folder: Path) -> None:
    options = ["test_good.py", "test_bad.py", "--rootdir", ".", "--skip", "_two$", "--done", str(folder / "done")]
    for number in (2, 1):
        lines: list[str] = []
        assert main(options, lines.append) == 1
        assert lines[-1].startswith(f"{number} tests, ")
    assert (folder / "done").read_text() == "test_good.py::test_one\n"
