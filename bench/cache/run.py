"""The cache manager's bookkeeping against vLLM's KVCacheManager, in turns in one process, on the CPU.

    python -m bench.cache.run [--json FILE] [--only NAME] [--repeats N]
    pytest bench/cache/run.py --benchmark-json=FILE        the rows stand in extra_info

The peer takes part where its Python files are on PYTHONPATH, at PEER_VERSION. Tensors are tiny, so that bookkeeping is
what is timed. Rows, and what the peer does for them:

allocate_free: room for a 2,048-token sequence, and free. With the prefix cache ours looks the new prompt up; the peer
    has its hashes already, and publishes the blocks.
publish_free: from the token ids of a 2,048-token prompt to published and freed blocks, hashing included on both sides.
decode_step: room for one more token of 256 sequences.
prefix_match: ours allocates a prompt, sharing what is cached; the peer hashes it and looks it up. Ours hashes no
    further than the index knows the prompt: of a new one its first block, and the rest when that is published.
evict: room for 2,048 tokens in a pool full of cached blocks. Ours looks the new prompt up, the peer publishes.
metadata: what a forward of 256 sequences needs, 8 of them chunks of 64 tokens in "mixed". Ours alone.
pool: allocate_free with the prefix cache in pools of that many blocks. Ours alone.

What bounds ours: packing ids, 8 ns each, and hashing them are a third of publish_free. Beside rows of 32k tokens the
shorter prompts find the processor's caches cold.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import torch

from paged import KvSlotRequest, PagedKvCacheConfig, PagedKvCacheManager
from paged.bench.cache.workload import BLOCK_SIZE, DECODE_STEPS, NUM_BLOCKS, check_hit, decode_lengths, prompts
from paged.bench.environment import INTERPRETING, environment, save
from paged.bench.goal import Goal, at_least, at_most, verdict
from paged.kernels.common.compat import interpreting

PEER_VERSION = "0.33.0"
REPEATS = 100
_WARM_UP = 3
_GOAL_RATIO = 3.0
_NUM_TOKENS = 2048
_EVICTION_BLOCKS = 4096
_CHUNK = 64

Samples = Iterator[float]
"""Seconds of one call after the other; what prepares a call is not counted."""


@dataclass(frozen=True)
class Case:
    """A row to be: samples of ours, and of the peer's given `vllm_cache`. goal_us: in place of a goal ratio."""

    name: str
    ours: Callable[[], Samples]
    peer: Callable[[Any], Samples] | None = None
    goal_us: float | None = None

    @property
    def group(self) -> str:
        """Cases of one group are sampled in turns."""
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Row:
    """A result in microseconds; peers: the same of a peer, with its median over ours as `ratio`."""

    name: str
    median_us: float
    p20_us: float
    p80_us: float
    peers: dict[str, dict[str, float]]
    goals: list[Goal]


def _manager(num_blocks: int = NUM_BLOCKS, *, prefix_cache: bool = True, head_dim: int = 8) -> PagedKvCacheManager:
    return PagedKvCacheManager(
        PagedKvCacheConfig(
            num_layers=1,
            num_kv_heads=1,
            head_dim=head_dim,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            dtype=torch.float16,
            device="cpu",
            enable_prefix_cache=prefix_cache,
        )
    )


def _publish_free(cache: PagedKvCacheManager, tokens: list[int]) -> None:
    handle = cache.allocate("prompt", token_ids=tokens)
    cache.advance(handle, len(tokens) - handle.num_cached_tokens)
    cache.commit(handle, tokens)
    cache.free(handle)


def allocate_free(num_tokens: int, *, prefix_cache: bool, num_blocks: int = NUM_BLOCKS) -> Samples:
    """Room for a sequence, looked up in the prefix cache where that is on, and free."""
    # One element a token keeps the cache of a million blocks at 64 MB.
    cache, fresh = (
        _manager(num_blocks, prefix_cache=prefix_cache, head_dim=8 if num_blocks == NUM_BLOCKS else 1),
        prompts(num_tokens),
    )
    if prefix_cache:
        _publish_free(cache, next(fresh))  # an empty index would need no look-up
    for tokens in fresh if prefix_cache else itertools.repeat(None):
        start = perf_counter()
        cache.free(cache.allocate("prompt", num_tokens, token_ids=tokens))
        yield perf_counter() - start


def publish_free(num_tokens: int) -> Samples:
    """Look up, allocate, publish, free."""
    cache = _manager()
    for tokens in prompts(num_tokens):
        start = perf_counter()
        _publish_free(cache, tokens)
        yield perf_counter() - start


def decode_step() -> Samples:
    """Reserve a token for every sequence, and commit."""
    while True:
        cache, lengths = _decoding()
        for step in range(1, DECODE_STEPS + 1):
            start = perf_counter()
            cache.reserve([KvSlotRequest(index, length + step) for index, length in enumerate(lengths)]).commit()
            yield perf_counter() - start


