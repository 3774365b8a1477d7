"""How threads wait: what `import paged` sets before torch, what it leaves, and the warning if it comes too late."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paged.executors.thread_waits import SPIN_COUNT, SPIN_VARIABLE, without_our_choice

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP is PyTorch's on Linux alone")
OURS = f"{SPIN_VARIABLE} = '{SPIN_COUNT}'"


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python without the choices of this process, which may be a user's."""
    chosen = ("GOMP_", "OMP_", "KMP_", "MKL_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(chosen)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=True)


def test_libgomp_reads_what_import_paged_sets() -> None:
    result = run("import paged, torch; torch.ones(9).sum()", OMP_DISPLAY_ENV="VERBOSE")
    assert OURS in result.stderr


def test_processes_that_it_starts_wait_alike() -> None:
    child = "import os; print(os.environ.get('GOMP_SPINCOUNT'))"
    result = run(f"import paged, subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
    assert result.stdout.strip() == SPIN_COUNT


@pytest.mark.parametrize(
    ("name", "value"), [(SPIN_VARIABLE, "7"), ("OMP_WAIT_POLICY", "active"), ("KMP_BLOCKTIME", "0")]
)
def test_the_users_choice_stays(name: str, value: str) -> None:
    code = "import os; before = dict(os.environ); import paged; assert dict(os.environ) == before"
    run(code, **{name: value})


@pytest.mark.thorough
@pytest.mark.parametrize("loaded", ["import torch", "import ctypes, sys; ctypes.CDLL(sys.argv[1])"])
def test_nothing_changes_once_libgomp_is_loaded(loaded: str) -> None:
    library = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch; print(next(l.split()[-1] for l in open('/proc/self/maps') if 'gomp' in l))",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    run(f"{loaded}\nimport os; before = dict(os.environ); import paged; assert dict(os.environ) == before", library)


_EXECUTORS = """
import sys
{first}
import torch, paged
torch.set_num_threads(int(sys.argv[2]))
for _ in range(2):
    paged.LlmExecutor.from_pretrained(sys.argv[1], device="cpu", num_blocks=8)
"""


@pytest.mark.parametrize(
    ("first", "threads", "variables", "count"),
    [
        ("import torch", "3", {}, 1),
        pytest.param("import torch", "1", {}, 0, marks=pytest.mark.thorough),
        pytest.param("import torch", "3", {"OMP_WAIT_POLICY": "passive"}, 0, marks=pytest.mark.thorough),
        pytest.param("import paged", "3", {}, 0, marks=pytest.mark.thorough),
    ],
)
def test_executors_warn_once_if_threads_spin(
    llama_folder: Path, first: str, threads: str, variables: dict[str, str], count: int
) -> None:
    result = run(_EXECUTORS.format(first=first), str(llama_folder), threads, **variables)
    assert result.stderr.count(f"{SPIN_VARIABLE}={SPIN_COUNT}") == count, result.stderr


def test_programs_of_others_wait_as_they_do_by_default() -> None:
    assert without_our_choice({SPIN_VARIABLE: SPIN_COUNT, "A": "1"}) == {"A": "1"}
    assert without_our_choice({SPIN_VARIABLE: "7"}) == {SPIN_VARIABLE: "7"}
