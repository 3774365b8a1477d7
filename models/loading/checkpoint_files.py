"""Safe reading of untrusted checkpoint files: regular, of bounded size, and plain JSON."""

from __future__ import annotations

import json
import os
import stat
from fnmatch import filter as filter_names
from pathlib import Path
from typing import Any

from paged.errors import CheckpointError
from paged.models.loading.files_read import note_text

# Limits of a JSON file's bytes and values. Any supported model's index is smaller. The limits bound the memory for
# parsing, because Python takes up to 30 bytes per byte of JSON.
_MAX_JSON_BYTES = 16 << 20
_MAX_JSON_VALUES = 400_000

# File name that shows that a folder is no Hugging Face checkpoint -> what it is and what to do; the first match counts.
_OTHER_KINDS = (
    ("*.gguf", "GGUF, the format of llama.cpp: give the safetensors folder that it was converted from"),
    ("adapter_config.json", "an adapter, not a model: load its base model, then load this folder with load_lora"),
    ("model_index.json", "a diffusers pipeline, which is not a language model"),
    ("params.json", "the authors' own layout: give the same model in Hugging Face layout, config.json and safetensors"),
    ("*.onnx", "ONNX: give the safetensors folder that it was converted from"),
    ("tokenizer*", "only a tokenizer: give the folder of the model, or add config.json and *.safetensors"),
)


def other_kind(path: Path) -> str:
    """Describe, for a message, a path without a loadable model, and say what to do; empty if nothing is known."""
    names = [path.name]
    try:
        if not path.is_file():
            names = sorted(entry.name for entry in path.iterdir())
    except OSError:  # not a folder
        return ""
    for glob, kind in _OTHER_KINDS:
        if filter_names(names, glob):
            return f"; this is {kind}"
    if path.is_file():
        return "; this is a file: give the folder that contains it, config.json and tokenizer.json"
    return ""


def regular_size(file: Path) -> int:
    """Return the size in bytes of a regular file. Links are followed, because the Hub's cache consists of links.

    Raises:
        CheckpointError: the file is missing, unreadable or not regular: reading a pipe or a device may never end.
    """
    try:
        status = os.stat(file)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise CheckpointError(f"{file}: unreadable ({error})") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file}: unreadable (not a regular file)")
    return status.st_size


def is_there(file: Path) -> bool:
    """Return whether a folder has an entry of this name, even a pipe, a folder or a broken link.

    `regular_size` then raises for an entry that cannot be read, instead of treating it as missing.
    """
    return os.path.lexists(file)


def read_text(file: Path, most_bytes: int, most_values: int | None = None) -> str:
    """Return a regular file's UTF-8 text. most_values limits the number of values, if the text is JSON.

    Raises:
        CheckpointError: the file is missing, not regular, not UTF-8, or too large.
    """
    size = regular_size(file)
    if size > most_bytes:
        raise CheckpointError(f"{file}: {size} bytes, expected at most {most_bytes}")
    try:
        with file.open("rb") as opened:
            data = opened.read(size)  # a file in /proc has size 0 and may be endless
        if most_values is not None and sum(map(data.count, (b",", b"[", b"{"))) > most_values:
            raise CheckpointError(f"{file}: unreadable (more than {most_values} values)")
        note_text(file, data)
        return data.decode()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: unreadable ({error})") from error


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    NaN and infinities are accepted, because Python writes them. If a key occurs twice, its last value counts.

    Raises:
        CheckpointError: the file is missing, not regular, not UTF-8 JSON, no object, too large, or nested too deep.
    """
    text = read_text(file, _MAX_JSON_BYTES, _MAX_JSON_VALUES)
    try:
        values = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{file}: unreadable ({error})") from error
    except RecursionError:
        raise CheckpointError(f"{file}: unreadable (nested too deep)") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: holds a {type(values).__name__}, expected an object")
    return values
