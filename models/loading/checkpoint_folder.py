"""Find a checkpoint: a local folder, or a model in the Hugging Face Hub's cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from paged.errors import CheckpointError, InvalidInputError, UnsupportedError
from paged.models.loading.checkpoint_files import is_there, other_kind

# Patterns of files to download: neither code nor pickles. "consolidated" files and the folder "original" are left out,
# because they repeat the weights in another layout.
_WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer*")
_UNWANTED = ("consolidated*", "original/*", "*.bin", "*.pt", "*.pth", "*.py")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}", re.ASCII)
# Name of a model's folder in the Hub's cache: organisation and model.
_CACHED = re.compile(r"models--(.+?)--(.+)")


def local_folder(path: Path, *, has_weights: bool = True) -> Path:
    """Return the path, or if it does not exist and reads OWNER/NAME, that model's folder in the Hub's cache.

    Missing files are downloaded unless HF_HUB_OFFLINE=1. has_weights: whether to download the weights too.

    Raises:
        CheckpointError: the model is neither on the Hub nor in its cache.
        UnsupportedError: the package huggingface_hub is not installed.
    """
    if os.path.lexists(path) or not _HUB_ID.fullmatch(str(path)):
        return path
    patterns = list(_WANTED)
    if not has_weights:
        patterns.remove("*.safetensors")
    return _download(str(path), patterns)


def model_name(folder: Path) -> str:
    """Return the folder's name, or OWNER/NAME for a commit's folder in the Hub's cache."""
    match = _CACHED.fullmatch(folder.parent.parent.name)
    if folder.parent.name != "snapshots" or match is None:
        return folder.name
    return "/".join(match.groups())


def checkpoint_folder(model: str | Path, *, is_run: bool = True) -> Path:
    """Return the folder of a checkpoint, given as a folder or as OWNER/NAME on the Hub, which is downloaded if missing.

    is_run: whether the model will run and needs all files. Otherwise config.json is enough, and weights are not
        downloaded.

    Raises:
        InvalidInputError: there is no such folder, and the name is not OWNER/NAME.
        CheckpointError: the folder lacks files, or the model is neither on the Hub nor in its cache.
        UnsupportedError: the model is on the Hub, and the package huggingface_hub is not installed.
    """
    path = local_folder(Path(model), has_weights=is_run)
    try:
        is_folder, is_file = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:  # the name is too long or has a NUL, or the folder is not readable
        raise InvalidInputError(f"model {str(model)!r}: {getattr(error, 'strerror', None) or error}") from error
    if is_folder:
        _check_complete(path, is_run)
        return path
    if is_file:
        raise InvalidInputError(
            f"model {str(model)!r}: a file, expected a folder in Hugging Face layout{other_kind(path)}"
        )
    raise InvalidInputError(f"model {str(model)!r}: no such folder, and not OWNER/NAME on the Hugging Face Hub")


def missing_files(folder: Path) -> list[str]:
    """Return the files that a folder lacks for a model to run."""
    missing = [name for name in ("config.json", "tokenizer.json") if not is_there(folder / name)]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    return missing


def _check_complete(folder: Path, is_run: bool) -> None:
    missing = missing_files(folder)
    if "config.json" in missing or (is_run and missing):
        present = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise CheckpointError(f"{folder}: {', '.join(missing)} missing; there is {present}{other_kind(folder)}")


def _download(model_id: str, patterns: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UnsupportedError(
            f"model {model_id!r}: no such folder, and models on the Hub need huggingface_hub: pip install 'paged[cli]'"
        ) from error
    try:
        return Path(snapshot_download(model_id, allow_patterns=patterns, ignore_patterns=list(_UNWANTED)))
    except Exception as error:  # a client's release may raise its own errors, HTTP's or the file system's
        reason = (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(
            f"model {model_id!r}: no such folder, not in the Hub's cache, and its download failed "
            f"({type(error).__name__}: {reason}). Without a network, fetch it elsewhere by `hf download {model_id} "
            f"--local-dir FOLDER` and give FOLDER; models behind a licence need `hf auth login`"
        ) from error
