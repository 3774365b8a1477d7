"""Which projections of a checkpoint are packed, and how."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.common.scalars import shown
from paged.models.loading.hf_config import HfConfig
from paged.models.quantization.layout import Layout

# Longer than any published one; what a pattern of a file costs to match grows with it.
_MAX_PATTERN = 1000
# Columns of the shortest groups of whole numbers, and a divisor of all.
_GROUP_UNIT = 32
# Plain, though a configuration that means classes of modules says nothing of it: of theirs routers are none.
_ROUTER = re.compile(r".*(?:gate|router)\Z")
HEAD = re.compile(r"lm_head\Z")


@dataclass(frozen=True)
class Quantization:
    """rules: patterns of projections' names, and how those are stored, None for plain; the first that matches counts,
    and of what none matches, and of routers, the weights are plain.
    """

    rules: tuple[tuple[re.Pattern[str], Layout | None], ...]

    def layout(self, name: str) -> Layout | None:
        """How a projection is stored, None for plain weights.

        name: as `model.layers.0.mlp.down_proj`. Patterns may also know it as a part of a model that reads more.
        """
        if _ROUTER.match(name):
            return None
        names = (name, f"language_model.{name}", name.replace("model.", "model.language_model.", 1))
        for pattern, layout in self.rules:
            if any(pattern.match(one) for one in names):
                return layout
        return None

    def common_layout(self, names: Iterable[str]) -> Layout | None:
        """That of projections whose products are one.

        Raises:
            UnsupportedError: some are stored in another way.
        """
        found = {name: self.layout(name) for name in names}
        first, *others = found
        for other in others:
            if found[other] != found[first]:
                raise UnsupportedError(
                    f"{first}, {other}: quantised in two ways, supported is one for projections of the same input"
                )
        return found[first]

    def with_scales(self, dtype: torch.dtype) -> Quantization:
        """The same, with scales of groups in this type on a device."""
        return Quantization(
            tuple((pattern, layout and replace(layout, scale_dtype=dtype)) for pattern, layout in self.rules)
        )


def pattern(expression: str, hf: HfConfig, key: str) -> re.Pattern[str]:
    """A regular expression that a configuration holds.

    Raises:
        CheckpointError: it is none, or too long.
    """
    try:
        if len(expression) <= _MAX_PATTERN:
            return re.compile(expression)
        problem = f"longer than {_MAX_PATTERN} characters"
    except (re.error, OverflowError, RecursionError) as error:
        problem = str(error)
    raise CheckpointError(f"{hf.source}: {key} has {shown(expression)}, which is no pattern ({problem})")


def unconverted(hf: HfConfig, key: str) -> list[tuple[re.Pattern[str], None]]:
    """Rules for the modules that stay plain, as transformers reads them: regular expressions from the start of a name
    up to a dot, or ends of names; and names of modules around them."""
    rules: list[tuple[re.Pattern[str], None]] = []
    for name in filter(None, hf.items(key, str)):
        plain = re.escape(name)
        rules.append((pattern(rf"(?:{name})(?:(?<=\.)|(?=\.|$))|.*{plain}$|.*\.{plain}\.", hf, key), None))
    return rules


def group_size(hf: HfConfig) -> int:
    """Columns that share a scale, 0 for all.

    Raises:
        UnsupportedError: it is no multiple of 32.
        CheckpointError: it is missing or malformed.
    """
    size = hf.integer("group_size", least=-1)
    if size == 0:
        raise CheckpointError(f"{hf.source}: group_size = 0, expected -1 or a positive integer")
    if size > 0 and size % _GROUP_UNIT:
        raise UnsupportedError(f"{hf.source}: group_size = {size} is not supported, known are multiples of 32")
    return max(size, 0)
