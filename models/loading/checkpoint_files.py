"""Open a checkpoint's files safely, as files of others: regular, of bounded size, and plain JSON."""

from __future__ import annotations

import json
import os
import stat
from fnmatch import filter as filter_names
from pathlib import Path
from typing import Any

from paged.errors import CheckpointError

# The largest index of a supported model has 3 MB and 40,000 entries; Python makes up to 30 bytes of every byte of JSON.
_MAX_JSON_BYTES = 16 << 20
_MAX_JSON_VALUES = 400_000

# What tells that something is no checkpoint in Hugging Face layout, of which the first counts; what it is, what to do.
_OTHER_KINDS = (
    ("*.gguf", "GGUF, the format of llama.cpp: give the folder that it was made from, in safetensors"),
    ("adapter_config.json", "an adapter, no model: load the model it was made for, and then this by load_lora"),
    ("model_index.json", "a pipeline of diffusers, which holds no language model to run"),
    ("params.json", "the authors' own layout: give the same model in Hugging Face layout, config.json and safetensors"),
    ("*.onnx", "ONNX: give the folder that it was made from, in safetensors"),
    ("tokenizer*", "a tokenizer alone: give the folder of the model, or put config.json and *.safetensors beside it"),
)


def other_kind(path: Path) -> str:
    """For messages: what a folder without a model to load is, or a file in place of a folder, and what to do; empty
    where nothing there says so."""
    try:
        names = [path.name] if path.is_file() else sorted(entry.name for entry in path.iterdir())
    except OSError:  # no folder
        return ""
    found = next((text for glob, text in _OTHER_KINDS if filter_names(names, glob)), None)
    if found is None and path.is_file():
        found = "a file: give the folder that holds it, config.json and tokenizer.json"
    return f"; this is {found}" if found else ""


def regular_size(file: Path) -> int:
    """Return the bytes of a regular file, or of the one that a link leads to, as in the Hub's cache.

    Raises:
        CheckpointError: it is missing, unreadable or no regular file: reading a pipe or a device may never end.
    """
    try:
        status = os.stat(file)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise CheckpointError(f"{file}: unreadable ({error})") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file}: unreadable (no regular file)")
    return status.st_size


def is_there(file: Path) -> bool:
    """Return whether a folder has an entry of this name, even a pipe, a folder or a broken link.

    `regular_size` then raises for an entry that cannot be read, so that it does not count as missing.
    """
    return os.path.lexists(file)


def read_text(file: Path, most_bytes: int, most_values: int | None = None) -> str:
    """Return a regular file's UTF-8 text; most_values limits the values of JSON.

    Raises:
        CheckpointError: it is missing, no regular file, not UTF-8, or too large.
    """
    size = regular_size(file)
    if size > most_bytes:
        raise CheckpointError(f"{file}: {size} bytes, expected at most {most_bytes}")
    try:
        with file.open("rb") as opened:
            data = opened.read(size)  # files of /proc have size 0 and no end
        if most_values is not None and sum(map(data.count, (b",", b"[", b"{"))) > most_values:
            raise CheckpointError(f"{file}: unreadable (more than {most_values} values)")
        return data.decode()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: unreadable ({error})") from error


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    NaN and infinities are numbers, as Python writes them. The last of two values of one key counts.

    Raises:
        CheckpointError: it is missing, no regular file, not JSON in UTF-8, no object, too large, or nested too deep.
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
