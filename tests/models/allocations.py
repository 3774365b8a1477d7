"""Bytes that PyTorch allocates on the CPU: the same on every machine, as pages of a process are not."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "mark of held bytes"


class Allocations:
    """Bytes held of what was allocated within `recorded`, to be read after it.

    at_marks: at each call of `mark`. most: at any time.
    """

    def __init__(self) -> None:
        self.at_marks: list[int] = []
        self.most = 0

    def mark(self) -> None:
        """Note how many are held."""
        with record_function(_MARK):
            pass


@contextmanager
def recorded() -> Iterator[Allocations]:
    """Record all allocations of tensors and their ends."""
    allocations = Allocations()
    gc.collect()  # what an earlier test has left is not to end within
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield allocations
    num_held = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            num_held += event.nbytes()
            allocations.most = max(allocations.most, num_held)
        elif event.name() == _MARK:
            allocations.at_marks.append(num_held)
