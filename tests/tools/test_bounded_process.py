"""Processes with limits: each way not to return ends that process alone, and none outlives its owner."""

import asyncio
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged.tools.bounded_process import Branch, ProcessEndedError, ProcessLostError, Root
from tests.processes import branches_of, is_alive, wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
WORK = "tests.tools.bounded_work"


@pytest.fixture(scope="module")
def root() -> Root:
    return Root(WORK)


def told(branch: Branch, kind: str, word: str, cpu_s: float = 60.0, seconds: float = 120.0) -> str:
    branch.send(json.dumps([kind, word]).encode(), cpu_s=cpu_s, seconds=seconds)
    return branch.receive().message.decode()


def error_of(branch: Branch, kind: str, *, cpu_s: float, seconds: float) -> type[ProcessEndedError] | None:
    """The type alone: the error itself would keep the branch."""
    try:
        told(branch, kind, "b", cpu_s, seconds)
    except ProcessEndedError as error:
        return type(error)
    return None


def test_branches_go_their_own_ways(root: Root) -> None:
    first = root.branch()
    assert told(first, "say", "a") == "a"
    copies = [first.branch() for _ in range(3)]
    assert [told(copy, "say", word) for copy, word in zip(copies, "bcd", strict=True)] == ["a b", "a c", "a d"]
    assert told(copies[0].branch(), "say", "e" * 300_000) == f"a b {'e' * 300_000}"
    assert told(first, "say", "f") == "a f"
    assert not first.is_ready()
    assert asyncio.run(first.ask(json.dumps(["say", "g"]).encode(), seconds=60)).message == b"a f g"


def test_bytes_that_arrive_amid_work_do_not_end_it(root: Root) -> None:
    """The second request stands for bytes whose signal comes late; only the end of the owner's side ends a branch."""
    branch = root.branch()
    for kind in ("nap", "say"):
        branch.send(json.dumps([kind, "a"]).encode(), cpu_s=60.0, seconds=120.0)
    assert [branch.receive().message for _ in range(2)] == [b"a", b"a a"]


@pytest.mark.parametrize("kind", ["spin", "spin in C", "sleep", "crash", "overflow", "raise", "killed", "no memory"])
def test_one_that_does_not_return_ends_alone(kind: str, root: Root) -> None:
    parent = root.branch()
    assert told(parent, "say", "a") == "a"
    bad, good = parent.branch(), parent.branch()
    error = error_of(bad, kind, cpu_s=0.2, seconds=0.5 if kind == "sleep" else 60.0)
    # What the system does is not blamed on the work.
    assert error is (ProcessLostError if kind in ("killed", "no memory") else ProcessEndedError)
    with pytest.raises(ProcessEndedError):
        told(bad, "say", "c")
    assert bad.is_ready()
    assert told(good, "say", "d") == "a d"
    assert told(parent.branch(), "say", "e") == "a e"


def test_memory_is_limited(root: Root) -> None:
    assert told(root.branch(), "allocate", "a") == "no memory"


def test_branches_end_when_they_are_dropped(root: Root) -> None:
    told(root.branch(), "say", "a")  # starts the root
    before = branches_of(WORK)
    branches = [root.branch() for _ in range(5)]
    assert [told(branch, "say", "a") for branch in branches] == ["a"] * 5
    for branch, kind in zip(branches, ["spin", "spin in C", "sleep"], strict=False):
        branch.send(json.dumps([kind, "b"]).encode(), cpu_s=3600, seconds=3600)
    assert len(branches_of(WORK) - before) == 5
    branches[0].close()
    with pytest.raises(ProcessEndedError):
        branches[0].receive()
    del branch, branches
    wait_until(lambda: not branches_of(WORK) - before)
    assert told(root.branch(), "say", "a") == "a"


def test_niceness_counts_beside_the_owner() -> None:
    """Linux shares the CPU out to sessions first, so the processes are in the owner's."""
    nice = Root(WORK, niceness=7)
    before = branches_of(WORK)
    branch = nice.branch()
    assert told(branch, "say", "a") == "a"
    for pid in branches_of(WORK) - before:
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + 7, 19)
        assert os.getsid(pid) == os.getsid(0)


def test_a_root_ends_when_it_is_dropped() -> None:
    own = Root(WORK)
    before = branches_of(WORK)
    assert told(own.branch(), "say", "a") == "a"
    assert branches_of(WORK) - before
    del own
    wait_until(lambda: not branches_of(WORK) - before)


