"""Sampler: distributions against Python floats, one row whatever its batch, log probabilities."""

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from paged import SamplingParams
from paged.executors.requests.request import NO_TOKEN
from paged.executors.sampling.noise import Stream, hash_seeds, noise_keys, split_keys, uniform
from paged.executors.sampling.rejection_sampling import rejection_sample
from paged.executors.sampling.rows import row_matrix
from paged.executors.sampling.sampler import Drafts, Sampler
from paged.kernels.sampling.sample_tokens import sample_tokens
from tests.executors.sampling.completions import OUTPUT, PROMPT, VOCAB, chi_square_p, completion
from tests.tolerance import assert_close

ANY = SamplingParams(max_tokens=1000, seed=0)


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


FIELDS: dict[str, dict[str, Any]] = {
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
CASES = {name: SamplingParams(max_tokens=1000, **fields) for name, fields in FIELDS.items()}


@pytest.mark.parametrize("num_draws", [2_000, pytest.param(6_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", CASES)
def test_distribution(name: str, num_draws: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draw by another seed, in batches that hold all other cases too."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")  # the interpreter takes 20 ms a row; kernels draw the same tokens
    torch.manual_seed(3)
    logits = torch.randn(VOCAB, device=device) * 1.5
    params = CASES[name]
    others = [completion(other, PROMPT, OUTPUT) for other in CASES.values()]
    count = 50 if params.is_greedy else num_draws
    rows = [completion(params, PROMPT, OUTPUT, seed=seed) for seed in range(count)] + others
    [*drawn] = sampler(device).sample(logits.expand(len(rows), -1), rows).read().token_ids[:count]
    counts = Counter(token for (token,) in drawn)
    expected = expected_probs(logits, params, PROMPT, OUTPUT)
    assert all(expected[token] > 0 for token in counts)
    assert chi_square_p([counts[token] for token in range(VOCAB)], expected) > 1e-4
    if sum(share > 0 for share in expected) > 1:  # the same draws do not fit another distribution
        wrong = expected_probs(logits, SamplingParams(temperature=1.4 * (params.temperature or 1)), [], [])
        assert chi_square_p([counts[token] for token in range(VOCAB)], wrong) < 1e-4


def test_a_row_is_the_same_in_any_batch(device: torch.device) -> None:
    cases = enumerate(CASES.values())
    rows = [completion(params, PROMPT, OUTPUT[: index % 6], seed=index) for index, params in cases]
    logits = torch.randn(len(rows), VOCAB, device=device)
    together = [ids[0] for ids in sampler(device).sample(logits, rows).read().token_ids]
    alone = [sampler(device).sample(logits[i : i + 1], [row]).read().token_ids[0][0] for i, row in enumerate(rows)]
    order = list(range(len(rows)))
    random.Random(1).shuffle(order)
    shuffled = sampler(device).sample(logits[order], [rows[i] for i in order]).read().token_ids
    assert together == alone
    assert [ids[0] for ids in shuffled] == [together[i] for i in order]


def test_logprobs_are_of_the_raw_logits(device: torch.device) -> None:
    logits = torch.randn(3, VOCAB, device=device)
    wanted = [SamplingParams(logprobs=count, temperature=5.0, max_tokens=9) for count in (0, 2)]
    rows = [completion(wanted[0]), completion(ANY), completion(wanted[1])]
    sampled = sampler(device).sample(logits, rows).read()
    exact = logits.double().log_softmax(-1)
    for row, count in ((0, 0), (2, 2)):
        [table] = sampled.logprobs[row]
        token = sampled.token_ids[row][0]
        assert next(iter(table)) == token
        assert set(table) == {token, *exact[row].topk(count).indices.tolist()}
        assert_close(torch.tensor(list(table.values())), exact[row, list(table)])
    assert sampled.logprobs[1] == []


def test_nothing_left_to_choose(device: torch.device) -> None:
    logits = torch.full((4, VOCAB), torch.nan, device=device)
    logits[3] = 0
    rows = [completion(one) for one in (ANY, SamplingParams(temperature=0), SamplingParams(top_k=3))]
    [*tokens] = sampler(device).sample(logits, [*rows, completion(ANY)]).read().token_ids
    assert tokens[:3] == [[NO_TOKEN]] * 3
    assert tokens[3][0] >= 0
    drafted = sampler(device).verify(logits[:4], [rows[1], rows[0]], Drafts([[2], [2]])).read().token_ids
    assert [ids[-1] for ids in drafted] == [NO_TOKEN, NO_TOKEN]


def test_verify_by_hand(device: torch.device) -> None:
    """All of N accepted gives N + 1 tokens, the first mismatch the target's token, N = 0 one."""
    rows = [completion(SamplingParams(temperature=0, max_tokens=99)) for _ in range(4)]
    wanted = [[3, 1, 4, 1], [5, 9, 2], [6, 5], [7]]
    logits = torch.zeros(10, VOCAB, device=device)
    logits[torch.arange(10), [token for tokens in wanted for token in tokens]] = 1.0
    sampled = sampler(device).verify(logits, rows, Drafts([[3, 1, 4], [5, 0], [0], []])).read()
    assert sampled.token_ids == [[3, 1, 4, 1], [5, 9], [6], [7]]


def test_penalties_count_accepted_drafts(device: torch.device) -> None:
    """A verify row knows the drafts before it: verified tokens are those of one step after the other."""
    penalties = {"frequency_penalty": 2.0, "repetition_penalty": 1.5}
    params = SamplingParams(temperature=0, min_tokens=3, max_tokens=99, stop_token_ids=[0], **penalties)
    logits = torch.randn(4, VOCAB, device=device)
    logits[:, 0] = 3.0
    one, plain = completion(params, [1, 2]), sampler(device)
    expected = []
    for row in logits:
        [[token]] = plain.sample(row[None], [one]).read().token_ids
        one.token_ids.append(token)
        one.num_sampled += 1
        expected.append(token)
    again = completion(params, [1, 2])
    assert sampler(device).verify(logits, [again], Drafts([expected[:3]])).read().token_ids == [expected]
    assert 0 not in expected[:3]


def test_counts_follow_the_output(device: torch.device) -> None:
    """The same sampler step after step gives what a fresh one gives, after others have come and gone."""
    params = SamplingParams(temperature=0.8, frequency_penalty=0.1, repetition_penalty=1.1, max_tokens=1000)
    kept, rows = sampler(device), [completion(params, PROMPT, seed=i) for i in range(3)]
    for step in range(24):  # more than noise keys are made for at once
        logits = torch.randn(3, VOCAB, device=device)
        tokens = kept.sample(logits, rows).read().token_ids
        assert tokens == sampler(device).sample(logits, rows).read().token_ids
        for row, ids in zip(rows, tokens, strict=True):
            row.token_ids += ids
            row.num_sampled += 1
        if step == 3:
            kept.forget(rows[1])
            rows[1] = completion(params, [5, 6], [7], seed=9)


def test_rows_of_one_matrix_are_not_copied() -> None:
    logits = torch.randn(6, VOCAB)
    for rows in (list(logits), list(logits[1:4]), list(logits.split([1, 3, 2])), [logits[0], logits[1:3], logits[3]]):
        matrix = row_matrix(rows)
        assert matrix.data_ptr() == rows[0].data_ptr()
        assert torch.equal(matrix, torch.cat([row.reshape(-1, VOCAB) for row in rows]))
    # Columns are no rows, though the first begins where a row of their matrix does.
    pieces, column = list(logits), torch.randn(VOCAB, VOCAB)[:, 0]
    for rows in (pieces[::-1], [pieces[0], pieces[2]], [pieces[0]] * 2, [torch.ones(VOCAB), pieces[1]], [column]):
        assert torch.equal(row_matrix(rows), torch.stack(rows))


@pytest.mark.parametrize("drafts_are_certain", [False, True])
def test_rejection_keeps_the_distribution(
    drafts_are_certain: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every position the tokens of 8,000 sequences fit the target as well as plain draws do; accepting a little too
    easily, or replacing a rejected draft by the target's own choice, does not.
    """
    monkeypatch.setenv("PAGED_BACKEND", "torch")  # the interpreter takes 20 ms a row
    num, width, vocab = 8_000, 3, 6
    seeds, everyone = hash_seeds(np.arange(num, dtype=np.uint64))[:, None], torch.arange(num, device=device)

    def keys_of(length: int, stream: Stream) -> np.ndarray:
        return noise_keys(seeds, np.arange(length)[None], stream)

    def draw(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return sample_tokens(logits.expand(num, -1), keys, torch.ones(num, device=device))

    logits = torch.randn(width + 1, vocab).to(device) * 1.2
    q = (torch.randn(width, vocab).to(device) * 1.2).softmax(-1)
    target = logits.double().softmax(-1).tolist()
    draft_keys = torch.from_numpy(split_keys(keys_of(width, Stream.DRAFT))).to(device)
    drafts = torch.stack([draw(q[i].log(), draft_keys[:, i]) for i in range(width)], 1)
    keys = torch.from_numpy(split_keys(keys_of(width + 1, Stream.TOKEN))).to(device)
    chances = torch.from_numpy(uniform(keys_of(width, Stream.ACCEPT))).to(device)
    num_drafts = everyone % (width + 1)

    def verify(uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        drafted = None if drafts_are_certain else q.expand(num, -1, -1)
        return rejection_sample(
            logits.repeat(num, 1), everyone * (width + 1), drafts, num_drafts, drafted, uniforms, keys
        )

    def fit(tokens: torch.Tensor, counts: torch.Tensor, position: int) -> float:
        reached = tokens[counts >= position, position].bincount(minlength=vocab)
        return chi_square_p(reached.tolist(), target[position])

    tokens, accepted = verify(chances)
    assert (accepted <= num_drafts).all()
    for position in range(width + 1):
        assert fit(tokens, accepted, position) > 1e-4
        plain = draw(logits[position], keys[:, position])
        assert chi_square_p(plain.bincount(minlength=vocab).tolist(), target[position]) > 1e-4
    biased, too_many = verify(chances * 0.7)
    assert fit(biased, too_many, 0) < 1e-6
    unlike = tokens.clone()
    rejected = (accepted == 0) & (num_drafts > 0)
    unlike[rejected, 0] = draw(logits[0], keys[:, 0])[rejected]
    assert fit(unlike, accepted, 0) < 1e-6
