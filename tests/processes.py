"""The processes of this machine, as /proc lists them."""

import os
import time
from collections.abc import Callable
from pathlib import Path


def branches_of(module: str, owner: int | None = None) -> set[int]:
    """Living processes that serve a module for an owner, None for this process: its root and all its branches."""
    owner = os.getpid() if owner is None else owner
    stats = dict(_stats())
    roots = {pid for pid, stat in stats.items() if int(stat[1]) == owner and module in _command(pid)}
    return {pid for pid, stat in stats.items() if int(stat[2]) in roots and stat[0] != "Z"}


def is_alive(pid: int) -> bool:
    """Whether a process runs and is no zombie."""
    return dict(_stats()).get(pid, ["Z"])[0] != "Z"


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail after a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def _stats() -> list[tuple[int, list[str]]]:
    """Numbers and fields of /proc/PID/stat from the state on: state, parent, group."""
    stats = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stats.append((int(path.name), (path / "stat").read_text().rpartition(")")[2].split()))
        except OSError:  # it has ended meanwhile
            continue
    return stats


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
