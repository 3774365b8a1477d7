"""SIGINT during a call of the cache waits for its end, and the program's handler runs as if it came there."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paged import PagedKvCacheManager
from tests.cache.prefix_cache import Cache
from tests.cache.snapshot import comparable, snapshot
from tests.cache.stress.test_failed_calls import CASES, MAKING, OURS, busy_cache, check_lock
from tests.deadline import HANG_S
from tests.failure import Failure

Handler = Callable[[int, Any], None]


class Interrupt(Failure):
    """A signal at a line; the program's handler raises `error`."""

    def fail(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def use_handler() -> Iterator[Callable[[Any], None]]:
    """Set a handler of SIGINT until the test ends."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


# The guard holds a signal whatever the call is; that every call runs under it, test_failed_calls.py shows.
@pytest.mark.parametrize("name", ["allocate a hit", "extend and evict", "commit", "roll back", "swap in"])
def test_an_interrupt_at_any_line_leaves_the_call_done_or_not_begun(
    name: str, use_handler: Callable[[Any], None]
) -> None:
    def prepared() -> tuple[PagedKvCacheManager, Callable[[], object]]:
        manager = busy_cache(torch.device("cpu"), None).manager
        return manager, CASES[name](manager)

    error = KeyboardInterrupt()

    def interrupt(*_: object) -> None:
        raise error

    use_handler(interrupt)
    manager, call = prepared()
    before = comparable(snapshot(manager))
    call()
    done = before if name.startswith(MAKING) else comparable(snapshot(manager))
    count, num_done, is_hit = 0, 0, True
    while is_hit:
        manager, call = prepared()
        is_hit = Interrupt(count, OURS, error).hits(call)
        assert signal.getsignal(signal.SIGINT) is interrupt
        check_lock(manager)
        if is_hit:
            after = comparable(snapshot(manager))
            parts = ("handles", "host", "rows") if name.startswith(MAKING) else tuple(done)
            is_done = all(after[part] == done[part] for part in parts)
            assert is_done or after == before
            num_done += is_done
        count += 17
    assert num_done > 0


def test_calls_in_calls_wait_for_the_outermost(cache: Cache, use_handler: Callable[[Any], None]) -> None:
    """Of this manager or another, of callbacks too; the signal comes once."""
    other, received = Cache(device="cpu").manager, list[object]()
    use_handler(lambda *_: received.append("interrupt"))

    def call_back(event: object) -> None:
        signal.raise_signal(signal.SIGINT)
        other.stats()
        cache.manager.stats()
        received.append(event)

    cache.manager.subscribe(call_back)
    handle = cache.run("a", range(3))
    with cache.manager._guard, other._guard:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        cache.manager.stats()
        other.stats()
        assert not received
    assert received == ["interrupt"]
    cache.feed(handle, [3])
    assert len(received) == 3
    assert received[2] == "interrupt"


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_program_without_a_handler_is_left_alone(
    handler: Any, cache: Cache, use_handler: Callable[[Any], None]
) -> None:
    use_handler(handler)
    with cache.manager._guard:
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_that_a_callback_sets_stays(cache: Cache, use_handler: Callable[[Any], None]) -> None:
    received: list[str] = []
    use_handler(lambda *_: received.append("first"))

    def second(*_: object) -> None:
        received.append("second")

    def call_back(event: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.signal(signal.SIGINT, second)

    cache.manager.subscribe(call_back)
    cache.run("a", range(4))
    assert received == ["first"]
    signal.raise_signal(signal.SIGINT)
    assert received == ["first", "second"]


def test_other_threads_neither_hold_nor_lose_an_interrupt(cache: Cache, use_handler: Callable[[Any], None]) -> None:
    """One that comes while another thread is in a call is handled at once, or after the main thread's own call."""
    received: list[str] = []
    use_handler(lambda *_: received.append("interrupt"))
    is_inside, may_leave = threading.Event(), threading.Event()

    def stay_inside() -> None:
        with cache.manager._guard:
            is_inside.set()
            may_leave.wait(HANG_S)

    def interrupt_the_waiting() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        received.append("leave")
        may_leave.set()

    thread = threading.Thread(target=stay_inside)
    thread.start()
    is_inside.wait(HANG_S)
    signal.raise_signal(signal.SIGINT)
    assert received == ["interrupt"]
    timer = threading.Timer(0.05, interrupt_the_waiting)
    timer.start()
    cache.manager.stats()
    assert received == ["interrupt", "leave", "interrupt"]
    thread.join()
    check_lock(cache.manager)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is none")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_thread_forks_amid_the_main_threads_call(cache: Cache, use_handler: Callable[[Any], None]) -> None:
    """The child has the program's handler, and undoes the call."""
    statuses: list[int] = []
    before = snapshot(cache.manager)

    def handler(*_: object) -> None:
        pass

    def fork() -> None:
        child = os.fork()
        if child == 0:
            signal.alarm(int(HANG_S))
            is_same = snapshot(cache.manager) == before
            os._exit(not (is_same and signal.getsignal(signal.SIGINT) is handler))
        statuses.append(os.waitpid(child, 0)[1])

    use_handler(handler)
    thread = threading.Thread(target=fork)
    with cache.manager._guard:
        cache.manager.allocate("half done", 9)
        thread.start()
        thread.join(HANG_S)
    assert statuses == [0]
    assert cache.manager.get_handle("half done") is not None
