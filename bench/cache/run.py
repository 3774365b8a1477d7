"""The cache manager's bookkeeping against vLLM's KVCacheManager, in turns in one process, on the CPU.

    python -m bench.cache.run [--json FILE] [--only NAME] [--repeats N]

The peer takes part if its Python files of PEER_VERSION are on PYTHONPATH. Tensors are tiny, so that bookkeeping is
timed. Rows, and the peer's work for them:

allocate_free: allocate a 2,048-token sequence, and free it. With the prefix cache, ours looks the new prompt up; the
    peer has its hashes already, and publishes the blocks.
publish_free: from the token ids of a 2,048-token prompt to published and freed blocks; both hash the prompt.
decode_step: reserve one more token for 256 sequences.
prefix_match: ours allocates a prompt and shares its cached blocks; the peer hashes it and looks it up. Ours hashes no
    further than the index knows the prompt: for a new prompt its first block, the rest when it is published.
evict: allocate 2,048 tokens in a pool full of cached blocks. Ours looks the new prompt up, the peer publishes it.
metadata: build the metadata of 256 sequences, in "mixed" with 8 chunks of 64 tokens. Ours only.
pool: allocate_free with the prefix cache, in pools of different sizes. Ours only.

Packing ids, 8 ns each, and hashing them take a third of our publish_free.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any

from paged.bench.benchmark import Benchmark, Setting
from paged.bench.cache.cases import CASES, Case
from paged.bench.limits import at_least, at_most, times_us
from paged.bench.timing import take_in_turns

PEER_VERSION = "0.33.0"
_WARM_UP = 3
_GOAL_RATIO = 3.0


def load_peer() -> tuple[ModuleType | None, str]:
    """Return `peer_vllm` if it can be imported at PEER_VERSION, and the version or why it cannot."""
    try:
        found = version("vllm")
        if found != PEER_VERSION:
            return None, f"skipped: vLLM {found} is on PYTHONPATH, expected {PEER_VERSION}"
        return importlib.import_module("paged.bench.cache.peer_vllm"), f"vLLM {found}"
    except ImportError as error:
        return None, f"skipped: vLLM {PEER_VERSION} is not on PYTHONPATH ({type(error).__name__}: {error})"


def measure(case: Case, setting: Setting) -> dict[str, Any]:
    """Measure a row; samples of both are taken in turns, and the first ones warm up."""
    peer, description = load_peer()
    samples = {"ours": case.ours()}
    if peer and case.has_peer:
        samples["theirs"] = case.theirs(peer)
    taken = take_in_turns({side: found.__next__ for side, found in samples.items()}, _WARM_UP + setting.repeats)
    absent = {} if peer else {"vllm": description}
    return row(case, *(taken.get(side, [])[_WARM_UP:] for side in ("ours", "theirs"))) | {"absent": absent}


def row(case: Case, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return the row of at least two samples in seconds; `theirs` is empty without a peer."""
    own = times_us(ours)
    peer = times_us(theirs) if theirs else None
    ratio = peer["median_us"] / own["median_us"] if peer else None
    goals = []
    if case.goal_us is not None:
        goals.append(at_most(f"{case.goal_us:.0f} us", own["median_us"], case.goal_us))
    elif case.has_peer:
        goals.append(at_least(f"{_GOAL_RATIO:.0f}x vLLM's manager", ratio, _GOAL_RATIO))
    peers = {"vllm": {**peer, "ratio": ratio}} if peer else {}
    return {"name": case.name, **own, "peers": peers, "goals": goals}


BENCHMARK = Benchmark(
    "cache",
    __doc__,
    lambda _: CASES,
    measure,
    {"cpu": 100},
    options=("json", "only", "repeats"),
    device="cpu",
    has_limits=False,
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
