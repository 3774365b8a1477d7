"""An indexer's choice of blocks: equal to the rule's, ties too, in every implementation."""

import importlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import paged.kernels.attention.choose_blocks
import paged.kernels.attention.choose_keys
from paged import paged_attention
from paged.bench.attention.problem import Problem, call_of
from paged.bench.cards.cards import CARDS
from paged.bench.cards.draw import Draw
from paged.kernels.attention import latent_definition
from tests.backends import needs_numba
from tests.headroom import unnoted
from tests.kernels.attention import loops
from tests.kernels.faulty import load_copy, planted, turns_red
from tests.kernels.refusals import assert_refuses

CPU = torch.device("cpu")
CARD = CARDS["choose_blocks"]
LENGTHS = ((1, 300), (4, 35), (0, 3), (9, 9), (2, 130), (3, 1))
modules = paged.kernels.attention.choose_keys, paged.kernels.attention.choose_blocks


def drawn(device: torch.device, **options: Any) -> dict[str, Any]:
    sizes = {"lengths": LENGTHS, "heads": 3, "dim": 32, "top_k": 3, "size": 16, **options}
    return CARD.draw(Draw(device, torch.float32), **sizes)


def call(seed: int, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a drawn call, with every option."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    pool = draw.choice((1, 1, 4, 16))
    return drawn(
        device,
        heads=draw.choice((1, 5)),
        top_k=draw.choice((1, 3, 20)),
        pool=pool,
        size=pool * draw.choice((1, 3, 8)),
        is_weighted=draw.random() < 0.5,
        is_packed=draw.random() < 0.3,
        reduction=draw.choice(("max", "mean")),
        local_blocks=draw.choice((0, 1)),
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_definition_is_the_rule(seed: int) -> None:
    arguments = call(seed, CPU)
    chosen = latent_definition.choose_blocks(**arguments)
    for got, want in zip(chosen.tolist(), loops.choose_blocks(**arguments), strict=True):
        assert got == [[-1] * (chosen.shape[2] - len(ids)) + ids for ids in want]


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(4, 24))]
)
def test_every_implementation_chooses_the_same(seed: int, backend: str, device: torch.device) -> None:
    check(call(seed, device))


def check(arguments: dict[str, Any]) -> None:
    got = modules[1].choose_blocks(**arguments)
    assert got.dtype == torch.int32
    assert torch.equal(got.cpu().long(), CARD.want(arguments)["chosen_blocks"].long())


@pytest.mark.parametrize("size", [1, 128, 256])
def test_parts_of_blocks_and_pieces_of_a_step(
    size: int, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules[1], "_MAX_RANKS", 700)
    check(drawn(device, size=size, top_k=2, lengths=((2, 600), (1, 40))))


def test_no_sequences_and_no_tokens(backend: str, device: torch.device) -> None:
    arguments = drawn(device)
    empty = arguments | {name: arguments[name][:0] for name in ("block_table", "seq_lens")}
    empty["cu_seqlens_q"] = arguments["cu_seqlens_q"][:1]
    assert (modules[1].choose_blocks(**empty) == -1).all()
    assert modules[1].choose_blocks(**{**empty, "q": arguments["q"][:0]}).shape[0] == 0


def test_all_blocks_are_dense_attention(backend: str, device: torch.device) -> None:
    arguments = call_of(Problem("", ((1, 90), (3, 70)), heads=(6, 3)), device)
    index = drawn(device, lengths=((1, 90), (3, 70)), top_k=100)
    chosen = modules[1].choose_blocks(**index)[:4]
    expected = paged_attention(**arguments)[0].clone()
    out, _ = paged_attention(**arguments, chosen_blocks=chosen, chosen_block_size=16)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    arguments = drawn(device, is_weighted=True)
    assert_refuses(
        modules[1].choose_blocks,
        arguments,
        ("q", arguments["q"][..., :8], "q: 3 heads of 8"),
        ("key_cache", arguments["key_cache"].half(), "key_cache: dtype"),
        ("weights", arguments["weights"][:, :2], "weights: shape"),
        ("top_k", 0, "top_k: 0"),
        ("chosen_block_size", 257, "chosen_block_size: 257"),
        ("pool_size", 3, "chosen_block_size: 16, expected a multiple of pool_size 3"),
        ("local_blocks", 4, "local_blocks: 4"),
        ("reduction", "sum", "reduction: 'sum', expected 'max' or 'mean'"),
    )


