"""Prompts that give up a folder because it hangs, and never because the machine is busy."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from paged.cache.tiers import files

PATIENCE_S = files.PATIENCE_S


@contextmanager
def patience_of_users(tier: files.FileTier, hangs: Callable[[str], bool] = lambda _: True) -> Iterator[list[float]]:
    """Give a tier the patience that users have; yield how long its prompts wait each time, in seconds.

    Time stands still, but for prompts that wait while the tier's thread asks for a block that `hangs`. By the machine's
    clock a busy machine's prompts would give up before the thread asks.
    """
    now_s = files.monotonic()
    waits: list[float] = []
    wait = tier._changed.wait

    def monotonic() -> float:
        return now_s

    def wait_for_a_hang(timeout: float | None = None) -> bool:
        nonlocal now_s
        if timeout is None:  # the tier's own threads
            return wait()
        reader = tier._reader
        if reader.asked_at == math.inf or not hangs(reader.name):
            return wait(0.001)
        waits.append(timeout)
        now_s += timeout
        return False

    with (
        mock.patch.object(files, "PATIENCE_S", PATIENCE_S),
        mock.patch.object(files, "monotonic", monotonic),
        mock.patch.object(tier._changed, "wait", wait_for_a_hang),
    ):
        yield waits
