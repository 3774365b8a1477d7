"""Tiny checkpoints with something changed, and what loading them in a process of its own comes to.

Apart from the tests, as a child imports the file of the function it calls, and theirs import more.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.children import Outcome, call_in_child

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def with_field(content: dict[str, Any], path: list[str], text: str) -> bytes:
    """The JSON of `content`, in which one field holds a text as it is."""
    section = content
    for key in path[:-1]:
        section = section.setdefault(key, {})
    section[path[-1]] = "@@"
    return json.dumps(content).replace('"@@"', text, 1).encode("utf-8", "surrogatepass")


def load_changed(base: Path, files: Mapping[str, bytes], adapter: Path | None = None) -> Outcome:
    """What comes of a copy of a checkpoint, or of an adapter for it, with these files in it: a named error, or finite
    logits after a prompt and the keys of config.json that were read; in two seconds and 200 MB."""
    return call_in_child(_load, str(base), dict(files), adapter and str(adapter))


def num_layers_of(folder: str) -> int:
    """Of the model in a folder; to be called in a child."""
    from paged.models.registry import load_model

    return load_model(folder, device="cpu").config.num_layers


def put(file: Path, kind: str) -> None:
    """Make `file` a pipe, a folder, a sparse file of 1 TiB, text in "utf-16", or a link to "itself" or to `kind`."""
    if file.is_dir():
        file.rmdir()
    else:
        file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "sparse":
        file.touch()
        os.truncate(file, 1 << 40)
    elif kind == "utf-16":
        file.write_bytes("{}".encode("utf-16"))
    else:
        file.symlink_to(file.name if kind == "itself" else kind)


def _load(base: str, files: Mapping[str, bytes], adapter: str | None) -> tuple[list[float], frozenset[str]]:
    from paged.models.loading.hf_config import HfConfig
    from paged.models.registry import load_model, model_config

    read_keys: frozenset[str] = frozenset()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(adapter or base, Path(folder) / "copy"))
        for name, content in files.items():
            (copy / name).write_bytes(content)
        if adapter is None:
            model = load_model(copy, device="cpu")
            hf = HfConfig.read(copy)
            model_config(hf)
            read_keys = frozenset(hf.read_keys)
        else:
            model = load_model(base, device="cpu", num_blocks=8, max_loras=1)
            model.adapters.load("adapter", copy)
            model.set_lora_adapter_for_cache("a", "adapter")
        logits: torch.Tensor = model.prefill("a", PROMPT[: model.config.max_seq_len])
    assert logits.isfinite().all(), "logits that are not finite"
    return logits.tolist(), read_keys
