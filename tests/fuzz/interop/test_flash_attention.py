"""FlashAttention's functions, in all versions and spellings: legal arguments give what they mean, odd ones say so."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from paged.interop import flash_attention, flash_attention_3, flash_attention_4
from paged.kernels.layers import reference
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.interop.odd_arguments import ODD_ARGUMENTS, call_with_odd
from tests.tolerance import assert_close

FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{name} {version}": function
    for version, module in ((2, flash_attention), (3, flash_attention_3), (4, flash_attention_4))
    for name, function in vars(module).items()
    if name.startswith("flash_attn_")
}
HEAD_DIM, BLOCK_SIZE, ROOM = 8, 4, 12
# The same thing under the names of other versions and forks, which all functions take by keyword.
SPELLINGS = {
    "block_table": ("block_table", "page_table"),
    "sinks": ("s_aux", "learnable_sink", "sinks"),
    "return_lse": ("return_softmax_lse", "return_lse"),
}
NO_LIMIT = [None, [-1, -1], [None, None], [-5, -1]]


def _pick(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


CASES = st.fixed_dictionaries(
    {
        "function": _pick(*sorted(FUNCTIONS)),
        # Of up to three sequences: queries, keys that are there, new keys.
        "lengths": st.lists(st.tuples(*[st.integers(0, n) for n in (3, 6, 3)]), min_size=1, max_size=3),
        "heads": _pick([4, 2], [2, 2], [3, 1]),
        "layout": _pick("padded", "picked", "paged"),
        "packs_queries": st.booleans(),
        "new": _pick("", "padded", "packed"),
        "rotary": _pick("", "interleaved", "halves", "elsewhere"),
        "leftpad": st.booleans(),
        "spare": st.booleans(),
        "causal": st.booleans(),
        "window": _pick(*NO_LIMIT, [2, 1], [0, 0], [None, 1], [2, -1], [-2, 0]),
        "softcap": _pick(None, 0.0, -1.0, 1.5),
        "scale": _pick(None, 0.7),
        "alibi": _pick("", "row", "rows", "expanded", "equal"),
        "sinks": st.booleans(),
        "descale": _pick("", "one", "row", "rows", "expanded"),
        "lse": st.booleans(),
        "probs": st.booleans(),
        "out": st.booleans(),
        "hints": st.booleans(),
        "spelling": st.integers(0, 2),
        "seed": st.integers(0, 99),
    }
)


class Call:
    """A call of one case: `given` by name, and what it must give."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.name, version = case["function"].split()
        self.version, self.function = int(version), FUNCTIONS[case["function"]]
        self.generator = torch.Generator().manual_seed(case["seed"])
        self.given: dict[str, Any] = {}
        self.is_cached, self.is_varlen = "kvcache" in self.name, "varlen" in self.name
        self.packs_queries = self.is_varlen or (self.is_cached and case["packs_queries"])
        self.new = case["new"] if self.is_cached else ""
        self.heads = case["heads"]
        if "qkv" in self.name and self.version == 2:
            self.heads = [self.heads[0]] * 2
        self._draw_lengths()
        self._draw_options()
        self._draw_tensors()
        self._lay_out_queries()
        self._lay_out_keys()
        if self.new:
            self._lay_out_new_keys()

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _draw_lengths(self) -> None:
        sizes = torch.tensor(self.case["lengths"], dtype=torch.int32)
        first = sizes[:1].expand_as(sizes)
        self.num_seqs = len(sizes)
        self.queries, self.before, self.added = (
            (sizes if self.packs_queries else first)[:, 0],
            (sizes if self.is_cached or self.is_varlen else first)[:, 1],
            (sizes if self.new == "packed" else first)[:, 2] * bool(self.new),
        )
        if "qkv" in self.name:
            self.before = self.queries
        self.leftpad = torch.zeros_like(self.before)
        if self.is_cached and self.case["leftpad"]:
            self.leftpad = self.before // 2
            self.given["cache_leftpad"] = self.leftpad
        # Rows of packed queries and keys that are of no use.
        self.spare = int(self.case["spare"] and self.name == "flash_attn_varlen_func")

    def _draw_options(self) -> None:
        case, given = self.case, self.given
        window = case["window"]
        given |= {"causal": case["causal"], "window_size": window, "softcap": case["softcap"]}
        if case["scale"]:
            given["softmax_scale"] = case["scale"]
        self.window = [-1 if edge is None else edge for edge in window or (-1, -1)]
        self.slopes = self._by_sequence("alibi_slopes", case["alibi"], self.heads[0], lambda x: x.abs() / 4)
        self.sinks = self.rand(self.heads[0]) if case["sinks"] else None
        self._give("sinks", self.sinks)
        # 8-bit values are few and scales powers of two, so that all products are exact.
        self.is_8_bit = case["descale"] != "" and self.is_cached and not (self.new and case["descale"] == "rows")
        kind, scales = case["descale"] if self.is_8_bit else "", lambda x: 2.0 ** x.round().clamp(-1, 1)
        self.k_scale = self._by_sequence("k_descale", kind, self.heads[1], scales)
        self.v_scale = self._by_sequence("v_descale", kind, self.heads[1], scales)
        self.has_lse, self.has_probs = case["lse"], case["probs"] and not self.is_cached
        self._give("return_lse", self.has_lse)
        if self.has_probs:
            given["return_attn_probs"] = True
        if case["hints"]:
            given |= {"num_splits": 3, "pack_gqa": True, "sm_margin": 2, "deterministic": True, "no_such_thing": None}

    def _by_sequence(
        self, name: str, kind: str, heads: int, make: Callable[[torch.Tensor], Any]
    ) -> torch.Tensor | None:
        """Given as one value, one row, or one a sequence; for the oracle [num_seqs, heads]."""
        if not kind or (kind == "one" and name == "alibi_slopes"):
            return None
        rows = make(self.rand(self.num_seqs, heads))
        if kind != "rows":
            rows = rows[:1].expand(self.num_seqs, -1)
        if kind == "one":
            rows = rows[:, :1].expand(-1, heads)
        self.given[name] = {"one": rows[0, 0], "row": rows[0].clone(), "equal": rows.clone()}.get(kind, rows)
        return rows

    def _give(self, name: str, given: Any) -> None:
        if given is not None:
            names = SPELLINGS[name]
            self.given[names[self.case["spelling"] % len(names)]] = given

    def _draw_tensors(self) -> None:
        heads, total = self.heads, self.before + self.added
        self.q = [self.rand(n, heads[0], HEAD_DIM) for n in self.queries.tolist()]
        self.stored: list[list[torch.Tensor]] = []  # k and v of each sequence as the cache holds them, and as they are
        self.k, self.v = [], []
        for seq, n in enumerate(total.tolist()):
            pair = [self.rand(n, heads[1], HEAD_DIM).clamp(-3, 3) for _ in "kv"]
            if self.is_8_bit:
                pair = [(2 * x).round() / 2 for x in pair]
            self.stored.append(pair)
            scales = [1.0 if scale is None else scale[seq][:, None] for scale in (self.k_scale, self.v_scale)]
            self.k.append(pair[0] * scales[0])
            self.v.append(pair[1] * scales[1])

    def _lay_out_queries(self) -> None:
        given, spare = self.given, self.spare
        nan = torch.full((spare, self.heads[0], HEAD_DIM), math.nan)
        packed = torch.cat([torch.cat([q, nan]) for q in self.q])
        if not self.packs_queries:
            packed = packed.view(self.num_seqs, -1, *packed.shape[1:])
        elif "qkv" not in self.name:
            longest = int(self.queries.max()) + spare
            given |= {"cu_seqlens_q": _offsets(self.queries + spare), "max_seqlen_q": longest}
        if spare:
            given["seqused_q"] = self.queries
        given["q"] = packed
        if self.case["out"]:
            given["out"] = torch.full_like(packed, math.nan)

    def _lay_out_keys(self) -> None:
        given, spare, heads = self.given, self.spare, self.heads[1]
        before = [[x[:n] for x in pair] for n, pair in zip(self.before.tolist(), self.stored, strict=True)]
        if self.is_cached or (self.name == "flash_attn_varlen_func" and self.case["layout"] == "paged"):
            self._lay_out_cache(before)
            return
        nan = torch.full((spare, heads, HEAD_DIM), math.nan)
        k, v = (torch.cat([torch.cat([pair[i], nan]) for pair in before]) for i in range(2))
        if self.is_varlen:
            if "qkv" in self.name:
                given |= {"cu_seqlens": _offsets(self.queries), "max_seqlen": int(self.queries.max())}
            else:
                longest = int(self.before.max()) + spare
                given |= {"cu_seqlens_k": _offsets(self.before + spare), "max_seqlen_k": longest}
            if spare:
                given["seqused_k"] = self.before
        else:
            k, v = (x.view(self.num_seqs, -1, *x.shape[1:]) for x in (k, v))
        if "qkv" in self.name and self.version == 3:
            given |= {"qkv": torch.cat([given.pop("q"), k, v], -2), "num_heads_q": self.heads[0]}
        elif "qkv" in self.name:
            given["qkv"] = torch.stack([given.pop("q"), k, v], -3)
        elif "kv" in self.name:
            given["kv"] = torch.stack([k, v], -3)
        else:
            given |= {"k": k, "v": v}

    def _lay_out_cache(self, before: list[list[torch.Tensor]]) -> None:
        given, layout = self.given, self.case["layout"]
        order = torch.randperm(10, generator=self.generator).int()
        block_size = BLOCK_SIZE if layout == "paged" else ROOM
        if layout == "paged":
            table = order[:9].view(3, 3)[: self.num_seqs]
            self._give("block_table", table)
        elif layout == "picked":
            table = order[: self.num_seqs, None]
            given["cache_batch_idx"] = table[:, 0]
        else:
            table = torch.arange(self.num_seqs)[:, None]
        self.table = table.long()
        size = 10 if layout == "picked" or layout == "paged" else self.num_seqs
        dtype = torch.float8_e4m3fn if self.is_8_bit else torch.float32
        caches = []
        for i in range(2):
            cache = torch.full((size, block_size, self.heads[1], HEAD_DIM), math.nan)
            for seq, pair in enumerate(before):
                for position, row in enumerate(pair[i]):
                    cache[self.table[seq, position // block_size], position % block_size] = row
            caches.append(cache.to(dtype))
        if self.is_cached:
            given |= {"k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": self.before}
        else:
            given |= {"k": caches[0], "v": caches[1], "seqused_k": self.before}
            if self.version == 3:  # whose offsets of keys have no default, and mean nothing to pages
                given |= {"cu_seqlens_k": _offsets(self.before), "max_seqlen_k": ROOM}

    def _lay_out_new_keys(self) -> None:
        given, case = self.given, self.case
        rows = [
            [x[n:] for x in pair]
            for n, pair in zip(self.before.tolist(), zip(self.k, self.v, strict=True), strict=True)
        ]
        k, v = (torch.cat([pair[i] for pair in rows]) for i in range(2))
        if self.new == "packed":
            given["cu_seqlens_k_new"] = _offsets(self.added)
        else:
            k, v = (x.view(self.num_seqs, -1, *x.shape[1:]) for x in (k, v))
        given |= {"k": k, "v": v}
        if not case["rotary"] or self.is_8_bit:
            return
        angles, is_interleaved = self.rand(30, 2), case["rotary"] != "halves"
        given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": is_interleaved}
        starts = self.before
        if case["rotary"] == "elsewhere":
            starts = given["rotary_seqlens"] = self.before + 7
        in_order = case["causal"] or self.given["window_size"] not in NO_LIMIT
        table = torch.cat([angles.cos(), angles.sin()], 1)
        for seq, start in enumerate(starts.tolist()):
            n, m = len(self.q[seq]), int(self.before[seq])
            of_q = start + torch.arange(n) * in_order
            self.q[seq] = reference.rotate(self.q[seq], of_q, table, is_interleaved)
            of_k = start + torch.arange(len(self.k[seq]) - m)
            rotated = reference.rotate(self.k[seq][m:], of_k, table, is_interleaved)
            self.k[seq] = self.stored[seq][0] = torch.cat([self.k[seq][:m].double(), rotated])

    def want(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[total_q, num_q_heads, head_dim] and [num_q_heads, total_q], with what rows of no use give."""
        outs, lses = [], []
        for seq, q in enumerate(self.q):
            out, lse = self._attend(seq, q.double())
            outs += [out, torch.zeros(self.spare, *out.shape[1:])]
            unused = torch.full((self.heads[0], self.spare), -math.inf)
            lses += [lse, unused if self.sinks is None else unused.logaddexp(self.sinks.double()[:, None])]
        return torch.cat(outs), torch.cat(lses, 1)

    def _attend(self, seq: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        group = self.heads[0] // self.heads[1]
        k, v = (x[seq].double().repeat_interleave(group, 1).transpose(0, 1) for x in (self.k, self.v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * (self.case["scale"] or HEAD_DIM**-0.5)
        if (softcap := self.case["softcap"] or 0.0) > 0:
            scores = softcap * (scores / softcap).tanh()
        distance = torch.arange(len(q))[:, None] + k.shape[1] - len(q) - torch.arange(k.shape[1])
        if self.slopes is not None:
            scores = scores - self.slopes[seq].double()[:, None, None] * distance.abs()
        left, right = self.window
        is_seen = torch.arange(k.shape[1]).expand_as(distance) >= self.leftpad[seq]
        is_seen = is_seen & ((distance <= left) | (left < 0)) & ((-distance <= right) | (right < 0))
        if self.case["causal"]:
            is_seen = is_seen & (distance >= 0)
        scores = scores.masked_fill(~is_seen, -math.inf)
        lse = scores.logsumexp(-1)
        if self.sinks is not None:
            lse = lse.logaddexp(self.sinks.double()[:, None])
        weights = (scores - lse.clamp(min=-1e300)[..., None]).exp()
        return (weights @ v).transpose(0, 1), lse

    def results(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out and lse as the oracle has them, after a look at what came with them."""
        result = self.function(**self.given)
        if self.version == 4:
            assert len(result) == 2
        elif not (self.has_lse or self.has_probs):
            result = result, None
        elif self.version == 3:
            assert len(result) == (4 if self.is_cached else 2)
        elif self.has_probs:
            assert result[2] is None
        out, lse = result[:2]
        assert "out" not in self.given or out is self.given["out"]
        if not self.packs_queries:
            out = out.flatten(0, 1)
            lse = None if lse is None else lse.transpose(0, 1).flatten(1)
        return out, lse


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


@fuzz(CASES, examples=250)
def test_flash_attention(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Any legal arguments, in any spelling, against float64; the cache gains what it should and nothing else."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    call = Call(case)
    out, lse = call.results()
    want, want_lse = call.want()
    assert_close(out, want)
    assert (lse is not None) == (call.has_lse or call.has_probs)
    if lse is not None:
        assert_close(lse, want_lse)
    if call.new:
        for i, name in enumerate(("k_cache", "v_cache")):
            cache = call.given[name].float()
            rows = [cache[call.table[seq]].flatten(0, 1) for seq in range(call.num_seqs)]
            for row, pair in zip(rows, call.stored, strict=True):
                assert_close(row[: len(pair[i])], pair[i].double())
                assert row[len(pair[i]) :].isnan().all()


ODD_CASES = st.tuples(CASES, st.integers(0, 99), ODD_ARGUMENTS)


@fuzz(ODD_CASES, examples=400)
def test_flash_attention_with_odd_arguments(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any value for any one argument: a result without NaN, or an error that speaks of arguments of this call."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    legal, index, expression = case
    call = Call(legal)
    given = {
        # Other lengths and tables may well ask for what was poison.
        name: one.float().nan_to_num().to(one.dtype)
        if isinstance(one, torch.Tensor) and one.is_floating_point()
        else one
        for name, one in call.given.items()
    }
    names = sorted({*given, *inspect.signature(call.function).parameters} - {"others"})
    # Heads split at another number do not fit what comes one a head.
    call_with_odd(call.function, given, names[index % len(names)], expression, {*names}, anywhere={"num_heads_q"})
