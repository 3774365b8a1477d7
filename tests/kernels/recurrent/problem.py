"""Sequences over shuffled slots of a pool, NaN wherever nothing may be read, and what an operation leaves there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

import paged
from paged import RecurrentBatch, RecurrentState
from paged.kernels.core.dtypes import KV_KINDS
from tests.kernels.recurrent import loops
from tests.tolerance import assert_close, assert_within

NAN, INT8 = float("nan"), KV_KINDS[torch.int8]
# Looked up once, so that no copy with a fault becomes an attribute of `paged`.
OPERATIONS = {name: getattr(paged, name) for name in ("causal_conv1d", "gated_delta_rule", "mamba2_scan")}


class Seq(NamedTuple):
    """A sequence of a step. ring: entries of its slot that are valid, -1 for a sequence without a slot. fresh: whether
    another slot is written; a scan always writes another. snapshot: length of the sequence to keep the state at."""

    tokens: int
    start: int = 0
    ring: int = -1
    fresh: bool = False
    snapshot: int = -1


class Shape(NamedTuple):
    """Sizes of a layer. decay: added to the gate's bias; beta: added to b. channels: whether each channel of a key has
    a decay; rank: 2 for a layer with erase vectors."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 16
    ring: int = 16
    width: int = 4
    decay: float = 0.0
    beta: float = 0.0
    channels: bool = False
    rank: int = 1
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Problem:
    """A layer's arguments. `owned` are slots that sequences read or write."""

    shape: Shape
    batch: RecurrentBatch
    state: RecurrentState
    x: torch.Tensor
    gates: tuple[torch.Tensor, torch.Tensor]
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    @staticmethod
    def make(device: torch.device, *seqs: Seq, max_append: int = 8, **sizes: Any) -> Problem:
        shape = Shape(**sizes)
        heads, length, rank = shape.value_heads, shape.ring, shape.rank
        decays: tuple[int, ...] = (heads,)
        if shape.channels:
            decays = heads, shape.key_dim
        channels = 2 * shape.key_heads * shape.key_dim + heads * shape.value_dim
        free = (torch.randperm(3 * len(seqs) + 1) + 1).tolist()
        num_slots, before = len(free) + 1, shape.width - 1

        def random(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(*size, device=device).to(dtype)

        def unread(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((num_slots, *size), NAN, dtype=dtype, device=device)

        state = RecurrentState(
            unread(before + length, channels, dtype=shape.dtype),
            unread(
                heads,
                shape.value_dim,
                shape.key_dim,
                dtype=shape.state_dtype if shape.state_dtype.is_floating_point else torch.float32,
            ),
            unread(rank * length, shape.key_heads, shape.key_dim),
            unread(rank * length, heads, shape.value_dim),
            unread(length, *decays),
        )
        conv, S, ring_k, ring_u, ring_g, _ = vars(state).values()
        columns: list[list[int]] = []
        for seq in seqs:
            read = -1 if seq.ring < 0 else free.pop()
            is_scanned = seq.tokens > max_append
            write = free.pop() if read < 0 or seq.fresh or is_scanned else read
            if read >= 0:
                conv[read, : before + seq.ring] = random(before + seq.ring, channels, dtype=shape.dtype)
                S[read] = random(heads, shape.value_dim, shape.key_dim)
                entries = rank * seq.ring
                keys = random(entries, shape.key_heads, shape.key_dim)
                ring_k[read, :entries] = keys / keys.norm(dim=-1, keepdim=True)
                ring_u[read, :entries] = random(entries, heads, shape.value_dim)
                ring_g[read, : seq.ring] = -random(seq.ring, *decays).abs()
            snapshot = free.pop() if seq.snapshot >= 0 else -1
            columns.append([seq.start, read, write, max(seq.ring, 0), snapshot, seq.snapshot])
        if shape.state_dtype is torch.int8:
            codes, scale = INT8.encode(S, None)
            state = replace(state, state=codes, state_scale=scale)
        lens = torch.tensor([0, *(seq.tokens for seq in seqs)])
        table = torch.tensor(columns, dtype=torch.int32).view(-1, 6).to(device)
        longest = int(lens.max())
        batch = RecurrentBatch(
            lens.cumsum(0).int().to(device), *(each.contiguous() for each in table.T), longest, max_append
        )
        num_tokens = int(lens.sum())
        return Problem(
            shape,
            batch,
            state,
            random(num_tokens, channels, dtype=shape.dtype),
            (random(num_tokens, *decays, dtype=shape.dtype), random(num_tokens, heads, dtype=shape.dtype) + shape.beta),
            random(heads) * 0.5,
            random(*decays) + shape.decay,
        )

    def conv(self) -> tuple[Any, dict[str, Any]]:
        """The operation's name and arguments."""
        weight = torch.randn(self.x.shape[1], self.shape.width, device=self.x.device).to(self.x.dtype)
        bias = torch.randn(self.x.shape[1], device=self.x.device)
        return "causal_conv1d", {"x": self.x, "weight": weight, "bias": bias, **self.step()}

    def delta(self, **options: Any) -> tuple[str, dict[str, Any]]:
        a, b = self.gates
        gates = {"a": a, "b": b, "A_log": self.A_log, "dt_bias": self.dt_bias}
        return "gated_delta_rule", {
            "mixed": self.x,
            **gates,
            **self.step(),
            "num_k_heads": self.shape.key_heads,
            **options,
        }

    def erasing(self, **options: Any) -> tuple[str, dict[str, Any]]:
        """RWKV-7: k and the vector that reads S have length 1, the vector that is written is at most as long."""
        name, arguments = self.delta(lower_bound=-0.6065, **options)
        keys, heads = self.shape.key_heads * self.shape.key_dim, self.shape.value_heads
        k = arguments["mixed"][:, keys : 2 * keys].unflatten(1, (heads, -1))
        k /= k.norm(dim=-1, keepdim=True)
        read = torch.randn(k.shape, device=k.device).to(k.dtype)
        read /= read.norm(dim=-1, keepdim=True)
        write = -read * torch.rand(read.shape, device=k.device).to(k.dtype)
        return name, arguments | {"b": None, "erase_read": read, "erase_write": write}

    def mamba(self, **options: Any) -> tuple[str, dict[str, Any]]:
        gates = {"dt": self.gates[0], "A_log": self.A_log, "dt_bias": self.dt_bias, "D": self.A_log + 1}
        return "mamba2_scan", {"mixed": self.x, **gates, **self.step(), "num_groups": self.shape.key_heads, **options}

    def step(self) -> dict[str, Any]:
        return {"state": self.state, "batch": self.batch}


# Options of `Problem.make` and the method that gives the arguments, by name of a layer.
LAYERS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "conv": ({}, "conv", {}),
    "delta": ({}, "delta", {}),
    "mamba": ({}, "mamba", {}),
    "channels": ({"channels": True}, "delta", {}),
    "bounded channels": ({"channels": True}, "delta", {"lower_bound": -5.0}),
    "erasing": ({"channels": True, "rank": 2, "key_heads": 2, "value_heads": 2}, "erasing", {}),
}


def make_layer(layer: str, device: torch.device, *seqs: Seq, **sizes: Any) -> tuple[Problem, str, dict[str, Any]]:
    """Return a problem of a layer in LAYERS, its operation's name and arguments."""
    fixed, method, options = LAYERS[layer]
    problem = Problem.make(device, *seqs, **sizes | fixed)
    return problem, *getattr(problem, method)(**options)


def run(name: str, arguments: dict[str, Any]) -> loops.Written:
    """What the operation returns and leaves in a copy of its state."""
    state = RecurrentState(*(None if each is None else _surrounded(each) for each in vars(arguments["state"]).values()))
    out = OPERATIONS[name](**arguments | {"state": state})
    return loops.Written(out, **vars(state))


def check(name: str, arguments: dict[str, Any]) -> loops.Written:
    """Everything is as the reference says, and bit by bit as before where the step writes nothing.

    Results of float32 may be off by 2e-5 of the root mean square of all: each is a sum over values as large.
    """
    got, before = run(name, arguments), with_float_state(arguments["state"])
    arguments = arguments | {"state": before}
    want = getattr(loops, name)(**arguments)
    step: torch.Tensor | float = 0.0  # of codes
    if got.state_scale is not None:
        step = got.state_scale.cpu().unsqueeze(-1)
        got = got._replace(state=INT8.decode(got.state, got.state_scale, torch.float64), state_scale=None)
    rounded = None if got.out.dtype == torch.float32 else getattr(loops, name)(**_rounded(arguments))
    for field, expected in want._asdict().items():
        if expected is None:
            continue
        result = getattr(got, field)
        values = ~expected.isnan()
        assert torch.equal(~result.cpu().isnan(), values), field
        slack = None if rounded is None else getattr(rounded, field)[values]
        if field == "state" and isinstance(step, torch.Tensor):
            assert rounded is None
            sizes = expected.square().mean(-1, keepdim=True).sqrt().maximum(expected.abs()).clamp(min=1.0)
            rounding = (0.5 * step).expand_as(expected)[values]
            assert_within(result.cpu()[values], expected[values], 4e-5 * sizes[values], rounding=rounding)
        else:
            assert_close(result.cpu()[values], expected[values], rounded=slack, float32=2e-5)
        if field != "out":
            old = getattr(before, field).cpu()
            kept = (expected == old.double()) | (expected.isnan() & old.isnan())
            assert torch.equal(result.cpu()[kept].nan_to_num(7.0), old[kept].nan_to_num(7.0)), field
    return got


def with_float_state(state: RecurrentState) -> RecurrentState:
    """The state whose int8 rows of S are float64, or the state itself."""
    if state.state is None or state.state_scale is None:
        return state
    S = INT8.decode(state.state, state.state_scale, torch.float64)
    return replace(state, state=S, state_scale=None)


def _surrounded(slots: torch.Tensor) -> torch.Tensor:
    """A copy of a pool, strided as it is, between two slots of NaN: a read of slot -1 shows in whatever memory."""
    slot_size = slots.stride(0)
    memory = slots.new_full(((len(slots) + 2) * slot_size,), 77 if slots.dtype == torch.int8 else NAN)
    return memory.as_strided(slots.shape, slots.stride(), slot_size).copy_(slots)


def _rounded(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with every input of a product off by half a unit in the last place, up or down."""
    name = "x" if "x" in arguments else "mixed"
    tensor = arguments[name]
    side = torch.randint(0, 2, tensor.shape) * 2 - 1
    return arguments | {name: tensor.cpu().double() * (1 + side * torch.finfo(tensor.dtype).eps / 2)}
