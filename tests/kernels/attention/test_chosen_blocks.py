"""Attention over chosen blocks: which rows of the cache it reads, and ids without a block."""

import random
from typing import Any

import pytest
import torch

import paged.kernels.attention.online_softmax
from paged import paged_attention
from paged.bench.attention.problem import Problem, call_of
from paged.bench.cards.attention import chosen_keys
from tests.backends import needs_numba
from tests.kernels.attention.problem import ATTENTION, check
from tests.tolerance import assert_close

module = paged.kernels.attention.online_softmax


@pytest.mark.parametrize(
    "problem",
    [
        Problem("parts of cache blocks", ((1, 300), (3, 130)), chosen=(24, 4), block_size=16),
        Problem("whole cache blocks", ((1, 1000),), heads=(2, 1), chosen=(128, 3), block_size=64),
        Problem("split", ((1, 4000),), heads=(1, 1), chosen=(64, 20), dtype=torch.float16),
        Problem("prompt", ((11, 500), (1, 300)), heads=(16, 1), chosen=(32, 6), kept=0.9, dtype=torch.float16),
        Problem("unlike neighbours", ((8, 700),), heads=(16, 1), chosen=(16, 5), dtype=torch.float16),
    ],
    ids=lambda problem: problem.name,
)
def test_only_chosen_rows_are_read(problem: Problem, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1.1 times the rows of the keys that any token of a tile sees. 4 tokens of 16 heads share a tile."""
    if device.type != "cpu":
        pytest.skip("counts what the interpreter loads")
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    arguments = call_of(problem, device)
    load_rows, num_read = module._load_rows, 0

    def load_and_count(cached: Any, offsets: Any, key_mask: Any, *rest: Any) -> Any:
        nonlocal num_read
        num_read += int(key_mask.handle.data.sum())
        return load_rows(cached, offsets, key_mask, *rest)

    monkeypatch.setattr(module, "_load_rows", load_and_count)
    paged_attention(**arguments)
    bundles = [
        (min(4, q_len - first), seq_len - max(q_len - first - 4, 0))
        for q_len, seq_len in problem.lengths
        for first in range(0, q_len, 4)
    ]
    _, num_keys = chosen_keys(bundles, arguments["chosen_blocks"], problem.chosen[0])
    assert 0 < num_read <= 1.1 * 2 * num_keys  # keys and values


def test_a_long_context_costs_little() -> None:
    """16 blocks of 128 of 128k keys: 3 % of the bytes at most."""
    (row,) = [row for row in ATTENTION.rows if row.variant == "chosen"]
    arguments = ATTENTION.problem(row, "full", torch.device("cpu"), torch.bfloat16)
    cost = ATTENTION.cost(ATTENTION, arguments)
    dense = ATTENTION.cost(ATTENTION, {**arguments, "chosen_blocks": None, "chosen_block_size": 0})
    assert cost.num_bytes <= 0.03 * dense.num_bytes
    assert cost.flops <= 0.03 * dense.flops


@pytest.mark.usefixtures("backend")
def test_ids_without_a_block_choose_nothing(device: torch.device) -> None:
    """Negative ones, and any behind the end of the sequence, even if their positions do not fit 32 bits."""
    arguments = call_of(Problem("", ((1, 40), (3, 20)), chosen=(16, 3)), device)
    chosen = arguments["chosen_blocks"]
    chosen[:] = torch.tensor([0, -1, -1])
    expected = paged_attention(**arguments)[0].clone()
    for others in ((-1, 3), (-(2**31), 2**31 - 1), (2**28, 2**24 + 5)):
        chosen[:] = torch.tensor([others[0], 0, others[1]])
        assert_close(paged_attention(**arguments)[0], expected.double())


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(12))
def test_prompts_match_the_definition(seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tokens of a sequence share a tile."""
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    draw = random.Random(seed)
    num_kv_heads = draw.choice((1, 2))
    problem = Problem(
        "",
        ((draw.choice((9, 33)), 70), (1, 50), (5, 130), (3, 2), (draw.choice((2, 17)), 300)),
        heads=(num_kv_heads * draw.choice((1, 3, 5, 8, 16)), num_kv_heads),
        head_dim=draw.choice((32, 48, 128)),
        block_size=draw.choice((8, 24, 64)),
        dtype=draw.choice((torch.float32, torch.float16)),
        cache_dtype=draw.choice((None, None, torch.int8, torch.float8_e4m3fn)),
        causal=draw.choice((True, False, (True, False, True, True, False))),
        window_size=draw.choice(((-1, -1), (30, -1), (20, 5))),
        chunk_size=draw.choice((0, 0, 50)),
        sinks=draw.random() < 0.4,
        alibi=draw.random() < 0.4,
        softcap=draw.choice((0.0, 2.0)),
        padding_rows=draw.randrange(3),
        chosen=draw.choice(((16, 4), (128, 2), (24, 5), (64, 3), (1, 70))),
        deterministic=draw.random() < 0.3,
    )
    check(problem, device)


@needs_numba
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(4, 30))]
)
def test_numba_matches_the_definition(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    draw = random.Random(seed)
    num_kv_heads, head_dim = draw.choice((1, 2)), draw.choice((32, 64, 40, 128))
    problem = Problem(
        "",
        ((1, 300), (5, 70), (0, 3), (3, draw.choice((2, 200))), (1, 5)),
        heads=(num_kv_heads * draw.choice((1, 3, 5, 16)), num_kv_heads),
        head_dim=head_dim,
        v_head_dim=draw.choice((head_dim, 32)),
        block_size=draw.choice((1, 5, 16, 24, 128)),
        dtype=draw.choice((torch.float32, torch.bfloat16)),
        causal=draw.choice((True, False)),
        window_size=draw.choice(((-1, -1), (30, -1), (20, 5))),
        chunk_size=draw.choice((0, 0, 50)),
        sinks=draw.random() < 0.4,
        alibi=draw.random() < 0.4,
        softcap=draw.choice((0.0, 2.0)),
        padding_rows=draw.randrange(3),
        layout=draw.choice(("separate", "head_major")),
        chosen=draw.choice(((16, 4), (128, 2), (24, 5), (1, 20), (256, 1))),
    )
    check(problem, torch.device("cpu"))


@pytest.mark.usefixtures("backend")
def test_layers_choose_for_themselves(device: torch.device) -> None:
    """With one plan, beside layers that see all keys."""
    arguments = call_of(Problem("", ((1, 90), (6, 40)), chosen=(16, 3)), device)
    lengths = {name: arguments[name] for name in ("cu_seqlens_q", "seq_lens")}
    plan = paged.AttentionPlan(**lengths, max_seqlen_q=6, max_seqlen_k=90)
    chosen = arguments["chosen_blocks"]
    for blocks in (chosen, chosen.flip(1), None, torch.zeros_like(chosen[..., :1]), chosen[:, :1].expand(-1, 2, -1)):
        size = 0 if blocks is None else 16
        layer = {**arguments, "chosen_blocks": blocks, "chosen_block_size": size}
        want = ATTENTION.want(layer)["out"]
        assert_close(paged_attention(**layer, plan=plan)[0], want)
