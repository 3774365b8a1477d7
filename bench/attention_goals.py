"""What a row of bench_attention is meant to reach, on one H200."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paged.bench.attention_cases import AttentionCase
from paged.bench.limits import Ceilings

_VLLM_RATIO = {"prefill": 2.5, "decode": 1.3, "mixed": 2.0}
_LONG_PREFILL = 4096
_LARGE_KV_BYTES = 256_000_000
_HOST_US = 30.0


@dataclass(frozen=True)
class Goal:
    """value and met: None where what the goal compares with did not run."""

    text: str
    value: float | None
    met: bool | None


def goals(case: AttentionCase, row: dict[str, Any], limits: Ceilings) -> list[Goal]:
    """The goals of a row, as `Measurement.row` makes it."""
    ratios = {name: peer.get("ratio") for name, peer in row["peers"].items()}
    found = [_at_least(f"{_VLLM_RATIO[case.kind]}x vLLM's Triton kernel", ratios.get("vllm"), _VLLM_RATIO[case.kind])]
    if case.kind == "prefill" and row["longest_key"] >= _LONG_PREFILL:
        found.append(_at_least("500 TFLOP/s", row["tflop_per_s"], 500.0))
        found.append(_at_least("0.85x cuDNN on contiguous keys", ratios.get("sdpa_cudnn"), 0.85))
    if case.kind == "decode" and row["num_bytes"] >= _LARGE_KV_BYTES:
        found.append(_at_least("90 % of the copy bandwidth", 100 * row["gb_per_s"] * 1e9 / limits.copy, 90.0))
    if case.kind == "mixed":
        found.append(_at_most("1.15x the perfect-overlap bound", row["median_us"] / row["bound_us"], 1.15))
    if case.kind in ("decode", "mixed"):
        found.append(_at_most(f"{_HOST_US:.0f} us of host time", row["host_us"], _HOST_US))
    return found


def _at_least(text: str, value: float | None, target: float) -> Goal:
    return Goal(f"at least {text}", value, None if value is None else value >= target)


def _at_most(text: str, value: float | None, target: float) -> Goal:
    return Goal(f"at most {text}", value, None if value is None else value <= target)
