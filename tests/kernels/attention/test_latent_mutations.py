"""A suite is worth what it catches: copies of the kernel with one fault each must turn the checks of MLA red."""

from pathlib import Path

import pytest
import torch

import paged.kernels.attention.keys
import paged.kernels.attention.latent_kernel
import paged.kernels.attention.launches
from paged.bench.mla.problem import Problem, call_of
from tests.kernels.attention.latent_problem import LATENT_ATTENTION
from tests.kernels.faulty import exceeds_no_bound_twice, planted, turns_red

attention = paged.kernels.attention

PROBLEMS = (
    Problem("dense", ((1, 40), (20, 24)), heads=3, sinks=True, sizes=(48, 16)),
    Problem("split", ((1, 1100),), coverage=True, heads=1),
    Problem("e4m3", ((3, 20),), form="e4m3"),
    Problem("packed", ((1, 20),), sizes=(512, 64), form="packed", heads=1),
    Problem("nvfp4", ((1, 20),), sizes=(512, 64), form="nvfp4", heads=1),
    Problem("window", ((3, 93), (40, 60)), heads=3, window_size=(20, -1), block_size=4),
    Problem("chosen", ((1, 40), (4, 24)), heads=3, chosen=20, padding_rows=1),
)

# fault -> (the problem that finds it, text of the kernel, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", "", ""),
    "no rotated part": ("dense", "if HAS_ROPE:", "if False:"),
    "rotated parts of another place": ("dense", "rope_ptr + rope_rows[:, None]", "rope_ptr + rope_rows[:, None] - 1"),
    "the ids of the keys before": ("split", "(latents.table_ptr, index + 1,", "(latents.table_ptr, index,"),
    "one block after the other": ("dense", "tl.load(table_ptr + index * BLOCK_N // KV_BLOCK_SIZE, mask=mask, other=0)",
                                  "index * BLOCK_N // KV_BLOCK_SIZE"),
    "no causal mask": ("dense", "& (keys[None, :] < end_key[:, None])", ""),
    "one key too many": ("dense",
                         "visible_range(seq_len - q_len + query,",
                         "visible_range(seq_len - q_len + query + 1,"),
    "a window off by one": ("window", ">= first_key[:, None]", "> first_key[:, None]"),
    "blocks before the window": ("window", "key_mask & (keys >= tl.min(first_key, 0))", "key_mask"),
    "NaN behind the end": ("split", "rows = tl.load(ptrs, mask=key_mask[:, None], other=0)", "rows = tl.load(ptrs)"),
    "the accumulator is not rescaled": ("dense", "acc * correction[:, None])", "acc)"),
    "the wrong head": ("dense", "head * stride_q_head", "(head // 2) * stride_q_head"),
    "no scale": ("dense", "weights = tl.exp2(scores * scale", "weights = tl.exp2(scores"),
    "no sink": ("dense", "output, sinks_ptr, token", "output, None, token"),
    "a whole block is dropped": ("split", "begin, full_end,\n", "begin + 1, full_end,\n"),
    "the last block is dropped": ("split", "full_end, end, ROPE", "full_end, end - 1, ROPE"),
    "splits in one place": ("split", "partial = slot * BLOCK_M", "partial = 0 * slot * BLOCK_M"),
    "keys without their scale": ("e4m3", "scale *= tl.load(k_scale_ptr)", "scale *= 1.0"),
    "values without their scale": ("e4m3", "acc *= tl.load(k_scale_ptr)", "acc *= 1.0"),
    "the scale of a neighbour": ("packed", "+ offs_g[None, :]", "+ (offs_g ^ 1)[None, :]"),
    "scales in their order": ("nvfp4", "+ place[None, :]", "+ offs_g[None, :]"),
    "a rotated part with a scale": ("nvfp4", "rope = decode_e4m3(rope, NATIVE_FP8).to(dtype)\n    return",
                                    "rope = (decode_e4m3(rope, NATIVE_FP8) * 2.0).to(dtype)\n    return"),
    "chosen keys beyond the position": ("chosen", "tl.load(token_keys_ptr + num_tokens + seq)",
                                        "tl.load(token_keys_ptr + num_tokens + seq) + 1"),
    "the choice of another token": ("chosen", "indices_ptr += seq * stride", "indices_ptr += 0 * seq * stride"),
    "no key is the first": ("chosen", "key_mask = (keys >= 0) &", "key_mask ="),
    "the table of another sequence": ("chosen", "seq = tl.load(token_keys_ptr + seq).to", "seq = (0 * seq).to"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    name, text, replacement = MUTATIONS[fault]
    with planted([attention.keys, attention.latent_kernel], [attention.launches], tmp_path, text, replacement):
        for problem in PROBLEMS:
            if name in ("", problem.name):
                arguments = call_of(problem, device)
                assert turns_red(exceeds_no_bound_twice, LATENT_ATTENTION, arguments) == bool(name)
