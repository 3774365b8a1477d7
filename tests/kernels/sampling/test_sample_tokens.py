"""sample_tokens against its definition in float64, its implementations against each other, and rows at the edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged import InvalidInputError, Penalties, sample_tokens
from paged.kernels.sampling import reference
from paged.kernels.sampling import sample_tokens as module
from paged.kernels.sampling.sample_tokens import filter_logits
from paged.kernels.sampling.torch_ops.sample_tokens import apply_penalties
from tests.kernels.sampling.rows import NAN, SPECIAL, random_rows
from tests.tolerance import dtypes

FILTERS = ("top_k", "top_p", "min_p")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of some hundred tokens then are several chunks, and lists several blocks."""
    monkeypatch.setattr(module, "BLOCK_TOKENS", 128)
    monkeypatch.setattr(module, "BLOCK_LIST", 64)


def _asking(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in (*FILTERS, "penalties") or name in names}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "names", [(), ("penalties",), ("top_k",), ("top_p",), ("min_p",), (*FILTERS, "penalties")], ids=str
)
def test_matches_reference(names: tuple[str, ...], device: torch.device) -> None:
    arguments = _asking(random_rows(8, 200, device, seed=len(names)), *names)
    tokens = sample_tokens(**arguments)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == reference.sample_tokens(**arguments).tolist()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", dtypes())
def test_logits_of_any_type_and_stride(dtype: torch.dtype, device: torch.device) -> None:
    arguments = _asking(random_rows(3, 200, device, seed=1), "top_k", "penalties")
    logits = arguments.pop("logits").to(dtype)
    expected = reference.sample_tokens(logits, **arguments).tolist()
    assert sample_tokens(logits, **arguments).tolist() == expected
    padded = torch.full((6, 207), NAN, dtype=dtype, device=device)[::2, 7:]
    assert sample_tokens(padded.copy_(logits), **arguments).tolist() == expected
    assert sample_tokens(logits.T.contiguous().T, **arguments).tolist() == expected


def test_backends_draw_the_same_tokens(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = random_rows(16, 200, device, seed=100)
    drawn = {}
    for backend in ("torch", "triton"):
        monkeypatch.setenv("PAGED_BACKEND", backend)
        drawn[backend] = sample_tokens(**arguments).tolist()
    assert drawn["torch"] == drawn["triton"]
    assert len(set(drawn["torch"])) > 6


@pytest.mark.usefixtures("backend")
def test_edges(device: torch.device) -> None:
    """Every special row, in one batch of rows filled up with -inf."""
    width = max(len(row[0]) for row in SPECIAL.values())
    logits = torch.tensor([row[0] + [-torch.inf] * (width - len(row[0])) for row in SPECIAL.values()], device=device)
    temperature, *rest = (
        torch.tensor([row[place] for row in SPECIAL.values()], device=device) for place in range(1, 5)
    )
    filters = dict(zip(FILTERS, rest, strict=True))
    keys = torch.randint(0, 1 << 32, (len(logits), 2), device=device)
    tokens = sample_tokens(logits, keys, temperature, **filters).tolist()
    left = filter_logits(logits, temperature, **filters)
    for (name, row), token, scores in zip(SPECIAL.items(), tokens, left, strict=True):
        assert token in row[-1], name
        found = {-1} if scores.isnan().any() else set((scores > -torch.inf).nonzero().flatten().tolist())
        assert found == row[-1], name


@pytest.mark.usefixtures("backend")
def test_filtered_logits_are_those_of_the_reference(device: torch.device) -> None:
    arguments = _asking(random_rows(5, 200, device, seed=7), *FILTERS)
    del arguments["keys"]
    filtered = filter_logits(**arguments)
    logits = arguments.pop("logits")
    for row, scores in enumerate(filtered.double().cpu()):
        temperature, *filters = (float(arguments[name][row]) for name in ("temperature", *FILTERS))
        if temperature == 0:
            best = [-torch.inf] * len(scores)
            best[int(logits[row].argmax())] = 0.0
            assert scores.tolist() == best
            continue
        expected = reference.kept_scores(logits[row].tolist(), temperature, int(filters[0]), *filters[1:])
        torch.testing.assert_close(scores, torch.tensor(expected).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("backend")
def test_a_row_depends_on_itself_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any batch and any order, and however programs share it."""
    arguments = random_rows(6, 200, device, seed=3)
    together = sample_tokens(**arguments).tolist()
    order = torch.randperm(6)[:3].to(device)
    penalties = arguments.pop("penalties")
    some = {name: tensor[order] for name, tensor in arguments.items()}
    chosen = Penalties(penalties.rows[order], penalties.counts, penalties.seen, penalties.weights[order])
    monkeypatch.setattr(module, "BLOCK_LIST", 256)
    assert sample_tokens(**some, penalties=chosen).tolist() == [together[row] for row in order.tolist()]


def test_long_lists(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens in the bin of the threshold, a third of them equal."""
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    monkeypatch.setattr(module, "BLOCK_LIST", 512)
    logits = torch.rand(2, 3000, device=device) * 0.1
    logits[:, ::3] = 0.05
    ones = torch.ones(2, device=device)
    keys = torch.randint(0, 1 << 32, (2, 2), device=device)
    filters = {"top_k": torch.tensor([1300, 3000], device=device), "top_p": torch.tensor([1.0, 0.4], device=device)}
    tokens = sample_tokens(logits, keys, ones, **filters)
    assert tokens.tolist() == reference.sample_tokens(logits, keys, ones, **filters).tolist()


def test_rejects_what_does_not_fit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    given = random_rows(2, 8, device, seed=0)
    sample_tokens(**given)

    def penalties(**other: torch.Tensor) -> Penalties:
        return Penalties(**{**vars(given["penalties"]), **other})

    for name, wrong, message in (
        ("logits", given["logits"][0], "logits: shape"),
        ("logits", given["logits"].int(), "logits: dtype"),
        ("logits", torch.zeros(2, (1 << 20) + 1, device=device), "logits: 1048577 tokens a row"),
        ("keys", given["keys"][:, :1], "keys: shape"),
        ("temperature", given["temperature"][:1], "temperature: shape"),
        ("top_k", given["top_k"].int(), "top_k: dtype"),
        ("top_p", given["top_p"].double(), "top_p: dtype"),
        ("min_p", given["min_p"][:, None], "min_p: shape"),
        ("penalties", penalties(rows=given["keys"][:, :1]), "penalties.rows: shape"),
        ("penalties", penalties(weights=given["keys"]), "penalties.weights: shape"),
        ("penalties", penalties(seen=given["penalties"].counts), "penalties.seen: dtype"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            sample_tokens(**{**given, name: wrong})


def test_penalties_beyond_float32_leave_a_token() -> None:
    """Finite ones, times counts: several tokens are favoured without a bound, and the first of them is best."""
    counts, weights = torch.tensor([[0, 9, 9, 1]]), torch.tensor([[1e-37, -3e38, -3e38]])
    logits = apply_penalties(torch.tensor([[1.0, -torch.inf, 5.0, 5.0]]), counts, counts > 0, weights)
    assert not logits.isnan().any()
    assert logits.argmax() == 2
    assert logits.isfinite()[0].tolist() == [True, False, True, True]
