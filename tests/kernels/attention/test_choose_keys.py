"""An indexer's choice of keys: both implementations against scores in float64, and what the cache of its keys holds."""

from pathlib import Path
from typing import Any

import pytest
import torch

import paged.kernels.attention.choose_keys
from paged.bench.attention.problem import Problem
from paged.bench.mla.problem import index_problem
from paged.errors import InvalidInputError
from paged.kernels.cache.latent_cache import write_index_keys
from tests.kernels.attention import loops
from tests.kernels.faulty import planted, turns_red
from tests.tolerance import assert_within

LENGTHS = ((1, 17), (0, 3), (5, 40), (9, 9), (1, 130))
module = paged.kernels.attention.choose_keys


def problem(device: torch.device, **options: Any) -> dict[str, Any]:
    heads, dim, packed = options.pop("heads", 5), options.pop("dim", 32), options.pop("packed", False)
    scales_last = options.pop("scales_last", False)
    pool_size, num_candidates = options.pop("pool_size", 1), options.pop("candidates", 0)
    lengths = tuple((q_len, -(-seq_len // pool_size)) for q_len, seq_len in LENGTHS)  # also keys of open pools
    given = Problem("", lengths, (heads, 1), dim, **{"block_size": 16, "padding_rows": 1, **options})
    arguments = index_problem(given, device, is_packed=packed, scales_last=scales_last)
    seq_lens = torch.tensor([seq_len for _, seq_len in LENGTHS], dtype=torch.int32, device=device)
    if num_candidates:  # blocks of 5 keys, among them unseen ones and -1
        blocks = torch.rand(len(arguments["q"]), 30, device=device).argsort(1)[:, :num_candidates] - 1
        arguments |= {"candidates": blocks.sort().values.int(), "candidate_size": 5}
    return {**arguments, "seq_lens": seq_lens, "pool_size": pool_size}


def check(given: dict[str, Any], top_k: int) -> None:
    """The chosen keys are as many as a token sees, distinct, and no other has a higher score, but for rounding."""
    found = module.choose_keys(**given, top_k=top_k).cpu()
    assert found.dtype == torch.int32
    eps = torch.finfo(given["q"].dtype).eps
    for row, scores in enumerate(loops.index_scores(**given)):
        chosen = found[row][found[row] >= 0].tolist()
        assert found[row].tolist() == [-1] * (found.shape[1] - len(chosen)) + sorted(chosen)
        count = min(int(scores.isfinite().sum()), found.shape[1])
        assert len(chosen) == len({*chosen}) == count
        if count:
            assert chosen[-1] < len(scores)
            error = 64 * max(eps, 2.0**-22) * float(scores[scores.isfinite()].abs().max())
            best = scores.sort(descending=True).values[:count]
            assert_within(scores[chosen].sort(descending=True).values, best, error)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packed": True, "heads": 16, "pool_size": 4},
        {"candidates": 9},
        pytest.param({"packed": True, "scales_last": True, "block_size": 24}, marks=pytest.mark.thorough),
        pytest.param({"candidates": 3, "packed": True, "heads": 64, "pool_size": 2}, marks=pytest.mark.thorough),
        pytest.param({"heads": 3, "pool_size": 7, "block_size": 3}, marks=pytest.mark.thorough),
        pytest.param({"heads": 64, "dim": 128, "packed": True, "block_size": 24}, marks=pytest.mark.thorough),
        pytest.param({"heads": 2, "dim": 40, "block_size": 1}, marks=pytest.mark.thorough),
        pytest.param({"heads": 32, "dtype": torch.float16, "packed": True}, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("top_k", [1, 12, 2048])
def test_the_best_keys(options: dict[str, Any], top_k: int, backend: str, device: torch.device) -> None:
    check(problem(device, **options), top_k)


def test_pieces_of_a_step(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(device)
    monkeypatch.setattr(module, "_MAX_SCORES", 3 * given["block_table"].shape[1] * 16)
    check(given, 12)


def test_no_sequences_and_no_tokens(backend: str, device: torch.device) -> None:
    given = problem(device)
    empty = given | {name: given[name][:0] for name in ("block_table", "seq_lens")}
    empty["cu_seqlens_q"] = given["cu_seqlens_q"][:1]
    assert (module.choose_keys(**empty, top_k=3) == -1).all()
    none = empty | {name: given[name][:0] for name in ("q", "weights")}
    assert module.choose_keys(**none, top_k=3).shape[0] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "top_k: 0"),
        ({"pool_size": 0}, "pool_size: 0"),
        ({"q": torch.zeros(17, 129, 32)}, "q: 129 heads of 32"),
        ({"weights": torch.zeros(17, 5, dtype=torch.float16)}, "weights"),
        ({"candidates": torch.zeros(17, 2)}, "candidates: dtype"),
        ({"candidates": torch.zeros(16, 2, dtype=torch.int32)}, "candidates: shape"),
        ({"candidate_size": 257}, "candidate_size: 257"),
        ({"key_cache": torch.zeros(3, 16, 35, dtype=torch.uint8)}, "key_cache"),
        ({"key_cache": torch.zeros(3, 16, 40, dtype=torch.uint8)[..., 1:37]}, "multiples of 4 bytes"),
        ({"key_cache": torch.zeros(3, 16 * 36 + 4, dtype=torch.uint8)}, "blocks of 580 bytes"),
        ({"key_cache": torch.zeros(3, 16 * 36 + 1, dtype=torch.uint8)[:, 1:]}, "multiples of 4 bytes"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str, device: torch.device) -> None:
    moved = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in change.items()}
    with pytest.raises(InvalidInputError, match=message):
        module.choose_keys(**{**problem(device), "top_k": 3, **moved})


@pytest.mark.parametrize("form", ["float32", "e4m3", "e4m3, scales last"])
def test_a_cached_key_is_the_written_one(form: str, device: torch.device) -> None:
    """Within half a unit of e4m3's last place, 2^-4 of a number; other rows stay as they are."""
    keys = torch.randn(3, 32, device=device) * torch.tensor([1e-3, 1.0, 300.0], device=device)[:, None]
    cache = torch.zeros(4, 8, 32, device=device)
    if form != "float32":
        cache = torch.zeros(4, 8, 36, dtype=torch.uint8, device=device)
    if "last" in form:
        cache = cache.flatten(1)
    write_index_keys(keys, cache, torch.tensor([9, -1, 31], device=device))
    got = loops.numbers_of_keys(cache, 32).float().flatten(0, 1).to(device)
    largest = keys.abs().amax(-1, keepdim=True)
    for slot, row in ((9, 0), (31, 2)):
        error = (got[slot] - keys[row]).abs()
        assert (error <= (0 if form == "float32" else 2**-4 * keys[row].abs() + 2e-5 * largest[row])).all()
    kept = [slot for slot in range(1, 32) if slot not in (9, 31)]
    assert not got[kept].any()


# fault -> (text of the kernel, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", ""),
    "negative products count": ("tl.where(products < 0, 0.0, products)", "products"),
    "no weights": ("products * weights[:, None]", "products"),
    "the key of an open pool": ("end_key // POOL_SIZE", "(end_key + POOL_SIZE - 1) // POOL_SIZE"),
    "one key too many": ("+ token + 1).to", "+ token + 2).to"),
    "blocks in order": (
        "tl.load(block_table_ptr + seq * stride_table_seq + keys // KV_BLOCK_SIZE, mask=mask, other=0)",
        "keys // KV_BLOCK_SIZE",
    ),
    "the next sequence": ("tl.minimum(low, num_seqs - 1)", "tl.minimum(low + 1, num_seqs - 1)"),
    "no scales": ("if scales_ptr is not None:\n            scores *=", "if False:\n            scores *="),
    "the last block of keys is dropped": ("(num_columns + BLOCK_N - 1) // BLOCK_N", "num_columns // BLOCK_N"),
    "the next candidate": ("columns // CANDIDATE_SIZE", "columns // CANDIDATE_SIZE + 1"),
    "other keys of a candidate": ("columns % CANDIDATE_SIZE", "0"),
    "padding sees keys": ("tl.where(low < num_seqs, end_key, 0)", "end_key"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    with planted([module], [module], tmp_path, *MUTATIONS[fault]):
        problems = [
            problem(device, packed=packed, heads=16, pool_size=size) for packed, size in ((False, 1), (True, 4))
        ]
        problems.append(problem(device, candidates=9))
        is_found = any(turns_red(check, each, 12) for each in problems)
    assert is_found == (fault != "no fault")
