"""Copies of source files with a fault."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest


def load_copy(name: str, folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Write `source` to a file, from which Triton reads its kernels, and import it under `name` for as long as a test
    runs."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, copy)
    spec.loader.exec_module(copy)
    return copy


def faulty_copies(
    modules: Sequence[ModuleType], folder: Path, text: str, replacement: str, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """Copies of modules, each of which may import those before it, in which `text` is replaced; the last of them."""
    sources = [Path(module.__file__ or "").read_text() for module in modules]
    assert any(text in source for source in sources), "the kernels have changed: this mutation no longer applies"
    copies = {module.__name__: "faulty_" + module.__name__.rpartition(".")[2] for module in modules}
    for source, name in zip(sources, copies.values(), strict=True):
        faulty = replaced(source, text, replacement)
        for original, copied in copies.items():
            faulty = faulty.replace(original, copied)
        copy = load_copy(name, folder, faulty, monkeypatch)
    return copy


def replaced(source: str, text: str, replacement: str) -> str:
    """The source with a fault, or as it is where `text` is empty."""
    return source.replace(text, replacement) if text else source
