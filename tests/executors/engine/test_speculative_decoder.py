"""SpeculativeDecoder: the output of the target, and nothing left behind by drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from paged import (
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
from paged.executors.sampling.noise import uniform
from paged.executors.sampling.sampler import Drafts
from tests.executors.engine_cases import check_pool_empty, tokens_of
from tests.executors.oracle import make_executor
from tests.executors.parrot import Parrot, other_executor, parrot_logits


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
    params = [SamplingParams(temperature=0.25, max_tokens=4, seed=first_seed + i) for i in range(800)]
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
