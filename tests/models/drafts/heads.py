"""Random draft heads for tiny checkpoints."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.train_draft_head import new_weights, save
from paged.executors.command_line.cli import RECALL
from tests.models.edits import edit_config, edit_tensors

CONFIG: dict[str, Any] = json.loads((RECALL / "config.json").read_text())


def save_head(kind: str, folder: Path, *, draft_ids: Sequence[int] = (), **sizes: Any) -> None:
    """Save a head of the recall checkpoint, or of one with other sizes.

    draft_ids: the head's vocabulary, rising, if it is not the target's.
    """
    config = CONFIG | sizes
    save(kind, new_weights(kind, config, torch.Generator().manual_seed(3)), config, folder)
    if draft_ids:
        ids = torch.tensor(draft_ids)

        def cut(tensors: dict[str, torch.Tensor]) -> None:
            tensors["lm_head.weight"] = tensors["lm_head.weight"][ids]
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)

        edit_tensors(folder, cut)
        edit_config(folder, draft_vocab_size=len(ids))
