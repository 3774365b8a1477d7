"""FlashAttention's functions, in all versions and spellings: legal arguments give what they mean, odd ones say so; odd
ones of vLLM's functions, too."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from paged.interop import (
    flash_attention,
    flash_attention_3,
    flash_attention_4,
    fused_experts,
    reshape_and_cache_flash,
)
from paged.kernels.attention.definition import paged_attention
from paged.kernels.layers.definition import rotate
from tests.fuzz.arguments import ODD_ARGUMENTS, call_with_odd
from tests.fuzz.fuzzing import fuzz
from tests.tolerance import assert_close

FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{name} {version}": function
    for version, module in ((2, flash_attention), (3, flash_attention_3), (4, flash_attention_4))
    for name, function in vars(module).items()
    if name.startswith("flash_attn_") and name != "flash_attn_combine"
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


CASES = st.fixed_dictionaries({
    # Those with a cache take most arguments.
    "function": _pick(*sorted(FUNCTIONS), *sorted(name for name in FUNCTIONS if "kvcache" in name) * 4),
    # Of up to three sequences: queries, keys that are there, new keys.
    "lengths": st.lists(st.tuples(*[st.integers(0, n) for n in (3, 6, 3)]), min_size=1, max_size=3),
    "heads": _pick([4, 2], [2, 2], [3, 1]), "layout": _pick("padded", "picked", "paged", "rows"),
    "new": _pick("", "padded", "packed"), "rotary": _pick("", "interleaved", "halves", "elsewhere"),
    "window": _pick(*NO_LIMIT, [2, 1], [0, 0], [None, 1], [2, -1], [-2, 0]), "softcap": _pick(None, 0.0, -1.0, 1.5),
    "scale": _pick(None, 0.7), "alibi": _pick("", "row", "rows", "expanded", "equal"),
    "descale": _pick("", "one", "row", "rows", "expanded"), "spelling": st.integers(0, 2), "seed": st.integers(0, 99),
} | dict.fromkeys(
    ["packs_queries", "leftpad", "spare", "causal", "sinks", "lse", "probs", "out", "hints", "narrow", "strided"],
    st.booleans(),
))  # fmt: skip


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
        if "qkv" in self.name:
            self.heads = [self.heads[0]] * 2
        self._draw_lengths()
        self._draw_options()
        self._draw_tensors()
        self._lay_out_queries()
        self._lay_out_keys()
        if self.new:
            self._lay_out_new_keys()
        for name in set("q k v kv qkv".split()) & self.given.keys() if case["strided"] else ():
            self.given[name] = self.given[name].transpose(-1, -2).contiguous().transpose(-1, -2)

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
        if self.version == 4 and window == [2, -1]:
            window = [2, None]  # there -1 is an edge, which tests/interop covers
        given |= {"causal": case["causal"], "window_size": window, "softcap": case["softcap"]}
        if case["scale"]:
            given["softmax_scale"] = case["scale"]
        self.window = [-1 if edge is None else edge for edge in window or (-1, -1)]
        if self.version == 4 and not case["causal"] and window and None not in window and sum(window) < 0:
            self.window = [-1, -1]
        self.slopes = self._by_sequence("alibi_slopes", case["alibi"], self.heads[0], lambda x: x.abs() / 4)
        self.sinks = self.rand(self.heads[0]) if case["sinks"] else None
        self._give("sinks", self.sinks)
        # 8-bit values are few and scales powers of two, so that all products are exact.
        kind, scales = case["descale"], lambda x: 2.0 ** x.round().clamp(-1, 1)
        self.is_8_bit = kind != "" and self.is_cached
        self.scales = [self._by_sequence(name, kind, self.heads[1], scales) for name in ("k_descale", "v_descale")]
        if not self.is_8_bit:
            self.scales = [None, None]  # given, and not read
        self.has_lse, self.has_probs = case["lse"], case["probs"] and not self.is_cached
        self._give("return_lse", self.has_lse)
        if self.has_probs:
            given["return_attn_probs"] = True
        if case["hints"]:
            given |= {"num_splits": 3, "pack_gqa": True, "sm_margin": 2, "deterministic": True, "no_such_thing": None}
            given |= {"seqlen_k_per_split": 64, "disable_scheduler_metadata": True, "q_descale": torch.tensor(3.0)}
            given["max_seqlen_q"] = 0  # read beside cu_seqlens_q only
            if self.is_cached:
                given |= {"rotary_seqlens": self.before + 7, "rotary_sin": torch.zeros(1)}

    def _by_sequence(self, name: str, kind: str, heads: int, make: Callable[..., Any]) -> torch.Tensor | None:
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
        self.q = [self.rand(n, self.heads[0], HEAD_DIM) for n in self.queries.tolist()]
        shapes = [(n, self.heads[1], HEAD_DIM) for n in (self.before + self.added).tolist()]
        # k and v of each sequence as the cache holds them, and as they are.
        self.stored = [[self.rand(*shape).clamp(-3, 3) for _ in "kv"] for shape in shapes]
        if self.is_8_bit:
            self.stored = [[(2 * x).round() / 2 for x in pair] for pair in self.stored]
        self.k, self.v = (
            [pair[i] if scale is None else pair[i] * scale[seq][:, None] for seq, pair in enumerate(self.stored)]
            for i, scale in enumerate(self.scales)
        )

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
        if "qkv" in self.name:
            given["qkv"] = torch.stack([given.pop("q"), k, v], -3)
        elif "kv" in self.name:
            given["kv"] = torch.stack([k, v], -3)
        else:
            given |= {"k": k, "v": v}

    def _lay_out_cache(self, before: list[list[torch.Tensor]]) -> None:
        given, layout = self.given, self.case["layout"]
        order = torch.randperm(10, generator=self.generator).int()
        block_size, size = BLOCK_SIZE if layout in ("paged", "rows") else ROOM, 10
        if layout in ("paged", "rows"):
            table = order[:9].view(3, 3)[: self.num_seqs]
            self._give("block_table", table)
            if layout == "rows":
                self._give("block_table", order[:9].view(3, 3))
                given["cache_batch_idx"] = torch.randperm(3, generator=self.generator)[: self.num_seqs]
                table = order[:9].view(3, 3)[given["cache_batch_idx"]]
        elif layout == "picked":
            table = order[: self.num_seqs, None]
            given["cache_batch_idx"] = table[:, 0]
        else:
            table, size = torch.arange(self.num_seqs)[:, None], self.num_seqs
        self.table = table.long()
        dtype = torch.float8_e4m3fn if self.is_8_bit else torch.float32
        caches = []
        for i in range(2):
            cache = torch.full((size, block_size, self.heads[1], HEAD_DIM), math.nan)
            for seq, pair in enumerate(before):
                at = torch.arange(len(pair[i]))
                cache[self.table[seq, at // block_size], at % block_size] = pair[i]
            caches.append(cache.to(dtype))
        if self.is_cached:
            given |= {"k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": self.before}
        else:
            given |= {"k": caches[0], "v": caches[1], "seqused_k": self.before}
            if self.version == 3:  # whose offsets of keys have no default, and mean nothing to pages
                given |= {"cu_seqlens_k": _offsets(self.before), "max_seqlen_k": ROOM}

    def _lay_out_new_keys(self) -> None:
        given, case, before = self.given, self.case, self.before.tolist()
        is_narrow = self.is_8_bit and case["narrow"]
        given_rows = zip(*self.stored, strict=True) if is_narrow else (self.k, self.v)
        k, v = (torch.cat([x[n:] for n, x in zip(before, rows, strict=True)]) for rows in given_rows)
        if is_narrow:
            k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
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
        given.pop("rotary_seqlens", None)
        if case["rotary"] == "elsewhere":
            starts = given["rotary_seqlens"] = self.before + 7
        in_order = case["causal"] or self.given["window_size"] not in NO_LIMIT
        table = torch.cat([angles.cos(), angles.sin()], 1)
        for seq, (start, n) in enumerate(zip(starts.tolist(), before, strict=True)):
            of_q, of_k = (start + torch.arange(count) for count in (len(self.q[seq]), len(self.k[seq]) - n))
            self.q[seq] = rotate(self.q[seq], of_q if in_order else start + 0 * of_q, table, interleaved=is_interleaved)
            rotated = rotate(self.k[seq][n:], of_k, table, interleaved=is_interleaved)
            self.k[seq] = self.stored[seq][0] = torch.cat([self.k[seq][:n].double(), rotated])

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
        """Over what is left of padding, as one block of one row more."""
        first = int(self.leftpad[seq])
        k, v = (torch.nn.functional.pad(x[seq][first:], (0, 0, 0, 0, 0, 1))[None] for x in (self.k, self.v))
        ends = {"cu_seqlens_q": torch.tensor([0, len(q)]), "seq_lens": torch.tensor([k.shape[1] - 1])}
        options = {"causal": self.case["causal"], "window_size": self.window, "softmax_scale": self.case["scale"]}
        options |= {"softcap": max(self.case["softcap"] or 0.0, 0.0), "sinks": self.sinks}
        slopes = None if self.slopes is None else self.slopes[seq]
        table = torch.zeros(1, 1, dtype=torch.long)
        return paged_attention(q, k, v, block_table=table, alibi_slopes=slopes, **ends, **options)

    def results(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out and lse as the oracle has them, after a look at what came with them."""
        result = self.function(**self.given)
        out, lse = result[:2] if isinstance(result, tuple) else (result, None)
        assert "out" not in self.given or out is self.given["out"]
        if not self.packs_queries:
            out = out.flatten(0, 1)
            lse = None if lse is None else lse.transpose(0, 1).flatten(1)
        return out, lse


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


