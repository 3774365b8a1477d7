"""paged_compressed_attention against float64, and copies of its kernel with one fault each."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import paged.kernels.attention.compressed_kernel
import paged.kernels.attention.compressed_launches
import paged.kernels.attention.latent_kernel
import paged.kernels.attention.plan
from paged import AttentionPlan, paged_compressed_attention
from paged.bench.cards.cards import CARDS
from paged.bench.mla.compressed_problem import PROBLEMS, Problem, call_of, make
from paged.kernels.attention import compressed_definition
from paged.kernels.cache.latent_cache import MXFP8_BYTES, NVFP4_BYTES, RECORD_BYTES
from paged.kernels.core import dtypes
from tests.kernels.attention import loops
from tests.kernels.faulty import exceeds_no_bound_twice, planted, turns_red
from tests.kernels.refusals import assert_refuses
from tests.tolerance import assert_within

attention = paged.kernels.attention
CARD = CARDS["paged_compressed_attention"]
HALF = [replace(PROBLEMS[1], name=f"chosen {dtype}", dtype=dtype) for dtype in (torch.float16, torch.bfloat16)]
FAST = {"chosen entries", "split", "records"}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_definition(problem: Problem, device: torch.device) -> None:
    arguments = make(problem, torch.device("cpu"))
    results = compressed_definition.paged_compressed_attention(**arguments)
    for result, expected in zip(results, loops.paged_compressed_attention(**arguments), strict=True):
        assert_within(result, expected, 1e-12 * expected[expected.isfinite()].abs().clamp(min=1).sum())


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(problem, id=problem.name, marks=[pytest.mark.thorough] * (problem.name not in FAST))
        for problem in (*PROBLEMS, *HALF)
    ],
)
@pytest.mark.usefixtures("backend")
def test_matches_reference(problem: Problem, device: torch.device) -> None:
    exceeds_no_bound_twice(CARD, call_of(problem, device))


@pytest.mark.usefixtures("backend")
def test_layers_share_a_plan_and_tokens_do_not_depend_on_the_batch(device: torch.device) -> None:
    problem = Problem("", ((1, 700), (3, 90)), heads=2, chosen=7, padding_rows=1)
    arguments = make(problem, device) | {"max_seqlen_q": 3, "deterministic": True}
    plan = AttentionPlan(arguments["cu_seqlens_q"], arguments["seq_lens"], max_seqlen_q=3, max_seqlen_k=700)
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"indices": None},
        {"indices": None, "entry_cache": None, "entry_table": None},
        {"sliding_window": 5},
    )
    for change in changes:
        layer = arguments | change
        shared = paged_compressed_attention(**layer, plan=plan)
        assert torch.equal(shared, paged_compressed_attention(**layer))
        last = {name: layer[name][3:4] for name in ("q", "indices") if layer[name] is not None}
        tables = {name: layer[name][1:] for name in ("block_table", "entry_table") if layer[name] is not None}
        offsets = torch.tensor([0, 1], dtype=torch.int32, device=device)
        alone = layer | last | tables | {"seq_lens": layer["seq_lens"][1:], "cu_seqlens_q": offsets}
        assert torch.equal(paged_compressed_attention(**alone), shared[3:4])


@pytest.mark.usefixtures("backend")
def test_no_sequences_and_no_visible_keys(device: torch.device) -> None:
    arguments = make(Problem("", ((1, 20),), sinks=False, chosen=3), device) | {"max_seqlen_q": 1}
    empty = {name: arguments[name][:0] for name in ("block_table", "entry_table", "seq_lens")}
    nobody = arguments | empty | {"cu_seqlens_q": arguments["cu_seqlens_q"][:1]}
    out, lse = paged_compressed_attention(**nobody, return_lse=True)
    assert not out.any()
    assert bool((lse == -math.inf).all())


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    arguments = make(Problem("", ((1, 20), (3, 3)), heads=4, chosen=3), device) | {"max_seqlen_q": 3}
    entries, table = arguments["entry_cache"], arguments["entry_table"]
    assert_refuses(
        paged_compressed_attention,
        arguments,
        ("kv_cache", arguments["kv_cache"][..., :16], "kv_cache: shape"),
        ("entry_cache", entries.half(), "entry_cache: dtype"),
        ("kv_cache", torch.zeros(3, 16, 584, dtype=torch.uint8, device=device), "584 bytes a row and head_dim 32"),
        ("entry_cache", None, "entry_table: given without entry_cache"),
        ("entry_table", None, "entry_table: None with entry_cache"),
        ("entry_table", table[:1], "entry_table: shape"),
        ("entry_table", table + 1000, "entry_table"),
        ("indices", arguments["indices"][:3], "indices: shape"),
        ("indices", arguments["indices"][:, :0], "indices: 0 columns"),
        ("sliding_window", 0, "sliding_window: 0"),
        ("pool_size", 0, "pool_size: 0"),
        ("sinks", torch.ones(3, device=device), "sinks: shape"),
        ("cos_sin_cache", torch.ones(20, 6, device=device), "cos_sin_cache: rotary_dim 6, expected a power of two"),
        ("cos_sin_cache", torch.ones(19, 16, device=device), "seq_lens"),
        ("out", torch.empty(1, device=device), "out: shape"),
    )


# fault -> (the problem that finds it, text of the kernel, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", "", ""),
    "an entry visible one token early": ("all", "num_keys // POOL_SIZE", "(num_keys + 1) // POOL_SIZE"),
    "a window one position long": ("all", "num_keys - sliding_window, 0)", "num_keys - sliding_window - 1, 0)"),
    "a window one position short": ("all", "num_keys - sliding_window, 0)", "num_keys - sliding_window + 1, 0)"),
    "no sink": ("all", "row_sum, sinks_ptr, head", "row_sum, None, head"),
    "a sink in every split": ("split", "row_mask & (slot < 0)", "row_mask"),
    "rotation forwards": ("all", "a * cos + b * sin, b * cos - a * sin", "a * cos - b * sin, b * cos + a * sin"),
    "rotated numbers of splits": ("split", "_store(partial_ptrs + UNROTATED, last", "_store(partial_ptrs, last"),
    "the angles of the next position": ("all", "token, volatile=True) - 1", "token, volatile=True)"),
    "the scale of a neighbour": ("records", "scale_rows[:, None] + offs_g", "scale_rows[:, None] + (offs_g ^ 1)"),
    "the scale of V4.1's neighbour": ("records of V4.1", "offs_g[None, :], key_mask, None, True)",
                                      "(offs_g ^ 1)[None, :], key_mask, None, True)"),
    "the scale of NVFP4's neighbour": ("records in NVFP4", "scale_rows[:, None] + offs_g[None, :]\n    scales = ",
                                       "scale_rows[:, None] + (offs_g ^ 1)[None, :]\n    scales = "),
    "swapped nibbles": ("records in NVFP4", "tl.join(first, second)", "tl.join(second, first)"),
    "rotated numbers elsewhere": ("records", "rope_rows[:, None] + (offs - (", "rope_rows[:, None] + (offs + 1 - ("),
    "the choice of another token": ("chosen", "indices_ptr + token * stride", "indices_ptr + 0 * token * stride"),
    "entries of another sequence": ("all", "seq * stride_entry_table_seq", "0 * seq * stride_entry_table_seq"),
    "the block of entries before": ("split", "tl.maximum(begin - window_blocks, 0)",
                                    "tl.maximum(begin - window_blocks - 1, 0)"),
    "the window ends early": ("all", "tl.minimum(end, window_blocks)", "tl.minimum(end, window_blocks - 1)"),
    "a plan of half of the entries": ("split", "ends // pool_size", "ends // pool_size // 2"),
}  # fmt: skip
MUTATED = (
    Problem("all", ((1, 143), (4, 90)), padding_rows=1),
    Problem("split", ((1, 1500),), heads=1, pool_size=2, entry_block_size=16),
    Problem("chosen", ((4, 90),), chosen=12),
    Problem("records", ((1, 60),), heads=1, head_dim=512, record_bytes=RECORD_BYTES),
    Problem("records of V4.1", ((1, 60),), heads=1, head_dim=512, record_bytes=MXFP8_BYTES),
    Problem("records in NVFP4", ((1, 60),), heads=1, head_dim=512, record_bytes=NVFP4_BYTES),
)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    name, text, replacement = MUTATIONS[fault]
    modules = [dtypes, attention.latent_kernel, attention.plan, attention.compressed_kernel]
    with planted(modules, [attention.compressed_launches], tmp_path, text, replacement):
        for problem in MUTATED:
            if name in ("", problem.name):
                assert turns_red(exceeds_no_bound_twice, CARD, call_of(problem, device)) == bool(name)