def metadata(*, num_chunks: int) -> Samples:
    """`build_metadata` after `reserve`, of sequences that grow between the calls; the last `num_chunks` are chunks."""
    while True:
        cache, lengths = _decoding()
        handles = cache.handles()
        new_tokens = [1] * (len(handles) - num_chunks) + [_CHUNK] * num_chunks
        items = list(zip(handles, new_tokens, strict=True))
        for _ in range(DECODE_STEPS):
            requests = [KvSlotRequest(handle.cache_id, handle.num_tokens + count) for handle, count in items]
            with cache.reserve(requests) as reservation:
                start = perf_counter()
                cache.build_metadata(items)
                seconds = perf_counter() - start
                reservation.commit()
            for handle, length in zip(handles[-num_chunks:] if num_chunks else (), lengths[-num_chunks:], strict=False):
                cache.truncate(handle, length)
            yield seconds


def _decoding() -> tuple[PagedKvCacheManager, list[int]]:
    """A cache with `decode_lengths()` tokens in the sequences 0 to 255."""
    cache, lengths = _manager(), decode_lengths()
    for index, length in enumerate(lengths):
        cache.advance(cache.allocate(index, length), length)
    return cache, lengths


def prefix_match(num_tokens: int, *, cached: bool) -> Samples:
    """Allocate a prompt, all or nothing of which is cached."""
    cache, fresh = _manager(), prompts(num_tokens)
    known = next(fresh)
    _publish_free(cache, known)
    while True:
        tokens = known if cached else next(fresh)
        start = perf_counter()
        handle = cache.allocate("prompt", token_ids=tokens)
        seconds = perf_counter() - start
        check_hit(handle.num_cached_tokens, num_tokens, cached=cached)
        cache.free(handle)
        yield seconds


