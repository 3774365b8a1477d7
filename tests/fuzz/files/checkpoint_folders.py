"""Tiny checkpoints with something changed, and what loading them in a process of its own comes to.

Apart from the tests, as a child imports the file of the function it calls, and theirs import transformers.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.children import Outcome, call_in_child

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def load_changed(base: Path, files: Mapping[str, bytes]) -> Outcome:
    """The logits after a prompt, and the keys of config.json that were read, of a copy with these files in it; refused
    or finite, in two seconds and 200 MB."""
    outcome = call_in_child(_load, str(base), dict(files))
    assert outcome.is_named or outcome.error is None, outcome.error
    return outcome


def load_changed_adapter(base: Path, adapter: Path, files: Mapping[str, bytes]) -> Outcome:
    """The logits after a prompt of a base model with a changed adapter, else as `load_changed`."""
    outcome = call_in_child(_load_adapter, str(base), str(adapter), dict(files))
    assert outcome.is_named or outcome.error is None, outcome.error
    return outcome


def num_layers_of(folder: str) -> int:
    """Of the model in a folder; to be called in a child."""
    from paged.models.registry import load_model

    return load_model(folder, device="cpu").config.num_layers


def _changed(base: str, files: Mapping[str, bytes], folder: str) -> Path:
    copy = Path(shutil.copytree(base, Path(folder) / "copy"))
    for name, content in files.items():
        (copy / name).write_bytes(content)
    return copy


def _load(base: str, files: Mapping[str, bytes]) -> Any:
    from paged.models.loading.hf_config import HfConfig
    from paged.models.registry import config_of, load_model, network_class_of

    os.environ["PAGED_BACKEND"] = "torch"
    with tempfile.TemporaryDirectory() as folder:
        copy = _changed(base, files, folder)
        model = load_model(copy, device="cpu")
        hf = HfConfig.read(copy)
        config_of(network_class_of(hf), hf)
        return _logits(model, "a"), hf.read_keys


def _load_adapter(base: str, adapter: str, files: Mapping[str, bytes]) -> Any:
    from paged.models.registry import load_model

    os.environ["PAGED_BACKEND"] = "torch"
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(base, device="cpu", num_blocks=8, max_loras=1)
        model.adapters.load("adapter", _changed(adapter, files, folder))
        model.set_lora_adapter_for_cache("a", "adapter")
        return _logits(model, "a")


def _logits(model: Any, cache_id: str) -> list[float]:
    prompt = PROMPT[: model.config.max_seq_len]
    logits: torch.Tensor = model.prefill(cache_id, prompt)
    assert logits.isfinite().all(), "logits that are not finite"
    values: list[float] = logits.tolist()
    return values
