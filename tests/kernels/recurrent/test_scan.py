"""The gated delta rule and the scan of Mamba-2 against the plain recurrence in float64, slots and rings included."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import paged
from paged import InvalidInputError, RecurrentBatch, RecurrentState
from paged.kernels.core.device import NUMBA_DTYPES
from paged.kernels.recurrent.metadata import STATE_DTYPES
from tests.backends import needs_numba
from tests.kernels.recurrent.problem import LAYERS, Problem, Seq, check, make_layer, run
from tests.pairwise import pairwise
from tests.tolerance import DTYPES, assert_close

# Every way in which a sequence reads and writes: scans from nothing, from a ring, with a snapshot, off the grid of
# chunks; verify rows appended in place and to another slot, the first token of a prompt, and no tokens at all.
MIXED = (
    Seq(70, start=0, snapshot=64),
    Seq(1, start=9, ring=3),
    Seq(0, start=4, ring=2),
    Seq(3, start=77, ring=5, fresh=True),
    Seq(9, start=60, ring=1, snapshot=64),
    Seq(1),
    Seq(8, start=8, ring=8),
)
OPERATIONS = ["delta", "mamba"]
# Arguments with a row for each token.
TOKENS = ("mixed", "a", "b", "dt", "erase_read", "erase_write")
NUMBA_MODULES = {"causal_conv1d": "causal_conv1d"}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        pytest.param(operation, dtype, marks=pytest.mark.thorough if operation == "mamba" and index else ())
        for operation in OPERATIONS
        for index, dtype in enumerate(DTYPES)
    ],
)
def test_mixed_batch_matches_reference(operation: str, dtype: torch.dtype, device: torch.device) -> None:
    problem = Problem.make(device, *MIXED, dtype=dtype, key_dim=24, value_dim=8, key_heads=1, value_heads=2)
    check(*getattr(problem, operation)())


CHANNEL_LAYERS = ["channels", "bounded channels", "erasing"]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        pytest.param(layer, dtype, marks=pytest.mark.thorough if index and layer != "erasing" else ())
        for layer in CHANNEL_LAYERS
        for index, dtype in enumerate(DTYPES)
    ],
)
def test_decays_of_channels_match_the_rule(layer: str, dtype: torch.dtype, device: torch.device) -> None:
    sizes = {"key_dim": 24, "value_dim": 8, "key_heads": 1, "value_heads": 2, "dtype": dtype}
    _, name, arguments = make_layer(layer, device, *MIXED, **sizes)
    check(name, arguments)


@pytest.mark.usefixtures("backend")
def test_a_bounded_decay_of_heads(device: torch.device) -> None:
    problem = Problem.make(device, *MIXED, key_dim=24, value_dim=8, key_heads=1, value_heads=2)
    check(*problem.delta(lower_bound=-5.0))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("seqs", [(), (Seq(0), Seq(0, start=4, ring=2))], ids=["no sequence", "empty sequences"])
@pytest.mark.parametrize("layer", sorted(LAYERS.keys() - {"conv"}))
def test_no_tokens_at_all(layer: str, seqs: tuple[Seq, ...], device: torch.device) -> None:
    problem, name, arguments = make_layer(layer, device, *seqs)
    assert check(name, arguments).out.shape == (0, problem.shape.value_heads, problem.shape.value_dim)


# Triton's kernels of both operations are the same, and its interpreter is slow.
by_each = pytest.mark.parametrize(
    ("backend", "operation"), [("torch", "delta"), ("torch", "mamba"), ("triton", "delta")], indirect=["backend"]
)
# Every way in which rows are appended.
ROWS = (*(seq for seq in MIXED if seq.tokens <= 8), Seq(3, start=7, ring=4, fresh=True))


@needs_numba
@pytest.mark.thorough
@pytest.mark.parametrize("dtype", NUMBA_DTYPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_rows_by_numba(layer: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows after the last sequence, and one short of the ring's end."""
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    sizes = {"dtype": dtype, "key_dim": 24, "value_dim": 40}
    _, name, arguments = make_layer(layer, torch.device("cpu"), *ROWS, **sizes)
    if layer == "conv":
        arguments["bias"] = arguments["bias"].to(dtype)
    _check_by_numba(name, arguments)


