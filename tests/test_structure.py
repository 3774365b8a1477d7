"""The shape of the package: who imports whom, what an import costs, and that no bare top-level name appears."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import paged

ROOT = Path(__file__).resolve().parents[1]
# package -> packages of ours it may import, besides itself
MAY_IMPORT = {
    "kernels": set(),
    "paged": {"kernels"},
    "models": {"kernels", "paged"},
    "executors": {"kernels", "paged", "models"},
    "bench": {"kernels", "paged", "models", "executors"},
}
# These two only forward to the public names and to the command line.
FORWARDERS = {ROOT / "paged" / "__init__.py", ROOT / "paged" / "__main__.py"}
SOURCES = [(package, path) for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _typing_imports(path: Path) -> set[str]:
    blocks = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.If)]
    return {
        f"{node.module}.{alias.name}"
        for block in blocks
        if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _package_of(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] != "paged":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "paged"


@pytest.mark.parametrize(("package", "path"), SOURCES, ids=lambda value: str(value).removeprefix(f"{ROOT}/"))
def test_imports_run_one_way(package: str, path: Path) -> None:
    imports = _imports(path)
    assert not {name.split(".")[0] for name in imports} & {"kernels", "executors", "models", "tests", "bench"}
    if path not in FORWARDERS:
        ours = {found for name in imports if (found := _package_of(name))}
        assert ours <= MAY_IMPORT[package] | {package}
    if package == "kernels":
        third_party = {name.split(".")[0] for name in imports} - sys.stdlib_module_names - {"paged", "__future__"}
        assert third_party <= {"torch", "triton"}


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "paged" else ("paged", *parts))


def test_no_file_imports_itself_through_others() -> None:
    files = {_module(path): _imports(path) for _, path in SOURCES if path not in FORWARDERS}
    graph = {
        name: {each if each in files else each.rpartition(".")[0] for each in imports} & files.keys() - {name}
        for name, imports in files.items()
    }
    assert "paged.kernels.common.custom_ops" in graph["paged.kernels.layers.ops"]
    TopologicalSorter(graph).prepare()  # its CycleError names the files


def _room(module: str) -> str:
    """The folder of a file, which holds its PyTorch twins too; a file at the top of its package stands for itself."""
    parts = [part for part in module.split(".")[1:] if part != "torch_ops"]
    depth = 2 if parts[0] in ("kernels", "models", "executors", "bench") else 1
    return ".".join(parts[:depth] if len(parts) > depth else parts)


def _rooms() -> dict[str, set[str]]:
    """Each folder, and those that its files import when they run, not for a type checker alone."""
    files = {_module(path): _imports(path) - _typing_imports(path) for _, path in SOURCES if path not in FORWARDERS}
    rooms: dict[str, set[str]] = {}
    for name, imports in files.items():
        found = {each if each in files else each.rpartition(".")[0] for each in imports} & files.keys()
        rooms.setdefault(_room(name), set()).update({_room(each) for each in found} - {_room(name)})
    return rooms


def test_no_folder_imports_itself_through_others() -> None:
    rooms = _rooms()
    assert "executors.requests" in rooms["executors.sampling"]
    TopologicalSorter(rooms).prepare()


def test_families_of_kernels_stand_side_by_side() -> None:
    rooms = {name: imports for name, imports in _rooms().items() if name.startswith("kernels.")}
    assert rooms.pop("kernels.common") == set()
    assert set(rooms) == {f"kernels.{family}" for family in ("attention", "cache", "layers", "lora", "moe", "sampling")}
    assert all(imports <= {"kernels.common"} for imports in rooms.values())


def test_folders_show_few_files() -> None:
    """A first look at a folder takes in some fourteen names; 16 is what `kernels/common` holds."""
    folders = [path.parent for _, path in SOURCES]
    assert {folder: folders.count(folder) for folder in folders if folders.count(folder) > 16} == {}


def test_interop_is_a_leaf() -> None:
    interop = ROOT / "paged" / "interop"
    for _, path in SOURCES:
        assert interop in path.parents or not any(name.startswith("paged.interop") for name in _imports(path)), path


def test_block_bookkeeping_takes_no_torch() -> None:
    pool = ROOT / "paged" / "cache" / "blocks" / "pool.py"
    assert not {"torch", "numpy"} & {name.split(".")[0] for name in _imports(pool)}


def test_layout_leaves_top_level_names_alone() -> None:
    for name in ("bench", "kernels", "executors", "models"):
        assert not (ROOT / name / "__init__.py").exists()
        assert (ROOT / "paged" / name).readlink() == Path("..") / name
    assert not (ROOT / "conftest.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_importing_paged_takes_neither_torch_nor_triton() -> None:
    code = "import paged, sys; assert not {'torch', 'triton', 'numpy'} & sys.modules.keys(), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_works_without_triton() -> None:
    """On a machine without triton every CPU operation runs, and the Triton backend is refused by name."""
    code = """
import os, sys
sys.modules["triton"] = None
os.environ.pop("TRITON_INTERPRET", None)
import torch, paged
for name in paged.__all__:
    getattr(paged, name)
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
