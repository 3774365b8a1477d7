"""What the fronts ask of executors that run with low-rank adapters; not all do."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from paged.errors import InvalidInputError, UnsupportedError
from paged.executors.model_executor import ModelExecutor
from paged.kernels.common.scalars import shown


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


def check_adapter(executor: ModelExecutor, name: object) -> None:
    """Raise unless sequences of the executor can run with the adapter of that name; None is none.

    Raises:
        InvalidInputError: it is no text, or not loaded.
        UnsupportedError: the executor takes no adapters.
    """
    if name is None:
        return
    if not isinstance(name, str) or not name:
        raise InvalidInputError(f"lora_adapter: {shown(name)}, expected the name of an adapter, or None")
    if not executor.capabilities().supports_lora:
        raise UnsupportedError(f"lora_adapter: {name!r}, and {type(executor).__name__} takes no adapters")
    loaded = executor.list_loras() if isinstance(executor, LoraLoader) else ()
    # Adapters of another's model are known to it alone, and then there is no snapshot.
    if name not in loaded and executor.lora_metrics_snapshot() is not None:
        raise InvalidInputError(f"lora_adapter: {name!r}, which is not loaded; loaded are {list(loaded)}")
