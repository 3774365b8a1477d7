"""Random draft heads for tiny checkpoints."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from examples.train_draft_head import new_weights, save
from paged.serving.command_line.cli import RECALL
from tests.models.edits import edit_config, edit_tensors
from tests.models.families import FAMILIES, save_checkpoint

CONFIG: dict[str, Any] = json.loads((RECALL / "config.json").read_text())
# The base model, where its head's tensors and those of the head's layer are, and the names of those beside the layer.
_QWEN = "mtp", "mtp.layers.0", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_MIMO_NAMES = "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"
_GLM_NAMES = "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"
PUBLISHED = {
    **{
        name: (name, "model.layers.2", "model.layers.2", _GLM_NAMES)
        for name in ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
    },
    "hy_v3": (
        "hy_v3",
        "model.layers.2",
        "model.layers.2",
        ("enorm", "hnorm", "eh_proj", "final_layernorm", "shared_head"),
    ),
    "mimo": ("qwen2", "model.mtp_layers.0", "model.mtp_layers.0", _MIMO_NAMES),
    "qwen3_5": ("qwen3_5", *_QWEN),
    "qwen3_next": ("qwen3_next", *_QWEN),
}


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


def save_published(
    family: str, folder: Path, models: Mapping[str, Any] = FAMILIES
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Save a model with a random multi-token head, whose layer is the model's last; transformers' model and the head's
    other tensors."""
    base, place, layer_place, names = PUBLISHED[family]
    model = save_checkpoint(models[base], folder)
    if family == "mimo":
        edit_config(folder, architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1)
    generator = torch.Generator().manual_seed(2)
    shapes = {"norm": (64,), "_proj": (64, 128), "fc": (64, 128), "head": (128, 64), "tokens": (128, 64)}
    own = {
        name: torch.randn(next(shape for part, shape in shapes.items() if part in name), generator=generator) / 4
        for name in names
    }

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {f"{place}.{name}.weight": tensor for name, tensor in own.items()}
        layer = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
        tensors |= {name.replace("model.layers.1", layer_place): tensor for name, tensor in layer.items()}

    edit_tensors(folder, add)
    return model, own
