"""Time recorded calls by each backend of this machine, beside other functions and the peers that take them.

    paged bench --replay FILE [--candidate MODULE:FUNCTION] [--repeats N]
    paged bench --trace PATH [--only TEXT] [--repeats N]

PATH is a trace set of FlashInfer-Bench, or a file of workloads in one; its solutions and references are timed, too.
Each implementation is bound once, as in models, and checked against the reference. Then all are timed in turns on the
same tensors, which may lie in the processor's cache.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from paged.bench.attention.cases import AttentionCase, Layer, Step
from paged.bench.attention.peers import PEERS as ATTENTION_PEERS
from paged.bench.benchmark import DEVICE, LEGEND, Setting, line
from paged.bench.cards.card import needed
from paged.bench.cards.cards import CARDS
from paged.bench.check import Result, WrongResultError
from paged.bench.contest import OURS, Contest, Peer
from paged.bench.moe.peers import PEERS as MOE_PEERS
from paged.bench.problems.arguments import Arguments, Tensors
from paged.bench.problems.experts import MoeBatch, MoeCase, MoeLayer, MoeModel
from paged.bench.timing import Call
from paged.bench.traces.calls import calls_of
from paged.bench.verification.candidate import Candidate
from paged.bench.verification.candidate_process import load_function
from paged.bench.verification.replay import Replay, about, backends
from paged.errors import InvalidInputError
from paged.kernels.moe.weights import ExpertLinear

# Arguments of calls without options.
_ATTENTION = ["q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seq_lens"]
_EXPERTS = ["hidden_states", "w1", "w2", "topk_weights", "topk_ids"]


class Entrants(NamedTuple):
    """Peers of an operation, the recorded call as their case, and a function that makes a peer's calls."""

    peers: Sequence[Peer]
    case: Any
    make: Callable[[Peer], Sequence[Call]]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the time of the models' backend here, ratios of the others to it, and why a peer is absent."""
    parser = argparse.ArgumentParser(description="Time recorded calls beside peers.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--replay", type=Path, metavar="FILE", help="a recorded call")
    source.add_argument("--trace", type=Path, metavar="PATH", help="a FlashInfer-Bench trace set, or a file of it")
    parser.add_argument("--candidate", metavar="MODULE:FUNCTION", help="with --replay: also time this function")
    parser.add_argument("--only", default="", metavar="TEXT", help="with --trace: definitions whose name contains this")
    parser.add_argument(
        "--repeats", type=int, default=20, help="samples of each implementation, at least 2; default: %(default)s"
    )
    args = parser.parse_args(argv)
    setting = Setting(torch.device(DEVICE), args.repeats)
    try:
        if args.trace:
            _time_trace(args, setting)
        else:
            timed = _Timed(args.replay, setting)
            if args.candidate:
                timed.add(args.candidate, args.candidate)
            timed.print(about(timed.replay.call))
    except SystemExit as error:  # the timed function may raise it, because it runs in this process
        raise WrongResultError("a timed function ends the process") from error
    return 0


def _time_trace(args: argparse.Namespace, setting: Setting) -> None:
    """Time each call of a trace set. A solution that is wrong or not called is absent."""
    with calls_of(args.trace, args.only) as calls:
        for call in calls:
            if not call.operation:
                for name, reason in call.refused.items():
                    print(f"{call.label(name)}: {reason}")
                continue
            timed = _Timed(call.path, setting)
            timed.contest.absent.update(call.refused)
            for name, function in call.candidates.items():
                try:
                    timed.add(name, function)
                except (WrongResultError, InvalidInputError) as error:
                    timed.contest.absent[name] = str(error)
            timed.print(call.name)