def evict(num_tokens: int, num_blocks: int) -> Samples:
    """Allocate in a pool of published, freed blocks."""
    cache, fresh = _manager(num_blocks), prompts(num_tokens)
    for tokens in itertools.islice(fresh, num_blocks * BLOCK_SIZE // num_tokens):
        _publish_free(cache, tokens)
    for tokens in fresh:
        start = perf_counter()
        handle = cache.allocate("prompt", token_ids=tokens)
        seconds = perf_counter() - start
        cache.advance(handle, num_tokens)
        cache.commit(handle, tokens)
        cache.free(handle)
        yield seconds


def _allocate_free_case(name: str, *, prefix_cache: bool) -> Case:
    return Case(
        f"allocate_free.{name}",
        lambda: allocate_free(_NUM_TOKENS, prefix_cache=prefix_cache),
        lambda peer: peer.allocate_free(_NUM_TOKENS, prefix_cache=prefix_cache),
    )


def _prefix_match_case(num_tokens: int, *, cached: bool) -> Case:
    return Case(
        f"prefix_match.{num_tokens // 1024}k_{'cached' if cached else 'new'}",
        lambda: prefix_match(num_tokens, cached=cached),
        lambda peer: peer.prefix_match(num_tokens, cached=cached),
    )


def _pool_case(name: str, num_blocks: int) -> Case:
    return Case(f"pool.{name}", lambda: allocate_free(_NUM_TOKENS, prefix_cache=True, num_blocks=num_blocks))


CASES = [
    _allocate_free_case("no_prefix_cache", prefix_cache=False),
    _allocate_free_case("prefix_cache", prefix_cache=True),
    Case("publish_free", lambda: publish_free(_NUM_TOKENS), lambda peer: peer.publish_free(_NUM_TOKENS)),
    Case("decode_step", decode_step, lambda peer: peer.decode_step()),
    *(_prefix_match_case(num_tokens, cached=True) for num_tokens in (4096, 8192, 16384, 32768)),
    _prefix_match_case(32768, cached=False),
    Case(
        "evict",
        lambda: evict(_NUM_TOKENS, _EVICTION_BLOCKS),
        lambda peer: peer.evict(_NUM_TOKENS, _EVICTION_BLOCKS),
    ),
    Case("metadata.decode", lambda: metadata(num_chunks=0), goal_us=100.0),
    Case("metadata.mixed", lambda: metadata(num_chunks=8)),
    _pool_case("1k", 1_000),
    _pool_case("10k", 10_000),
    _pool_case("100k", 100_000),
    _pool_case("1M", 1_000_000),
]
# What grows over a group, and by how much the input does: (larger row, smaller row, growth of the input).
_GROWTH = [("pool.1M", "pool.1k", 1000), ("prefix_match.32k_cached", "prefix_match.4k_cached", 8)]


def load_peer() -> tuple[ModuleType | None, str]:
    """`vllm_cache` where it can be imported at PEER_VERSION, and the version or why there is none."""
    try:
        found = version("vllm")
        if found != PEER_VERSION:
            return None, f"skipped: vLLM {found} is on PYTHONPATH, expected {PEER_VERSION}"
        return importlib.import_module("paged.bench.cache.peer_vllm"), f"vLLM {found}"
    except ImportError as error:
        return None, f"skipped: vLLM {PEER_VERSION} is not on PYTHONPATH ({type(error).__name__}: {error})"


class Sampling:
    """The samples of one case, ours and the peer's in turns."""

    def __init__(self, case: Case, peer: ModuleType | None) -> None:
        self._case = case
        self._ours = case.ours()
        self._theirs = case.peer(peer) if case.peer and peer else None
        self._our_seconds: list[float] = []
        self._their_seconds: list[float] = []

    def take(self) -> None:
        """One more sample of each side."""
        self._our_seconds.append(next(self._ours))
        if self._theirs is not None:
            self._their_seconds.append(next(self._theirs))

    def row(self) -> Row:
        """The row of all samples but the first, which warm up."""
        return row(self._case, self._our_seconds[_WARM_UP:], self._their_seconds[_WARM_UP:])


def measure(cases: Sequence[Case], peer: ModuleType | None, repeats: int) -> list[Row]:
    """Rows of `cases`, whose samples are taken in turns.

    Every round has an order of its own: a row that always follows the longest one would always find the processor's
    caches cold, which doubles 150 us.
    """
    samplings = [Sampling(case, peer) for case in cases]
    generator = random.Random(0)
    for _ in range(_WARM_UP + repeats):
        for sampling in generator.sample(samplings, len(samplings)):
            sampling.take()
    return [sampling.row() for sampling in samplings]


def row(case: Case, ours: Sequence[float], theirs: Sequence[float]) -> Row:
    """The row of at least two samples in seconds; `theirs` is empty without a peer."""
    own = _quantiles_us(ours)
    ratio, peers, goals = None, {}, []
    if theirs:
        peer = _quantiles_us(theirs)
        ratio = peer["median_us"] / own["median_us"]
        peers["vllm"] = {**peer, "ratio": ratio}
    if case.goal_us is not None:
        goals.append(at_most(f"{case.goal_us:.0f} us", own["median_us"], case.goal_us))
    elif case.peer is not None:
        goals.append(at_least(f"{_GOAL_RATIO:.0f}x vLLM's manager", ratio, _GOAL_RATIO))
    return Row(name=case.name, **own, peers=peers, goals=goals)


def _quantiles_us(samples: Sequence[float]) -> dict[str, float]:
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return {"median_us": statistics.median(samples) * 1e6, "p20_us": deciles[1] * 1e6, "p80_us": deciles[7] * 1e6}


def growth(rows: Sequence[Row]) -> dict[str, float]:
    """How much longer the larger of two inputs takes, for every pair of rows that stands in `rows`."""
    medians = {row.name: row.median_us for row in rows}
    return {
        f"{large} / {small}, input x{factor}": medians[large] / medians[small]
        for large, small, factor in _GROWTH
        if large in medians and small in medians
    }


def pytest_generate_tests(metafunc: Any) -> None:
    """Parametrise without importing pytest, which the command line does not need."""
    metafunc.parametrize("case", CASES, ids=[case.name for case in CASES])


def test_cache(case: Case, benchmark: Any) -> None:
    """One row of the pytest-benchmark suite, whose own statistics are of both sides' calls with their preparation."""
    peer, _ = load_peer()
    sampling = Sampling(case, peer)
    benchmark.pedantic(sampling.take, rounds=_WARM_UP + REPEATS)
    benchmark.extra_info.update(environment("cache", torch.device("cpu")), **asdict(sampling.row()))


def main(argv: list[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Print the table; missed goals are shown, and no error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the environment and the rows here too")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help="samples a row, at least 2; %(default)s by default"
    )
    args = parser.parse_args(argv)
    if interpreting():
        parser.error(INTERPRETING)
    peer, description = load_peer()
    rows: list[Row] = []
    report = environment("cache", torch.device("cpu"))
    report |= {"absent": {} if peer else {"vllm": description}}
    write("\n".join(f"{name}: {value}" for name, value in report.items()))
    write(f"{'case':30} {'ours':>10} {'p20':>10} {'p80':>10} us {'peer':>10} {'p20':>10} {'p80':>10} us  ratio  goal")
    selected = [case for case in CASES if args.only in case.name]
    for _, group in itertools.groupby(selected, key=lambda case: case.group):
        measured = measure(list(group), peer, args.repeats)
        rows += measured
        for result in measured:
            write(_line(result))
    report["growth"] = growth(rows)
    for name, factor in report["growth"].items():
        write(f"{name}: {factor:.2f} times as long")
    if args.json:
        save(args.json, {**report, "rows": [asdict(row) for row in rows]})
    return 0


def _line(row: Row) -> str:
    names, peer = ("median_us", "p20_us", "p80_us"), row.peers.get("vllm")
    ours = " ".join(f"{getattr(row, name):10.1f}" for name in names)
    theirs = " ".join(f"{peer[name]:10.1f}" if peer else f"{'-':>10}" for name in names)
    ratio = f"{peer['ratio']:.2f}" if peer else "-"
    goals = "; ".join(verdict(vars(goal)) for goal in row.goals)
    return f"{row.name:30} {ours}    {theirs}    {ratio:>6}  {goals}"


if __name__ == "__main__":
    sys.exit(main())
