"""Tests in many processes: one that crashes or hangs takes nothing from those in others, and nothing is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged.bench.suite import groups, main, run_group

FILES = {
    "test_good.py": "def test_one(): pass\ndef test_two(): pass\n",
    "test_bad.py": "def test_three(): assert 1 == 2, 'said at once'\n",
    "test_crash.py": "import os\ndef test_four(): os.kill(os.getpid(), 11)\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_each_file_has_its_own_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    lines: list[str] = []
    assert main([".", "--processes", "2", "--rootdir", "."], lines.append) == 1
    said = "\n".join(lines)
    assert lines[-1] == "4 tests, 1 groups passed, 2 groups failed"
    assert "said at once" in said
    assert "test_good.py: exit code 0" in said
    assert "test_bad.py: exit code 1" in said
    assert "test_crash.py: exit code -11" in said
    assert "test_four" in said.partition("test_crash.py: exit code")[0], "which test it was"
    assert main(["test_good.py", "--rootdir", "."], lines.append) == 0


def test_unreadable_file_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "test_broken.py").write_text("import nowhere_to_be_found\n")
    lines: list[str] = []
    assert main(["test_good.py", "test_broken.py", "--rootdir", "."], lines.append) == 1
    assert "nowhere_to_be_found" in lines[0]
    assert lines[-1] == "2 tests, 1 groups passed, 0 groups failed"


def test_process_that_hangs_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "test_hang.py").write_text("import time\ndef test_five(): time.sleep(60)\n")
    code, _ = run_group(["test_hang.py::test_five"], 2.0)
    assert code == -9


def test_groups_hold_every_test_of_one_file_each() -> None:
    ids = [f"{file}::test_{number}[a::b]" for file in "ab" for number in range(5)]
    found = groups(ids, 2)
    assert [len(group) for group in found] == [2, 2, 1, 2, 2, 1]
    assert [one for group in found for one in group] == ids
