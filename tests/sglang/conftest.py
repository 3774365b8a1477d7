"""Replaces packages that SGLang imports, if they are not installed. On a CPU it calls only the JSON of orjson."""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import transformers  # noqa: F401  # the same for torchvision

_UNUSED = {"orjson", "IPython", "dill", "gguf", "sentencepiece", "torchvision", "sgl_kernel", "setproctitle"}
_MISSING = {name for name in _UNUSED if importlib.util.find_spec(name) is None}


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if (self.__name__, name) == ("orjson", "loads"):
            return json.loads
        is_kernel = self.__name__.startswith("sgl_kernel")
        return Mock(name=f"{self.__name__}.{name}", return_value=b"", side_effect=RuntimeError if is_kernel else None)


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
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # before SGLang's modules ask which platform they are on


@pytest.fixture
def sglang_settings(tmp_path: Any) -> Iterator[Any]:
    """SGLang's own settings of a server on a CPU, for all that reads them from the process."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    runtime_context.publish(ServerArgs("dummy", device="cpu"), role="scheduler")
    yield runtime_context.get_context()
    runtime_context.reset_context()
