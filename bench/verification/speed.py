"""Time a recorded call by each backend of this machine, beside a candidate and the peers that take it.

    paged bench --replay FILE [--candidate MODULE:FUNCTION] [--repeats N]

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
from paged.bench.cards.cards import CARDS
from paged.bench.check import Result, WrongResultError
from paged.bench.contest import OURS, Contest, Peer
from paged.bench.moe.peers import PEERS as MOE_PEERS
from paged.bench.problems.arguments import Arguments
from paged.bench.problems.experts import MoeBatch, MoeCase, MoeLayer, MoeModel
from paged.bench.timing import Call
from paged.bench.verification.candidate import Candidate, needed
from paged.bench.verification.candidate_process import load_function
from paged.bench.verification.replay import Replay, about, backends
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
    parser = argparse.ArgumentParser(description="Time a recorded call beside peers.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--candidate", metavar="MODULE:FUNCTION", help="also time this function")
    parser.add_argument(
        "--repeats", type=int, default=20, help="samples of each implementation, at least 2; default: %(default)s"
    )
    args = parser.parse_args(argv)
    try:
        _time(args)
    except SystemExit as error:  # the timed function may raise it, because it runs in this process
        raise WrongResultError("a timed function ends the process") from error
    return 0


def _time(args: argparse.Namespace) -> None:
    device = torch.device(DEVICE)
    replay = Replay(args.file, device, "")
    card, arguments = replay.card, replay.arguments
    want = replay.want()
    bounds = card.bounds(arguments, want)
    entries = Contest({"name": card.name, "size": {}}, Setting(device, args.repeats))

    def check(function: Any) -> None:
        """Check the results of a call on fresh tensors, because the timed tensors change where a call writes."""
        fresh = Replay(args.file, device, "").arguments
        for result in card.beside(arguments, card.call(fresh, function), want, bounds).values():
            result.check()

    names = backends(device)
    for name in names:
        with mock.patch.dict(os.environ, {"PAGED_BACKEND": name}):
            bound: Any = card.operation.bind(**arguments)  # type: ignore[attr-defined]
        check(bound)
        entries.add(OURS if name == names[0] else name, [partial(bound, **arguments)], lambda _: None)
    if args.candidate:
        candidate = Candidate(card.name, args.candidate)
        try:
            with candidate.installed():
                check(candidate)
                for result in card.beside(arguments, candidate.again, want, bounds).values():
                    result.check()
        finally:
            candidate.close()
        timed = partial(load_function(candidate.path), **candidate.taken(arguments))
        entries.add(candidate.path, [timed], lambda _: None)
    entrants = None
    if card.name == "paged_attention":
        entrants = _attention(arguments)
    elif card.name == "fused_moe":
        entrants = _experts(arguments)
    if entrants is not None:
        entries.add_peers(
            *entrants, lambda out: Result(out.reshape(want["out"].shape), want["out"], bounds["out"]).check()
        )
    print("\n".join([about(replay.call), f"ours: {names[0]} on {device}; {LEGEND}", line(entries.row())]))
    for name, reason in entries.absent.items():
        print(f"without {name}: {reason}")
    if entrants is None:
        print("without peers: they take paged_attention and fused_moe without options; torch is PyTorch's operators")


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