def test_a_root_that_has_ended_starts_again() -> None:
    own = Root(WORK)
    before = branches_of(WORK)
    branch = own.branch()
    assert told(branch, "say", "a") == "a"
    killed = branches_of(WORK) - before
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(ProcessEndedError):
        told(branch, "say", "b")
    # A process loses its command line, by which `branches_of` finds it, before its files are closed.
    wait_until(lambda: not any(map(is_alive, killed)))
    assert told(own.branch(), "say", "c") == "c"


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_without_a_copy_the_process_goes_on(number: int, root: Root) -> None:
    """At each of its forks; the copies come again as soon as the system has some."""
    parent = root.branch()
    assert told(parent, "no copies", json.dumps([number] * 2)) == "ok"
    for _ in range(2):
        with pytest.raises(ProcessLostError):
            told(parent.branch(), "say", "a")
    assert told(parent.branch(), "say", "b") == "b"
    assert told(parent, "say", "c") == "c"
    assert told(root.branch(), "say", "d") == "d"


@pytest.mark.parametrize("owner", ["root", "branch"])
def test_without_descriptors_of_the_owner(owner: str) -> None:
    """Each number of them that is left: nothing leaks, and with enough of them it goes on."""
    own = Root(WORK)
    asker = own if owner == "root" else own.branch()
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for num_left in range(8):
        spare = os.dup(0)  # the lowest free number
        os.close(spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare + num_left, hard))
        try:
            copy = asker.branch()
        except ProcessLostError:
            copy = None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if copy is not None:
            assert told(copy, "say", "a") == "a"
            copy.close()
        del copy
    assert told(own.branch(), "say", "b") == "b"
    assert len(os.listdir("/proc/self/fd")) == before + (owner == "root")  # the root itself


def test_without_descriptors_in_the_process(root: Root) -> None:
    branch = root.branch()
    assert told(branch, "no descriptors", "0") == "ok"
    with pytest.raises(ProcessLostError):
        told(branch.branch(), "say", "a")
    assert told(branch, "no descriptors", "100") == "ok"
    assert told(branch.branch(), "say", "b") == "b"


def test_a_root_that_cannot_start_starts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Root(WORK)
    for number in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE):
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", _raise(OSError(number, "no process")))
            with pytest.raises(ProcessLostError):
                own.branch()
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socketpair", _raise(OSError(number, "no descriptors")))
            with pytest.raises(ProcessLostError):
                own.branch()
    assert told(own.branch(), "say", "a") == "a"


def test_a_root_that_is_killed_while_it_works() -> None:
    """The asker of a copy that is not made any more is told so, and the next one gets a copy of a new root."""
    own = Root(WORK)
    before = branches_of(WORK)
    own.branch().close()
    wait_until(lambda: len(branches_of(WORK) - before) == 1)
    (pid,) = branches_of(WORK) - before
    os.kill(pid, signal.SIGSTOP)
    branch = own.branch()
    branch.send(json.dumps(["say", "a"]).encode(), cpu_s=60.0, seconds=120.0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ProcessLostError):
        branch.receive()
    assert told(own.branch(), "say", "b") == "b"
    assert not Path(f"/proc/{pid}").exists(), "a zombie"


def test_without_threads_nothing_is_asked(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    branch = root.branch()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "to_thread", _raise(RuntimeError("can't start new thread")))
        with pytest.raises(ProcessLostError, match="new thread"):
            asyncio.run(branch.ask(b"[]", seconds=60))
    assert asyncio.run(branch.ask(json.dumps(["say", "a"]).encode(), seconds=60)).message == b"a"


def _raise(error: Exception) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize("ending", ["exit", "SIGTERM", "SIGKILL"])
def test_nothing_outlives_the_owner(ending: str) -> None:
    """However it ends, while one branch waits and others work for an hour; its end waits for none of them."""
    code = f"""
import json, sys
from paged.tools.bounded_process import Root
root = Root({WORK!r})
branches = [root.branch() for _ in range(3)]
for branch, kind in zip(branches, ["spin", "sleep", "say"]):
    branch.send(json.dumps([kind, "a"]).encode(), cpu_s=3600, seconds=3600)
branches[2].receive()
print("ready", flush=True)
sys.stdin.readline()
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner:
        assert owner.stdout.readline() == b"ready\n"
        pids = branches_of(WORK, owner.pid)
        assert len(pids) == 4
        if ending == "exit":
            owner.stdin.close()
        else:
            owner.send_signal(getattr(signal, ending))
        owner.wait(60)
        wait_until(lambda: not any(map(is_alive, pids)))
