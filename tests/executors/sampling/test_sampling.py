"""Sampling against the formulas in float64, one row at a time; and that a row's token depends on nothing but itself."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paged import Engine, InvalidInputError, RequestOutput, SamplingParams
from paged.executors.requests.output import CompletionOutput
from paged.executors.requests.request import NO_TOKEN, Completion, Request
from paged.executors.sampling.row_matrix import row_matrix
from paged.executors.sampling.sampler import Drafts, Sampler
from paged.kernels.sampling.torch_ops.sample_tokens import apply_penalties
from tests.executors.oracle import make_executor
from tests.executors.sampling.statistics import chi_square_p

VOCAB = 12
ANY = SamplingParams(max_tokens=1000, seed=0)
Rows = list[tuple[SamplingParams, list[int], list[int]]]


def completion(
    params: SamplingParams, prompt: Sequence[int] = (1,), output: Sequence[int] = (), seed: int = 0
) -> Completion:
    """A completion in the middle of its output."""
    outputs = RequestOutput("r", list(prompt), [CompletionOutput(0, list(output))])
    ends = frozenset(params.stop_token_ids)
    name = str(random.random())
    request = Request("r", list(prompt), params, (0, 0), {}, 1000, ends, outputs, 0.0, name)
    return Completion(request, 0, seed, None)


def sampler(device: torch.device) -> Sampler:
    return Sampler(VOCAB, device)


def expected_probs(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """The distribution of one row, step by step in Python's floats."""
    values = [float(value) for value in logits]
    if params.allowed_token_ids is not None:
        values = [value if token in params.allowed_token_ids else -math.inf for token, value in enumerate(values)]
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    if len(output) < params.min_tokens:
        values = [-math.inf if token in params.stop_token_ids else value for token, value in enumerate(values)]
    for token in range(VOCAB):
        if token in prompt or token in output:
            is_positive = values[token] > 0
            values[token] *= 1 / params.repetition_penalty if is_positive else params.repetition_penalty
        values[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
    if params.is_greedy:
        best = values.index(max(values))
        return [float(token == best) for token in range(VOCAB)]
    weights = [math.exp(value / params.temperature) for value in values]
    if params.top_k > 0:
        least = sorted(weights)[-min(params.top_k, VOCAB)]
        weights = [weight if weight >= least else 0.0 for weight in weights]
    if params.top_p < 1:
        total, running, least = sum(weights), 0.0, 0.0
        for weight in sorted(weights, reverse=True):
            if running < params.top_p * total:
                least = weight
            running += weight
        weights = [weight if weight >= least else 0.0 for weight in weights]
    weights = [weight if weight >= params.min_p * max(weights) else 0.0 for weight in weights]
    return [weight / sum(weights) for weight in weights]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 4},
    "top_k beyond": {"top_k": 50},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "all filters": {"top_k": 6, "top_p": 0.8, "min_p": 0.1, "temperature": 1.7},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "reward": {"frequency_penalty": -0.5, "presence_penalty": -0.4, "repetition_penalty": 0.7},
    "bias": {"logit_bias": {3: 2.0, 5: -100.0}},
    "allowed": {"allowed_token_ids": [2, 3, 7]},
    "minimum": {"min_tokens": 9, "stop_token_ids": [0, 4]},
    "minimum reached": {"min_tokens": 5, "stop_token_ids": [0, 4]},
    "greedy": {"temperature": 0.0},
    "greedy with rules": {"temperature": 0.0, "allowed_token_ids": [2, 9], "repetition_penalty": 3.0},
    "best of one": {"top_k": 1},
}
PROMPT, OUTPUT = [1, 2, 2, 8], [3, 3, 4, 9, 3]


