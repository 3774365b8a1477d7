"""Every sequence of calls of a small cache, breadth first, each call compared with the specification.

    python -m tests.cache.model_check [depth]

Two states are merged if they differ only in the names of blocks, sequences, tokens, namespaces and serial numbers.
Every call is made twice. First it fails at its very end and must be undone. Then, if it led to a new state, the calls
from an empty cache up to it are made again, and must lead to the same state.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from tests.cache.model_check.checked_cache import CAPACITY, NAMES, TOKENS, CheckedCache, Key
from tests.cache.model_check.specification import (
    SpecificationError,
    check_call,
    check_view,
    expect_call,
    must_refuse,
    require,
)
from tests.cache.model_check.view import BLOCK_SIZE, Call, View, hit

LONGEST_PROMPT = 4


def calls(view: View, namespaces: tuple[str | None, ...]) -> Iterator[Call]:
    """Yield the calls to try in a state."""
    unused = [name for name in NAMES if name not in view.sequences]
    ready = [name for name, seq in view.sequences.items() if seq.host is None]
    for name in unused[:1]:
        for namespace in namespaces:
            for length in range(LONGEST_PROMPT + 1):
                # Prompts of one length that begin with the same found blocks differ in nothing that the cache keeps.
                prompts = {}
                for tokens in product(TOKENS, repeat=length):
                    prompts.setdefault(tuple(hit(view, (namespace, tokens))), tokens)
                for tokens in prompts.values():
                    yield Call("allocate", name, namespace=namespace, tokens=tokens)
            yield Call("allocate", name, namespace=namespace, count=CAPACITY)
        for source in ready:
            yield Call("fork", name, source)
    for name, seq in view.sequences.items():
        yield Call("free", name)
        if seq.host is not None:
            yield Call("swap_in", name)
            continue
        yield Call("swap_out", name)
        for length in (1, 2):
            for tokens in product(TOKENS, repeat=length):
                yield Call("step", name, tokens=tokens)
                if length == 1:
                    yield Call("step", name, tokens=tokens, has_ids=False)
            yield Call("rollback", name, tokens=(0,) * length)
        if seq.tokens:
            yield Call("commit", name)
        for length in range(len(seq.tokens)):
            yield Call("truncate", name, count=length)
        if not seq.tokens:
            for source in ready:
                if source != name and view.sequences[source].namespace == seq.namespace:
                    for count in range(1, len(view.sequences[source].tokens) // BLOCK_SIZE + 1):
                        yield Call("share", name, source, count=count)
    for count in range(1, len(view.cached) + 1):
        yield Call("evict", count=count)
    if view.published:
        yield Call("clear")


@dataclass(frozen=True)
class Scope:
    """Limits of an exploration.

    Attributes:
        max_depth: largest number of calls in a sequence.
        kinds: kinds of calls to make; empty for all.
        may_collide: see `check_call`.
    """

    max_depth: int
    namespaces: tuple[str | None, ...] = (None,)
    kinds: tuple[str, ...] = ()
    may_collide: bool = False


@dataclass
class Level:
    """Counts of the calls at one depth.

    Attributes:
        num_states: states in which every call was made.
        num_lost: undone calls that had evicted cached blocks and written over them.
    """

    depth: int
    num_states: int
    num_calls: int = 0
    num_refused: int = 0
    num_lost: int = 0
    seconds: float = 0.0


def explore(scope: Scope) -> Iterator[Level]:
    """Check every call after every sequence of fewer than `max_depth` calls; yield the counts of each depth.

    Raises:
        SpecificationError: the message ends with the calls that lead to the error, as few as possible.
    """
    paths: dict[Key, tuple[Call, ...]] = {CheckedCache().key(): ()}
    seen = set(paths)
    for depth in range(1, scope.max_depth + 1):
        start = time.perf_counter()
        level = Level(depth, len(paths))
        new_paths: dict[Key, tuple[Call, ...]] = {}
        for key, path in paths.items():
            for call, next_key in _successors(path, key, scope, level):
                if next_key not in seen:
                    seen.add(next_key)
                    new_paths[next_key] = (*path, call)
        level.seconds = time.perf_counter() - start
        yield level
        paths = new_paths


def _successors(path: tuple[Call, ...], key: Key, scope: Scope, level: Level) -> Iterator[tuple[Call, Key]]:
    """Check every call in the state after `path`; yield calls and the states that they lead to."""
    last: tuple[Call, ...] = ()
    try:
        cache = CheckedCache(path)
        require(cache.key() == key, "made again, the calls lead to another state")
        before, exact = cache.view(), cache.exact_state()
        check_view(before)
        for call in list(calls(before, scope.namespaces)):
            if scope.kinds and call.kind not in scope.kinds:
                continue
            last = (call,)
            level.num_calls += 1
            expected = expect_call(before, call)
            result = cache.attempt(call)
            is_refused = result is None
            require(is_refused == must_refuse(before, expected), f"refused: {is_refused}")
            if result is None:
                level.num_refused += 1
            else:
                after, next_key = result
                check_call(before, expected, after, may_collide=scope.may_collide)
                yield call, next_key
            if cache.exact_state() != exact:
                undone = cache.view()
                require(not is_refused, "a refused call has changed something")
                check_undone(before, call, expected.num_taken, undone)
                level.num_lost += undone.published != before.published
                cache = CheckedCache(path)
                before, exact = cache.view(), cache.exact_state()
    except SpecificationError as error:
        lines = "".join(f"\n  {call}" for call in (*path, *last))
        raise SpecificationError(f"{error}, after{lines}") from None


def check_undone(before: View, call: Call, num_taken: int, after: View) -> None:
    """Raise SpecificationError unless a failed call has changed nothing but lost blocks that it evicted.

    A step is two calls, and undoing both at once does not restore which chains are found.
    """
    require(after.sequences == before.sequences, "a failed call has changed sequences")
    require(after.references == before.references, "a failed call has changed references")
    require(after.num_host_free == before.num_host_free, "a failed call has kept host blocks")
    lost = before.published - after.published
    require(bool(lost) or call.kind == "step", "a failed call has changed what nobody sees")
    require(after.published <= before.published, "a failed call has published blocks")
    require(lost <= set(before.cached) and len(lost) <= num_taken, f"a failed call has withdrawn {lost}")
    check_view(after)


def main() -> None:
    """Print the counts of each depth."""
    max_depth = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print("depth   states   calls made   refused   lost   seconds")
    for level in explore(Scope(max_depth)):
        counts = f"{level.num_states:8} {level.num_calls:12} {level.num_refused:9} {level.num_lost:6}"
        print(f"{level.depth:5} {counts} {level.seconds:9.1f}", flush=True)
