"""Paged attention against the hardware's limits and other packages, in one process on the same tensors.

    python -m bench.attention.run [--json FILE] [--only NAME] [--shape SHAPE ...] [--budget SECONDS] [--small]

A GPU runs bfloat16 at full size from CUDA graphs, in turns with the peers. A CPU runs what models run there, numba
kernels or PyTorch, in float32 at small sizes. Block tables are shuffled. Consecutive calls use different layers'
tensors, in total more than the cache holds. `sdpa` is PyTorch's attention as it chooses itself; the row says what.

A row is a call with a plan made before, as for all layers of a step except the first; `planning_us` is the time to make
it, 0 if it is less than the noise. A row is refused if single queries differ from the float64 reference. A peer gets no
ratio if they do, or if it differs from ours. Missing peers are listed; vLLM's files are found on PYTHONPATH.
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
    parse_case,
)
from paged.bench.attention.peers import PEERS, chosen_by_sdpa
from paged.bench.benchmark import SHARED, Benchmark, Setting, backend_name
from paged.bench.check import compare
from paged.bench.contest import Contest
from paged.bench.limits import Ceilings, Goal, at_least, at_most
from paged.bench.timing import num_sets

# Limit of a case's seconds beyond its least samples: with 16k prompts a sample takes 60 ms or more.
MAX_SECONDS, MIN_REPEATS = 2.0, 10
_VLLM_RATIO = {"prefill": 2.5, "decode": 1.3, "mixed": 2.0, "latent": 1.5}
_LONG_PREFILL = 4096
_WIDE_HEAD = 256  # beyond it registers hold tiles of half as many rows
_LARGE_KV_BYTES = 256_000_000


def contest(case: AttentionCase, setting: Setting) -> tuple[Contest, bool]:
    """Return the contest of both our calls and the peers; and whether the tensors exceed the cache.

    Raises:
        WrongResultError: the operation differs from the reference.
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
    """Measure the row of a case."""
    found, is_cold = contest(case, setting)
    row = found.row(case.cost(setting.dtype), cold=is_cold, seconds=MAX_SECONDS, least=MIN_REPEATS)
    row["planning_us"] = max(row["peers"].pop("planning")["median_us"] - row["median_us"], 0.0)
    if "sdpa" in row["peers"]:
        step, layers = case.tensors(setting.device, setting.dtype, 1)
        row["peers"]["sdpa"]["backend"] = chosen_by_sdpa(step, layers[0])
    return {
        "name": case.name,
        "backend": backend_name(setting.device, has_loops=not case.latent),
        **row,
        "goals": goals(case, row, setting.limits) if setting.device.type == "cuda" else [],
    }


def goals(case: AttentionCase, row: dict[str, Any], limits: Ceilings) -> list[Goal]:
    """Return the goals of a row on one H200; `row` is without them."""
    ratios = {name: peer.get("ratio") for name, peer in row["peers"].items()}
    if case.latent:
        found = [at_least(f"{_VLLM_RATIO['latent']}x vLLM's Triton MLA", ratios.get("vllm_mla"), _VLLM_RATIO["latent"])]
        if case.kind == "decode" and row["num_bytes"] >= _LARGE_KV_BYTES:
            # FlashMLA reaches 660 TFLOP/s of a H800 at 128 heads, where the matrix unit is the limit.
            bandwidth = 100 * row["gb_per_s"] * 1e9 / limits.copy
            is_reached = max(row["tflop_per_s"] / 500, bandwidth / 75)
            found.append(at_least("500 TFLOP/s or 75 % of the copy bandwidth, in parts", is_reached, 1.0))
        return found
    found = [at_least(f"{_VLLM_RATIO[case.kind]}x vLLM's Triton kernel", ratios.get("vllm"), _VLLM_RATIO[case.kind])]
    if case.kind == "prefill" and max(case.lengths)[1] >= _LONG_PREFILL and case.head_dim <= _WIDE_HEAD:
        found.append(at_least("500 TFLOP/s", row["tflop_per_s"], 500.0))
        found.append(at_least("0.85x cuDNN on contiguous keys", ratios.get("sdpa_cudnn"), 0.85))
    if case.kind == "decode" and row["num_bytes"] >= _LARGE_KV_BYTES:
        found.append(at_least("90 % of the copy bandwidth", 100 * row["gb_per_s"] * 1e9 / limits.copy, 90.0))
    if case.kind == "mixed":
        found.append(at_most("1.15x the perfect-overlap bound", row["median_us"] / row["bound_us"], 1.15))
    return found


def cases(setting: Setting) -> list[AttentionCase]:
    """Return the shapes asked for, or all cases."""
    if setting.shapes:
        return [parse_case(text) for text in setting.shapes]
    return [case.small() if setting.small else case for case in CASES]


BENCHMARK = Benchmark(
    "attention",
    __doc__,
    cases,
    measure,
    {"cuda": 50, "cpu": 10},
    options=(*SHARED, "shape"),
    legend="decode.4x700.h8_2.b16.d64: 4 sequences of 700 keys, 8 query and 2 KV heads, blocks of 16, heads of 64",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
