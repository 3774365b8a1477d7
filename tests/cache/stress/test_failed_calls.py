"""A call that fails in the middle, wherever that is, leaves everything as it was."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import paged.cache.manager
from paged import CacheGroup, KvSlotRequest, PagedKvCacheManager, Retention, UnifiedBatchItem
from paged.step.batch_step import step_of
from tests.cache.prefix_cache import Cache
from tests.cache.snapshot import snapshot
from tests.deadline import HANG_S
from tests.failure import CACHE_GUARD, Failure

CACHE = Path(paged.cache.manager.__file__).parent
OURS = {CACHE.parent, CACHE, CACHE / "kinds"}


def busy_cache(device: torch.device, groups: list[CacheGroup] | None) -> Cache:
    """Sequences of every kind, blocks that are shared, cached and free, and tables whose rows are all taken."""
    num_tables = 1 if groups is None else len(groups)
    sizes = {"num_blocks": 16 * num_tables, "num_swap_blocks": 8 * num_tables, "max_pinned_fraction": 0.3}
    cache = Cache(device=device, groups=groups, **sizes)
    cache.run("a", range(9))
    cache.run("b", [*range(8), 20, 21])
    cache.fork(cache.manager.get_handle("a"), "fork")
    cache.manager.swap_out(cache.run("out", range(30, 37)))
    cache.run("other", range(50, 59), "tenant")
    cache.manager.build_metadata([(cache.manager.allocate("room", num_tokens=5), 5)])
    for first in (60, 70):
        cache.free(cache.run("gone", range(first, first + 9), "gone"))
    while len(cache.manager.handles()) < 16:
        cache.manager.allocate(len(cache.manager.handles()))
    return cache


Case = Callable[[PagedKvCacheManager], Callable[[], object]]


def _call(name: str, *args: Any, **kwargs: Any) -> Case:
    """`args` that name sequences stand for their handles, where the method takes one."""

    def prepare(manager: PagedKvCacheManager) -> Callable[[], object]:
        handles = {handle.cache_id: handle for handle in manager.handles()}
        given = [handles.get(arg, arg) if isinstance(arg, str) else arg for arg in args]
        return partial(getattr(manager, name), *given, **kwargs)

    return prepare


def _requests(**targets: int) -> list[KvSlotRequest]:
    return [KvSlotRequest(name, target) for name, target in targets.items()]


def _free_reserved(manager: PagedKvCacheManager) -> Callable[[], object]:
    manager.reserve(_requests(fork=13, b=17))
    return partial(manager.free, manager.get_handle("fork"))


def _forward(manager: PagedKvCacheManager) -> None:
    items = [UnifiedBatchItem("fork", [5], pos_offset=9), UnifiedBatchItem("new", [1, 2, 3, 4, 5])]
    with step_of(manager, items) as step:
        assert step.metadata.max_seqlen_q == 5


def _fill_blocks(manager: PagedKvCacheManager) -> Callable[[], object]:
    """Of two sequences at once, by ids that are told after the forward."""
    for first in (80, 90):
        manager.allocate(first, token_ids=range(first, first + 4))
    for target, ids in ((4, [[*range(80, 84)], [*range(90, 94)]]), (8, None)):
        manager.reserve([KvSlotRequest(80, target), KvSlotRequest(90, target)]).commit(ids)
    handles = [manager.get_handle(first) for first in (80, 90)]
    return partial(manager.append_tokens, [(handles[0], [1, 2, 3, 4]), (handles[1], [5, 6, 7, 8])])


NEW_IDS = [[9, 10, 11], [22, 23, 24, 25], []]
CASES: dict[str, Case] = {
    "allocate room": _call("allocate", "new", 20),
    "allocate a hit": _call("allocate", "new", token_ids=[*range(60, 69), *range(12)], namespace="gone"),
    "allocate a miss": _call("allocate", "new", token_ids=range(200, 220), namespace="new"),
    "allocate retained": _call(
        "allocate", "new", token_ids=[*range(60, 69), *range(12)], namespace="gone", retention=Retention()
    ),
    "pin": _call("pin", range(60, 69), namespace="gone"),
    "release": lambda m: m.pin(range(60, 69), namespace="gone").release,
    "extend": _call("extend", "b", 3),
    "extend a copy": _call("extend", "fork", 3),
    "extend and evict": _call("extend", "fork", 9),
    "advance": _call("advance", "room", 5),
    "commit ids": _call("commit", "room", []),
    "append": lambda m: partial(m.append_tokens, [(m.get_handle("room"), [])]),
    "append blocks": _fill_blocks,
    "truncate": _call("truncate", "a", 5),
    "truncate all": _call("truncate", "other", 0),
    "fork": _call("fork", "b", "new"),
    "free": _call("free", "other"),
    "free shared": _call("free", "a"),
    "free swapped": _call("free", "out"),
    "free reserved": _free_reserved,
    "swap out": _call("swap_out", "b"),
    "swap out all": _call("swap_out", "other"),
    "swap in": _call("swap_in", "out"),
    "reserve": _call("reserve", [*_requests(other=13, b=17), KvSlotRequest(11, 3)]),
    "reserve a copy": _call("reserve", [KvSlotRequest("fork", 10, 13)]),
    "commit": lambda m: partial(m.reserve(_requests(a=12, fork=13, room=0)).commit, NEW_IDS),
    "roll back": lambda m: m.reserve(_requests(fork=13, b=17)).rollback,
    "share": _call("share_prefix_blocks", "a", "room", 2),
    "evict": _call("evict", 3),
    "clear": _call("clear_prefix_cache"),
    "forget": _call("forget_namespace", "gone"),
    "metadata": lambda m: partial(m.build_metadata, [(m.get_handle("fork"), 1), (m.get_handle("room"), 3)]),
    "write": _call("write_kv", "fork", 1, 5, torch.ones(4, 1, 8), torch.ones(4, 1, 8)),
    "forward": lambda m: partial(_forward, m),
}
# What they make is given up where they fail late.
MAKING = ("allocate", "fork", "pin", "reserve")
# Evicted blocks that may have been written to stay evicted, and those that a forward took before it failed.
EVICTING = {"extend and evict", "forward"}
# Each with one group of layers or two, in turns.
GROUPS = None, [CacheGroup((0,)), CacheGroup((1,), sliding_window=6)]
SLOW = ("append blocks", "forward")  # of many lines
by_case = pytest.mark.parametrize(
    ("name", "groups"),
    [
        pytest.param(name, GROUPS[at % 2], id=name, marks=pytest.mark.thorough if name in SLOW else ())
        for at, name in enumerate(CASES)
    ],
)


@by_case
def test_failure_anywhere_changes_nothing(name: str, groups: list[CacheGroup] | None, device: torch.device) -> None:
    """At every line behind the lock."""
    if device.type != "cpu":
        pytest.skip("it is the bookkeeping that fails here")
    count, num_rows = 0, 0
    while True:
        if num_rows != 16:  # more of them were made, which stays
            manager, events = busy_cache(device, groups).manager, list[object]()
            call, before = CASES[name](manager), snapshot(manager)
            if name != "forward":  # where what comes in a callback is logged, and the next call runs
                manager.subscribe(events.append)
        failure = Failure(count, OURS, MemoryError(), skip=CACHE_GUARD)
        if not failure.hits(call):
            break
        after = snapshot(manager)
        for part, value in before.items():
            if name not in EVICTING or part in ("handles", "host", "rows"):
                assert after[part] == value, f"{part}, after failing at line {count}"
        if count % 10 == 0:
            check_lock(manager)
        assert name in EVICTING or not events
        count, num_rows = count + 1, len(manager._sequences.tables._num_blocks)
    assert count > 5
    after = snapshot(manager)
    if name not in ("commit ids", "append"):  # of nothing, but it is what they would check first
        assert after != before
    check_lock(manager)


def check_lock(manager: PagedKvCacheManager) -> None:
    """Another thread gets it."""
    other = threading.Thread(target=manager.stats, daemon=True)
    other.start()
    other.join(HANG_S)
    assert not other.is_alive()


@pytest.mark.parametrize("ending", [KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(MAKING)])
def test_a_listener_that_ends_the_program_leaves_nothing(name: str, ending: type[BaseException]) -> None:
    """Of a pressure that changes with every call: what was made for nobody is given up."""
    manager = busy_cache(torch.device("cpu"), None).manager
    call, before = CASES[name](manager), snapshot(manager)
    manager.on_pressure(Mock(side_effect=ending))
    manager._guard.listeners._last_pressure = None  # type: ignore[assignment]
    with pytest.raises(ending):
        call()
    after = snapshot(manager)
    assert all(after[part] == before[part] for part in ("handles", "host", "rows"))
    assert manager.stats().free_blocks == sum(map(len, before["free"][:2]))
    check_lock(manager)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is none")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_forked_process_has_a_lock_of_its_own(cache: Cache) -> None:
    """Also amid another thread's call, which it takes back."""
    manager, amid, goes_on = cache.manager, threading.Event(), threading.Event()
    before = snapshot(manager)

    def hold() -> None:
        with manager._guard:
            manager.allocate("half done", 9)
            amid.set()
            goes_on.wait(HANG_S)

    thread = threading.Thread(target=hold)
    thread.start()
    amid.wait(HANG_S)
    child = os.fork()
    if child == 0:
        signal.alarm(int(HANG_S))
        os._exit(not (snapshot(manager) == before and manager.allocate("child", 9).is_valid))
    assert os.waitpid(child, 0)[1] == 0
    goes_on.set()
    thread.join()
    assert [handle.cache_id for handle in manager.handles()] == ["half done"]


