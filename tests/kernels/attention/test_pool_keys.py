"""Keys of pools: the rule's, in every implementation."""

from pathlib import Path
from typing import Any

import pytest
import torch

import paged.kernels.attention.choose_keys
import paged.kernels.attention.pool_keys
from paged.bench.cards.cards import CARDS
from paged.bench.cards.draw import Draw
from paged.kernels.attention import latent_definition
from tests.kernels.faulty import exceeds_no_bound_twice, planted, turns_red
from tests.kernels.refusals import assert_refuses

CARD = CARDS["pool_keys"]
# Pools that close within a step, at its ends, and in no step; a step that begins before the sequence does.
LENGTHS = ((9, 30), (1, 32), (0, 8), (5, 5), (1, 15), (12, 4))
modules = paged.kernels.attention.choose_keys, paged.kernels.attention.pool_keys


def drawn(device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    return CARD.draw(Draw(device, dtype), **{"lengths": LENGTHS, "dim": 24, "pool": 4, **options})


@pytest.mark.parametrize("pool", [1, 3, 4])
def test_the_definition_is_the_rule(pool: int) -> None:
    """Channel by channel."""
    arguments = drawn(torch.device("cpu"), dim=2, pool=pool)
    rows, bias = arguments["row_cache"].double(), arguments["position_bias"].double()
    expected = torch.zeros(arguments["num_tokens"], 2, dtype=torch.float64)
    row = 0
    for seq, (q_len, seq_len) in enumerate(LENGTHS):
        for end in range(seq_len - q_len + 1, seq_len + 1):
            if end > 0 and end % pool == 0:
                places = [(arguments["block_table"][seq, at // 16], at % 16) for at in range(end - pool, end)]
                for channel in range(2):
                    gates = torch.stack([rows[block, slot, 2 + channel] for block, slot in places]) + bias[:, channel]
                    keys = torch.stack([rows[block, slot, channel] for block, slot in places])
                    expected[row, channel] = (gates.exp() * keys).sum() / gates.exp().sum()
            row += 1
    assert expected.count_nonzero() > 6
    torch.testing.assert_close(latent_definition.pool_keys(**arguments), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_implementation_agrees(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    for options in ({}, {"pool": 16, "dim": 128, "lengths": ((20, 40), (1, 16))}, {"pool": 3}):
        for result in CARD.check(drawn(device, dtype, **options)).values():
            assert result.first_wrong() is None
    empty = drawn(device)
    empty |= {name: empty[name][:0] for name in ("block_table", "seq_lens")} | {
        "cu_seqlens_q": empty["cu_seqlens_q"][:1]
    }
    assert not modules[1].pool_keys(**empty).any()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    arguments = drawn(device)
    assert_refuses(
        modules[1].pool_keys,
        arguments,
        ("row_cache", arguments["row_cache"][..., :40], "row_cache: shape"),
        ("position_bias", arguments["position_bias"].new_zeros(257, 24), "position_bias: 257 positions of 24"),
        ("position_bias", arguments["position_bias"].long(), "position_bias: dtype"),
        ("num_tokens", 3, "cu_seqlens_q"),
    )


# fault -> (text of the kernel, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", ""),
    "a pool closes one token late": ("(end_key % POOL_SIZE == 0)", "(end_key % POOL_SIZE == 1 % POOL_SIZE)"),
    "the pool one token late": ("end_key - POOL_SIZE + offs_p", "end_key - POOL_SIZE + 1 + offs_p"),
    "no bias": ("gates += tl.load(bias_ptrs", "gates += 0 * tl.load(bias_ptrs"),
    "gates are keys": ("tl.load(row_ptrs + HEAD_DIM", "tl.load(row_ptrs"),
    "padding has weight": ('tl.where(in_pool[:, None], gates, float("-inf"))', "gates"),
    "sums for means": (" / tl.sum(weights, 0)", ""),
    "the first sequence's rows": ("block_table_ptr + seq * stride_table_seq", "block_table_ptr"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    text, replacement = MUTATIONS[fault]
    with planted(modules, modules, tmp_path, text, replacement):
        is_found = turns_red(exceeds_no_bound_twice, CARD, drawn(device, pool=3))
    assert is_found == (fault != "no fault")
