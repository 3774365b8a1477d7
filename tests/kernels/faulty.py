"""Copies of source files with a fault."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paged.bench.cards.card import Card
from paged.bench.problems.arguments import Arguments
from paged.kernels.core import operation
from tests.headroom import unnoted


def load_copy(name: str, folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Write `source` to a file, from which Triton reads its kernels, and import it under `name` for as long as a test
    runs. Its operations become no custom ops: an op would stay and take the place of the module's own."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, copy)
    with monkeypatch.context() as patch:
        patch.setattr(operation, "register", lambda *_: None)
        spec.loader.exec_module(copy)
    return copy


def replace_modules(
    names: Sequence[str], folder: Path, text: str, replacement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let copies of modules with numba kernels stand in for them as long as a test runs. In the first, `text` is
    replaced; an empty text is no fault. Each may import those before it."""
    for name in names:
        original = importlib.import_module(name)
        source = Path(original.__file__ or "").read_text()
        if name == names[0]:
            assert text in source, "the kernels have changed: this fault no longer applies"
            source = source.replace(text, replacement) if text else source
        package, _, last = name.rpartition(".")  # its imports are relative
        copy = load_copy(f"{package}.faulty_{last}", folder, source, monkeypatch)
        monkeypatch.setitem(sys.modules, name, copy)
        monkeypatch.setattr(sys.modules[package], last, copy)


@contextmanager
def planted(
    modules: Sequence[ModuleType], users: Sequence[ModuleType], folder: Path, text: str, replacement: str
) -> Iterator[None]:
    """Let copies of modules in which `text` is replaced stand in for them: wherever these modules, or `users`, name a
    function of theirs. Each module may import those before it; an empty text is no fault."""
    sources = {module: Path(module.__file__ or "").read_text() for module in modules}
    assert any(text in source for source in sources.values()), "the kernels have changed: this fault no longer applies"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGED_BACKEND", "triton")
        for module, source in sources.items():
            if text not in source:
                continue
            faulty = source.replace(text, replacement) if text else source
            own = {name: each for name, each in vars(module).items() if _home_of(each) == module.__name__}
            package, _, last = module.__name__.rpartition(".")  # its imports are relative
            copy = load_copy(f"{package}.faulty_{last}", folder, faulty, patch)
            for user in (*modules, *users):
                for name, each in own.items():
                    if vars(user).get(name) is each:
                        patch.setattr(user, name, getattr(copy, name))
        with unnoted():
            yield


def turns_red(check: Callable[..., object], *arguments: Any) -> bool:
    """Whether a check fails; a fault may also lead the interpreter out of a tensor."""
    try:
        check(*arguments)
    except (AssertionError, IndexError):
        return True
    return False


def exceeds_no_bound_twice(card: Card, arguments: Arguments) -> None:
    """Compare all results with the definition by the bounds of `paged verify`, as planted faults are judged."""
    for result in card.check(arguments).values():
        assert not (result.shares() > 2).any(), result.name


def _home_of(value: object) -> str | None:
    """The module of a function, or of the one that a kernel was made of."""
    return getattr(getattr(value, "fn", value), "__module__", None)
