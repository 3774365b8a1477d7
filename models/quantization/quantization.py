"""Which projections of a checkpoint are packed, and how."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from paged.errors import UnsupportedError
from paged.models.quantization.layouts import Layout

# A pattern of projections' names, and how those are stored; None for plain weights.
Rule = tuple[re.Pattern[str], Layout | None]
# Plain, though a configuration that means classes of modules says nothing of it: of theirs routers are none.
_ROUTER = re.compile(r".*(?:gate|router)\Z")


@dataclass(frozen=True)
class Quantization:
    """rules: the first that matches counts, and of what none matches, and of routers, the weights are plain."""

    rules: tuple[Rule, ...]

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
