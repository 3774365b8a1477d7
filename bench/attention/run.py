"""Paged attention against the hardware's limits and other packages, in one process on the same tensors.

    python -m bench.attention.run [--json FILE] [--only NAME] [--shape SHAPE ...] [--budget SECONDS] [--small]

A GPU runs bfloat16 at full size from CUDA graphs, in turns with the peers. A CPU runs what models run there, numba
kernels or PyTorch, in float32 at small sizes. Block tables are shuffled. Consecutive calls use different layers'
tensors, in total more than the cache holds. `sdpa` is PyTorch's attention; the row names the implementation that
PyTorch chooses.

A row is a call with a plan made before, as in all layers of a step except the first. `planning_us` is the time to make
the plan, 0 if it is less than the noise. A row is refused if single queries differ from the float64 reference. A peer
that differs from the reference or from ours gets no ratio. Missing peers are listed; vLLM's files are found on
PYTHONPATH.
"""

from __future__ import annotations

import sys

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
from paged.bench.benchmark import SHARED, Benchmark, Json, Setting, backend_name
from paged.bench.check import agreement
from paged.bench.contest import OURS, Contest
from paged.bench.limits import Ceilings, Goal, at_least, at_most
from paged.bench.timing import num_sets

# Time limit of a case in seconds, and the number of samples that it takes even beyond the limit. A sample with 16k
# prompts takes 60 ms or more.
MAX_SECONDS, MIN_REPEATS = 2.0, 10
# Kind of a batch -> goal of the speed, relative to vLLM's Triton kernel.
_VLLM_RATIO = {"prefill": 2.5, "decode": 1.3, "mixed": 2.0, "latent": 1.5}
_LONG_PREFILL = 4096
_WIDE_HEAD = 256  # no TFLOP/s goal for wider heads: registers then hold half as many rows of a tile
_LARGE_KV_BYTES = 256_000_000


def contest(case: AttentionCase, setting: Setting) -> Contest:
    """Return the contest of our calls, with a plan made before and with planning, and of the peers'.

    Raises:
        WrongResultError: the operation differs from the reference.
    """
    torch.manual_seed(0)
    cost = case.cost(setting.dtype)
    num_layers, is_cold = num_sets(cost.num_bytes, setting.device, MAX_LAYERS)
    step, layers = case.tensors(setting.device, setting.dtype, num_layers)
    spots = expected_spots(step, layers[0])
    about = {"name": case.name, "backend": backend_name(setting.device, has_numba_kernels=not case.latent)}
    entries = Contest(about, setting, cost, is_cold, MAX_SECONDS, MIN_REPEATS)

    def check_spots(out: torch.Tensor) -> None:
        for token, heads, want in spots:
            agreement(out.reshape(*layers[0].q.shape[:2], -1)[token, heads], want).check()

    our_calls = ours(step, layers)
    entries.add(OURS, our_calls, check_spots)
    our_out = our_calls[0]()

    def check_all(out: torch.Tensor) -> None:
        check_spots(out)
        agreement(out.reshape(our_out.shape), our_out).check()

    entries.add("planning", ours_with_planning(step, layers), check_all)
    entries.add_peers(PEERS, case, lambda peer: peer.make(step, layers), check_all)

    def complete(row: Json) -> None:
        row["planning_us"] = max(row["peers"].pop("planning")["median_us"] - row["median_us"], 0.0)
        if "sdpa" in row["peers"]:
            row["peers"]["sdpa"]["backend"] = chosen_by_sdpa(step, layers[0])
        if setting.device.type == "cuda":
            row["goals"] = goals(case, row, setting.limits)

    entries.complete = complete
    return entries


def goals(case: AttentionCase, row: Json, limits: Ceilings) -> list[Goal]:
    """Return the goals of a row on one H200; `row` has no goals yet."""
    ratios = {}
    for name, peer in row["peers"].items():
        ratios[name] = peer["ratio"]
    bandwidth = 100 * row["gb_per_s"] * 1e9 / limits.copy
    reads_much = case.kind == "decode" and row["num_bytes"] >= _LARGE_KV_BYTES
    if case.latent:
        ratio = _VLLM_RATIO["latent"]
        judged = [at_least(f"{ratio}x vLLM's Triton MLA", ratios.get("vllm_mla"), ratio)]
        if reads_much:
            # The goal is 500 TFLOP/s: with 128 heads the matrix unit is the limit, see bench/limits.md.
            share = max(row["tflop_per_s"] / 500, bandwidth / 75)
            judged.append(at_least("500 TFLOP/s or 75 % of the copy bandwidth, in parts", share, 1.0))
        return judged
    ratio = _VLLM_RATIO[case.kind]
    judged = [at_least(f"{ratio}x vLLM's Triton kernel", ratios.get("vllm"), ratio)]
    if case.kind == "prefill" and max(case.lengths)[1] >= _LONG_PREFILL and case.head_dim <= _WIDE_HEAD:
        judged.append(at_least("500 TFLOP/s", row["tflop_per_s"], 500.0))
        judged.append(at_least("0.85x cuDNN on contiguous keys", ratios.get("sdpa_cudnn"), 0.85))
    if reads_much:
        judged.append(at_least("90 % of the copy bandwidth", bandwidth, 90.0))
    if case.kind == "mixed":
        judged.append(at_most("1.15x the perfect-overlap bound", row["median_us"] / row["bound_us"], 1.15))
    return judged


def cases(setting: Setting) -> list[AttentionCase]:
    """Return the shapes asked for, or all cases."""
    if setting.shapes:
        return [parse_case(text) for text in setting.shapes]
    if setting.small:
        return [case.small() for case in CASES]
    return list(CASES)


BENCHMARK = Benchmark(
    "attention",
    __doc__,
    cases,
    lambda case, setting: contest(case, setting).row(),
    {"cuda": 50, "cpu": 10},
    options=(*SHARED, "shape"),
    legend="decode.4x700.h8_2.b16.d64: 4 sequences of 700 keys, 8 query and 2 KV heads, blocks of 16, heads of 64",
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