# fault -> (text of the kernel, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", ""),
    "a key is visible one token early": ("tl.maximum(end_key, 0) // POOL_SIZE", "(end_key + 1) // POOL_SIZE"),
    "an open pool is visible": ("(keys < num_keys)", "(keys <= num_keys)"),
    "negative products count": ("tl.where(scores < 0, 0.0, scores)", "scores"),
    "no weights": ("scores * weights[:, None]", "scores"),
    "keys of padding lanes count": ("(of_block < KEYS) & (keys", "(keys"),
    "the highest id of a tie": ("(0x7FFFFFFF - blocks)", "blocks"),
    "negative scores in disorder": ("bits ^ ((bits >> 31) & 0x7FFFFFFF)", "bits"),
    "no block is forced": ("is_forced = (blocks <= own)", "is_forced = (blocks < 0)"),
    "an open block is left out": ("is_open & (blocks == own)", "is_open & (blocks < 0)"),
    "every block is open": ("is_open = (best[:, 0, :1] >> 32) == _LAST_ID", "is_open = best[:, 0, :1] > _NO_RANK"),
    "the list of another head": ("offs_h[:, None] * stride_out_list", "(2 - offs_h)[:, None] * stride_out_list"),
    "sums for means": ("total = tl.div_rn(total,", "total += 0 * tl.div_rn(total,"),
    "the last block is dropped": ("own // TOGETHER + 1", "own // TOGETHER"),
    "no scales": ("if scales_ptr is not None:\n                places", "if False:\n                places"),
    "the first sequence's keys": ("block_table_ptr + seq * stride_table_seq + keys", "block_table_ptr + keys"),
}  # fmt: skip


# Without the faults that copies of the Triton kernel have: each copy is compiled, and the problems are the same.
NUMBA_MUTATIONS = {
    "earlier tiles are dropped": ("if tile + j > block * block_keys:", "if False:"),
    "the root is not the worst": ("if heap[child] >= rank:", "if True:"),
    "the scale of another key": ("*= scratch[key_scales + j]", "*= scratch[key_scales]"),
    "8 bits are one bit off": ("number_of_e4m3(codes[start + i])", "number_of_e4m3(codes[start + i] >> 1)"),
}  # fmt: skip


def faulty_problems(device: torch.device) -> tuple[dict[str, Any], ...]:
    """Return problems that see each fault."""
    return (
        drawn(device, size=24, local_blocks=1),
        drawn(device, size=16, pool=4, local_blocks=0, is_weighted=True),
        drawn(device, size=8, reduction="mean", is_packed=True, local_blocks=0),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    problems = faulty_problems(device)
    text, replacement = MUTATIONS[fault]
    with planted(modules, modules, tmp_path, text, replacement):
        is_found = any(turns_red(check, each) for each in problems)
    assert is_found == (fault != "no fault")


@needs_numba
@pytest.mark.thorough
@pytest.mark.parametrize("fault", NUMBA_MUTATIONS)
def test_checks_see_the_fault_in_numba(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "paged.kernels.cpu.attention.choose_blocks"
    source = Path(importlib.import_module(name).__file__ or "").read_text()
    text, replacement = NUMBA_MUTATIONS[fault]
    assert text in source, "the kernels have changed: this fault no longer applies"
    load_copy(name, tmp_path, source.replace(text, replacement), monkeypatch)
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    with unnoted():
        assert any(turns_red(check, problem) for problem in faulty_problems(CPU))
