"""Speculation keeps the target's distribution, whatever the drafts are worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from paged import (
    DraftModel,
    Engine,
    EngineConfig,
    InvalidInputError,
    PagedKvCacheManager,
    PromptLookup,
    SamplingParams,
    SpeculativeDecoder,
    UnsupportedError,
)
from paged.executors.requests.request import Completion
from paged.executors.sampling.noise import Stream, hash_seeds, noise_keys, split_keys, uniform
from paged.executors.sampling.operations import draw, rejection_sample
from paged.executors.sampling.sampler import Drafts, Sampler
from tests.executors.engine_cases import check_pool_empty, tokens_of
from tests.executors.oracle import make_executor
from tests.executors.sampling.statistics import chi_square_p
from tests.executors.sampling.test_sampling import completion
from tests.executors.test_llm_executor import Parrot, other_executor, parrot_logits

NUM, VOCAB, WIDTH = 8_000, 6, 3


def _keys(width: int, stream: Stream) -> np.ndarray:
    return noise_keys(hash_seeds(np.arange(NUM, dtype=np.uint64))[:, None], np.arange(width)[None], stream)


@pytest.mark.parametrize("drafts_are_certain", [False, True])
def test_rejection_keeps_the_distribution(drafts_are_certain: bool, device: torch.device) -> None:
    """At every position the tokens of 8,000 sequences fit the target as well as plain draws do; accepting a little too
    easily, or replacing a rejected draft by the target's own choice, does not.
    """
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(WIDTH + 1, VOCAB, generator=generator).to(device) * 1.2
    q = (torch.randn(WIDTH, VOCAB, generator=generator).to(device) * 1.2).softmax(-1)
    target = logits.double().softmax(-1).tolist()
    draft_keys = torch.from_numpy(split_keys(_keys(WIDTH, Stream.DRAFT))).to(device)
    drafts = torch.stack([draw(q[i].log().expand(NUM, -1), draft_keys[:, i]) for i in range(WIDTH)], 1)
    keys = torch.from_numpy(split_keys(_keys(WIDTH + 1, Stream.TOKEN))).to(device)
    chances = torch.from_numpy(uniform(_keys(WIDTH, Stream.ACCEPT))).to(device)
    num_drafts = torch.arange(NUM, device=device) % (WIDTH + 1)

    def verify(uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rejection_sample(
            logits.repeat(NUM, 1),
            torch.arange(NUM, device=device) * (WIDTH + 1),
            drafts,
            num_drafts,
            None if drafts_are_certain else q.expand(NUM, -1, -1),
            uniforms,
            keys,
        )

    def fit(tokens: torch.Tensor, counts: torch.Tensor, position: int) -> float:
        reached = tokens[counts >= position, position].bincount(minlength=VOCAB)
        return chi_square_p(reached.tolist(), target[position])

    tokens, accepted = verify(chances)
    assert (accepted <= num_drafts).all()
    for position in range(WIDTH + 1):
        assert fit(tokens, accepted, position) > 1e-4
        plain = draw(logits[position].expand(NUM, -1), keys[:, position])
        assert chi_square_p(plain.bincount(minlength=VOCAB).tolist(), target[position]) > 1e-4
    biased, too_many = verify(chances * 0.7)
    assert fit(biased, too_many, 0) < 1e-6
    unlike = tokens.clone()
    rejected = (accepted == 0) & (num_drafts > 0)
    unlike[rejected, 0] = draw(logits[0].expand(NUM, -1), keys[:, 0])[rejected]
    assert fit(unlike, accepted, 0) < 1e-6


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


def _oracle_tokens(device: torch.device, *, drafted: bool, first_seed: int) -> Counter[tuple[int, ...]]:
    """The first three tokens of 1,500 sampled completions."""
    sizes = {"vocab_size": 4, "num_layers": 1, "num_blocks": 4096}
    target = make_executor(device, num_heads=1, num_kv_heads=1, head_dim=4, **sizes)
    config = EngineConfig(token_budget=8192, max_num_seqs=2048)
    if drafted:
        draft = make_executor(device, num_heads=2, num_kv_heads=2, head_dim=2, **sizes, embedding="sinusoidal")
        engine: Engine = SpeculativeDecoder(target, draft, num_draft_tokens=3, config=config)
    else:
        engine = Engine(target, config)
    params = [SamplingParams(temperature=0.25, max_tokens=4, seed=first_seed + i) for i in range(1_500)]
    outputs = engine.generate([[1, 2, 1, 3, 1]] * len(params), params, progress=False)
    if drafted:
        assert 0.05 < engine.metrics.accepted_tokens / engine.metrics.draft_tokens < 0.95
    return Counter(tuple(ids[:3]) for ids in tokens_of(outputs))


def test_sampled_output_is_distributed_as_without_drafts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not so where drafts are accepted half as hard as they should be."""
    plain = _oracle_tokens(device, drafted=False, first_seed=0)
    drafted = _oracle_tokens(device, drafted=True, first_seed=10_000)
    assert len(plain) > 20

    def fit(first: Counter[tuple[int, ...]], second: Counter[tuple[int, ...]]) -> float:
        common = [key for key in first | second if first[key] + second[key] >= 20]
        left = [first[key] for key in common]
        shares = [(first[key] + second[key]) for key in common]
        # Of a pooled cell each sample has a half; their difference has twice the variance of one against the truth.
        total = sum(left) / sum(shares)
        statistic = sum((a - total * n) ** 2 / (total * (1 - total) * n) for a, n in zip(left, shares, strict=True))
        half = torch.tensor([(len(common) - 1) / 2, statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))

    assert fit(plain, drafted) > 1e-4
    monkeypatch.setattr("paged.executors.sampling.sampler.uniform", lambda keys: uniform(keys) / 2)
    assert fit(plain, _oracle_tokens(device, drafted=True, first_seed=10_000)) < 1e-4


