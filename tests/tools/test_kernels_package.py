"""The kernels as a repository of Hugging Face's `kernels`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paged
from paged.bench.cards.cards import CARDS
from paged.tools.kernels_package import BACKENDS, main, write_repository

ROOT = Path(__file__).resolve().parents[2]
HUB_KERNELS = ROOT / ".peers" / "kernels-0.17.0"


@pytest.mark.thorough
def test_a_build_needs_nothing_of_ours(tmp_path: Path) -> None:
    """All its files import where `paged` does not, and an operation computes in a namespace of its own."""
    write_repository(tmp_path)
    build = tmp_path / "build" / "torch-cpu"
    name = json.loads((build / "metadata.json").read_text())["id"]
    modules = []
    for path in sorted((build / "operations").rglob("*.py")):
        if "cpu" not in path.relative_to(build).parts:  # numba kernels need numba
            modules.append(".".join((name, *path.relative_to(build).with_suffix("").parts)))
    code = f"""
import importlib, importlib.util, sys
sys.modules["paged"] = None
spec = importlib.util.spec_from_file_location("{name}", "{build}/__init__.py")
sys.modules["{name}"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
for module in {modules}:
    importlib.import_module(module)
import torch
x = torch.full((2, 16), 3.0)
for run in (package.rms_norm, torch.ops.{name}.rms_norm):
    torch.testing.assert_close(run(x, torch.ones(16)), torch.ones(2, 16))
assert not hasattr(torch.ops.paged, "rms_norm")
try:
    package.rms_norm(x.int(), torch.ones(16))
except package.InvalidInputError as error:
    assert "x: dtype torch.int32" in str(error)
else:
    raise AssertionError("an integer was normalised")
assert package.layers.RMSNorm
for name in package.__all__:
    getattr(package, name)
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": ""}, check=True)


@pytest.mark.thorough
@pytest.mark.skipif(not HUB_KERNELS.is_dir(), reason="`make hub-kernels` installs Hugging Face's kernels")
def test_the_library_loads_it_and_the_oracle_is_green(tmp_path: Path) -> None:
    """In Triton's interpreter. With numba it takes 44 s, because a copy is compiled anew."""
    write_repository(tmp_path)
    environ = dict(os.environ, PYTHONPATH=f"{HUB_KERNELS}:{ROOT}", HF_HUB_OFFLINE="1")
    environ |= {"PAGED_BACKEND": "triton", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.tools.hub_kernels", str(tmp_path)]
    printed = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout
    assert printed.split() == list(CARDS)


def test_a_second_build_replaces_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stale = tmp_path / "build" / "torch-cuda" / "stale.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert main([str(tmp_path)]) == 0
    assert not stale.exists()
    assert "Publishing needs a license" in capsys.readouterr().out
    ids = set()
    for backend in BACKENDS:
        metadata = json.loads((tmp_path / "build" / f"torch-{backend}" / "metadata.json").read_text())
        assert metadata["backend"] == {"type": backend}
        ids.add(metadata["id"])
    assert len(ids) == len(BACKENDS)
    (tmp_path / "file").touch()
    with pytest.raises(paged.InvalidInputError, match="cannot be written: Not a directory"):
        write_repository(tmp_path / "file")