@needs_numba
@pytest.mark.thorough
@pytest.mark.parametrize("state_dtype", STATE_DTYPES[1:])
@pytest.mark.parametrize("layer", ["delta", *CHANNEL_LAYERS])
def test_rounded_states_by_numba(layer: str, state_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in place and in another slot; for decays of channels, scans with snapshots too."""
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    seqs = ROWS if layer == "delta" else MIXED
    _, name, arguments = make_layer(
        layer, torch.device("cpu"), *seqs, state_dtype=state_dtype, key_dim=24, value_dim=40
    )  # fmt: skip
    _check_by_numba(name, arguments)


@needs_numba
@pytest.mark.parametrize("dtype", NUMBA_DTYPES)
@pytest.mark.parametrize("layer", CHANNEL_LAYERS)
def test_prompts_by_numba(layer: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    _, name, arguments = make_layer(layer, torch.device("cpu"), *MIXED, dtype=dtype, key_dim=24, value_dim=40)
    _check_by_numba(name, arguments)


def _check_by_numba(name: str, arguments: dict[str, Any]) -> None:
    rows = {key: value for key, value in arguments.items() if key in (*TOKENS, "x") and value is not None}
    module = importlib.import_module(f"paged.kernels.cpu.recurrent.{NUMBA_MODULES.get(name, 'scan')}")
    with mock.patch.object(module, "launch_for", wraps=module.launch_for) as launch_for:
        check(name, arguments | {key: torch.cat([value, value[:2]]) for key, value in rows.items()})
    launch_for.assert_called_once()


@pytest.mark.thorough
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("backend", "layer"),
    [*(("torch", layer) for layer in (*OPERATIONS, "channels")), ("triton", "delta"), ("triton", "channels")],
    indirect=["backend"],
)
@pairwise(
    heads=[(1, 1), (2, 4), (1, 4)],
    key_dim=[16, 64, 128],
    value_dim=[16, 64, 128],
    decay=[-12.0, 0.0, 30.0],
    beta=[-12.0, 0.0, 12.0],
    state_dtype=[torch.float32, torch.bfloat16, torch.int8],
)
def test_sizes_and_gates(
    layer: str,
    heads: tuple[int, int],
    key_dim: int,
    value_dim: int,
    decay: float,
    beta: float,
    state_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Decay near 1 and near 0; beta near 0, 1 and 2, where S turns over with each token."""
    seqs = (Seq(67, start=3, snapshot=64), Seq(2, start=5, ring=4), Seq(1, start=40, ring=16, fresh=True))
    sizes: dict[str, Any] = {"key_heads": heads[0], "value_heads": heads[1]}
    sizes |= {"key_dim": key_dim, "value_dim": value_dim}
    sizes |= {"decay": decay, "beta": beta, "state_dtype": state_dtype}
    _, name, arguments = make_layer(layer, device, *seqs, **sizes)
    check(name, arguments | ({"dt_limits": (0.01, 0.5)} if layer == "mamba" else {"beta_scale": 2.0}))


def lengths_to_130(backend: str) -> Iterable[int]:
    """In the interpreter, which takes a minute for all, those around the sizes of tiles."""
    return range(1, 131) if backend == "torch" else (*range(1, 18), *range(31, 34), *range(63, 66), 127, 128, 130)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "layer"),
    [
        *(("torch", layer) for layer in (*OPERATIONS, *CHANNEL_LAYERS)),
        *(("triton", layer) for layer in ("delta", "channels", "erasing")),
    ],
    indirect=["backend"],
)
def test_every_length_from_1_to_130(layer: str, backend: str, device: torch.device) -> None:
    """Each from a position of its own, so that first and last chunks have every length too, with rows that are no
    tokens; with eps 0 their length may not be divided by."""
    lengths = lengths_to_130(backend)
    seqs = [Seq(tokens, start=5 * tokens % 64, ring=0 if tokens % 3 else -1) for tokens in lengths]
    _, name, arguments = make_layer(layer, device, *seqs, max_append=0, key_heads=1, value_heads=1)
    if name == "gated_delta_rule":
        arguments["eps"] = 0.0
    check(name, arguments)


@pytest.mark.thorough
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layer", CHANNEL_LAYERS)
@pytest.mark.parametrize("share", [0.03, 0.5])
def test_gates_at_both_limits(layer: str, share: float, backend: str, device: torch.device) -> None:
    """Channels that keep everything, but for a share of the tokens, at which they decay as fast as they can: no
    exponent leaves float32. The interpreter takes 6 seconds for 4,096 tokens of a head, and 30 with erase vectors:
    it scans so many once in each layer without them."""
    seqs = [Seq(tokens, start=5 * tokens % 64) for tokens in (1, 15, 17, 65, 130)]
    is_interpreted = backend == "triton" and device.type == "cpu"
    if not is_interpreted or (share < 0.1 and layer != "erasing"):
        seqs.append(Seq(4096, start=7))
    _, name, arguments = make_layer(layer, device, *seqs, max_append=0, key_heads=1, value_heads=1)
    a = arguments["a"]
    decays = torch.rand(a.shape, device=device) < share
    check(name, arguments | {"a": torch.where(decays, 3000.0, -60.0).to(a.dtype)})


