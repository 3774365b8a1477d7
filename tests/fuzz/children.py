"""Calls in a process of their own, with limits of time and memory: for what might hang, exhaust or end the process."""

from __future__ import annotations

import multiprocessing
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

# Forked from a process that has imported these already, so a child costs milliseconds and its limits are its own. The
# last is what PyTorch imports at the first call of a custom operation, with sympy: a second in every child.
_PRELOADED = [
    *("torch", "numpy", "paged.models.registry", "paged.executors", "tests.fuzz.children"),
    "torch.fx.experimental.symbolic_shapes",
]
_BYTES_PER_MB = 1 << 20


class Outcome(NamedTuple):
    """How a call in a child ended.

    error: the type's name and message of what it raised, None where it returned. is_named: whether that is a
    PagedError. result: what it returned, if it can be pickled. seconds: of processor time. megabytes: by which the
    child's largest resident size grew during the call.
    """

    error: str | None
    is_named: bool
    result: Any
    seconds: float
    megabytes: float


def call_in_child(
    function: Callable[..., Any], *args: Any, seconds: float = 2.0, megabytes: float = 200.0, wall_s: float = 60.0
) -> Outcome:
    """Call a module-level function in a child. Fails where a signal ends the child, where it takes more than `seconds`
    of processor time or `megabytes` of new memory, or where it is not done after `wall_s`, be it asleep.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_call, args=(sender, function, args, seconds))
    child.start()
    sender.close()
    is_done = receiver.poll(wall_s)
    try:
        outcome: Outcome | None = receiver.recv() if is_done else None
    except EOFError:
        outcome = None
    if outcome is None:
        child.kill()
    child.join()
    what = f"{function.__name__}{args!r}"
    if outcome is None:
        ended = f"ended by signal {-(child.exitcode or 0)}" if is_done else f"not done after {wall_s} s"
        raise AssertionError(f"{what[:2000]}: {ended}")
    assert outcome.seconds <= seconds, f"{what[:2000]}: {outcome.seconds:.1f} s, expected {seconds} at most"
    assert outcome.megabytes <= megabytes, f"{what[:2000]}: {outcome.megabytes:.0f} MB, expected {megabytes} at most"
    return outcome


def _call(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> None:
    from paged.errors import PagedError

    # A second more than allowed, so that a call a little too slow is measured and one that hangs is ended.
    _set_limit(resource.RLIMIT_CPU, int(_processor_seconds() + seconds + 2))
    _set_limit(resource.RLIMIT_AS, _address_space() + 4096 * _BYTES_PER_MB)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    before, started = _largest_resident(), _processor_seconds()
    error, is_named, result = None, False, None
    try:
        result = function(*args)
    except BaseException as raised:
        error, is_named = f"{type(raised).__name__}: {raised}", isinstance(raised, PagedError)
    spent, grown = _processor_seconds() - started, _largest_resident() - before
    sender.send(Outcome(error, is_named, result, spent, grown / _BYTES_PER_MB))


def _set_limit(kind: int, soft: int) -> None:
    resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _largest_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