@fuzz(CASES, examples=120, thorough=250)
def test_flash_attention(case: dict[str, Any]) -> None:
    """Any legal arguments, in any spelling, against float64; the cache gains what it should and nothing else."""
    call = Call(case)
    out, lse = call.results()
    want, want_lse = call.want()
    assert_close(out, want)
    assert (lse is not None) == (call.has_lse or call.has_probs)
    if lse is not None:
        assert_close(lse, want_lse)
    for i, name in enumerate(("k_cache", "v_cache") if call.new else ()):
        cache = call.given[name].float()
        rows = [cache[call.table[seq]].flatten(0, 1) for seq in range(call.num_seqs)]
        for row, pair in zip(rows, call.stored, strict=True):
            assert_close(row[: len(pair[i])], pair[i].double())
            assert row[len(pair[i]) :].isnan().all()


@fuzz(st.tuples(CASES, st.integers(0, 99), ODD_ARGUMENTS), examples=90, thorough=400)
def test_flash_attention_with_odd_arguments(case: Any) -> None:
    """Any value for any one argument: a result without NaN, or an error that speaks of arguments of this call."""
    legal, index, replacement = case
    call = Call(legal)
    given = call.given
    for name, one in given.items():
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            given[name] = one.float().nan_to_num().to(one.dtype)  # other lengths and tables may ask for what was poison
    names = {*given, *inspect.signature(call.function).parameters} - {"others"}
    name = sorted(names)[index % len(names)]
    call_with_odd(call.function, given, name, replacement, names=names)


