"""A recorded call, timed by each backend of this machine beside a candidate and the peers that take it.

    paged bench --replay FILE [--candidate MODULE:FUNCTION] [--repeats N]

Each implementation is bound once, as in models, and checked against the reference before it is timed, in turns on the
same tensors. They may lie in the processor's cache.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from paged.bench.attention.cases import AttentionCase, Layer, Step
from paged.bench.attention.peers import PEERS
from paged.bench.benchmark import DEVICE, Setting, line
from paged.bench.check import Result
from paged.bench.contest import OURS, Contest
from paged.bench.operations import DEFINITIONS, Arguments
from paged.bench.verification.candidate import Candidate, needed
from paged.bench.verification.replay import Replay, about, backends

_PLAIN = {"q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seq_lens"}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line: the times of what models run here, and of each other as a ratio to it."""
    parser = argparse.ArgumentParser(description="Time a recorded call beside peers.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--candidate", metavar="MODULE:FUNCTION", help="also time this function")
    parser.add_argument("--repeats", type=int, default=20, help="samples of each, at least 2; %(default)s")
    args = parser.parse_args(argv)
    device = torch.device(DEVICE)
    replay = Replay(args.file, device, "")
    definition, arguments = replay.definition, replay.arguments
    want, judgement = definition.want(arguments), definition.judge(arguments)
    entries = Contest({"name": definition.name, "size": {}}, Setting(device, args.repeats))

    def add(name: str, function: Any) -> None:
        """Results are checked by a call on tensors of its own: the timed ones change where a call writes to them."""
        fresh = Replay(args.file, device, "").arguments
        for result in definition.beside(definition.call(fresh, function), want, judgement).values():
            result.check()
        entries.add(name, [lambda: function(**arguments)], lambda _: None)

    names = backends(device)
    for name in names:
        with mock.patch.dict(os.environ, {"PAGED_BACKEND": name}):
            bound: Any = definition.operation.bind(**arguments)  # type: ignore[attr-defined]
        add(OURS if name == names[0] else name, bound)
    if args.candidate:
        add(args.candidate, Candidate(definition.name, args.candidate))
    step_and_layer = None
    if definition.name == "paged_attention":
        step_and_layer = _step(arguments)
    if step_and_layer is not None:
        step, layer = step_and_layer
        entries.add_peers(
            PEERS, step.case, lambda peer: peer.make(step, [layer]),
            lambda out: Result(out.reshape(want["out"].shape), want["out"], *judgement).check(),
        )  # fmt: skip
    print("\n".join([about(replay.call), f"ours: {names[0]} on {device}", line(entries.row())]))
    return 0


def _step(arguments: Arguments) -> tuple[Step, Layer] | None:
    """Return a call as peers take it; None if it has options, or sequences without a token."""
    if set(needed(DEFINITIONS["paged_attention"], arguments)) != _PLAIN:
        return None
    q, k_cache, v_cache = (arguments[name] for name in ("q", "k_cache", "v_cache"))
    q_lens, seq_lens = arguments["cu_seqlens_q"].diff().tolist(), arguments["seq_lens"].tolist()
    if min(q_lens, default=0) < 1 or sum(q_lens) != len(q) or k_cache.dtype != q.dtype:
        return None
    groups = tuple((1, q_len, seq_len) for q_len, seq_len in zip(q_lens, seq_lens, strict=True))
    if len(set(groups)) == 1:
        groups = ((len(groups), *groups[0][1:]),)
    kind = "mixed"
    if max(q_lens) == 1:
        kind = "decode"
    elif q_lens == seq_lens:
        kind = "prefill"
    v_head_dim = v_cache.shape[3]
    if v_head_dim == q.shape[2]:
        v_head_dim = 0
    heads = q.shape[1], k_cache.shape[2]
    case = AttentionCase(kind, "recorded", groups, heads, k_cache.shape[1], q.shape[2], v_head_dim)
    table, offsets, lengths = (arguments[name] for name in ("block_table", "cu_seqlens_q", "seq_lens"))
    step = Step(case, table, offsets, lengths, max(q_lens), max(seq_lens))
    return step, Layer(q, k_cache, v_cache)
