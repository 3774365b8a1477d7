"""A suite is worth what it catches: copies of the kernels with one fault each must turn the attention checks red."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import paged.kernels.attention.launches
import paged.kernels.attention.mask
import paged.kernels.attention.online_softmax
import paged.kernels.attention.tile_kernels
from paged.bench.attention.problem import Problem
from tests.kernels.attention.problem import check
from tests.kernels.faulty import planted

attention = paged.kernels.attention
MODULES = (attention.mask, attention.online_softmax, attention.tile_kernels)  # each imports those before it

PROBLEMS = (
    Problem("ragged", ((1, 17), (3, 40), (20, 20)), heads=(4, 1)),
    Problem("window", ((1, 150), (20, 90)), window_size=(33, -1)),
    Problem("options", ((3, 30), (20, 24)), sinks=True, alibi=True, scales="head", tree=True, causal=(True, False)),
    Problem("whole blocks at once", ((1, 70),), heads=(2, 1), block_size=128, dtype=torch.float16),
    Problem("split, coverage", ((1, 2011),), heads=(1, 1), head_dim=64, coverage=True),
    Problem("chunks", ((1, 65), (30, 70)), chunk_size=24, causal=(True, False), head_dim=48, v_head_dim=24),
    Problem("int8", ((3, 40), (20, 24)), cache_dtype=torch.int8, softcap=3.0),
    Problem("keys whose start is the value", ((3, 40),), layout="shared", head_dim=64, v_head_dim=40),
)

# fault -> (text of the kernels, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", ""),
    "the last token of a sequence is dropped": ("key_mask = offs_n < seq_len", "key_mask = offs_n < seq_len - 1"),
    "one token too many is read": ("key_mask = offs_n < seq_len", "key_mask = offs_n < seq_len + 1"),
    "the last block is dropped": ("v_scales, full_end, end,", "v_scales, full_end, end - 1,"),
    "a full block is dropped": ("v_scales, full_begin,", "v_scales, full_begin + 1,"),
    "a full block is done twice": ("v_scales, full_begin,", "v_scales, tl.maximum(full_begin - 1, 0),"),
    "no causal mask": (
        "visible = offs_n[None, :] < end_key[:, None]",
        "visible = offs_n[None, :] < seq_len + 0 * end_key[:, None]",
    ),
    "the causal mask is one off": ("offs_n[None, :] < end_key[:, None]", "offs_n[None, :] < end_key[:, None] - 1"),
    "the window is one off": ("first = position - window_left", "first = position - window_left - 1"),
    "chunks begin one early": ("first = tl.maximum(first, chunk)", "first = tl.maximum(first, chunk - 1)"),
    "chunks begin one late": ("chunk = tl.maximum(position, 0) //", "chunk = 1 + tl.maximum(position, 0) //"),
    "chunks end one late": ("0, chunk + CHUNK_SIZE)", "0, chunk + CHUNK_SIZE + 1)"),
    "no chunks": ("first = tl.maximum(first, chunk)", "first = tl.maximum(first, 0 * chunk)"),
    "values are one column off": ("_load_rows(v_cache, v_offsets,", "_load_rows(v_cache + 1, v_offsets,"),
    "no scale": ("scores = scores * (scale * LOG2E)", "scores = scores * LOG2E"),
    "blocks in order, whatever the table says": (
        "block = tl.load(block_table_ptr + offs_n // KV_BLOCK_SIZE).to(tl.int64)",
        "block = (offs_n // KV_BLOCK_SIZE).to(tl.int64)",
    ),
    "the accumulator is not rescaled": ("v, acc * correction[:, None])", "v, acc)"),
    "values behind the end are read": (
        "rows = tl.load(ptrs, mask=key_mask[:, None], other=0)",
        "rows = tl.load(ptrs)",
    ),
    "values behind the end of a whole block are read": ("v = tl.where(key_mask[:, None], v, 0)", "v = v"),
    "the wrong head of a group": ("(kv_head * GROUP + row % GROUP)", "(kv_head * GROUP + row % 1)"),
    "the first split is not merged": ("for split in range(num_slots):", "for split in range(1, num_slots):"),
    "merged splits weigh the same": ("weight = tl.exp2(part_lse - finite(new_max))", "weight = tl.exp2(part_lse * 0)"),
    "lse in base 2": ("lse * _LN2", "lse"),
    "no sink": ("if sinks_ptr is not None:", "if False:"),
    "the sink is scaled": ("sink = tl.load(sinks_ptr + head,", "sink = 0.5 * tl.load(sinks_ptr + head,"),
    "no slope": ("scores -= distance", "scores -= 0 * distance"),
    "K is not scaled": ("scale *= tl.load(k_scale_ptr", "scale *= 0 * kv_head + 1.0  # tl.load(k_scale_ptr"),
    "the scale of another head": ("tl.load(v_scale_ptr + kv_head * stride_v_scale_head)", "tl.load(v_scale_ptr)"),
    "the mask is one column off": ("bits >> (offs_n % WORD_KEYS)", "bits >> ((offs_n + 1) % WORD_KEYS)"),
    "the scale of a neighbour": ("block * stride_block + slot *", "block * stride_block + (slot ^ 1) *"),
    "the scales of V for K": ("scores *= k_scale[None, :]", "scores *= v_scale[None, :]"),
    "the scales of K for V": ("v.to(tl.float32) * v_scale[:, None]", "v.to(tl.float32) * k_scale[:, None]"),
    "every sequence is causal": (
        "tl.where(tl.load(is_causal_ptr + seq) != 0, 0, window_right)",
        "window_right * 0",
    ),
}


def _first_failure(device: torch.device) -> str | None:
    for problem in PROBLEMS:
        try:
            check(problem, device)
        except (AssertionError, IndexError):
            return problem.name
    return None


@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    with planted(MODULES, [paged.kernels.attention.launches], tmp_path, *MUTATIONS[fault]):
        failed = _first_failure(device)
    assert (failed is None) == (fault == "no fault"), failed