class Steps:
    """One sequence's tokens in steps, over slots that begin as NaN, as a pool would keep it."""

    def __init__(self, name: str, arguments: dict[str, Any], problem: Problem) -> None:
        self.operation = getattr(paged, name)
        self.arguments = arguments
        tensors = [
            None if each is None else torch.full_like(each, float("nan")) for each in vars(problem.state).values()
        ]
        self.state = RecurrentState(*tensors)
        self.at, self.slot, self.cursor = 0, -1, 0
        self.outs: list[torch.Tensor] = []

    def step(self, tokens: int, *, write: int, kept: int | None = None) -> None:
        """Run `tokens` and keep so many of them, as after rejected drafts or, with 0, after a failure."""
        kept = tokens if kept is None else kept
        columns = [[0, tokens], *([each] for each in (self.at, self.slot, write, self.cursor, -1, -1))]
        device = self.state.conv.device
        tensors = [torch.tensor(column, dtype=torch.int32, device=device) for column in columns]
        batch = RecurrentBatch(*tensors, tokens, 16 if tokens <= 16 else 0)
        part = {
            key: value[self.at : self.at + tokens]
            for key, value in self.arguments.items()
            if key in TOKENS and value is not None
        }
        found = self.read()
        out = self.operation(**self.arguments | part | {"state": self.state, "batch": batch})
        assert all(torch.equal(new, old) for new, old in zip(self.read(), found, strict=True))
        self.outs.append(out[:kept])
        self.at += kept
        if kept:
            self.cursor = 0 if tokens > 16 else kept + (self.cursor if write == self.slot else 0)
            self.slot = write

    def read(self) -> list[torch.Tensor]:
        """What the next step reads: it must be the same bits after a step that fails, or whose drafts are rejected."""
        if self.slot < 0:
            return []
        rings = self.state.rings()
        entries = self.slot, slice(0, self.cursor * rings.rank)
        read = rings.state[self.slot], rings.k[entries], rings.u[entries], rings.g[self.slot, : self.cursor]
        return [tensor.clone() for tensor in read]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("backend", "layer"),
    [
        *(("torch", layer) for layer in (*OPERATIONS, *CHANNEL_LAYERS)),
        *(pytest.param("triton", layer, marks=pytest.mark.thorough) for layer in ("delta", "channels", "erasing")),
    ],
    indirect=["backend"],
)
def test_one_text_by_any_steps(layer: str, device: torch.device) -> None:
    """A scan; single tokens until the ring is full; a flush; drafts of which some are rejected; a failed step that is
    made again; a scan off the grid. Outputs are those of one scan of the whole text."""
    problem, name, arguments = make_layer(layer, device, Seq(140), value_heads=2, decay=-3.0)
    whole = run(name, arguments).out
    steps = Steps(name, arguments, problem)
    steps.step(37, write=1)
    for _ in range(16):
        steps.step(1, write=1)
    steps.step(1, write=2)
    steps.step(4, write=2, kept=0)
    steps.step(4, write=2, kept=2)
    steps.step(8, write=2, kept=3)
    steps.step(6, write=3, kept=0)
    steps.step(6, write=3)
    steps.step(75, write=1)
    assert_close(torch.cat(steps.outs), whole.double(), float32=2e-5)


