"""Changes to saved checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged.errors import CheckpointError
from paged.models.registry import load_model

WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


def edit_config(folder: Path, *dropped: str, name: str = "config.json", **values: Any) -> None:
    """Set values in config.json or the file of another name, and leave out keys."""
    file = folder / name
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in config.items() if key not in dropped}))


def edit_tensors(folder: Path, change: Callable[[Tensors], object], file: str = WEIGHTS) -> None:
    """Save the tensors of a file as `change` leaves them."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / file)


def assert_refused(folder: Path, message: str, error: type[Exception] = CheckpointError, **options: Any) -> str:
    """Loading it ends in an error with such a message, which is returned."""
    with pytest.raises(error, match=message) as caught:
        load_model(folder, **options)
    return str(caught.value)


def copy_with_rolled_weights(folder: Path, target: Path) -> Path:
    """Copy a checkpoint's folder, with the rows of its weights in another order; return the copy."""
    shutil.copytree(folder, target)

    def roll(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.roll(1, 0)

    edit_tensors(target, roll)
    return target