VLLM: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "experts": (fused_experts, lambda: {
        "hidden_states": torch.randn(3, 8), "w1": torch.randn(4, 12, 8) / 4, "w2": torch.randn(4, 8, 6) / 4,
        "topk_weights": torch.rand(3, 2), "topk_ids": torch.tensor([[0, 1], [3, 2], [1, 1]]), "activation": "silu",
        "apply_router_weight_on_input": False, "global_num_experts": 5, "quant_config": None, "inplace": False,
        "expert_map": torch.tensor([3, 2, -1, 1, 0], dtype=torch.int32),
    }),
    "cache": (reshape_and_cache_flash, lambda: {
        "key": torch.randn(4, 2, 8), "value": torch.randn(4, 2, 8), "slot_mapping": torch.tensor([0, 5, -1]),
        "key_cache": torch.zeros(3, 4, 2, 8), "value_cache": torch.zeros(3, 4, 2, 8), "kv_cache_dtype": "auto",
        "k_scale": torch.tensor(1.0), "v_scale": None,
    }),
}  # fmt: skip


@fuzz(st.tuples(st.sampled_from(sorted(VLLM)), st.integers(0, 99), ODD_ARGUMENTS), examples=80, thorough=300)
def test_vllm_functions_with_odd_arguments(case: Any) -> None:
    kind, index, replacement = case
    function, make = VLLM[kind]
    given = make()
    function(**make())
    call_with_odd(function, given, sorted(given)[index % len(given)], replacement, names={*given})