@pytest.mark.thorough
@by_each
def test_ten_thousand_tokens_by_scans_and_by_decodes(operation: str, backend: str, device: torch.device) -> None:
    """Ten scans, and rows of 1 to 16 tokens beside the ring, agree to the rounding of float32 at every token; in the
    interpreter, which takes 3 minutes for 10,000, over 700 tokens."""
    length = 10_000 if backend == "torch" or device.type == "cuda" else 700
    problem = Problem.make(device, Seq(length), key_heads=1, value_heads=1, decay=-4.0)
    name, arguments = getattr(problem, operation)()
    by_scans = Steps(name, arguments, problem)
    by_rows = Steps(name, arguments, problem)
    for count in range(10):
        by_scans.step(length // 10, write=1 + count % 2)
    while by_rows.at < length:
        tokens = min(by_rows.at % 16 + 1, length - by_rows.at)
        fits = by_rows.slot >= 0 and by_rows.cursor + tokens <= 16
        by_rows.step(tokens, write=by_rows.slot if fits else 3 - max(by_rows.slot, 1))
    scanned, appended = (torch.cat(steps.outs) for steps in (by_scans, by_rows))
    assert_close(appended, scanned.double(), float32=4e-5)


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    problem = Problem.make(device, Seq(9, start=60, ring=1), Seq(2, start=3, ring=3))
    name, arguments = problem.delta()
    run(name, arguments)
    state, batch = problem.state, problem.batch
    slots = int(batch.read_slots[0]), int(batch.write_slots[1])

    def with_batch(**fields: object) -> dict[str, object]:
        made = {
            field: torch.tensor(value, dtype=torch.int32, device=device) if isinstance(value, list) else value
            for field, value in fields.items()
        }
        return {"batch": replace(batch, **made)}

    for bad, message in (
        ({"mixed": arguments["mixed"][:, 1:]}, r"mixed: shape \[11, 127\], expected \[num_tokens, 128\]"),
        ({"a": arguments["a"][1:]}, r"a: shape \[10, 4\], expected \[11, 4\]"),
        ({"b": arguments["b"].double()}, "b: dtype"),
        ({"A_log": arguments["A_log"][1:]}, r"A_log: shape \[3\], expected \[4\]"),
        ({"num_k_heads": 3}, "key heads: 3, expected a divisor of 4"),
        ({"num_k_heads": 4}, r"ring_k: shape .*, expected \[8, 16, 4, 16\]"),
        ({"b": None}, "b: None, expected a tensor"),
        ({"lower_bound": 1.0}, "lower_bound: 1.0"),
        ({"erase_read": arguments["a"]}, "erase_read, erase_write: one of them"),
        ({"erase_read": arguments["a"], "erase_write": arguments["a"]}, "b: .* None with erase vectors"),
        ({"a": arguments["a"].unsqueeze(2).expand(-1, -1, 16)}, r"ring_g: shape .*, expected \[8, L, 4, 16\]"),
        ({"eps": -1.0}, "eps"),
        ({"state": RecurrentState(state.conv)}, "state: of a convolution alone"),
        ({"state": replace(state, ring_u=state.ring_u[:, 1:])}, "ring_u: shape"),
        ({"state": replace(state, ring_g=state.ring_g.half())}, "ring_g: dtype"),
        ({"state": replace(state, state=state.state.mT)}, "state: strides"),
        (with_batch(max_append=17), "max_append: 17, expected at most 16"),
        (with_batch(max_seqlen_q=8), r"tokens of sequence\[0\]: 9, expected 0 to 8"),
        (with_batch(cu_seqlens_q=[1, 9, 11]), r"cu_seqlens_q\[0\]: 1, expected 0"),
        (with_batch(cu_seqlens_q=[0, 9, 12]), r"cu_seqlens_q\[2\]: 12, expected 0 to 11"),
        (with_batch(read_slots=[8, slots[1]]), r"read_slots\[0\]: 8, expected -1 to 7"),
        (with_batch(write_slots=[-1, slots[1]]), r"write_slots\[0\]: -1, expected 0 to 7"),
        (with_batch(write_slots=[slots[0], slots[1]]), "another slot than is read by a scan"),
        (with_batch(write_slots=[slots[1], slots[1]]), f"slot {slots[1]} is written twice"),
        (with_batch(cursors=[17, 3]), r"cursors\[0\]: 17, expected 0 to 16"),
        (with_batch(cursors=[1, 15]), r"cursors\[1\]: 15, expected room for the tokens in 16 entries"),
        (with_batch(snapshot_slots=[0, -1], snapshot_lens=[66, 0]), r"snapshot_lens\[0\]: 66, expected a multiple"),
        (with_batch(snapshot_slots=[-1, 0], snapshot_lens=[0, 64]), r"snapshot_lens\[1\]: 64"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            run(name, arguments | bad)
    with pytest.raises(InvalidInputError, match="cu_seqlens_q: shape"):
        with_batch(starts=[0])
    _, name, erasing = make_layer("erasing", device, Seq(2))
    narrow = erasing["a"][:, :, :8]
    for bad, message in (
        ({"a": erasing["a"][:, :, 0]}, r"a: shape \[2, 2\], expected \[num_tokens, HV, K\]"),
        ({"num_k_heads": 1}, "num_k_heads: 1, expected 2, all heads"),
        ({"a": narrow}, r"a: shape \[2, 2, 8\], expected \[2, 2, 16\]"),
        ({"a": erasing["a"].mT.contiguous().mT}, "a: strides .*, expected every token contiguous"),
        ({"dt_bias": erasing["dt_bias"][:, 0]}, r"dt_bias: shape \[2\], expected \[2, 16\]"),
        ({"state": replace(erasing["state"], ring_k=erasing["state"].ring_k[:, :16])}, r"expected \[5, 32, 2, 16\]"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            run(name, erasing | bad)
    with pytest.raises(InvalidInputError, match="expected RecurrentState"):
        paged.gated_delta_rule(**arguments | {"state": state.conv})
    with pytest.raises(InvalidInputError, match="dt_limits"):
        paged.mamba2_scan(**problem.mamba(dt_limits=(0.5, 0.1))[1])
