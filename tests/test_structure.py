"""The shape of the package: who imports whom, what an import costs, and that no bare top-level name appears."""

import re
import subprocess
import sys
from dataclasses import is_dataclass
from enum import Enum
from graphlib import TopologicalSorter
from inspect import isabstract
from pathlib import Path
from typing import Any

import pytest

import paged
from tests.deadline import HANG_S
from tests.structure.imports import (
    FORWARDERS,
    MAY_IMPORT,
    ROOT,
    SOURCES,
    file_imports,
    folder_imports,
    names_imported,
    package_of,
)


def test_imports_run_one_way() -> None:
    """Nothing imports interop, kernels take torch and triton alone, and numba kernels their own."""
    for package, path in SOURCES:
        imports = names_imported(path)
        names = {name.split(".")[0] for name in imports}
        assert not names & {"kernels", "executors", "models", "serving", "tests", "bench"}, path
        if path not in FORWARDERS:
            assert {package_of(name) for name in imports} <= MAY_IMPORT[package] | {package, None}, path
        if ROOT / "paged" / "interop" not in path.parents:
            assert not any(name.startswith("paged.interop") for name in imports), path
        if package == "kernels":
            of_numba = {"numba", "llvmlite", "numpy"} if ROOT / "kernels" / "cpu" in path.parents else set()
            assert names <= {"torch", "triton", "paged", "__future__"} | sys.stdlib_module_names | of_numba, path


def test_no_file_imports_itself_through_others() -> None:
    graph = file_imports()
    assert "paged.kernels.core.operation" in graph["paged.kernels.layers.rms_norm"]
    TopologicalSorter(graph).prepare()  # its CycleError names the files


def test_no_folder_imports_itself_through_others() -> None:
    graph = folder_imports()
    assert "executors/requests" in graph["executors/sampling"]
    TopologicalSorter(graph).prepare()


def test_families_of_kernels_stand_side_by_side() -> None:
    """What several share lies in core.

    A family imports another only where that one owns what it reads.
    """
    graph = {name: imports for name, imports in folder_imports().items() if name.startswith("kernels/")}
    assert graph.pop("kernels/core") == set()
    assert graph.pop("kernels/cpu") == {"kernels/core"}
    families = {name for name in graph if not name.startswith("kernels/cpu/")}
    of_numba = {name: imports for name, imports in graph.items() if name not in families}
    for name, imports in of_numba.items():
        assert imports <= {"kernels/core", "kernels/cpu", name.replace("cpu/", "")}, name
    owners = {
        "attention": {"cache", "layers"},
        "cache": {"layers"},
        "layers": set(),
        "lora": set(),
        "moe": {"layers", "quantization"},
        "quantization": {"layers"},
        "recurrent": set(),
        "sampling": set(),
    }
    assert families == {f"kernels/{family}" for family in owners}
    for family, read in owners.items():
        allowed = {"kernels", "kernels/core", "kernels/cpu"} | {f"kernels/{other}" for other in read}
        assert graph[f"kernels/{family}"] <= allowed, family


def _does_something(value: Any) -> bool:
    """Functions, and classes that are neither data nor errors nor contracts: others' tests try those."""
    if not isinstance(value, type):
        return callable(value)
    return not (is_dataclass(value) or isabstract(value) or issubclass(value, (BaseException, Enum, tuple)))


def test_public_names_are_tested_where_they_are_looked_for() -> None:
    """In a file of the module's name, or by their own in the tests of its folder; those of `paged/` stand beside
    those of the other packages."""
    missing = {}
    for module, names in paged._EXPORTS.items():
        *folders, name_of_file = module.removeprefix("paged.").split(".")
        folder = ROOT.joinpath("tests", *(folders or ["paged"]))
        words = {word for path in folder.glob("test_*.py") for word in re.findall(r"\w+", path.read_text())}
        has_file = (folder / f"test_{name_of_file}.py").exists()
        missing |= {
            name: module
            for name in names
            if _does_something(getattr(paged, name)) and not has_file and name not in words
        }
    assert missing == {}


def test_block_bookkeeping_takes_no_torch() -> None:
    pool = ROOT / "paged" / "cache" / "pool.py"
    assert not {"torch", "numpy"} & {name.split(".")[0] for name in names_imported(pool)}


def test_layout_leaves_top_level_names_alone() -> None:
    for name in ("bench", "kernels", "executors", "models", "serving"):
        assert not (ROOT / name / "__init__.py").exists()
        assert (ROOT / "paged" / name).readlink() == Path("..") / name
    assert not (ROOT / "conftest.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_works_without_torch_and_without_triton() -> None:
    """`import paged` takes neither; without triton CPU operations run, and the Triton backend is refused by name."""
    code = """
import os, sys
sys.modules["triton"] = None
os.environ.pop("TRITON_INTERPRET", None)
import paged
assert not {"torch", "triton", "numpy"} & {name for name, module in sys.modules.items() if module}, sorted(sys.modules)
import torch
for name in paged.__all__:
    getattr(paged, name)
assert not {"fastapi", "uvicorn", "zmq", "transformers"} & sys.modules.keys()
x = torch.randn(2, 16)
assert paged.rms_norm(x, torch.ones(16)).shape == x.shape
os.environ["PAGED_BACKEND"] = "triton"
try:
    paged.rms_norm(x, torch.ones(16))
except paged.UnsupportedError as error:
    assert "triton is not installed" in str(error)
else:
    raise SystemExit("ran without triton")
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_public_name_loads() -> None:
    for name in paged.__all__:
        assert getattr(paged, name) is not None
        assert name in dir(paged)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = paged.nothing


WITHOUT_EXTRAS = """
import sys
import pytest

sys.modules.update(dict.fromkeys(sys.argv[1:]))  # importing None raises ModuleNotFoundError
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:schemathesis", "tests"]))
"""


@pytest.mark.thorough
def test_tests_are_collected_without_extras() -> None:
    """As on a machine that has what kernels and models need, and no server."""
    extras = "aiohttp anthropic fastapi httptools llguidance msgspec openai prometheus_client uvicorn uvloop"
    command = [sys.executable, "-c", WITHOUT_EXTRAS, *extras.split(), "xgrammar", "zmq", "PIL"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=HANG_S)
