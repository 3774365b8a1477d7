"""The kernel benchmark: its arithmetic, its coverage, and that nothing wrong gets a speed."""

from typing import Any

import pytest
import torch

import paged
from paged.bench.attention.cases import AttentionCase
from paged.bench.benchmark import Setting
from paged.bench.cards.card import Card
from paged.bench.check import WrongResultError
from paged.bench.kernels.run import CASES, Case
from paged.bench.limits import Ceilings, Cost
from paged.bench.problems.arguments import Arguments
from tests.operations import OPERATIONS

pytestmark = pytest.mark.usefixtures("by_pytorch")
SETTING = Setting(torch.device("cpu"), 1)
ATTENTION = AttentionCase("mixed", "tiny", (), heads=(4, 2), block_size=16, head_dim=8)


def test_attention_cost() -> None:
    """A chunk: 3 queries after 5 cached keys see 6 + 7 + 8 = 21 keys: 4 * 4 heads * 8 * 21 operations. Moved: 3 rows of
    4 heads in and out, 8 of 2 heads of K and of V, 16 bytes each, and one block id. A decode step: 4 Hq D L operations,
    2 L Hkv D b of K and V, 2 Hq D b of query and output, ceil(40 / 16) = 3 block ids. A mixed batch is their sum."""
    chunk, decode = (
        Cost(2688, (2 * 3 * 4 + 2 * 8 * 2) * 16 + 4),
        Cost(4 * 4 * 8 * 40, 2 * 40 * 2 * 16 + 2 * 4 * 16 + 12),
    )
    both = Cost(chunk.flops + decode.flops, chunk.num_bytes + decode.num_bytes)
    for lengths, expected in (([(3, 8)], chunk), ([(1, 40)], decode), ([(3, 8), (1, 40)], both)):
        assert ATTENTION.cost(torch.float16, lengths) == expected


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("reshape_and_cache", 4 * 19 * 2 * 128 * 4 + 19 * 8),
        ("copy_blocks", 2 * 3 * 4 * 16 * 2 * 128 * 4 + 4 * 2 * 8),
        ("merge_attn_states", 3 * (19 * 8 * 128 + 19 * 8) * 4),
        ("rms_norm", (2 * 19 + 1) * 4096 * 4),
        ("fused_add_rms_norm", (4 * 19 + 1) * 4096 * 4),
        ("rotary_embedding", 2 * 19 * 10 * 128 * 4 + 19 * (8 + 128 * 4)),
        ("qk_norm_rope_and_cache", 2 * 19 * 12 * 128 * 4 + 19 * (8 + 8 + 128 * 4) + 2 * 128 * 4),
        ("silu_and_mul", 3 * 19 * 12288 * 4),
        ("greedy_argmax", 2 * 9000 * 4 + 2 * 8),
        ("sample_tokens", 2 * 9000 * 4 + 2 * 8),
        ("sample_tokens.top_k_top_p", 2 * 9000 * 12 + 2 * 8),
        ("route_tokens", 19 * 16 * 4 + 19 * 4 * (4 + 4)),
        ("route_and_align", 19 * 16 * 4 + 76 * 8 + 20 * 16 * 4 + 20 * 4 + 4),
        ("moe_align_block_size", 76 * 4 + 20 * 16 * 4 + 20 * 4 + 4),  # 76 entries, at most 15 unused an expert
    ],
)
def test_bytes_of_the_row_operations(name: str, num_bytes: int) -> None:
    (case,) = (case for case in CASES if case.name == name)
    assert case.card.cost(case.card, case.draw("check", SETTING)) == Cost(0, num_bytes)


def test_bound_is_the_slower_of_memory_and_matmul() -> None:
    limits = Ceilings(copy=4e12, read=5e12, matmul=8e14)
    assert limits.bound(Cost(flops=int(8e11), num_bytes=int(1e9))) == (1e-3, "matmul")
    assert limits.bound(Cost(flops=int(8e11), num_bytes=int(1e10))) == (2e-3, "memory")  # of the faster stream


def test_every_public_kernel_has_a_case() -> None:
    assert {"paged_attention", "fused_moe"} <= set(OPERATIONS)
    assert {case.card.name for case in CASES} == set(OPERATIONS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_agrees_with_the_reference_and_a_wrong_one_is_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation is replaced by one whose last element is off by one, or by nothing where it returns none."""
    card = case.card
    arguments = case.draw("check", SETTING)
    expected = {name: tensor.clone() for name, tensor in card.want(arguments).items()}
    monkeypatch.setattr(Card, "want", lambda *_: expected)
    _check(card, arguments)
    right = getattr(paged, card.name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        if card.name in ("reshape_and_cache", "concat_and_cache_mla", "copy_blocks", "write_pooled_entries"):
            return None
        last = result = right(*args, **kwargs)
        while not isinstance(last, torch.Tensor):
            last = last[-1]
        last.view(-1)[-1] += 1
        return result

    monkeypatch.setattr(paged, card.name, wrong)
    torch.manual_seed(0)  # the same tensors
    with pytest.raises(WrongResultError, match="elements are wrong"):
        _check(card, case.draw("check", SETTING))


def _check(card: Card, arguments: Arguments) -> None:
    for result in card.check(arguments).values():
        result.check()
