"""A random model by its formula, where transformers has no class of it."""

import json
from copy import copy
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


class FormulaModel:
    """What tests use of transformers' classes; a subclass has the formula, `__call__`.

    config: a configuration of transformers, with the architecture's own keys. tensors: weights by published names.
    """

    architecture: str

    def __init__(self, config: Any, tensors: Tensors) -> None:
        self.config = config
        self.tensors = tensors

    def __call__(self, ids: torch.Tensor) -> Any:
        """Return an object with `logits` [1, T, vocab_size]; ids: [1, T]."""
        raise NotImplementedError

    def double(self) -> Self:
        wide = copy(self)
        wide.tensors = {name: tensor.double() for name, tensor in self.tensors.items()}
        return wide

    def save_pretrained(self, folder: Path) -> None:
        Path(folder).mkdir(exist_ok=True)
        save_file(self.tensors, Path(folder) / "model.safetensors")
        values = json.loads(self.config.to_json_string())
        (Path(folder) / "config.json").write_text(json.dumps(values | {"architectures": [self.architecture]}))

    def generate(self, ids: torch.Tensor, max_new_tokens: int, **_: Any) -> torch.Tensor:
        for _ in range(max_new_tokens):
            ids = torch.cat([ids, self(ids).logits[:, -1:].argmax(-1)], 1)
        return ids
