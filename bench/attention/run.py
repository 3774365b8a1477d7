"""Paged attention against the hardware's limits and against others' attention, in one process on the same tensors.

    python -m bench.attention.run [--json FILE] [--only NAME] [--budget SECONDS] [--small]

A GPU runs bfloat16 at full size, in turns with the peers out of CUDA graphs; a CPU the PyTorch implementation in
float32 at small sizes. Block tables are shuffled; each call reads another layer's tensors than the last, more than the
cache can hold.

A row is of a call whose plan was made before, as for all layers of a step but the first; `planning_us` is what making
it adds. A row of which single queries differ from the float64 reference is refused; a peer whose do, or that differs
from ours, gets no ratio. Peers that are missing say so: vLLM's files come on PYTHONPATH.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from paged.bench.attention.cases import (
    CASES,
    MAX_LAYERS,
    AttentionCase,
    expected_spots,
    ours,
    ours_with_planning,
)
from paged.bench.attention.peers import PEERS
from paged.bench.benchmark import Benchmark, Setting
from paged.bench.check import compare
from paged.bench.contest import Contest
from paged.bench.limits import Ceilings, Goal, at_least, at_most
from paged.bench.timing import num_sets

# A case takes no more samples than fit in so many seconds, beyond the least: 16k prompts take 60 ms and more a sample.
MAX_SECONDS, MIN_REPEATS = 2.0, 10
_VLLM_RATIO = {"prefill": 2.5, "decode": 1.3, "mixed": 2.0}
_LONG_PREFILL = 4096
_WIDE_HEAD = 256  # beyond it registers hold tiles of half as many rows
_LARGE_KV_BYTES = 256_000_000


def contest(case: AttentionCase, setting: Setting) -> tuple[Contest, bool]:
    """Ours, with a plan made before and with a plan of its own, and the peers; whether the tensors exceed the cache.

    Raises:
        WrongResultError: the operation does not agree with the reference.
    """
    torch.manual_seed(0)
    found = Contest(setting)
    num_layers, is_cold = num_sets(case.cost(setting.dtype).num_bytes, setting.device, MAX_LAYERS)
    step, layers = case.tensors(setting.device, setting.dtype, num_layers)
    spots = expected_spots(step, layers[0])

    def check_spots(out: torch.Tensor) -> None:
        for token, heads, want in spots:
            compare(out.reshape(*layers[0].q.shape[:2], -1)[token, heads], want)

    found.add("ours", ours(step, layers), check_spots)
    our_out = found.calls["ours"][0]()

    def check_all(out: torch.Tensor) -> None:
        check_spots(out)
        compare(out.reshape(our_out.shape), our_out)

    found.add("planning", ours_with_planning(step, layers), check_all)
    found.add_peers(PEERS, case, lambda peer: peer.make(step, layers), check_all)
    return found, is_cold


def measure(case: AttentionCase, setting: Setting) -> dict[str, Any]:
    """The row of a case."""
    case = case.small() if setting.small else case
    found, is_cold = contest(case, setting)
    row = found.row(case.cost(setting.dtype), cold=is_cold, seconds=MAX_SECONDS, least=MIN_REPEATS)
    row["planning_us"] = row["peers"].pop("planning")["median_us"] - row["median_us"]
    row |= {
        name: getattr(case, name)
        for name in ("name", "kind", "batch", "groups", "heads", "head_dim", "v_head_dim", "block_size")
    }
    return row | {"goals": goals(case, row, setting.limits) if setting.device.type == "cuda" else []}


def goals(case: AttentionCase, row: dict[str, Any], limits: Ceilings) -> list[Goal]:
    """What a row is meant to reach on one H200; `row` is without it."""
    ratios = {name: peer.get("ratio") for name, peer in row["peers"].items()}
    found = [at_least(f"{_VLLM_RATIO[case.kind]}x vLLM's Triton kernel", ratios.get("vllm"), _VLLM_RATIO[case.kind])]
    if case.kind == "prefill" and max(case.lengths)[1] >= _LONG_PREFILL and case.head_dim <= _WIDE_HEAD:
        found.append(at_least("500 TFLOP/s", row["tflop_per_s"], 500.0))
        found.append(at_least("0.85x cuDNN on contiguous keys", ratios.get("sdpa_cudnn"), 0.85))
    if case.kind == "decode" and row["num_bytes"] >= _LARGE_KV_BYTES:
        found.append(at_least("90 % of the copy bandwidth", 100 * row["gb_per_s"] * 1e9 / limits.copy, 90.0))
    if case.kind == "mixed":
        found.append(at_most("1.15x the perfect-overlap bound", row["median_us"] / row["bound_us"], 1.15))
    return found


BENCHMARK = Benchmark("attention", __doc__, lambda _: CASES, measure, {"cuda": 50, "cpu": 10})
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
