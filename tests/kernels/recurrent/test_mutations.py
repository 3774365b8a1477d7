"""A suite is worth what it catches: copies of the kernels with one fault each must turn the checks red."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.kernels.recurrent import (
    append_kernel,
    causal_conv1d,
    channel_kernels,
    chunk_kernels,
    gated_delta_rule,
    gated_rms_norm,
    launches,
    mamba2_scan,
    row_functions,
)
from tests.kernels.faulty import planted, turns_red
from tests.kernels.recurrent import loops
from tests.kernels.recurrent.problem import Problem, Seq, check, make_layer
from tests.tolerance import assert_close

MODULES = (row_functions, append_kernel, chunk_kernels, channel_kernels, causal_conv1d, gated_rms_norm)
SIZES: dict[str, Any] = {"key_heads": 1, "value_heads": 2, "key_dim": 16, "value_dim": 24, "ring": 8}
ROWS = (Seq(2, start=9, ring=2), Seq(0, start=4, ring=2), Seq(1, start=7, ring=3, fresh=True), Seq(1))
CHUNKS = (Seq(70, start=60, ring=2, snapshot=64), Seq(9, start=5, ring=1))

# fault -> (the problem that finds it, text of a kernel, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", "", ""),
    "the next sequence": ("chunks", "// BLOCK + EXTRA * middle", "// BLOCK + EXTRA * middle + 1"),
    "no decay": ("rows", "decay = tl.exp(g)", "decay = 1.0 + 0.0 * g"),
    "beta through 16 bits": ("rows", "gates.beta_scale / (1.0 + tl.exp(-b))",
                             "(gates.beta_scale / (1.0 + tl.exp(-b))).to(tl.float16).to(tl.float32)"),
    "softplus without its small values": ("small gates", "total == 1.0, grown, tl.log(total)",
                                          "total == 1.0, 0.0, tl.log(total)"),
    "u is not corrected": ("rows", "u = beta * (v - seen)", "u = beta * v"),
    "S before its decay": ("rows", "rest_of_S *= decay", "rest_of_S *= 1.0"),
    "all entries decay alike": ("rows", "is_later = entries[None, :] > entries[:, None]",
                                "is_later = entries[None, :] >= entries[:, None] * 0"),
    "entries of before": ("rows", "valid = entries < cursor", "valid = entries <= cursor"),
    "k is not normalised": ("rows", "k /= tl.sqrt(", "k /= 1.0 + 0.0 * tl.sqrt("),
    "the ring in the other order": ("rows", "entry = cursor - 1 - index", "entry = index"),
    "a cursor off by one": ("rows", "entry = (cursor + index) * RANK", "entry = (cursor + index + 1) * RANK"),
    "the ring of another slot": ("rows", "        cursor = 0\n", "        cursor = cursor\n"),
    "S of another slot is not written": ("rows", "if is_moved:", "if False:"),
    "the first scale of S for all rows": ("int8 chunks", "(slot >= 0), other=0.0)[None, :]",
                                          "(slot >= 0), other=0.0)[None, :] * 0.0 + 0.01"),
    "scales of another head": ("int8 chunks", "_scale_slot + head * V + offs_v\n        not_finite",
                               "_scale_slot + offs_v\n        not_finite"),
    "the state that was read is written": ("rows", "is_moved = write_slot != read_slot", "is_moved = write_slot >= 0"),
    "a stale slot": ("rows", "mask_v[None, :] & (slot >= 0)", "mask_v[None, :]"),
    "padding is not cleared": ("padding", "for token in range(first, num_tokens)", "for token in range(first, first)"),
    "chunks of another sequence": ("chunks", "(program - begin // CHUNK - 2 * seq)", "(program - 2 * seq)"),
    "chunks begin with the step": ("chunks", "* CHUNK - tl.load(starts_ptr + seq) % CHUNK", "* CHUNK"),
    "sums of float32 alone": ("sums", "(low[:, None] - low[None, :])", "0.0"),
    "rows without a token have a length": ("eps 0", "tl.where(mask, 1.0 / tl.sqrt(k_square + eps), 0.0)",
                                           "1.0 / tl.sqrt(k_square + eps)"),
    "the diagonal is corrected": ("chunks", "rows[:, None] > rows[None, :], factors",
                                  "rows[:, None] >= rows[None, :], factors"),
    "no blocks below": ("chunks", "tl.where(row == 1, -corner", "tl.where(row == 2, -corner"),
    "the state is not seen": ("chunks", "u.to(tl.float32) - product(w, operand, zero, PRECISION)", "u.to(tl.float32)"),
    "the state does not decay": ("chunks", "S * tl.load(scales_ptr + (place * 4 + 3) * CHUNK)", "S"),
    "a snapshot of the end": ("chunks", "(start + first + TOKENS == snapshot_len)", "(start + first == snapshot_len)"),
    "a gate of the next channel": ("channel rows", "gates.stride_gate_token + columns, mask",
                                   "gates.stride_gate_token + (columns ^ 1), mask"),
    "another lower bound": ("channel rows", "gates.lower_bound / (1.0", "-4.0 / (1.0"),
    "S is erased before its decay": ("channel rows", "            S *= decay[:, None]\n",
                                     "            S *= 1.0 + 0.0 * decay[:, None]\n"),
    "entries do not decay": ("channel rows", "            keys *= decay[:, None]\n",
                             "            keys *= 1.0 + 0.0 * decay[:, None]\n"),
    "an entry decays by its own gate": ("channel rows", "later = (entries // RANK + 1)", "later = (entries // RANK)"),
    "S decays by a gate too few": ("channel rows", "S *= tl.exp(g_of_first + ", "S *= tl.exp(0.0 * g_of_first + "),
    "a stale entry": ("channel rows", "valid = entries < cursor * RANK", "valid = entries <= cursor * RANK"),
    "half of the ring": ("erasing rows", "valid = entries < cursor * RANK", "valid = entries < cursor"),
    "an erased S after its decay": ("erasing rows", "removed = tl.sum(S * read[:, None]",
                                    "removed = tl.sum(S * (decay * read)[:, None]"),
    "the erased part is not seen": ("erasing rows", "out += tl.sum(q * write, axis=0) * removed", "out += 0.0"),
    "a move decays at the wrong entry": ("erasing rows", "is_first = entry % RANK == 0",
                                         "is_first = entry % RANK == RANK - 1"),
    "chunks erase before the decay": ("channel chunks", "        before = since_start\n",
                                      "        before = since_start - g\n"),
    "chunks erase after the decay": ("erasing chunks", "            before = since_start - g\n",
                                     "            before = since_start\n"),
    "pairs erase after the decay": ("erasing chunks", "sums - g, 0.0", "sums, 0.0"),
    "borders of both halves alike": ("channel chunks", "is_second[:, None], is_after, ~is_after",
                                     "is_second[:, None], is_after, is_after"),
    "pairs beyond their block": ("channel chunks", "is_second[:, None] & (block[:, None] == block[None, :] + 1)",
                                 "block[:, None] == block[None, :] + 1"),
    "sums of 16 bits": ("channel chunks", "tl.dot(factors, low, tl.dot(factors, middle, tl.dot(factors, high)))",
                        "tl.dot(factors, high)"),
    "endless gates": ("endless", "g = tl.where(g < LEAST, LEAST, g)", "g = g"),
    "the chunk does not decay": ("channel chunks", "S * tl.load(decay_ptr", "S + 0.0 * tl.load(decay_ptr"),
    "outputs of rows that erase": ("erasing chunks", "mask & (rows % RANK == RANK - 1)", "mask & (rows % RANK == 0)"),
    "no D": ("mamba", "out += tl.load(D_ptr + head).to(tl.float32) * v", "out += 0.0"),
    "no limit of dt": ("mamba", "dt < gates.least, gates.least", "dt < gates.least, dt"),
    "inputs from the step's begin": ("conv", "(cursor + inputs) * CHANNELS", "inputs * CHANNELS"),
    "inputs are not kept": ("conv", "is_stored & (inputs >= first_kept)", "is_stored & (inputs > first_kept)"),
    "the snapshot of another place": ("conv", "inputs - first_of_snapshot", "inputs + 1 - first_of_snapshot"),
    "the gate on one side": ("norm", "if NORM_FIRST:\n        x *= gate", "if not NORM_FIRST:\n        x *= gate"),
    "the weight of another place": ("norm", "places % WEIGHT_SIZE", "offs[None, :] % WEIGHT_SIZE"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    name, text, replacement = MUTATIONS[fault]
    users = (launches, gated_delta_rule, mamba2_scan)
    with planted(MODULES, users, tmp_path, text, replacement):
        for problem, check_problem in PROBLEMS.items():
            if name in ("", problem):
                assert turns_red(check_problem, device) == bool(name)


def _delta(device: torch.device, *seqs: Seq, **sizes: Any) -> None:
    check(*Problem.make(device, *seqs, max_append=3, **SIZES | sizes).delta())


def _sums(device: torch.device) -> None:
    """Decays of exp(-3000) between others near 1."""
    name, arguments = Problem.make(device, Seq(64), max_append=3, **SIZES).delta()
    a = torch.where(torch.arange(64, device=device) % 8 == 0, 3000.0, -3.0)
    check(name, arguments | {"a": a[:, None] + arguments["a"]})


def _layer(layer: str, seqs: tuple[Seq, ...], device: torch.device) -> None:
    _, name, arguments = make_layer(layer, device, *seqs, max_append=3, **SIZES)
    check(name, arguments)


def _endless(device: torch.device) -> None:
    """Logarithms of a decay that are infinite in float32, and -3000, between others."""
    _, name, arguments = make_layer("channels", device, Seq(64), max_append=3, **SIZES)
    tokens = torch.arange(64, device=device)[:, None, None]
    a = torch.where(tokens % 8 == 0, 3e38, torch.where(tokens % 8 == 3, 3000.0, arguments["a"]))
    check(name, arguments | {"a": a, "A_log": torch.full_like(arguments["A_log"], 1.0)})


def _small_gates(device: torch.device) -> None:
    """x of 1e9 times dt of 1e-8."""
    problem = Problem.make(device, Seq(2), max_append=3, decay=-18.0, **SIZES)
    name, arguments = problem.mamba()
    arguments["mixed"][:, : 2 * SIZES["value_dim"]] *= 1e9
    check(name, arguments | {"D": torch.zeros_like(arguments["D"])})


def _padding(device: torch.device) -> None:
    """Rows after the last sequence are 0, whatever their memory held."""
    name, arguments = Problem.make(device, Seq(2, start=9, ring=2), max_append=3, **SIZES).delta()
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    try:
        check(name, arguments | {key: torch.cat([arguments[key]] * 2) for key in ("mixed", "a", "b")})
    finally:
        torch.use_deterministic_algorithms(False)


def _mamba(device: torch.device) -> None:
    check(*Problem.make(device, *ROWS, *CHUNKS, max_append=3, **SIZES).mamba(dt_limits=(0.3, 0.9)))


def _conv(device: torch.device) -> None:
    check(*Problem.make(device, *ROWS, *CHUNKS, max_append=3, **SIZES).conv())


def _norm(device: torch.device) -> None:
    x, z = torch.randn(2, 3, 2, 24, device=device)
    weight = torch.randn(48, device=device)
    for norm_first in (True, False):
        options: Any = {"norm_first": norm_first, "group_size": 16}
        assert_close(
            gated_rms_norm.gated_rms_norm(x, z, weight, **options), loops.gated_rms_norm(x, z, weight, **options)
        )


PROBLEMS = {
    "rows": lambda device: _delta(device, *ROWS),
    "small gates": _small_gates,
    "chunks": lambda device: _delta(device, *CHUNKS),
    "int8 chunks": lambda device: _delta(device, *CHUNKS, state_dtype=torch.int8),
    "eps 0": lambda device: check(*Problem.make(device, *CHUNKS, max_append=3, **SIZES).delta(eps=0.0)),
    "sums": _sums,
    "padding": _padding,
    "channel rows": partial(_layer, "bounded channels", ROWS),
    "channel chunks": partial(_layer, "channels", CHUNKS),
    "erasing rows": partial(_layer, "erasing", ROWS),
    "erasing chunks": partial(_layer, "erasing", CHUNKS),
    "endless": _endless,
    "mamba": _mamba,
    "conv": _conv,
    "norm": _norm,
}
