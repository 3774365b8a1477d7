"""How many threads a process takes: cores, not their siblings, quotas of any depth, and the user's own choice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paged.executors.cpu_threads import choose_threads, cpu_quota

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")
V2 = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
HYBRID = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
V1 = "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"


def write(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def with_cores(root: Path, *cores: str) -> None:
    """Describe cores, each by the list of its CPUs."""
    for core in cores:
        for cpu in core.split(","):
            write(root, {f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list": core})


def with_v2(root: Path, group: str, **quotas: str) -> Path:
    """Describe a group of version 2. quotas: cpu.max by the depth of a group, "of_1" for the first below the top."""
    write(root, {"proc/self/cgroup": f"0::{group}", "proc/self/mountinfo": V2})
    folders = group.strip("/").split("/")
    for depth, quota in quotas.items():
        folder = "/".join(folders[: int(depth.removeprefix("of_"))])
        write(root, {f"sys/fs/cgroup/{folder}/cpu.max": quota})
    return root


def test_a_thread_for_each_core(tmp_path: Path) -> None:
    with_cores(tmp_path, "0,4", "1,5", "2,6", "3,7")
    for cpus, current, count in (
        (range(8), 8, 4),  # PyTorch's default is every CPU, or with MKL every core
        (range(8), 4, 4),
        ({0, 4}, 2, 1),
        ({0, 4, 1}, 3, 2),
        ({0, 1}, 2, 2),
        ({5}, 1, 1),
    ):
        assert choose_threads(current, {}, cpus, tmp_path).num_threads == count, cpus


def test_older_and_missing_descriptions(tmp_path: Path) -> None:
    """Linux before 5.1 calls the list of a core's CPUs otherwise; without any, each CPU is a core."""
    for cpu in "01":
        write(tmp_path, {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": "0-1"})
    assert choose_threads(2, {}, {0, 1}, tmp_path).num_threads == 1
    assert choose_threads(2, {}, {0, 1}, tmp_path / "nothing").num_threads == 2


@pytest.mark.parametrize(
    ("quotas", "count"),
    [
        ({"of_3": "max 100000"}, 8),
        ({"of_3": "300000 100000"}, 3),
        ({"of_3": "250000 100000"}, 2),
        ({"of_3": "50000 100000"}, 1),
        ({"of_3": "max 100000", "of_1": "100000 50000"}, 2),
        ({"of_3": "400000 100000", "of_2": "max 100000", "of_1": "1600000 100000"}, 4),
        ({"of_3": "1600000 100000"}, 8),
    ],
)
def test_the_least_quota_of_a_group_and_its_parents(tmp_path: Path, quotas: dict[str, str], count: int) -> None:
    with_v2(tmp_path, "/a/b/c", **quotas)
    choice = choose_threads(8, {}, range(8), tmp_path)
    assert choice.num_threads == count
    assert ("quota" in choice.reason) == (count < 8)


@pytest.mark.parametrize(("top", "group"), [("/", "/docker/1"), ("/docker/1", "/docker/1"), ("/docker", "/docker/1")])
def test_quotas_of_version_1(tmp_path: Path, top: str, group: str) -> None:
    """Beside a mount of version 2 without quotas; a container's mount begins at its own group."""
    write(tmp_path, {"proc/self/mountinfo": f"{V1.format(top=top)}\n{HYBRID}"})
    write(tmp_path, {"proc/self/cgroup": f"9:name=systemd:/\n4:cpu,cpuacct:{group}\n0::/"})
    folder = f"sys/fs/cgroup/cpu,cpuacct/{group.removeprefix(top.rstrip('/'))}"
    for quota, expected in (("150000", 1.5), ("-1", None)):
        write(tmp_path, {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"})
        assert cpu_quota(tmp_path) == expected
    write(tmp_path, {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "90000"})
    write(tmp_path, {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000"})
    assert cpu_quota(tmp_path) == 0.9


def test_a_group_outside_of_the_namespace_has_the_mounts_quota(tmp_path: Path) -> None:
    with_v2(tmp_path, "/../other")
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "200000 100000", "sys/fs/other/cpu.max": "100000 100000"})
    assert cpu_quota(tmp_path) == 2


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PLACES"])
def test_the_users_choice_stays(tmp_path: Path, name: str) -> None:
    with_v2(tmp_path, "/a", of_1="100000 100000")
    assert choose_threads(8, {name: "6"}, range(8), tmp_path) == (8, f"{name}=6")
    assert choose_threads(5, {}, range(8), tmp_path) == (5, "torch.set_num_threads")
    assert choose_threads(8, {name: ""}, range(8), tmp_path).num_threads == 1


_EXECUTOR = """
import os, sys
cpus = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, cpus[: int(sys.argv[1])])
import torch
import paged
from paged.executors import cpu_threads
if sys.argv[2]:
    cpu_threads.cpu_quota = lambda root: float(sys.argv[2])
paged.LlmExecutor.from_pretrained(sys.argv[3], device="cpu", num_blocks=8)
print(torch.get_num_threads())
"""


_ALL = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


@pytest.mark.parametrize(
    ("cpus", "quota", "variables", "count"),
    [
        (_ALL, "1.9", {}, 1),
        pytest.param(1, "", {}, 1, marks=pytest.mark.thorough),
        pytest.param(_ALL, "1", {"OMP_NUM_THREADS": str(_ALL)}, _ALL, marks=pytest.mark.thorough),
    ],
)
def test_executors_take_as_many(
    llama_folder: Path, cpus: int, quota: str, variables: dict[str, str], count: int
) -> None:
    """By affinity, by a quota, and by the environment."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", _EXECUTOR, str(cpus), quota, str(llama_folder)]
    result = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=True)
    assert int(result.stdout) == count
