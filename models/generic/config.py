"""The configuration of a decoder that runs as transformers' own module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paged.models.layers.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class ModuleConfig(DecoderConfig):
    """A decoder that runs as transformers' own module.

    Attributes:
        architecture: name of the class in transformers.
        model_class, config: transformers' class and its configuration.
        text_module: name of the submodule that makes logits of text; "" for the whole model.
        places: names of the attention modules, in the order of their calls.
        decoder: name of the module that turns token ids into final hidden states.
        layers: name of the list of layers.
        linears: names of the linear layers whose weights no other code reads.
        unused: names of the modules that text does not need, such as a vision tower.
        tp_styles: styles of transformers' `tp_plan`, by names of submodules and parameters.
    """

    architecture: str
    model_class: Any = field(compare=False)
    config: Any = field(compare=False)
    text_module: str
    places: tuple[str, ...]
    decoder: str
    layers: str
    linears: tuple[str, ...]
    unused: tuple[str, ...]
    tp_styles: Mapping[str, str]