@pytest.mark.parametrize("outer", ["reserve", "build_metadata", "commit", "append_tokens"])
def test_a_call_within_a_call_fails_alone(outer: str, cache: Cache) -> None:
    """The caller's iterable calls the cache: without the lock, and what fails there is taken back there."""
    manager = cache.manager
    handle = cache.run("a", range(9))
    room = manager.reserve([KvSlotRequest("a", 10)])
    threads: list[bool] = []

    def calls_back(item: Any) -> Any:
        other = threading.Thread(target=manager.stats, daemon=True)
        other.start()
        other.join(HANG_S)
        threads.append(not other.is_alive())
        before = snapshot(manager)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manager._sequences.tables, "add", Mock(side_effect=ArithmeticError))
            with pytest.raises(ArithmeticError):
                manager.allocate("b", token_ids=list(range(13)))
        assert snapshot(manager) == before
        yield item

    calls: dict[str, Callable[[], object]] = {
        "reserve": lambda: manager.reserve(calls_back(KvSlotRequest("a", 11))),
        "build_metadata": lambda: manager.build_metadata(calls_back((handle, 1))),
        "commit": lambda: room.commit(calls_back([9])),
        "append_tokens": lambda: manager.append_tokens(calls_back((handle, [8]))),
    }
    calls[outer]()
    assert threads == [True]
    manager.check_integrity()
    assert manager.get_handle("b") is None


