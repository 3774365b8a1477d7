"""A suite is worth what it catches: copies of the kernels with one fault each must turn the attention checks red."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import paged.kernels.attention.chosen_kernel
import paged.kernels.attention.keys
import paged.kernels.attention.launches
import paged.kernels.attention.merge_splits
import paged.kernels.attention.online_softmax
import paged.kernels.attention.tile_kernels
import paged.kernels.attention.union_kernel
import paged.kernels.core.dtypes
from paged.bench.attention.problem import Problem, call_of
from tests.backends import needs_numba
from tests.headroom import unnoted
from tests.kernels.attention.problem import ATTENTION
from tests.kernels.faulty import exceeds_no_bound_twice, load_copy, planted, turns_red

attention = paged.kernels.attention
# Each imports those before it.
MODULES = (
    paged.kernels.core.dtypes,
    attention.keys,
    attention.merge_splits,
    attention.online_softmax,
    attention.tile_kernels,
    attention.chosen_kernel,
    attention.union_kernel,
)

PROBLEMS = (
    Problem("window", ((1, 150), (20, 90)), heads=(2, 1), window_size=(33, -1)),
    Problem("options", ((3, 30), (20, 24)), sinks=True, alibi=True, scales="head", tree=True, causal=(True, False)),
    Problem("block", ((1, 70),), heads=(2, 1), block_size=128, dtype=torch.float16),
    Problem("split", ((1, 2011),), heads=(1, 1), head_dim=64, coverage=True),
    Problem("tiles", ((1, 300),) * 3, heads=(8, 8), deterministic=True),
    Problem(
        "chunks", ((1, 65), (30, 70)), heads=(2, 1), chunk_size=24, causal=(True, False), head_dim=48, v_head_dim=24
    ),
    Problem("int8", ((3, 40), (20, 24)), cache_dtype=torch.int8, softcap=3.0),
    Problem("int4", ((3, 40), (20, 24)), cache_dtype=torch.bits4x2, head_dim=72, v_head_dim=40),
    Problem("nvfp4", ((3, 40), (20, 24)), cache_dtype=torch.float4_e2m1fn_x2, scales="table", v_head_dim=24),
    Problem("mixed", ((3, 40),), cache_dtype=torch.bits4x2, v_cache_dtype=torch.float4_e2m1fn_x2),
    Problem("fp8", ((30, 60),), cache_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16),
    Problem("values", ((3, 40),), layout="shared", head_dim=64, v_head_dim=40),
    Problem("chosen", ((3, 30), (7, 70)), chosen=(24, 3), alibi=True, tree=True, window_size=(50, -1), scales="head"),
    Problem("chosen boxes", ((1, 300), (2, 250)), heads=(2, 1), chosen=(128, 3), block_size=64),
    Problem("chosen int8", ((1, 90), (4, 70)), chosen=(16, 4), cache_dtype=torch.int8, causal=(False, True)),
    Problem("chosen splits", ((1, 2000),), heads=(2, 2), chosen=(128, 9)),
    Problem("union", ((7, 75), (1, 30), (12, 90)), chosen=(24, 3), window_size=(50, -1), causal=(True, True, False)),
    Problem("union splits", ((8, 2000),), heads=(16, 1), chosen=(128, 9), dtype=torch.float16),
)

# fault -> (the problem that finds it, text of the kernels, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", "", ""),
    "a full block is done twice": ("window", "rules, full_begin,", "rules, tl.maximum(full_begin - 1, 0),"),
    "the window is one off": ("window", "first = position - window.left", "first = position - window.left - 1"),
    "no sink": ("options", "if sinks_ptr is not None:", "if False:"),
    "the sink is scaled": ("options", "sink = tl.load(sinks_ptr + head,", "sink = 0.5 * tl.load(sinks_ptr + head,"),
    "no slope": ("options", "scores -= distance", "scores -= 0 * distance"),
    "K is not scaled": ("options", "scale *= k_scale\n", "scale *= 1.0\n"),
    "the scale of another head": ("options", "scale_ptr + kv_head * stride_head)", "scale_ptr)"),
    "the mask is one column off": ("options", "bits >> (offs_n % WORD_KEYS)", "bits >> ((offs_n + 1) % WORD_KEYS)"),
    "the last token is dropped": ("block", "key_mask = offs_n < keys.seq_len", "key_mask = offs_n < keys.seq_len - 1"),
    "one token too many is read": ("block", "key_mask = offs_n < keys.seq_len", "key_mask = offs_n < keys.seq_len + 1"),
    "the last block is dropped": ("block", "rules, full_end, end,", "rules, full_end, end - 1,"),
    "the causal mask is one off": ("block", "< rules.end_key[:, None]", "< rules.end_key[:, None] - 1"),
    "no scale": ("block", "scores = scores * (rules.scale * LOG2E)", "scores = scores * LOG2E"),
    "values behind the end of a whole block are read": ("block", "v = tl.where(key_mask[:, None], v, 0)", "v = v"),
    "the wrong head of a group": ("block", "(kv_head * GROUP + row % GROUP)", "(kv_head * GROUP + row % 1)"),
    "lse in base 2": ("block", "lse * _LN2", "lse"),
    "the first split is not merged": ("split", "in tl.range(0, num_slots,", "in tl.range(1, num_slots,"),
    "a program merges one tile alone": ("tiles", "counts_ptr + 1), tl.num_programs(1)", "counts_ptr + 1), 1 << 30"),
    "merged splits weigh the same": ("split", "tl.exp2(part_lse - finite(new_max))", "tl.exp2(part_lse * 0)"),
    "chunks begin one early": ("chunks", "first = tl.maximum(first, chunk)", "first = tl.maximum(first, chunk - 1)"),
    "chunks begin one late": ("chunks", "chunk = tl.maximum(position, 0) //", "chunk = 1 + tl.maximum(position, 0) //"),
    "chunks end one late": ("chunks", "0, chunk + window.chunk_size)", "0, chunk + window.chunk_size + 1)"),
    "no chunks": ("chunks", "first = tl.maximum(first, chunk)", "first = tl.maximum(first, 0 * chunk)"),
    "every sequence is causal": ("chunks", "tl.load(is_causal_ptr + seq) != 0", "tl.load(is_causal_ptr + seq) > -1"),
    "values are one column off": (
        "int8",
        "load_elements(v_rows, block, slots,",
        "load_elements(v_rows, block + 1, slots,",
    ),
    "the scale of a block's first slot": (
        "int8",
        "cached.stride_scale_block, cached.stride_scale_slot",
        "cached.stride_scale_block, 0",
    ),
    "the scale of another group": (
        "int4",
        "starts[:, None] + tl.arange(0, GROUPS)",
        "starts[:, None] + 0 * tl.arange(0, GROUPS)",
    ),
    "nibbles of nvfp4 are swapped": ("nvfp4", "tl.join(first, second)", "tl.join(second, first)"),
    "the sign of nvfp4 is lost": ("nvfp4", "((wide << 12) & 0x80008000) |", ""),
    "no scale of the table": (
        "nvfp4",
        "scale = tl.load(table_scale_ptr)",
        "scale = 0.0 * tl.load(table_scale_ptr) + 1.0",
    ),
    "the kind of keys for values": ("mixed", "V_HEAD_DIM_PADDED, V_KIND, NATIVE", "V_HEAD_DIM_PADDED, K_KIND, NATIVE"),
    "nibbles are swapped": ("int4", "tl.join(packed & 15, packed >> 4)", "tl.join(packed >> 4, packed & 15)"),
    "the scales of V for K": ("int8", "scores *= k_scale[None, :]", "scores *= v_scale[None, :]"),
    "the scales of K for V": ("int8", "V_KIND, NATIVE_FP8) * v_scale[", "V_KIND, NATIVE_FP8) * k_scale["),
    "queries are scaled by no power of two": (
        "fp8",
        "return (wide * factor).to(tl.float16), scale * inverse",
        "return (wide * factor * 0.7).to(tl.float16), scale * inverse / 0.7",
    ),
    "a full block is dropped": ("values", "rules, full_begin,", "rules, full_begin + 1,"),
    "no causal mask": ("values", "< rules.end_key[:, None]", "< tl.max(rules.end_key, 0) + 0 * rules.end_key[:, None]"),
    "the first block for all keys": (
        "values",
        "KV_BLOCK_SIZE) + offs_n // KV_BLOCK_SIZE",
        "KV_BLOCK_SIZE) + 0 * offs_n",
    ),
    "the ids of the keys before": ("split", "(keys.block_table_ptr, index + 1,", "(keys.block_table_ptr, index,"),
    "the accumulator is not rescaled": ("values", "v, acc * correction[:, None])", "v, acc)"),
    "an entry is visible one token early": ("chosen", "(positions < choice.end_key)", "(positions <= choice.end_key)"),
    "a chosen block's first key is dropped": (
        "chosen",
        "positions >= choice.first_key",
        "positions > choice.first_key",
    ),
    "the blocks of another KV head": (
        "chosen",
        "stride_chosen_token + kv_head_64 * stride_chosen_head",
        "stride_chosen_token",
    ),
    "the blocks of another token": (
        "chosen",
        "chosen_ptr += first_token.to(tl.int64) * stride_chosen_token + kv_head_64",
        "chosen_ptr += step_token.to(tl.int64) * stride_chosen_token + kv_head_64",
    ),
    "chosen keys of another KV head": ("chosen", "k_cache + kv_head_64 * stride_k_head", "k_cache"),
    "the last entry is dropped": ("chosen", "entry < choice.num_chosen", "entry < choice.num_chosen - 1"),
    "each part of a chosen block is its first": (
        "chosen boxes",
        "first += index * BLOCK_N % CHOSEN_SIZE",
        "first += index * 0",
    ),
    "parts of chosen blocks begin anew": (
        "chosen",
        "first += (index * BLOCK_N + offs_n) % CHOSEN_SIZE",
        "first += offs_n % CHOSEN_SIZE",
    ),
    "the ids of the chosen keys before": ("chosen boxes", "_load_ids(choice, index + 1,", "_load_ids(choice, index,"),
    "chosen keys begin at a cache block": ("chosen boxes", "first=first % KV_BLOCK_SIZE", "first=first * 0"),
    "every token is of the first sequence": (
        "chosen",
        "tl.load(bundle_seqs_ptr + bundle).to",
        "tl.load(bundle_seqs_ptr).to",
    ),
    "distances of chosen keys in order": (
        "chosen",
        "rules.position[:, None] - positions[None, :]",
        "rules.position[:, None] - index * BLOCK_N",
    ),
    "the mask of chosen keys is one off": ("chosen", "(positions % WORD_KEYS)", "((positions + 1) % WORD_KEYS)"),
    "no sequence of chosen blocks is causal": (
        "chosen int8",
        "tl.load(is_causal_ptr + seq) != 0",
        "tl.load(is_causal_ptr + seq) > 1",
    ),
    "chosen values take the scales of K": ("chosen int8", "* v_scale[:, None]).to", "* k_scale[:, None]).to"),
    "partial results of chosen keys of another head": (
        "chosen splits",
        "(slot * tl.num_programs(0) + kv_head) * BLOCK_M",
        "(slot + kv_head) * BLOCK_M",
    ),
    "a block of one token is of all": ("union", "& is_member & (positions", "& (positions"),
    "members are one token off": ("union", "members[None, :] >> rules.query", "members[None, :] >> 1 + rules.query"),
    "members of a whole block are one off": (
        "union splits",
        "(members >> rules.query)",
        "(members >> 1 + rules.query)",
    ),
    "tokens of a union see behind themselves": ("union", "(positions[None, :] < rules.end_key[:, None])", "True"),
    "the window of a union is one off": ("union", ">= rules.first_key[:, None]", "> rules.first_key[:, None]"),
    "a union ends at its first token": (
        "union",
        "visible_range(first_position + last_query,",
        "visible_range(first_position,",
    ),
    "a union reads the last token's window": (
        "union",
        "first_key, _ = visible_range(first_position,",
        "first_key, _ = visible_range(first_position + last_query,",
    ),
    "a second entry of a block counts for all": ("union", "(times > repeats)", "(times > 0 * repeats)"),
    "a second entry of a block is dropped": ("union", "(times > repeats)", "(times > 2 * repeats)"),
    "each token adds its blocks to the union": ("union", "is_new & ~(is_member & (other_token < token))", "is_new"),
    "blocks of the first token alone": (
        "union",
        "is_new & ~(is_member & (other_token < token))",
        "is_new & (token == 0)",
    ),
    "a token hides blocks that it does not see": (
        "union",
        "(times > repeats) & _is_seen(ids, first_position + other_token, seq_len, window, CHOSEN_SIZE)",
        "(times > repeats)",
    ),
    "the union of another bundle": (
        "union",
        "union_ids_ptr + index * max_entries",
        "union_ids_ptr + kv_head * max_entries",
    ),
    "splits of a union as planned": ("union splits", "end = (end * blocks // planned).to(tl.int32)", "end = end"),
    "values behind the end are read": ("values", "tl.load(ptrs, mask=key_mask[:, None], other=0)", "tl.load(ptrs)"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    name, text, replacement = MUTATIONS[fault]
    with planted(MODULES, [attention.launches], tmp_path, text, replacement):
        for problem in PROBLEMS:
            if name in ("", problem.name):
                assert turns_red(exceeds_no_bound_twice, ATTENTION, call_of(problem, device)) == bool(name)


NUMBA_OPS = "paged.kernels.cpu.attention"
# Of `NUMBA_OPS`; each imports those before it.
NUMBA_MODULES = (
    *("many_queries", "few_formats", "few_queries", "few_kernels", "tile_products", "vector_products"),
    *("paged_attention", "chosen_blocks"),
)
_FEW = Problem("few", ((3, 150), (1, 90), (2, 0)), sinks=True, alibi=True, softcap=2.0, padding_rows=2)
# The kernel of few queries takes up to 16 rows of a KV head: beside more it is not compiled.
_MANY = replace(_FEW, name="many", lengths=((40, 150), (12, 20)), heads=(34, 2))
_CHOSEN = replace(_FEW, name="chosen", chosen=(24, 4))
_INT4 = replace(_FEW, name="int4", cache_dtype=torch.bits4x2, head_dim=64)
_PAIRS = replace(_INT4, name="pairs", dtype=torch.bfloat16)
_INT8 = replace(_FEW, name="int8", cache_dtype=torch.int8, head_dim=64)
_MANY_INT8 = replace(_INT8, name="many int8", lengths=_MANY.lengths, heads=_MANY.heads)
_NVFP4 = replace(_INT4, name="nvfp4", cache_dtype=torch.float4_e2m1fn_x2, scales="table")
_MANY_NVFP4 = replace(_NVFP4, name="many nvfp4", lengths=_MANY.lengths, heads=_MANY.heads)
_TWO_FORMATS = replace(_INT4, name="two formats", cache_dtype=torch.float4_e2m1fn_x2, v_cache_dtype=torch.bits4x2)
# fault -> (the problem that finds it, text of the numba kernels, what the copy has instead). A problem compiles its
# kernel in 6 to 15 s. The checks are those of the Triton kernels, so faults that copies of those have are left out.
NUMBA_MUTATIONS = {
    "no fault": ("few", "", ""),
    "the sink counts once for every 64 keys": ("few", "* rescale + total", "* rescale + total + rescale"),
    "the sink of another head": ("many", "first_sum(sinks, member)", "first_sum(sinks, head)"),
    "a sink of padding": ("few", "clear_rows(out, lse, no_sinks, last", "clear_rows(out, lse, sinks, last"),
    "no softcap": ("many", "score = softcapped(score, cap)", "score = score"),
    "scores are scaled twice": ("many", "        scale = np.float32(1)", "        scale = scale"),
    "the slope of another head": ("many", "number_of_head(slopes, member)", "number_of_head(slopes, head)"),
    "scales of values of another head": ("int4", "(head + h) * v_scale_head", "head * v_scale_head"),
    "the first scale of values for all": ("int4", "place + column // NUMBERS * num_scales", "place"),
    "even and odd sums are swapped": (
        "int4",
        "+ 2 * i, sums[start + chunk + i]",
        "+ 2 * i, sums[start + chunk + LANES + i]",
    ),
    "queries in another order than pairs of keys": (
        "pairs",
        "start + chunk + lanes[i]",
        "start + chunk + lanes[i ^ 1]",
    ),
    "pairs of sums in the order of memory": ("pairs", "to + chunk + columns[i]", "to + chunk + i"),
    "the first scale of values of a block": ("int8", "scales[place + key * stride]", "scales[place]"),
    "scales of keys of the next": ("int8", "place + i * scale_stride", "place + (i + 1) * scale_stride"),
    "values with scales of keys": ("many int8", "longs[starts + 3 * KEYS + key]", "longs[starts + 2 * KEYS + key + 1]"),
    "no scale of a table of keys": ("nvfp4", "nb.floats(values[42])[0] * ", ""),
    "no scale of a table of values": ("nvfp4", "inverse * factors[1]", "inverse"),
    "the first of two scales of 32 numbers for both": ("nvfp4", "column // NUMBERS * num_scales", "column // NUMBERS"),
    "the table scale of values for keys": ("many nvfp4", "scale_start, k_table, wide", "scale_start, v_table, wide"),
    "values in the format of keys": (
        "two formats",
        "for cache in (k_cache, v_cache)",
        "for cache in (k_cache, k_cache)",
    ),
    "keys behind a chosen block": ("chosen", "for j in range(num_keys, padded)", "for j in range(padded, padded)"),
}


@needs_numba
@pytest.mark.thorough
@pytest.mark.parametrize("fault", NUMBA_MUTATIONS)
def test_checks_see_the_fault_of_a_numba_kernel(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, text, replacement = NUMBA_MUTATIONS[fault]
    if name == "pairs" and not importlib.import_module("paged.kernels.cpu.vectors").HAS_BF16_PRODUCTS:
        pytest.skip("the CPU does not multiply pairs of bfloat16")
    package = importlib.import_module(NUMBA_OPS)
    modules = [importlib.import_module(f"{NUMBA_OPS}.{module}") for module in NUMBA_MODULES]
    sources = [Path(module.__file__ or "").read_text() for module in modules]
    assert any(text in source for source in sources), "the kernels have changed: this fault no longer applies"
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    for module, source in zip(NUMBA_MODULES, sources, strict=True):
        faulty = source.replace(text, replacement) if text else source
        copy = load_copy(f"{NUMBA_OPS}.{module}", tmp_path, faulty, monkeypatch)
        monkeypatch.setattr(package, module, copy)
    with unnoted():
        for problem in (_FEW, _MANY, _CHOSEN, _INT4, _PAIRS, _INT8, _MANY_INT8, _NVFP4, _MANY_NVFP4, _TWO_FORMATS):
            if problem.name == name:
                arguments = call_of(problem, torch.device("cpu"))
                assert turns_red(exceeds_no_bound_twice, ATTENTION, arguments) == (fault != "no fault")
