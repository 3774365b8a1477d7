"""Sampler: distributions against Python floats, one row whatever its batch, log probabilities."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import Engine, SamplingParams
from paged.executors.requests.request import NO_TOKEN
from paged.executors.sampling.sampler import Drafts, Sampler
from tests.executors.oracle import make_executor
from tests.executors.sampling.completions import OUTPUT, PROMPT, VOCAB, completion
from tests.executors.sampling.statistics import chi_square_p


def test_verify_by_hand(device: torch.device) -> None:
    """All of N accepted gives N + 1 tokens, the first mismatch the target's token, N = 0 one."""
    rows = [completion(SamplingParams(temperature=0, max_tokens=99)) for _ in range(4)]
    wanted = [[3, 1, 4, 1], [5, 9, 2], [6, 5], [7]]
    logits = torch.zeros(10, 12, device=device)
    logits[torch.arange(10), [token for tokens in wanted for token in tokens]] = 1.0
    drafts = [[3, 1, 4], [5, 0], [0], []]
    sampled = Sampler(12, device).verify(logits, rows, Drafts(drafts))
    assert sampled.token_ids == [[3, 1, 4, 1], [5, 9], [6], [7]]


def test_penalties_count_accepted_drafts(device: torch.device) -> None:
    """A verify row knows the drafts before it: verified tokens are those of one step after the other."""
    params = SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=1.5, min_tokens=3, max_tokens=99)
    params = replace(params, stop_token_ids=[0])
    torch.manual_seed(1)
    logits = torch.randn(4, 12, device=device)
    logits[:, 0] = 3.0
    one, plain = completion(params, [1, 2]), Sampler(12, device)
    expected = []
    for row in logits:
        [[token]] = plain.sample(row[None], [one]).token_ids
        one.token_ids.append(token)
        expected.append(token)
    again = completion(params, [1, 2])
    assert Sampler(12, device).verify(logits, [again], Drafts([expected[:3]])).token_ids == [expected]
    assert 0 not in expected[:3]


ANY = SamplingParams(max_tokens=1000, seed=0)
Rows = list[tuple[SamplingParams, list[int], list[int]]]


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
