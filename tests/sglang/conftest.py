"""Replaces packages that SGLang imports and that its attention layers do not call, if they are not installed."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import transformers  # noqa: F401  # the same for torchvision

_UNUSED = {"orjson", "IPython", "dill", "gguf", "sentencepiece", "torchvision"}
_MISSING = {name for name in _UNUSED if importlib.util.find_spec(name) is None}


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Mock(name=f"{self.__name__}.{name}", return_value=b"")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in _MISSING:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


if importlib.util.find_spec("sglang") is not None:
    sys.meta_path.append(_Finder())
