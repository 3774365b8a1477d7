"""Write the kernels as a repository for Hugging Face's `kernels` library (0.17), which loads it from a local path.

    python -m paged.tools.kernels_package FOLDER

A repository holds one build for each backend: `build/torch-<backend>/` with metadata.json, an `__init__.py` that
exports the public operations and `layers`, and a copy of the kernels. The library may load several versions of a
repository into one process, beside an installed `paged`. So every build has custom ops in a namespace of its own, whose
name ends in a hash of the sources.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import paged
from paged.errors import InvalidInputError
from paged.kernels.core import errors

BACKENDS = ("cpu", "cuda", "rocm")
_KERNELS = Path(paged.__file__).parent / "kernels"
# The copy's place in a build. `layers` beside it belongs to the library.
_COPY = "operations"
_NAMESPACE = 'NAMESPACE = "paged"'


def main(argv: Sequence[str] | None = None) -> int:
    """Write the repository to the folder on the command line."""
    arguments = sys.argv[1:]
    if argv is not None:
        arguments = list(argv)
    if len(arguments) != 1:
        print("usage: python -m paged.tools.kernels_package FOLDER", file=sys.stderr)
        return 2
    for build in write_repository(Path(arguments[0])):
        print(build)
    print('metadata.json says "license": "none". Publishing needs a license, which the owner of the sources chooses.')
    return 0


def write_repository(folder: Path) -> list[Path]:
    """Write a build for each of BACKENDS in place of earlier ones; return their folders.

    Raises:
        InvalidInputError: the folder cannot be written.
    """
    digest = _digest()
    builds = []
    try:
        for backend in BACKENDS:
            build = folder / "build" / f"torch-{backend}"
            if build.exists():
                shutil.rmtree(build)
            _write_build(build, backend, f"paged_{backend}_{digest}")
            builds.append(build)
    except OSError as error:
        raise InvalidInputError(f"{folder}: cannot be written: {error.strerror}, expected a folder") from error
    return builds


def public_names() -> dict[str, tuple[str, ...]]:
    """Return the public names that lie in the kernels, by their module below `paged.kernels`."""
    names = {"core.errors": tuple(name for name in paged._EXPORTS["paged.errors"] if hasattr(errors, name))}
    for module, exports in paged._EXPORTS.items():
        if module.startswith("paged.kernels."):
            names[module.removeprefix("paged.kernels.")] = exports
    return names


def _sources() -> list[Path]:
    """Return the files to copy: sources, and tile choices in JSON."""
    return sorted([*_KERNELS.rglob("*.py"), *_KERNELS.rglob("*.json")])


def _digest() -> str:
    sha = hashlib.sha256()
    for path in _sources():
        sha.update(str(path.relative_to(_KERNELS)).encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()[:10]


def _write_build(build: Path, backend: str, name: str) -> None:
    """Write one build; name: of its module in `sys.modules` and of its namespace in `torch.ops`."""
    for path in _sources():
        target = build / _COPY / path.relative_to(_KERNELS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    custom_ops = build / _COPY / "core" / "custom_ops.py"
    text = custom_ops.read_text()
    assert text.count(_NAMESPACE) == 1
    custom_ops.write_text(text.replace(_NAMESPACE, f'NAMESPACE = "{name}"'))
    (build / "__init__.py").write_text(_init())
    metadata = {
        "id": name,
        "name": "paged",
        "version": 1,
        "kernels-minver": "0.17.0",
        "license": "none",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def _init() -> str:
    lines = ['"""Paged attention, fused MoE and their layers in Triton; see `paged`, whose kernels these are."""', ""]
    lines.append(f"from .{_COPY}.layers import modules as layers")
    exports = ["layers"]
    for module, names in public_names().items():
        lines.append(f"from .{_COPY}.{module} import {', '.join(names)}")
        exports += names
    lines += ["", f"__all__ = {sorted(exports)!r}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
