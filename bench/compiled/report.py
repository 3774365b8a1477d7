"""What runs on compiled code have found: faults, launches and their time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """A fault: its kind, the kernel, and the Python line of the instruction, "" if it is the launch's."""

    kind: str
    kernel: str
    source: str = ""


@dataclass
class Report:
    """Faults with an example of each, and how often each kernel was launched.

    times: fault -> how many threads had it. details: fault -> its first example. seconds: kernel -> time of its CTAs.
    """

    times: Counter[Fault] = field(default_factory=Counter)
    details: dict[Fault, str] = field(default_factory=dict)
    launches: Counter[str] = field(default_factory=Counter)
    ctas: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, fault: Fault, detail: str, times: int = 1) -> None:
        self.times[fault] += times
        self.details.setdefault(fault, detail)

    def add_seconds(self, kernel: str, seconds: float) -> None:
        self.seconds[kernel] = self.seconds.get(kernel, 0.0) + seconds

    @property
    def num_launches(self) -> int:
        return sum(self.launches.values())

    def kinds(self) -> list[str]:
        return sorted({fault.kind for fault in self.times})

    def lines(self) -> list[str]:
        """Return a line for each fault."""
        lines = []
        for fault, times in self.times.items():
            place = " ".join(filter(None, (fault.kernel, fault.source)))
            lines.append(f"{fault.kind}, {place}, {times} times: {self.details[fault]}")
        return lines

    def clear(self) -> None:
        for counts in (self.times, self.details, self.launches, self.ctas, self.seconds):
            counts.clear()
