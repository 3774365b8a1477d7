"""How many threads the operations of a CPU take: by the cores that this process may use, and by its quota of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# Variables by which users choose the number of threads or their places. PyTorch and its libraries obey them.
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
    """num_threads: number of threads. reason: what it follows from."""

    num_threads: int
    reason: str


class _Mount(NamedTuple):
    """A file system of control groups. version: 1 or 2. top: the group at its mount point. folder: of that."""

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

    They take one for each core that the process may use; a second thread on a core would share its arithmetic. A quota
    of CPU time (cgroup) lowers that, rounded down: with more threads than the quota pays for, all stand still at the
    end of each period. A choice of the user stays: an environment variable, or another number than PyTorch's default.

    Args:
        current: PyTorch's number of threads.
        cpus: the CPUs that this process may use; by default its affinity.
        root: folder with `proc` and `sys`.
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
    """Return the cores of some CPUs, each as the list of its CPUs; a CPU that the system does not describe is one."""
    cores = set()
    for cpu in cpus:
        topology = root / "sys/devices/system/cpu" / f"cpu{cpu}" / "topology"
        siblings = _text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list")
        cores.add(siblings or str(cpu))
    return cores


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPUs that this process's control group may keep busy, the least of its own and its parents' quotas;
    None if there is no limit."""
    quotas: list[float] = []
    groups = dict(_groups(root))
    for mount in _mounts(root):
        group = groups.get(mount.version)
        if group is not None:
            quotas += _quotas(mount, group)
    return min(quotas, default=None)


def _groups(root: Path) -> Iterator[tuple[int, str]]:
    """Yield this process's group of version 2, and that which limits CPU time of version 1, each after its version."""
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
    """Yield the quotas of a group and its parents, as far as the mount shows them, in CPUs."""
    folder = mount.folder
    top = mount.top.rstrip("/")
    if group == top or group.startswith(f"{top}/"):
        folder = mount.folder / group[len(top) :].strip("/")
    if ".." in folder.parts:  # a group outside of this process's namespace
        folder = mount.folder
    while True:
        if mount.version == 2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():  # not "max" or "-1": no limit
            yield int(quota) / int(period)
        if folder == mount.folder:
            return
        folder = folder.parent


def _text(path: Path) -> str:
    """Return the text of a file of the system without its last newline; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeError):
        return ""
