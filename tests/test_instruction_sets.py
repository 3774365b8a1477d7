"""Whatever chooses by the processor, under the instruction sets of older ones."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

AVX512 = "+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
# oneDNN, PyTorch and numba are told separately.
SETS = {
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "NUMBA_CPU_FEATURES": ""},
    "AVX-512 without bfloat16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "NUMBA_CPU_FEATURES": AVX512},
    "without numba": {},
}
NUMBA_CPUS = {"": "haswell", AVX512: "skylake-avx512"}


@pytest.mark.long
@pytest.mark.thorough
@pytest.mark.parametrize("name", SETS)
def test_on_an_older_processor(name: str, tmp_path: Path) -> None:
    """In a process of its own, as all three ask the processor once."""
    if "AVX-512" in name and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("no AVX-512")
    environment = os.environ | SETS[name]
    if "NUMBA_CPU_FEATURES" in environment:
        environment["NUMBA_CPU_NAME"] = NUMBA_CPUS[environment["NUMBA_CPU_FEATURES"]]
    if name == "without numba":
        (tmp_path / "numba.py").write_text("raise ImportError('hidden')")
        environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment.get("PYTHONPATH", "")))
    # These two start processes of their own, and compile what no instruction set changes.
    others = "not made_of and not without_numba"
    options = ["-qm", "by_cpu", "-k", others, *"-p no:cacheprovider -p no:xdist -rf".split()]
    command = [sys.executable, "-m", "pytest", *options, "tests/kernels", "tests/models"]
    root = Path(__file__).resolve().parents[1]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", run.stdout)
    assert int(passed) > 20
