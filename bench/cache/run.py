"""The cache manager's bookkeeping against vLLM's KVCacheManager, in turns in one process, on the CPU.

    python -m bench.cache.run [--json FILE] [--only NAME] [--repeats N]

The peer takes part if its Python files of PEER_VERSION are on PYTHONPATH. Tensors are tiny, so the times are times of
bookkeeping. Rows, and the peer's work for them:

allocate_free: allocate a 2,048-token sequence, and free it. With the prefix cache, ours looks the new prompt up; the
    peer has its hashes already, and publishes the blocks.
publish_free: from the token ids of a 2,048-token prompt to published and freed blocks; both hash the prompt.
decode_step: reserve one more token for 256 sequences.
prefix_match: ours allocates a prompt and shares its cached blocks; the peer hashes it and looks it up. Ours hashes no
    further than the index knows the prompt: only the first block of a new prompt, and the others when it is published.
evict: allocate 2,048 tokens in a pool full of cached blocks. Ours looks the new prompt up, the peer publishes it.
metadata: build the metadata of 256 sequences, in "mixed" with 8 chunks of 64 tokens. Ours only.
pool: allocate_free with the prefix cache, in pools of different sizes. Ours only.

Packing and hashing token ids take a third of our publish_free.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version

import torch

from paged.bench.benchmark import Benchmark, Json, Setting
from paged.bench.cache.cases import CASES, Case
from paged.bench.contest import OURS, Contest, Peer
from paged.bench.limits import Goal, at_least, at_most

PEER_VERSION = "0.33.0"
_PEER_MODULE = "paged.bench.cache.peer_vllm"
_WARM_UP = 3
_GOAL_RATIO = 3.0


def _refused_by_vllm(case: Case, _dtype: torch.dtype, _device: torch.device) -> str | None:
    if not case.has_peer:
        return "is measured without a peer"
    try:
        installed = version("vllm")
        if installed != PEER_VERSION:
            return f"skipped: vLLM {installed} is on PYTHONPATH, expected {PEER_VERSION}"
        importlib.import_module(_PEER_MODULE)
    except ImportError as error:
        return f"skipped: vLLM {PEER_VERSION} is not on PYTHONPATH ({type(error).__name__}: {error})"
    return None


PEERS = (Peer("vllm", _refused_by_vllm, lambda case: case.theirs(importlib.import_module(_PEER_MODULE))),)


def contest(case: Case, setting: Setting) -> Contest:
    """Return the contest of a case; its first samples warm up."""
    entries = Contest({"name": case.name}, setting)
    entries.samples[OURS] = case.ours().__next__
    for peer in PEERS:
        reason = peer.refuses(case, setting.dtype, setting.device)
        if reason is None:
            entries.samples[peer.name] = peer.make(case).__next__
        else:
            entries.absent[peer.name] = reason
    for sample in entries.samples.values():
        for _ in range(_WARM_UP):
            sample()

    def complete(row: Json) -> None:
        row["goals"] = goals(case, row)

    entries.complete = complete
    return entries


def goals(case: Case, row: Json) -> list[Goal]:
    """Return the goal of a row: microseconds, or a ratio to the peer's time."""
    if case.goal_us is not None:
        return [at_most(f"{case.goal_us:.0f} us", row["median_us"], case.goal_us)]
    if case.has_peer:
        ratio = row["peers"].get("vllm", {}).get("ratio")
        return [at_least(f"{_GOAL_RATIO:.0f}x vLLM's manager", ratio, _GOAL_RATIO)]
    return []


BENCHMARK = Benchmark(
    "cache",
    __doc__,
    lambda _: CASES,
    lambda case, setting: contest(case, setting).row(),
    {"cpu": 100},
    options=("json", "only", "repeats"),
    device="cpu",
    has_limits=False,
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
