"""Recordings beside the calls that they record: faults of a disk, and recordings that begin and end in any order."""

import errno
import logging
import os
import random
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import paged
from paged import InvalidInputError
from paged.kernels.core.operation import current_watch
from paged.tools.recorded_calls.encoder import Encoder
from paged.tools.recorder import read_call

X, WEIGHT = torch.randn(2, 16), torch.rand(16)
CODES = (errno.ENOSPC, errno.ENOENT, errno.EACCES)
# Where a file is opened, written, renamed, or what it holds is copied.
PLACES = ((Path, "open"), (safetensors.torch, "save_file"), (os, "replace"), (Encoder, "part"), (Encoder, "write"))


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs in one thread at a time."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")


@contextmanager
def _failing(owner: Any, name: str, code: int) -> Iterator[None]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield


@contextmanager
def _small_files(size: int) -> Iterator[None]:
    """No file may have more bytes, as where a disk is full within a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _check_faults(folder: Path, fault: AbstractContextManager[None], caplog: pytest.LogCaptureFixture) -> None:
    """Three calls of which one raises are as they are without a recording; the fourth, without the fault, is kept."""
    right = paged.rms_norm(X, WEIGHT)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "paged"), paged.record(folder, ["rms_norm"], max_files=1):
        with fault:
            assert torch.equal(paged.rms_norm(X, WEIGHT), right)
            with pytest.raises(InvalidInputError, match="weight") as raised:
                paged.rms_norm(X, WEIGHT[:3])
            assert raised.value.__context__ is None
            with pytest.raises(TypeError, match="weight"):
                paged.rms_norm(X)  # type: ignore[call-arg]
        folder.mkdir(exist_ok=True)
        assert list(folder.iterdir()) == [], "no draft stays"
        paged.rms_norm(X, WEIGHT)
    assert [path.suffix for path in folder.iterdir()] == [".safetensors"], "faults use up no file of max_files"
    first, last = (record.getMessage() for record in caplog.records)
    assert "a call of rms_norm is not recorded" in first
    assert last.endswith("3 calls are not recorded")


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("owner", "name"), PLACES)
def test_a_fault_of_a_recording_changes_no_call(
    owner: Any, name: str, code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _check_faults(tmp_path / "calls", _failing(owner, name, code), caplog)


def test_a_full_disk_and_a_lost_folder_change_no_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Faults of the system itself, in the middle of a file and before it is opened."""
    _check_faults(tmp_path / "full", _small_files(100), caplog)

    @contextmanager
    def lost() -> Iterator[None]:
        (tmp_path / "lost").rmdir()
        yield

    _check_faults(tmp_path / "lost", lost(), caplog)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="cannot be made"), paged.record(tmp_path / "file"):
        pass


class _Recording:
    """One of several, with the calls that it is to get."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.expected: list[int] = []
        self._context = paged.record(folder, ["rms_norm"])

    def begin(self) -> None:
        self._context.__enter__()

    def end(self) -> None:
        self._context.__exit__(None, None, None)

    def calls(self) -> list[int]:
        return sorted(int(read_call(path, torch.device("cpu")).arguments["x"][0, 0]) for path in self.folder.iterdir())


def _in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def _call(number: int) -> None:
    paged.rms_norm(torch.full((1, 16), float(number)), WEIGHT)


@pytest.mark.parametrize("seed", range(12))
def test_recordings_begin_and_end_in_any_order(seed: int, tmp_path: Path) -> None:
    """Each from another thread. All get every call that begins while they are open, and none of them stays."""
    draw = random.Random(seed)
    waiting = [_Recording(tmp_path / str(index)) for index in range(4)]
    recordings, under_way = list(waiting), []
    number = 0
    while waiting or under_way:
        if waiting and (not under_way or draw.random() < 0.5):
            recording = waiting.pop()
            _in_thread(recording.begin)
            under_way.append(recording)
        else:
            recording = under_way.pop(draw.randrange(len(under_way)))
            _in_thread(recording.end)
        number += 1
        _call(number)
        for recording in under_way:
            recording.expected.append(number)
    assert [recording.calls() for recording in recordings] == [recording.expected for recording in recordings]
    assert current_watch() is None


def test_recordings_of_threads_share_a_folder(tmp_path: Path) -> None:
    """Each thread's calls are in the files of its own recording, which other recordings write to the same folder."""

    def run(first: int) -> None:
        with paged.record(tmp_path, ["rms_norm"]):
            for number in range(first, first + 3):
                _call(number)

    threads = [threading.Thread(target=run, args=(10 * index,)) for index in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert current_watch() is None
    paths = list(tmp_path.iterdir())
    assert {path.suffix for path in paths} == {".safetensors"}
    numbers = {int(read_call(path, torch.device("cpu")).arguments["x"][0, 0]) for path in paths}
    assert numbers == {10 * index + number for index in range(1, 4) for number in range(3)}


def test_a_later_recording_leaves_the_files_of_an_earlier_one(tmp_path: Path) -> None:
    for number in range(3):
        with paged.record(tmp_path, ["rms_norm"]):
            _call(number)
    names = [f"rms_norm-{os.getpid()}-000000{suffix}.safetensors" for suffix in ("", "-1", "-2")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
