"""What imports what: every file's imports, and the folders that they make."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# package -> packages of ours it may import, besides itself; from the bottom up
MAY_IMPORT = {
    "kernels": set(),
    "paged": {"kernels"},
    "models": {"kernels", "paged"},
    "executors": {"kernels", "paged", "models"},
    "serving": {"kernels", "paged", "models", "executors"},
    "bench": {"kernels", "paged", "models", "executors", "serving"},
}
# These only forward to the public names, to the command line, and to names that pages give.
FORWARDERS = {
    ROOT / "paged" / "__init__.py",
    ROOT / "paged" / "__main__.py",
    ROOT / "paged" / "interop" / "kv_events.py",
    ROOT / "paged" / "interop" / "structured.py",
}
SOURCES = [(package, path) for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]
Graph = dict[str, set[str]]


@cache
def _imports(path: Path) -> tuple[set[str], set[str]]:
    """Full names of what is imported when the file runs, and of what is for a type checker alone.

    Numba kernels that a function imports are left out: the function runs them where numba is installed.
    """
    nodes = list(ast.walk(ast.parse(path.read_text())))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    in_functions = {node for function in functions for node in ast.walk(function)}
    tests = [node for node in nodes if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    for_types = {each for node in tests if node.test.id == "TYPE_CHECKING" for each in node.body}
    names: tuple[set[str], set[str]] = (set(), set())
    for node in nodes:
        if isinstance(node, ast.Import):
            names[node in for_types].update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module
            if path.is_relative_to(ROOT / "kernels"):
                assert not f"{module}.".startswith("paged."), f"{path}: absolute import"
                if node.level:
                    folders = ("paged", *path.relative_to(ROOT).parts[: -node.level], *filter(None, [module]))
                    module = ".".join(folders)
                if node in in_functions and module.startswith("paged.kernels.cpu."):
                    continue
            else:
                assert node.level == 0, f"{path}: relative import"
            names[node in for_types].update(f"{module}.{alias.name}" for alias in node.names)
    return names


def names_imported(path: Path, *, when_run: bool = False) -> set[str]:
    """Full names of the modules and of what is taken from them; `when_run`: not those for a type checker alone."""
    run, for_types = _imports(path)
    return run if when_run else run | for_types


def package_of(name: str) -> str | None:
    """The key of MAY_IMPORT that a full name belongs to, None where it is not ours."""
    first, *rest = name.split(".")
    if first != "paged":
        return None
    return rest[0] if rest and rest[0] in MAY_IMPORT else "paged"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "paged" else ("paged", *parts))


@cache
def file_imports(*, when_run: bool = False) -> Graph:
    """module -> the modules of ours that it imports; the forwarders are left out."""
    names = {module_of(path): names_imported(path, when_run=when_run) for _, path in SOURCES if path not in FORWARDERS}
    return {
        module: {each if each in names else each.rpartition(".")[0] for each in imports} & names.keys() - {module}
        for module, imports in names.items()
    }


def folder_of(module: str) -> str:
    """`kernels/moe` of `paged.kernels.moe.gemm`.

    The files of `paged/` itself are two folders, as some lie below the cache and some above it.
    """
    parts = module.split(".")[1:-1]
    if not parts and reaches_cache(module):
        return "paged, above the cache"
    return "/".join(parts if parts and parts[0] in MAY_IMPORT else ["paged", *parts])


@cache
def reaches_cache(module: str) -> bool:
    """Whether the file, or one that it imports, imports the cache."""
    imports = file_imports(when_run=True)[module]
    return any(each.startswith("paged.cache.") or reaches_cache(each) for each in imports)


def folder_imports() -> Graph:
    """folder -> the folders that its files import when they run."""
    graph: Graph = {folder_of(module): set() for module in file_imports()}
    for module, imports in file_imports(when_run=True).items():
        folder = folder_of(module)
        graph[folder] |= {folder_of(each) for each in imports} - {folder}
    return graph
