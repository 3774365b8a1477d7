"""Choice of the number of CPU threads, from the cores that this process may use and its CPU quota."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# Environment variables by which users choose the number or placement of threads of PyTorch and its libraries.
_CHOICES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_THREAD_LIMIT",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
)


class ThreadChoice(NamedTuple):
    """num_threads: number of threads. reason: explanation of the number."""

    num_threads: int
    reason: str


class _Mount(NamedTuple):
    """A mounted control group file system. version: 1 or 2. top: group at the mount point. folder: the mount point."""

    version: int
    top: str
    folder: Path


def choose_threads(
    current: int,
    environment: Mapping[str, str] = os.environ,
    cpus: Collection[int] | None = None,
    root: Path = Path("/"),
) -> ThreadChoice:
    """Return how many threads operations on this CPU should take.

    The number is one thread for each core that the process may use, because two threads on a core share its arithmetic
    units. A CPU quota (cgroup), rounded down, lowers the number: with more threads, all would be throttled in every
    period. A user's choice has priority: an environment variable, or a number that differs from PyTorch's default.

    Args:
        current: PyTorch's number of threads.
        cpus: the CPUs that this process may use; None for its affinity.
        root: folder that contains `proc` and `sys`.
    """
    for name in _CHOICES:
        if environment.get(name):
            return ThreadChoice(current, f"{name}={environment[name]}")
    if sys.platform != "linux":
        return ThreadChoice(current, "PyTorch's default")
    if cpus is None:
        cpus = os.sched_getaffinity(0)
    num_cores = len(_cores(cpus, root))
    if current not in (len(cpus), num_cores):
        return ThreadChoice(current, "torch.set_num_threads")
    reason = f"a thread for each core, of {len(cpus)} CPUs that this process may use"
    quota = cpu_quota(root)
    if quota is not None and quota < num_cores:
        return ThreadChoice(max(1, int(quota)), f"the cgroup's quota of {quota:g} CPUs, of {num_cores} cores")
    return ThreadChoice(num_cores, reason)


def _cores(cpus: Collection[int], root: Path) -> set[str]:
    """Group CPUs by core. A CPU that the system does not describe counts as a core."""
    cores = set()
    for cpu in cpus:
        topology = root / "sys/devices/system/cpu" / f"cpu{cpu}" / "topology"
        siblings = _text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list")
        cores.add(siblings or str(cpu))
    return cores


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of this process in CPUs (the smallest of its group and parents), or None."""
    quotas: list[float] = []
    groups = dict(_groups(root))
    for mount in _mounts(root):
        group = groups.get(mount.version)
        if group is not None:
            quotas += _quotas(mount, group)
    return min(quotas, default=None)


def _groups(root: Path) -> Iterator[tuple[int, str]]:
    """Yield (version, group) of this process: its group of version 2, and its CPU group of version 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield 2, group
        elif "cpu" in controllers.split(","):
            yield 1, group


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _text(root / "proc/self/mountinfo").splitlines():
        place, _, kind = line.partition(" - ")
        _, _, _, top, point, *_ = place.split()
        file_system, _, *options = kind.split()
        folder = root / point.lstrip("/")
        if file_system == "cgroup2":
            yield _Mount(2, top, folder)
        elif file_system == "cgroup" and "cpu" in ",".join(options).split(","):
            yield _Mount(1, top, folder)


def _quotas(mount: _Mount, group: str) -> Iterator[float]:
    """Yield the quotas in CPUs of a group and its parents, as far as the mount shows them."""
    folder = mount.folder
    top = mount.top.rstrip("/")
    if group == top or group.startswith(f"{top}/"):
        folder = mount.folder / group[len(top) :].strip("/")
    if ".." in folder.parts:  # the group lies outside this process's namespace
        folder = mount.folder
    while True:
        if mount.version == 2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():  # "max" and "-1" mean no limit
            yield int(quota) / int(period)
        if folder == mount.folder:
            return
        folder = folder.parent


def _text(path: Path) -> str:
    """Return the text of a system file without its last newline; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeError):
        return ""
