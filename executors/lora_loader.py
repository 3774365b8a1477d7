"""What the fronts ask of executors that run with low-rank adapters; not all do."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from paged.errors import UnsupportedError
from paged.executors.model_executor import ModelExecutor


@runtime_checkable
class LoraLoader(Protocol):
    """An executor whose items may name an adapter; `LlmExecutor` says what its calls do and raise."""

    def load_lora(self, name: str, path: str | Path) -> None: ...

    def unload_lora(self, name: str) -> None: ...

    def list_loras(self) -> tuple[str, ...]: ...


def lora_loader(executor: ModelExecutor) -> LoraLoader:
    """The executor, if it loads adapters.

    Raises:
        UnsupportedError: it does not.
    """
    if not isinstance(executor, LoraLoader):
        raise UnsupportedError(f"{type(executor).__name__} takes no adapters")
    return executor