@pytest.mark.parametrize("is_overwriting", [False, True])
@pytest.mark.parametrize("is_outer_failing", [False, True])
def test_a_failed_call_within_a_call_is_undone_to_where_it_began(
    is_outer_failing: bool, is_overwriting: bool, cache: Cache
) -> None:
    """Events included, and whichever way the outer call ends; blocks that were overwritten stay evicted."""
    manager = cache.manager
    first = cache.run("a", range(9))
    cache.free(cache.run("b", range(20, 29)))
    before = snapshot(manager)
    with contextlib.suppress(ZeroDivisionError), manager._guard:
        fork = manager.fork(first, "c")
        forked = snapshot(manager)
        with contextlib.suppress(KeyError), manager._guard:
            manager.evict(1)
            manager.truncate(fork, 2)
            if is_overwriting:
                manager.extend(fork, 4 * (manager._pool.num_free - 1))
            else:
                manager.allocate("d", token_ids=list(range(20, 30)))
            raise KeyError
        assert is_overwriting or snapshot(manager) == forked
        assert snapshot(manager)["handles"] == forked["handles"]
        if is_outer_failing:
            raise ZeroDivisionError
    manager.check_integrity()
    assert (manager.get_handle("c") is None) == is_outer_failing
    if is_outer_failing:
        assert snapshot(manager)["handles"] == before["handles"]
    assert (cache.found(range(20, 29)) == 8) != is_overwriting
