"""A suite is worth what it catches: copies of the kernels with one fault each must turn the checks red."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paged.kernels.recurrent import (
    append_kernel,
    causal_conv1d,
    chunk_kernels,
    gated_delta_rule,
    gated_rms_norm,
    launches,
    mamba2_scan,
    reference,
    row_functions,
)
from tests.kernels.faulty import planted, turns_red
from tests.kernels.recurrent.problem import Problem, Seq, check
from tests.tolerance import assert_close

MODULES = (row_functions, append_kernel, chunk_kernels, causal_conv1d, gated_rms_norm)
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
    "a cursor off by one": ("rows", "entry = cursor + index", "entry = cursor + index + 1"),
    "the ring of another slot": ("rows", "        cursor = 0\n", "        cursor = cursor\n"),
    "S of another slot is not written": ("rows", "if is_moved:", "if False:"),
    "the state that was read is written": ("rows", "is_moved = write_slot != read_slot", "is_moved = write_slot >= 0"),
    "a stale slot": ("rows", "mask_v[None, :] & (slot >= 0)", "mask_v[None, :]"),
    "padding is not cleared": ("padding", "for token in range(first, num_tokens)", "for token in range(first, first)"),
    "chunks of another sequence": ("chunks", "(program - begin // CHUNK - 2 * seq)", "(program - 2 * seq)"),
    "chunks begin with the step": ("chunks", "* CHUNK - tl.load(starts_ptr + seq) % CHUNK", "* CHUNK"),
    "sums of float32 alone": ("sums", "(low[:, None] - low[None, :])", "0.0"),
    "the diagonal is corrected": ("chunks", "rows[:, None] > rows[None, :], factors",
                                  "rows[:, None] >= rows[None, :], factors"),
    "no blocks below": ("chunks", "tl.where(row == 1, -corner", "tl.where(row == 2, -corner"),
    "the state is not seen": ("chunks", "u.to(tl.float32) - product(w, operand, zero, PRECISION)", "u.to(tl.float32)"),
    "the state does not decay": ("chunks", "S * tl.load(scales_ptr + (place * 4 + 3) * CHUNK)", "S"),
    "a snapshot of the end": ("chunks", "(start + first + CHUNK == snapshot_len)", "(start + first == snapshot_len)"),
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
            gated_rms_norm.gated_rms_norm(x, z, weight, **options), reference.gated_rms_norm(x, z, weight, **options)
        )


PROBLEMS = {
    "rows": lambda device: _delta(device, *ROWS),
    "small gates": _small_gates,
    "chunks": lambda device: _delta(device, *CHUNKS),
    "sums": _sums,
    "padding": _padding,
    "mamba": _mamba,
    "conv": _conv,
    "norm": _norm,
}
