"""A hook of MkDocs: pages of the API reference, one an area, from the public names of `paged` and their docstrings."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import paged

SOURCES = Path("build/api")
IMPORT = "Every name here imports from `paged`."
# Where a name's module begins, and the page it is on; the first that fits.
AREAS = {
    "paged.kernels": "Kernels",
    "paged.executors": "Executors and engine",
    "paged.models": "Models",
    "paged.cache": "Cache",
    "paged.tools.picture": "Cache",
    "paged.errors": "Errors",
    "paged": "Batches and metadata",
}


def on_startup(command: str, dirty: bool) -> None:
    """The sources as the reference's reader wants them: packages, not links; before it looks for them."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    shutil.copytree("paged", SOURCES / "paged", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (SOURCES / "paged").rglob("*"):
        if path.is_dir():
            (path / "__init__.py").touch()
        elif path.suffix == ".py":  # what a caller of an operation gets
            path.write_text(re.sub(r"-> Run\[(.*)\]:\n", r"-> \1:\n", path.read_text()))


def on_config(config: MkDocsConfig) -> None:
    """The reference at the end of the navigation."""
    pages: Any = [{title: path} for title, path in _paths().items()]
    assert config.nav is not None
    config.nav.append({"Reference": pages})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """The pages of the reference, which lie in no folder."""
    names: dict[str, list[str]] = defaultdict(list)
    for name in paged.__all__:
        module = paged._MODULE_OF.get(name)
        if module is not None:
            area = next(title for start, title in AREAS.items() if module.startswith(start))
            names[area].append(f"::: {module}.{name}")
    for title, path in _paths().items():
        files.append(File.generated(config, path, content="\n\n".join([f"# {title}", IMPORT, *sorted(names[title])])))


def _paths() -> dict[str, str]:
    return {title: f"reference/{title.split()[0].lower()}.md" for title in dict.fromkeys(AREAS.values())}
