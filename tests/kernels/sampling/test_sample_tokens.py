"""sample_tokens against its definition in float64, its implementations against each other, and rows at the edges."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paged import InvalidInputError, Penalties, sample_tokens
from paged.kernels.sampling import passes, row_functions, thresholds
from paged.kernels.sampling import sample_tokens as module
from paged.kernels.sampling.definition import apply_penalties
from paged.kernels.sampling.sample_tokens import filter_logits
from tests.kernels.faulty import planted
from tests.kernels.sampling import loops
from tests.tolerance import DTYPES, assert_close

NAN, INF = float("nan"), float("inf")
FILTERS = ("top_k", "top_p", "min_p")


# (logits, temperature, top_k, top_p, min_p) and the tokens that may come; -1 for none.
SPECIAL: dict[str, tuple[list[float], float, int, float, float, set[int]]] = {
    "NaN": ([NAN, 1.0, 2.0], 1.0, 9, 1.0, 0.0, {-1}),
    "NaN, filtered": ([0.0, NAN, 2.0], 1.0, 2, 0.5, 0.1, {-1}),
    "NaN, greedy": ([NAN, 1.0, 2.0, 2.0], 0.0, 1, 0.5, 0.0, {2}),
    "inf": ([INF, 1.0], 1.0, 9, 1.0, 0.0, {-1}),
    "inf, greedy": ([1.0, INF], 0.0, 9, 1.0, 0.0, {1}),
    "all -inf": ([-INF, -INF], 1.0, 9, 0.5, 0.0, {-1}),
    "all -inf, greedy": ([-INF, -INF], 0.0, 9, 0.5, 0.0, {-1}),
    "one finite": ([-INF, -3e38, -INF], 2.0, 9, 0.9, 0.0, {1}),
    "top_k beyond what is finite": ([-INF, 1.0, -INF, 1.0], 1.0, 3, 1.0, 0.0, {1, 3}),
    "top_k of 1": ([1.0, 3.0, 2.9], 9.0, 1, 1.0, 0.0, {1}),
    "top_k of 1, a tie": ([3.0, 1.0, 3.0], 1.0, 1, 1.0, 0.0, {0, 2}),
    "top_p of the top_k alone": ([0.0, 0.0, -0.1, -0.1], 1.0, 2, 0.51, 0.0, {0, 1}),
    "top_p before the tie": ([0.0, 0.0, -0.1, -0.1], 1.0, 3, 0.6, 0.0, {0, 1}),
    "top_p, and fewer finite than top_k": ([0.0, -0.05, -0.1, -INF, -INF, -INF, -INF], 1.0, 4, 0.6, 0.0, {0, 1}),
    "top_p, and fewer near than top_k": ([0.0, -0.1, -40.0, -41.0, -42.0], 1.0, 4, 0.9, 0.0, {0, 1}),
    "half of four equals": ([1.0, 1.0, 1.0, 1.0], 1.0, 9, 0.5, 0.0, {0, 1, 2, 3}),
    "half of two pairs, exactly": ([0.0, 0.0, -INF, -INF], 1.0, 9, 0.5, 0.0, {0, 1}),
    "tiny top_p": ([1.0, 1.0, 0.999999], 1.0, 9, 2.0**-126, 0.0, {0, 1}),
    "top_p below 1": ([0.0, -10.0], 1.0, 9, 1 - 2.0**-24, 0.0, {0, 1}),
    "min_p of 1": ([1.0, 2.0, 2.0], 5.0, 9, 1.0, 1.0, {1, 2}),
    "a tiny temperature": ([1.0, 1.0 + 2.0**-23, 0.0], 2.0**-126, 9, 0.9, 0.0, {1}),
    "a huge temperature": ([1e30, -1e30, 0.0], 3e38, 2, 1.0, 0.0, {0, 2}),
    "far apart": ([0.0, -40.0, -80.0, -1e9], 1.0, 3, 1.0, 0.0, {0}),
}


def random_rows(num_rows: int, vocab_size: int, device: torch.device, *, seed: int) -> dict[str, Any]:
    """Arguments of `sample_tokens`: every third row has ties, every fifth a mask, every seventh is greedy."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    logits = torch.randn(num_rows, vocab_size, generator=generator) * (0.2 + 7 * rand(num_rows, 1))
    logits[::3] = (logits[::3] * 2).round() / 2
    temperature = 0.05 + 2 * rand(num_rows)
    temperature[1::7] = 0
    top_k = (1 + rand(num_rows) ** 3 * 1.3 * vocab_size).long()
    top_p = torch.where(rand(num_rows) < 0.3, 1.0, rand(num_rows).clamp(min=1e-6))
    min_p = torch.where(rand(num_rows) < 0.6, 0.0, 0.3 * rand(num_rows))
    counts = (rand(4, vocab_size) * 1.4).int()
    weights = torch.stack([0.5 + rand(num_rows), rand(num_rows) - 0.5, rand(num_rows) - 0.3], 1)
    rows = (rand(num_rows) * 6 - 2).floor().clamp(min=-1).long()
    penalties = Penalties(rows, counts, (counts > 0) | (rand(4, vocab_size) < 0.3), weights)
    keys = torch.randint(0, 1 << 32, (num_rows, 2), generator=generator)
    is_masked = rand(num_rows, vocab_size)[4::5] < rand(num_rows, 1)[4::5]
    logits[4::5, 1:] = logits[4::5, 1:].masked_fill(is_masked[:, 1:], -torch.inf)
    tensors = {"logits": logits, "keys": keys, "temperature": temperature}
    tensors |= {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    return _on(device, tensors, penalties)


def demanding_rows(device: torch.device) -> dict[str, Any]:
    """Eight rows without ties, of which filters and penalties leave few tokens."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(8, 300, generator=generator) * 2
    logits[4:6] = torch.rand(2, 300, generator=generator) * 4
    seen = torch.rand(2, 300, generator=generator) < 0.95
    counts = (seen & (torch.rand(2, 300, generator=generator) < 0.95)).int() * 2
    weights = torch.tensor([[1.0, 0.0, 0.0]] * 6 + [[1.0, 9.0, 0.0], [9.0, 0.0, 4.0]])
    tensors = {
        "logits": logits,
        "keys": torch.randint(0, 1 << 32, (8, 2), generator=generator),
        "temperature": torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0]),
        "top_k": torch.tensor([250, 40, 300, 100, 300, 300, 300, 300]),
        "top_p": torch.tensor([0.5, 1.0, 0.9, 0.97, 1.0, 0.3, 1.0, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.9, 0.6, 0.0, 0.0]),
    }
    rows = torch.tensor([-1] * 6 + [0, 1])
    return _on(device, tensors, Penalties(rows, counts, seen, weights))


def _on(device: torch.device, tensors: dict[str, torch.Tensor], penalties: Penalties) -> dict[str, Any]:
    moved = Penalties(*(tensor.to(device) for tensor in vars(penalties).values()))
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"penalties": moved}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of some hundred tokens then are several chunks, and lists several blocks."""
    monkeypatch.setattr(module, "BLOCK_TOKENS", 128)
    monkeypatch.setattr(module, "BLOCK_LIST", 64)


def _rows(arguments: dict[str, Any], rows: Any) -> dict[str, Any]:
    given = arguments["penalties"]
    chosen = Penalties(given.rows[rows], given.counts, given.seen, given.weights[rows])
    return {name: chosen if name == "penalties" else tensor[rows] for name, tensor in arguments.items()}


def _asking(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in (*FILTERS, "penalties") or name in names}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("names", [(), ("penalties",), ("top_k",), ("top_p",), ("min_p",)], ids=str)
def test_matches_reference(names: tuple[str, ...], device: torch.device) -> None:
    arguments = _asking(random_rows(4, 200, device, seed=len(names)), *names)
    tokens = sample_tokens(**arguments)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == loops.sample_tokens(**arguments).tolist()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_any_type_and_stride(dtype: torch.dtype, device: torch.device) -> None:
    arguments = _asking(random_rows(3, 200, device, seed=1), "top_k", "penalties")
    logits = arguments.pop("logits").to(dtype)
    expected = loops.sample_tokens(logits, **arguments).tolist()
    assert sample_tokens(logits, **arguments).tolist() == expected
    padded = torch.full((6, 207), NAN, dtype=dtype, device=device)[::2, 7:]
    assert sample_tokens(padded.copy_(logits), **arguments).tolist() == expected
    assert sample_tokens(logits.T.contiguous().T, **arguments).tolist() == expected


@pytest.mark.usefixtures("backend")
def test_rows_with_everything(device: torch.device) -> None:
    """So the implementations draw the same tokens, too."""
    arguments = random_rows(9, 200, device, seed=100)
    tokens = sample_tokens(**arguments).tolist()
    assert tokens == loops.sample_tokens(**arguments).tolist()
    assert len(set(tokens)) > 4


@pytest.mark.usefixtures("backend")
def test_edges(device: torch.device) -> None:
    """Every special row, in one batch of rows filled up with -inf."""
    width = max(len(row[0]) for row in SPECIAL.values())
    logits = torch.tensor([row[0] + [-torch.inf] * (width - len(row[0])) for row in SPECIAL.values()], device=device)
    columns = list(zip(*SPECIAL.values(), strict=True))
    temperature, *rest = (torch.tensor(column, device=device) for column in columns[1:5])
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
        expected = loops.kept_scores(logits[row].tolist(), temperature, int(filters[0]), *filters[1:])
        assert_close(scores.float(), torch.tensor(expected).double())


@pytest.mark.usefixtures("backend")
def test_a_row_depends_on_itself_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any batch and any order, and however programs share it."""
    arguments = random_rows(6, 200, device, seed=3)
    together = sample_tokens(**arguments).tolist()
    order = torch.randperm(6)[:3].to(device)
    monkeypatch.setattr(module, "BLOCK_LIST", 256)
    assert sample_tokens(**_rows(arguments, order)).tolist() == [together[row] for row in order.tolist()]


def test_long_lists(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens in the bin of the threshold, a third of them equal."""
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    monkeypatch.setattr(module, "BLOCK_LIST", 512)
    logits = torch.rand(2, 3000, device=device) * 0.1
    logits[:, ::3] = 0.05
    given = (logits, torch.randint(0, 1 << 32, (2, 2), device=device), torch.ones(2, device=device))
    filters = {"top_k": torch.tensor([1300, 3000], device=device), "top_p": torch.tensor([1.0, 0.4], device=device)}
    assert sample_tokens(*given, **filters).tolist() == loops.sample_tokens(*given, **filters).tolist()


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    given = random_rows(2, 8, device, seed=0)
    sample_tokens(**given)

    def penalties(**other: torch.Tensor) -> Penalties:
        return Penalties(**{**vars(given["penalties"]), **other})

    for name, wrong, message in (
        ("logits", given["logits"][0], "logits: shape"),
        ("logits", torch.zeros(2, (1 << 20) + 1, device=device), "logits: 1048577 tokens a row"),
        ("temperature", given["temperature"][:1], "temperature: shape"),
        ("top_k", given["top_k"].int(), "top_k: dtype"),
        ("penalties", penalties(rows=given["keys"][:, :1]), "penalties.rows: shape"),
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


PARTS = {part.__name__.rpartition(".")[2]: part for part in (row_functions, passes, thresholds)}

# fault -> (file, its text, what the faulty copy has in its place)
MUTATIONS = {
    "no fault": ("passes", "", ""),
    "the noise of another token": ("row_functions", "* 0x9E3779B1 + low)", "* 0x9E3779B1 + low + 1)"),
    "no penalty": ("row_functions", "if table_row >= 0:", "if table_row >= 1000:"),
    "counts of tokens not seen": ("row_functions", "tl.where(counts > 0, presence, 0.0)", "presence"),
    "no temperature": ("row_functions", "tl.div_rn(x - largest, temperature)", "x - largest"),
    "a chunk's own largest": ("passes", "z = scaled(x, largest, temperature)", "z = scaled(x, tl.max(x), temperature)"),
    "the first bin is not counted": ("passes", "mask=histogram > 0)", "mask=(histogram > 0) & (bins > 0))"),
    "masses of whole bins are lost": ("passes", "tl.atomic_add(sums_ptr + 3 * row, before)", "pass"),
    "masses between are lost": ("passes", "tl.atomic_add(sums_ptr + 3 * row + 1, between)", "pass"),
    "the last bin is not listed": ("passes", "(bins <= last) | (bins == last_bin)", "bins <= last"),
    "a token of the list is lost": ("passes", "length.to(tl.int64)) - 1", "length.to(tl.int64) - 1) - 1"),
    "min_p is ignored": ("passes", "kept = z >= minimum", "kept = z >= -100.0"),
    "one token more than top_k": ("thresholds", "target = wanted.to(tl.float64)", "target = wanted.to(tl.float64) + 1"),
    "top_p of everything": ("thresholds", "+ (wanted - count) * tied", "+ (length - count) * tied"),
    "less than top_p": ("thresholds", "sums.to(tl.float64) < target", "sums.to(tl.float64) < target * 0.98"),
    "half of the mass": ("thresholds", "total = preceding +", "total = 0 * preceding +"),
    "bounds too narrow": ("thresholds", "tl.minimum(by_head, by_tail))", "tl.minimum(by_head, by_tail) - 2)"),
    "bounds too wide": ("thresholds", "tl.maximum(by_head, by_tail))", "tl.maximum(by_head, by_tail) + 2)"),
    "listed tokens are never drawn": ("thresholds", "(found > best)", "(found > best + 1000)"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(module, "BLOCK_LIST", 512)
    name, *change = MUTATIONS[fault]
    with planted([PARTS[name]], list(PARTS.values()), tmp_path, *change):
        assert _is_right(demanding_rows(device)) == (fault == "no fault")


def _is_right(arguments: dict[str, Any]) -> bool:
    """Whether filters keep what they should, and draws are the reference's, in rows in which all faults show."""
    for place in (0, 3, 1):
        row = _asking(_rows(arguments, [place]), *FILTERS)
        del row["keys"]
        expected = loops.kept_scores(*(tensor[0].tolist() for tensor in row.values()))
        if expected is None or (filter_logits(**row) > -INF).tolist() != [[score > -INF for score in expected]]:
            return False
    given = _rows(arguments, [4, 5, 6]) | {"keys": arguments["keys"][[4, 2, 6]]}
    return bool(sample_tokens(**given).tolist() == loops.sample_tokens(**given).tolist())
