"""Keys of pools: the rule's, in every implementation."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import paged.kernels.attention.pool_keys as module
from paged.bench.cards.cards import CARDS
from paged.bench.cards.draw import Draw
from paged.kernels.attention import latent_definition
from tests.kernels.faulty import exceeds_no_bound_twice, planted, turns_red
from tests.kernels.refusals import assert_refuses

CARD = CARDS["pool_keys"]


def drawn(device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    """Three decodes behind a prompt's 37 tokens: one closes a pool, one does not, and one is padding."""
    arguments = CARD.draw(Draw(device, dtype), **{"tokens": 40, "dim": 24, "pool": 4, **options})
    arguments["slot_mapping"][37:] = torch.tensor([47, 46, -1], device=device)
    return arguments


@pytest.mark.parametrize("pool", [1, 3, 4])
def test_the_definition_is_the_rule(pool: int) -> None:
    """Channel by channel."""
    arguments = drawn(torch.device("cpu"), dim=2, pool=pool)
    bias = arguments["position_bias"].double()
    rows = arguments["row_cache"].double().flatten(0, 1)
    expected = torch.zeros(40, 2, dtype=torch.float64)
    for token, slot in enumerate(arguments["slot_mapping"].tolist()):
        if slot >= 0 and slot % pool == pool - 1:
            keys, gates = rows[slot - pool + 1 : slot + 1].split(2, 1)
            for channel in range(2):
                weights = (gates[:, channel] + bias[:, channel]).exp()
                expected[token, channel] = (weights * keys[:, channel]).sum() / weights.sum()
    assert expected.count_nonzero() > 6
    torch.testing.assert_close(latent_definition.pool_keys(**arguments), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_implementation_agrees(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    for options in ({}, {"pool": 16, "dim": 128}, {"pool": 3}):
        for result in CARD.check(drawn(device, dtype, **options)).values():
            assert result.first_wrong() is None


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    arguments = drawn(device)
    assert_refuses(
        module.pool_keys,
        arguments,
        ("row_cache", arguments["row_cache"][..., :40], "row_cache: shape"),
        ("row_cache", arguments["row_cache"][:, :15], "row_cache: block_size 15, expected a multiple of pool_size 4"),
        ("position_bias", arguments["position_bias"].new_zeros(257, 24), "position_bias: 257 positions of 24"),
        ("position_bias", arguments["position_bias"].long(), "position_bias: dtype"),
        ("slot_mapping", arguments["slot_mapping"] + 96, "slot_mapping"),
    )


# fault -> (text of the kernel, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", ""),
    "a pool closes one token early": ("(slot % POOL_SIZE == POOL_SIZE - 1)", "(slot % POOL_SIZE == POOL_SIZE - 2)"),
    "the pool one token late": ("slot - POOL_SIZE + 1", "slot - POOL_SIZE + 2"),
    "no bias": ("gates += tl.load(bias_ptrs", "gates += 0 * tl.load(bias_ptrs"),
    "gates are keys": ("tl.load(row_ptrs + HEAD_DIM", "tl.load(row_ptrs"),
    "padding has weight": ('tl.where(in_pool[:, None], gates, float("-inf"))', "gates"),
    "sums for means": (" / tl.sum(weights, 0)", ""),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    text, replacement = MUTATIONS[fault]
    with planted((module,), (), tmp_path, text, replacement):
        faulty = dataclasses.replace(CARD, function=module.pool_keys)
        is_found = turns_red(exceeds_no_bound_twice, faulty, drawn(device, pool=3))
    assert is_found == (fault != "no fault")
