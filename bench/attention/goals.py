"""Goals of the attention benchmark's rows, on one H200."""

from __future__ import annotations

from typing import Any

from paged.bench.attention.cases import AttentionCase
from paged.bench.goal import Goal, at_least, at_most
from paged.bench.limits import Ceilings

_VLLM_RATIO = {"prefill": 2.5, "decode": 1.3, "mixed": 2.0}
_LONG_PREFILL = 4096
_WIDE_HEAD = 256  # beyond it registers hold tiles of half as many rows
_LARGE_KV_BYTES = 256_000_000
_HOST_US = 30.0


def goals(case: AttentionCase, row: dict[str, Any], limits: Ceilings) -> list[Goal]:
    """The goals of a row, without its goals."""
    ratios = {name: peer.get("ratio") for name, peer in row["peers"].items()}
    found = [at_least(f"{_VLLM_RATIO[case.kind]}x vLLM's Triton kernel", ratios.get("vllm"), _VLLM_RATIO[case.kind])]
    if case.kind == "prefill" and row["longest_key"] >= _LONG_PREFILL and case.head_dim <= _WIDE_HEAD:
        found.append(at_least("500 TFLOP/s", row["tflop_per_s"], 500.0))
        found.append(at_least("0.85x cuDNN on contiguous keys", ratios.get("sdpa_cudnn"), 0.85))
    if case.kind == "decode" and row["num_bytes"] >= _LARGE_KV_BYTES:
        found.append(at_least("90 % of the copy bandwidth", 100 * row["gb_per_s"] * 1e9 / limits.copy, 90.0))
    if case.kind == "mixed":
        found.append(at_most("1.15x the perfect-overlap bound", row["median_us"] / row["bound_us"], 1.15))
    if case.kind in ("decode", "mixed"):
        found.append(at_most(f"{_HOST_US:.0f} us of host time", row["host_us"], _HOST_US))
    return found