class _Timed:
    """A recorded call and what is timed on its tensors: the backends at first."""

    def __init__(self, path: Path, setting: Setting) -> None:
        self._path, self._device = path, setting.device
        self.replay = Replay(path, setting.device, "")
        self._want = self.replay.want()
        self._bounds = self.replay.card.bounds(self.replay.arguments, self._want)
        self.contest = Contest({"name": self.replay.card.name, "size": {}}, setting)
        self._names = backends(setting.device)
        for name in self._names:
            with mock.patch.dict(os.environ, {"PAGED_BACKEND": name}):
                bound: Any = self.replay.card.operation.bind(**self.replay.arguments)  # type: ignore[attr-defined]
            self._check(bound)
            label = name
            if name == self._names[0]:
                label = OURS
            self.contest.add(label, [partial(bound, **self.replay.arguments)], lambda _: None)

    def _check(self, function: Any) -> None:
        """Check the results of a call on fresh tensors, because the timed tensors change where a call writes."""
        card, fresh = self.replay.card, Replay(self._path, self._device, "").arguments
        self._check_results(card.call(fresh, function))

    def _check_results(self, results: Tensors) -> None:
        for result in self.replay.card.beside(self.replay.arguments, results, self._want, self._bounds).values():
            result.check()

    def add(self, name: str, path: str) -> None:
        """Check a function in a process of its own, then time it. A function with `bind` is bound once, as ours."""
        candidate = Candidate(self.replay.card.name, path)
        try:
            with candidate.installed():
                self._check(candidate)
                self._check_results(candidate.again)
        finally:
            candidate.close()
        function, arguments = load_function(path), candidate.taken(self.replay.arguments)
        if hasattr(function, "bind"):
            function = function.bind(**arguments)
        self.contest.add(name, [partial(function, **arguments)], lambda _: None)

    def print(self, head: str) -> None:
        """Time all, beside the peers that take the call, and print a line."""
        card, arguments = self.replay.card, self.replay.arguments
        entrants = None
        if card.name == "paged_attention":
            entrants = _attention(arguments)
        elif card.name == "fused_moe":
            entrants = _experts(arguments)
        if entrants is not None:
            want, bound = self._want["out"], self._bounds["out"]
            self.contest.add_peers(*entrants, lambda out: Result(out.reshape(want.shape), want, bound).check())
        print("\n".join([head, f"ours: {self._names[0]} on {self._device}; {LEGEND}", line(self.contest.row())]))
        for name, reason in self.contest.absent.items():
            print(f"without {name}: {reason}")
        if entrants is None:
            print(
                "without peers: they take paged_attention and fused_moe without options; torch is PyTorch's operators"
            )


def _attention(arguments: Arguments) -> Entrants | None:
    """Return the entrants for a call of attention; None if it has options, or sequences without a token."""
    if set(needed(CARDS["paged_attention"], arguments)) != set(_ATTENTION):
        return None
    q, k_cache, v_cache = (arguments[name] for name in ("q", "k_cache", "v_cache"))
    q_lens, seq_lens = arguments["cu_seqlens_q"].diff().tolist(), arguments["seq_lens"].tolist()
    if min(q_lens, default=0) < 1 or sum(q_lens) != len(q) or k_cache.dtype != q.dtype:
        return None
    groups = tuple((1, q_len, seq_len) for q_len, seq_len in zip(q_lens, seq_lens, strict=True))
    if len(set(groups)) == 1:
        groups = ((len(groups), *groups[0][1:]),)
    v_head_dim = v_cache.shape[3]
    if v_head_dim == q.shape[2]:
        v_head_dim = 0
    heads = q.shape[1], k_cache.shape[2]
    case = AttentionCase("mixed", "recorded", groups, heads, k_cache.shape[1], q.shape[2], v_head_dim)
    table, offsets, lengths = (arguments[name] for name in ("block_table", "cu_seqlens_q", "seq_lens"))
    step = Step(case, table, offsets, lengths, max(q_lens), max(seq_lens))
    layer = Layer(q, k_cache, v_cache)
    return Entrants(ATTENTION_PEERS, case, lambda peer: peer.make(step, [layer]))


def _experts(arguments: Arguments) -> Entrants | None:
    """Return the entrants for a call of experts; None if it has options, or ids that name no expert."""
    if set(needed(CARDS["fused_moe"], arguments)) != set(_EXPERTS):
        return None
    hidden_states, w1, w2, topk_weights, topk_ids = (arguments[name] for name in _EXPERTS)
    num_experts, hidden_size, intermediate_size = w2.shape
    if bool(((topk_ids < 0) | (topk_ids >= num_experts)).any()):
        return None
    model = MoeModel("recorded", num_experts, topk_ids.shape[1], hidden_size, intermediate_size, num_experts)
    case = MoeCase(model, len(hidden_states), "recorded")
    layer, batch = MoeLayer(ExpertLinear(w1), ExpertLinear(w2)), MoeBatch(hidden_states, topk_weights, topk_ids)
    return Entrants(MOE_PEERS, case, lambda peer: [peer.make(case, layer, batch)])