@pytest.mark.parametrize("name", CASES)
def test_distribution(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """6,000 draws, each by another seed, in batches that hold all other cases too."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")  # the interpreter takes 20 ms a row; kernels draw the same tokens
    torch.manual_seed(3)
    logits = torch.randn(VOCAB, device=device) * 1.5
    params = SamplingParams(**{"max_tokens": 1000, **CASES[name]})
    others = [completion(SamplingParams(**{"max_tokens": 1000, **case}), PROMPT, OUTPUT) for case in CASES.values()]
    count = 6_000 if not params.is_greedy else 50
    rows = [completion(params, PROMPT, OUTPUT, seed=seed) for seed in range(count)] + others
    [*drawn] = sampler(device).sample(logits.expand(len(rows), -1), rows).token_ids[:count]
    counts = Counter(token for (token,) in drawn)
    expected = expected_probs(logits, params, PROMPT, OUTPUT)
    assert all(expected[token] > 0 for token in counts)
    assert chi_square_p([counts[token] for token in range(VOCAB)], expected) > 1e-4
    if sum(share > 0 for share in expected) > 1:  # the same draws do not fit another distribution
        wrong = expected_probs(logits, SamplingParams(temperature=1.4 * (params.temperature or 1)), [], [])
        assert chi_square_p([counts[token] for token in range(VOCAB)], wrong) < 1e-4


def test_a_row_is_the_same_in_any_batch(device: torch.device) -> None:
    torch.manual_seed(0)
    rows = [
        completion(SamplingParams(**{"max_tokens": 1000, **case}), PROMPT, OUTPUT[: index % 6], seed=index)
        for index, case in enumerate(CASES.values())
    ]
    logits = torch.randn(len(rows), VOCAB, device=device)
    together = [ids[0] for ids in sampler(device).sample(logits, rows).token_ids]
    alone = [sampler(device).sample(logits[i : i + 1], [row]).token_ids[0][0] for i, row in enumerate(rows)]
    order = list(range(len(rows)))
    random.Random(1).shuffle(order)
    shuffled = sampler(device).sample(logits[order], [rows[i] for i in order]).token_ids
    assert together == alone
    assert [ids[0] for ids in shuffled] == [together[i] for i in order]


def test_counts_follow_the_output(device: torch.device) -> None:
    """The same sampler step after step gives what a fresh one gives, after others have come and gone."""
    torch.manual_seed(0)
    params = SamplingParams(temperature=0, frequency_penalty=1.0, repetition_penalty=1.3, max_tokens=1000)
    kept, rows = sampler(device), [completion(params, PROMPT, seed=i) for i in range(3)]
    for step in range(8):
        logits = torch.randn(3, VOCAB, device=device)
        tokens = kept.sample(logits, rows).token_ids
        assert tokens == sampler(device).sample(logits, rows).token_ids
        for row, ids in zip(rows, tokens, strict=True):
            row.token_ids += ids
        if step == 3:
            kept.forget(rows[1])
            rows[1] = completion(params, [5, 6], [7], seed=9)


def test_logprobs_are_of_the_raw_logits(device: torch.device) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, VOCAB, device=device)
    wanted = [SamplingParams(logprobs=count, temperature=5.0, max_tokens=9) for count in (0, 2)]
    rows = [completion(wanted[0]), completion(ANY), completion(wanted[1])]
    sampled = sampler(device).sample(logits, rows)
    assert sampled.logprobs is not None
    exact = logits.double().log_softmax(-1)
    for row, count in ((0, 0), (2, 2)):
        [table] = sampled.logprobs[row]
        token = sampled.token_ids[row][0]
        assert next(iter(table)) == token
        assert set(table) == {token, *exact[row].topk(count).indices.tolist()}
        assert all(value == pytest.approx(float(exact[row, one]), abs=1e-5) for one, value in table.items())
    assert sampled.logprobs[1] == []


def test_nothing_left_to_choose(device: torch.device) -> None:
    logits = torch.full((4, VOCAB), torch.nan, device=device)
    logits[3] = 0
    rows = [
        completion(ANY),
        completion(SamplingParams(temperature=0)),
        completion(SamplingParams(top_k=3, max_tokens=9)),
    ]
    [*tokens] = sampler(device).sample(logits, [*rows, completion(ANY)]).token_ids
    assert tokens[:3] == [[NO_TOKEN]] * 3
    assert tokens[3][0] >= 0
    drafted = sampler(device).verify(logits[:4], [rows[1], rows[0]], Drafts([[2], [2]])).token_ids
    assert [ids[-1] for ids in drafted] == [NO_TOKEN, NO_TOKEN]


def test_rows_of_one_matrix_are_not_copied() -> None:
    logits = torch.randn(6, VOCAB)
    for rows in (list(logits), list(logits[1:4]), list(logits.split([1, 3, 2])), [logits[0], logits[1:3], logits[3]]):
        matrix = row_matrix(rows)
        assert matrix.data_ptr() == rows[0].data_ptr()
        assert torch.equal(matrix, torch.cat([row.reshape(-1, VOCAB) for row in rows]))
    pieces = list(logits)
    for rows in (pieces[::-1], [pieces[0], pieces[2]], [pieces[0], pieces[0]], [torch.ones(VOCAB), pieces[1]]):
        assert torch.equal(row_matrix(rows), torch.stack(rows))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"n": 0}, {"n": 1}),
        ({"temperature": -0.1}, {"temperature": 0}),
        ({"temperature": math.nan}, {"temperature": 100.0}),
        ({"top_p": 0}, {"top_p": 1e-9}),
        ({"top_p": 1.1}, {"top_p": 1}),
        ({"top_k": -2}, {"top_k": -1}),
        ({"min_p": 1.5}, {"min_p": 1}),
        ({"repetition_penalty": 0}, {"repetition_penalty": 0.1}),
        ({"presence_penalty": math.inf}, {"presence_penalty": -2}),
        ({"allowed_token_ids": []}, {"allowed_token_ids": [0]}),
        ({"stop": ["a", ""]}, {"stop": "a"}),
        ({"max_tokens": 0}, {"max_tokens": None, "min_tokens": 99}),
        ({"min_tokens": 17}, {"min_tokens": 16}),
        ({"logprobs": -1}, {"logprobs": 0}),
    ],
)
def test_parameters_are_checked(wrong: dict[str, Any], right: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        SamplingParams(**wrong)
    SamplingParams(**right)


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": range(30_000)},
        {"logit_bias": dict.fromkeys(range(30_000), 0.5)},
        {"stop_token_ids": range(1024), "min_tokens": 9},
        {"logprobs": 1024},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_a_request_names_costs_little(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in which one row names all of a vocabulary, by the processor time of steps in which none does."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    times = []
    for params in (SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, **fields)):
        engine = Engine(make_executor(torch.device("cpu"), vocab_size=30_000, num_blocks=64))
        for _ in range(8):
            engine.add_request([1, 2], SamplingParams(max_tokens=9))
        engine.add_request([1, 2], params)
        engine.step()
        start = time.process_time()
        for _ in range(4):
            engine.step()
        times.append(time.process_time() - start)
    assert times[1] < 4 * times[0] + 0.1


def test_penalties_beyond_float32_leave_a_token() -> None:
    """Finite ones, times counts: several tokens are favoured without a bound, and the first of them is best."""
    counts, weights = torch.tensor([[0, 9, 9, 1]]), torch.tensor([[1e-37, -3e38, -3e38]])
    logits = apply_penalties(torch.tensor([[1.0, -torch.inf, 5.0, 5.0]]), counts, counts > 0, weights)
    assert not logits.isnan().any()
    assert logits.argmax() == 2
    assert logits.isfinite()[0].tolist() == [True, False, True, True]


def test_columns_are_no_rows() -> None:
    """Views that begin where a row of their matrix does."""
    matrix = torch.arange(9.0).view(3, 3)
    assert torch.equal(row_matrix([matrix[:, 0]]), torch.tensor([[0.0, 3.0, 6.0]]))
    assert torch.equal(row_matrix([matrix[0]]), torch.tensor([[0.0, 1.0, 2.0]]))
