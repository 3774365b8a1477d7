"""Calls in a process of their own, with limits of time and memory: for what might hang, exhaust or end the process."""

import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from time import process_time
from typing import Any, NamedTuple

from tests.deadline import HANG_S

# Forked from a process that has imported these already, so a child costs milliseconds and its limits are its own. The
# last is what PyTorch imports at the first call of a custom operation, with sympy: a second in every child.
_PRELOADED = [
    *("torch", "numpy", "tokenizers", "jinja2", "pytest", "hypothesis", "paged.models.registry", "paged.executors"),
    *("tests.fuzz.children", "tests.fuzz.values", "torch.fx.experimental.symbolic_shapes"),
]
_BYTES_PER_MB = 1 << 20
# What a call takes at most, in times of a loop of Python on the same machine: about two seconds. No call of the
# tests takes more than a tenth of it.
MOST_LOOPS = 40
# Nine times what any call takes; what explodes takes gigabytes.
_MOST_MEGABYTES = 400.0


class Outcome(NamedTuple):
    """How a call in a child ended.

    error: the type's name and message of the PagedError that it raised, "" where it returned. result: what it returned.
    seconds: of processor time. megabytes: by which its largest size grew.
    """

    error: str
    result: Any
    seconds: float
    megabytes: float


def call_in_child(
    function: Callable[..., Any], *args: Any, loops: float = MOST_LOOPS, megabytes: float = _MOST_MEGABYTES
) -> Outcome:
    """Call a module-level function in a child. Fails where that raises what is no PagedError, where a signal ends the
    child, where it takes more than so many loops of processor time or `megabytes` of new memory, or where it hangs, be
    it asleep.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_call, args=(sender, function, args))
    child.start()
    sender.close()
    is_done = receiver.poll(2 * HANG_S)
    try:
        outcome, is_bad = receiver.recv() if is_done else (None, True)
    except EOFError:
        outcome, is_bad = None, True
    if outcome is None:
        child.kill()
    child.join()
    what = f"{function.__name__}{args!r}"[:2000]
    ended = f"ended by signal {-(child.exitcode or 0)}" if is_done else "it hangs"
    assert outcome is not None, f"{what}: {ended}"
    assert not is_bad, f"{what}: {outcome.error}"
    limit_s = loops * _seconds_of_a_loop()
    assert outcome.seconds <= limit_s, f"{what}: {outcome.seconds:.1f} s, expected {limit_s:.1f} at most"
    assert outcome.megabytes <= megabytes, f"{what}: {outcome.megabytes:.0f} MB, expected {megabytes} at most"
    return outcome  # type: ignore[no-any-return]


def _call(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    from paged.errors import PagedError

    os.environ["PAGED_BACKEND"] = "torch"  # the interpreter takes minutes
    with open("/proc/self/statm") as file:
        address_space = int(file.read().split()[0]) * resource.getpagesize()
    for kind, soft in (
        (resource.RLIMIT_CPU, int(process_time() + HANG_S)),
        (resource.RLIMIT_AS, address_space + 4096 * _BYTES_PER_MB),
    ):
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    before, started = _largest_resident(), process_time()
    error, result, is_bad = "", None, False
    try:
        result = function(*args)
    except BaseException as raised:
        error, is_bad = f"{type(raised).__name__}: {raised}", not isinstance(raised, PagedError)
    spent, grown = process_time() - started, _largest_resident() - before
    sender.send((Outcome(error, result, spent, grown / _BYTES_PER_MB), is_bad))


@cache
def _seconds_of_a_loop() -> float:
    started, total = process_time(), 0
    for number in range(2_000_000):
        total += number
    return process_time() - started


def _largest_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
