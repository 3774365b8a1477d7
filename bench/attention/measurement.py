"""One case of bench_attention: everyone's calls, checked before they are timed, and the row of their times."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from paged.bench.attention.cases import (
    AttentionCase,
    Layer,
    MakeCalls,
    Step,
    expected,
    expected_spots,
    ours,
    ours_with_planning,
)
from paged.bench.attention.goals import goals
from paged.bench.attention.peers import Peer
from paged.bench.check import WrongResultError, compare
from paged.bench.environment import INTERPRETING, benchmark_dtype
from paged.bench.limits import Ceilings, speed
from paged.bench.timing import Call, cache_bytes, host_seconds, sampler
from paged.kernels.common.compat import interpreting

# Calls whose host time is taken: four kernels each, together far below the 1,024 launches that a device queues.
HOST_CALLS = 64
MAX_LAYERS = 512
_PLANNING = "planning"


@functools.cache
def check(case: AttentionCase, device: torch.device) -> None:
    """Raise WrongResultError unless `paged_attention` gives what the float64 reference gives; once for each case."""
    step, (layer,) = case.tensors(device, benchmark_dtype(device), 1)
    compare(ours(step, [layer])[0](), expected(step, layer))


@dataclass
class Contender:
    """The calls of one implementation for one case, and the samples taken of them, in seconds."""

    calls: list[Call]
    method: str
    sample: Callable[[], float]
    samples: list[float] = field(default_factory=list)


class Measurement:
    """One case: checked when made, sampled in turns by `take`, told by `row`."""

    def __init__(self, case: AttentionCase, device: torch.device, peers: dict[str, Peer | str]) -> None:
        """peers: by name, a peer or why it is missing.

        Raises:
            WrongResultError: the operation does not agree with the reference.
        """
        if interpreting():
            raise RuntimeError(INTERPRETING)
        torch.manual_seed(0)
        self._case, self._device, self._dtype = case, device, benchmark_dtype(device)
        check(case.sibling(), device)
        self._cost = case.cost(self._dtype)
        num_layers = 1 + min(2 * cache_bytes(device) // self._cost.num_bytes, MAX_LAYERS - 1)
        step, layers = case.tensors(device, self._dtype, num_layers)
        self.cold = num_layers * self._cost.num_bytes > cache_bytes(device)
        self._spots = expected_spots(step, layers[0])
        self.contenders = {"ours": self._contender(ours, step, layers, None)}
        out = self.contenders["ours"].calls[0]()
        self.contenders[_PLANNING] = self._contender(ours_with_planning, step, layers, out)
        self.absent: dict[str, str] = {}
        for name, peer in peers.items():
            reason = peer if isinstance(peer, str) else peer.refuses(case, self._dtype)
            if reason is None:
                try:
                    self.contenders[name] = self._contender(peer.make, step, layers, out)  # type: ignore[union-attr]
                except WrongResultError as error:
                    reason = f"wrong: {error}"
                except Exception as error:  # whatever a peer fails with, the others get their times
                    reason = f"failed: {type(error).__name__}: {str(error)[:500]}"
            if reason is not None:
                self.absent[name] = reason

    def _contender(self, make: MakeCalls, step: Step, layers: list[Layer], our_out: torch.Tensor | None) -> Contender:
        calls = make(step, layers)
        out = calls[0]().reshape(layers[0].q.shape)
        for token, heads, want in self._spots:
            compare(out[token, heads], want)
        if our_out is not None:
            compare(our_out, out)
        return Contender(calls, *sampler(calls, self._device))

    def take(self) -> None:
        """One more sample of everyone."""
        for contender in self.contenders.values():
            contender.samples.append(contender.sample())

    def row(self, limits: Ceilings) -> dict[str, Any]:
        """All that is known of the case; peers hold times and a ratio (their median over ours), or why they do not."""
        results = {name: self._result(contender, limits) for name, contender in self.contenders.items()}
        own, planning = results.pop("ours"), results.pop(_PLANNING)
        for result in results.values():
            result["ratio"] = result["median_us"] / own["median_us"]
        row = {
            "name": self._case.name,
            **{
                name: getattr(self._case, name)
                for name in ("kind", "batch", "groups", "heads", "head_dim", "block_size")
            },
            "longest_key": max(seq_len for _, seq_len in self._case.lengths),
            "flops": self._cost.flops,
            "num_bytes": self._cost.num_bytes,
            "method": self.contenders["ours"].method,
            "cold": self.cold,
            "samples": len(self.contenders["ours"].samples),
            **own,
            "per_sequence_bound_us": self._per_sequence_bound(limits) * 1e6,
            "planning_us": planning["median_us"] - own["median_us"],
            "host_with_planning_us": planning["host_us"],
            "peers": results,
            "absent": self.absent,
        }
        on_gpu = self._device.type == "cuda"
        return {**row, "goals": [asdict(goal) for goal in goals(self._case, row, limits)] if on_gpu else []}

    def _result(self, contender: Contender, limits: Ceilings) -> dict[str, Any]:
        host = None
        if self._device.type == "cuda" and self._case.kind != "prefill":
            host = statistics.median(host_seconds(contender.calls, self._device, HOST_CALLS)) * 1e6
        return {**asdict(speed(contender.samples, self._cost, limits)), "host_us": host}

    def _per_sequence_bound(self, limits: Ceilings) -> float:
        """The bound of a schedule that overlaps memory and matrix units within a sequence, but not across."""
        return sum(
            count * limits.bound(self._case.cost(self._dtype, [(q_len, seq_len)]))[0]
            for count, q_len, seq_len in self._case.groups
        )
