"""What all parts of one launch share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from paged.bench.compiled.report import Fault, Report

if TYPE_CHECKING:
    from paged.bench.compiled.counters import Counters
    from paged.bench.compiled.ptx import Instruction


@dataclass
class Context:
    """One launch: its kernel's name, its instructions by number, a source of random orders, and who is told.

    counters: counts accesses and instructions, if asked for.
    """

    kernel: str
    sites: list[Instruction]
    random: np.random.Generator
    report: Report = field(default_factory=Report)
    counters: Counters | None = None

    def fault(self, kind: str, site: int, detail: str, times: int = 1) -> None:
        """Report a fault of the instruction `site`."""
        i = self.sites[site]
        text = f"{detail} [PTX line {i.line}: {i.text}]".strip()
        self.report.add(Fault(kind, self.kernel, i.source), text, times)
