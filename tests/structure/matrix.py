"""Checks the oldest and newest PyTorch, Triton and transformers on every Python of this machine, and writes a table.

    python -m tests.structure.matrix [--python python3.11] [--torch oldest] [--triton newest] [--transformers newest]

Each combination gets an environment of its own in build/matrix (6 GB), which is removed afterwards. It runs
`paged verify --quick` and the tests of `CORE`. Rows of docs/stability.md are replaced by those of this run; other rows
stay. pip's settings decide the index. The exit code is 1 if something failed or could not be installed.
"""

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path
from typing import NamedTuple

from tests.structure.imports import ROOT

PAGE = ROOT / "docs" / "stability.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- /matrix -->\n"
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
PACKAGES = ("torch", "triton", "transformers")
AGES = ("oldest", "newest")
# Kernels, in Triton's interpreter too, cache, engine, transformers' models and custom ops.
CORE = (
    "tests/kernels/attention/test_paged_attention.py",
    "tests/kernels/moe/test_fused_moe.py",
    "tests/kernels/cache",
    "tests/cache/test_manager.py",
    "tests/executors/engine/test_engine.py",
    "tests/interop/test_transformers.py",
    "tests/interop/test_custom_ops.py",
)
_HEAD = (
    "| Python | torch | triton | transformers | numpy | `paged verify --quick` | core tests | date |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


class Cell(NamedTuple):
    """python: a command. The others: "oldest" or "newest"."""

    python: str
    torch: str
    triton: str
    transformers: str


def floors() -> dict[str, str]:
    """Return the oldest supported version of each package, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["transformers"]
    versions = {}
    for requirement in requirements:
        match = re.match(r"(\w+)>=([\d.]+)", requirement)
        if match and match[1] in PACKAGES:
            versions[match[1]] = match[2]
    return versions


def pythons() -> list[str]:
    """Return the Pythons that start: pyenv has commands of versions that it does not start, too."""
    names = []
    for name in PYTHONS:
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            names.append(name)
    return names


def install(cell: Cell, folder: Path) -> Path:
    """Make the cell's environment and return its Python.

    Triton comes last and without dependencies, because each PyTorch with CUDA asks for one version of it.
    """
    subprocess.run([cell.python, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    requirements = {}
    for name, floor in floors().items():
        is_oldest = getattr(cell, name) == "oldest"
        requirements[name] = f"{name}~={floor}.0" if is_oldest else f"{name}>={floor}"
    triton = requirements.pop("triton")
    others = ["pytest", "hypothesis"]
    if cell.triton == "oldest":
        others.append("numpy<2.4")  # the interpreter of Triton 3.6 fails with newer ones
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, *requirements.values(), "--editable", ".[cli,cpu,transformers]", *others], cwd=ROOT, check=True
    )
    subprocess.run([*pip, "--upgrade", "--no-deps", triton], check=True)
    return python


def versions(python: Path) -> list[str]:
    """Return the installed versions: Python, torch, triton, transformers, numpy."""
    code = (
        "import platform, importlib.metadata as m;"
        "print(platform.python_version(), *map(m.version, ('torch', 'triton', 'transformers', 'numpy')))"
    )
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def outcome(command: list[str | Path]) -> tuple[bool, str]:
    """Run a check; return whether it passed, and the last line of its output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = (result.stdout + result.stderr).strip().splitlines()
    print(*lines[-30:], sep="\n", flush=True)
    return result.returncode == 0, lines[-1].strip("= ")


def run(cell: Cell, folder: Path) -> tuple[bool, str]:
    """Return whether a cell passed, and its row of the table."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        python = install(cell, folder)
        installed = versions(python)
        verified, _ = outcome([python, "-m", "paged", "verify", "--quick"])
        tested, counts = outcome([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not thorough", *CORE])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    counts = re.sub(r", \d+ warnings?|, \d+ deselected| in .*", "", counts)
    words = {True: "passed", False: "failed"}
    row = [*installed, words[verified], counts, date.today().isoformat()]
    return verified and tested, f"| {' | '.join(row)} |\n"


def write(rows: list[str]) -> None:
    """Put rows into the page; those of the same versions are replaced."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    by_versions = {}
    for row in [*table.splitlines(keepends=True)[2:], *rows]:
        by_versions[tuple(row.split("|")[1:6])] = row
    body = "".join(by_versions[key] for key in sorted(by_versions))
    PAGE.write_text(before + BEGIN + _HEAD + body + END + after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", choices=PYTHONS, help="default: all that start here")
    for name in PACKAGES:
        parser.add_argument(f"--{name}", choices=AGES, help="default: both")
    args = parser.parse_args()
    names = [args.python] if args.python else pythons()
    ages = [[getattr(args, name)] if getattr(args, name) else list(AGES) for name in PACKAGES]
    has_passed = True
    for parts in itertools.product(names, *ages):
        cell = Cell(*parts)
        print(*cell, flush=True)
        try:
            passed, row = run(cell, ROOT / "build" / "matrix")
        except subprocess.CalledProcessError as error:  # such as no wheel for this Python
            print("not run:", error, flush=True)
            has_passed = False
            continue
        has_passed = has_passed and passed
        print(row, flush=True)
        write([row])
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