def test_lookup_continues_the_longest_run() -> None:
    lookup = PromptLookup(num_tokens=3, max_ngram=2)
    text = completion(SamplingParams(max_tokens=99), [5, 6, 7, 8, 9, 6, 7])
    assert lookup.propose([text], [9]).token_ids == [[8, 9, 6]]
    assert lookup.propose([text], [2]).token_ids == [[8, 9]]
    text.token_ids += [8, 1]
    assert lookup.propose([text], [9]).token_ids == [[]]
    text.token_ids += [7]
    assert lookup.propose([text], [9]).token_ids == [[8, 1, 7]], "the last place where the run stood"
    other = completion(SamplingParams(max_tokens=99), [4])
    assert lookup.propose([other, text], [9, 0]).token_ids == [[], []]
    lookup.forget(text)
    lookup.forget(other)


@pytest.mark.parametrize("trouble", ["no room", "raises", "raises later", "behind", "one cache"])
def test_a_draft_in_trouble_costs_nothing_but_drafts(
    trouble: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[i, 3, i, 5, i] * 4 for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = tokens_of(Engine(make_executor(device, num_blocks=64)).generate(prompts, params, progress=False))
    target = make_executor(device, num_blocks=24 if trouble == "one cache" else 64)
    draft = make_executor(device, num_blocks=7 if trouble == "no room" else 64)
    if trouble == "one cache":
        draft = target
    if trouble.startswith("raises"):
        calls, forward = [0], draft.unified_decode

        def failing(batch: object) -> object:
            calls[0] += 1
            if trouble == "raises" or calls[0] % 3 == 0:
                raise RuntimeError("the draft model broke")
            return forward(batch)  # type: ignore[arg-type]

        monkeypatch.setattr(draft, "unified_decode", failing)
    proposer = DraftModel(draft, 3, token_budget=8 if trouble == "behind" else 2048)
    engine = Engine(target, proposer=proposer)
    assert tokens_of(engine.generate(prompts, params, progress=False)) == expected
    assert (engine.metrics.draft_tokens > 0) == (trouble != "raises")
    assert not engine.metrics.finished["error"]
    check_pool_empty(target)
    check_pool_empty(draft)


def test_rejected_drafts_leave_the_cache(device: torch.device) -> None:
    """After every step each sequence holds all of its tokens but the newest, and no more."""
    executor = make_executor(device, num_blocks=64)
    engine = Engine(executor, proposer=PromptLookup(4))
    outputs = [engine.add_request([i, 3, i, 5, i], SamplingParams(temperature=0, max_tokens=20)) for i in range(4)]
    while engine.num_unfinished:
        engine.step()
        for output in outputs:
            request = engine._lifecycle.requests.get(output.request_id)
            if request is not None and (handle := request.completions[0].handle) is not None:
                assert handle.num_tokens == len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
    assert 0 < engine.metrics.accepted_tokens < engine.metrics.draft_tokens
    check_pool_empty(executor)


def test_anothers_model_verifies_through_its_own_calls() -> None:
    """It has neither a cache manager nor a unified forward: `forward_verify` runs drafts, what fails is truncated."""
    prompts, params = [[1, 2, 3, 6, 12], [4, 8]], SamplingParams(temperature=0, max_tokens=8)
    expected = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(8):
            tokens.append(int(parrot_logits(tokens).argmax()))
        expected.append(tokens[len(prompt) :])
    executor = other_executor(Parrot())
    engine = Engine(executor, proposer=_Guesses(expected))
    assert tokens_of(engine.generate(prompts, params, progress=False)) == expected
    assert 0 < engine.metrics.accepted_tokens < engine.metrics.draft_tokens
    assert executor.model.caches == {}  # type: ignore[attr-defined]


class _Guesses:
    """Drafts two tokens, the second of which is wrong every other time."""

    num_tokens = 2
    vocab_size = None

    def __init__(self, expected: list[list[int]]) -> None:
        self._expected = expected

    def propose(self, completions: Sequence[Completion], limits: Sequence[int]) -> Drafts:
        drafts = []
        for one, limit in zip(completions, limits, strict=True):
            done = len(one.token_ids)
            answer = next(tokens for tokens in self._expected if tokens[:done] == one.token_ids)
            drafts.append([answer[done], (answer[done + 1] + done % 2) % 61][:limit] if limit > 1 else [])
        return Drafts(drafts)

    def forget(self, completion: Completion) -> None: ...

    def make_room(self, manager: PagedKvCacheManager) -> bool:
        return False


def test_what_cannot_speculate_is_refused(device: torch.device) -> None:
    target = make_executor(device)
    with pytest.raises(InvalidInputError, match="vocabulary of 64, expected 256"):
        SpeculativeDecoder(target, make_executor(device, vocab_size=64))
    with pytest.raises(InvalidInputError, match="token_budget: 4, expected at least 5"):
        SpeculativeDecoder(target, config=EngineConfig(token_budget=4))
    with pytest.raises(InvalidInputError, match="num_tokens"):
        SpeculativeDecoder(target, num_draft_tokens=0)
    with pytest.raises(UnsupportedError, match="cache manager"):
        SpeculativeDecoder(target, other_executor(Parrot()))
    SpeculativeDecoder(target, make_executor(device), config=EngineConfig(token_budget=5))
