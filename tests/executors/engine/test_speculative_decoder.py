"""SpeculativeDecoder: the output of the target, and nothing left behind by drafts."""

from collections import Counter

import pytest
import torch

from paged import Engine, EngineConfig, InvalidInputError, PromptLookup, SamplingParams, SpeculativeDecoder
from paged.errors import UnsupportedError
from paged.executors.closed_form import expected_logits
from paged.executors.requests.request import Completion
from paged.executors.sampling.noise import uniform
from paged.executors.sampling.sampler import Sampler
from tests.executors.engine.answers import parrot_tokens
from tests.executors.engine_cases import check_pool_empty, recall_engine, run, run_to_end, tokens_of
from tests.executors.oracle import make_executor
from tests.executors.parrot import Parrot, other_executor
from tests.executors.sampling.completions import chi_square_p


def _fit(device: torch.device, draft_min_probability: float = 0.0) -> float:
    """How well the first three tokens of 800 drafted completions fit the target's distribution: Pearson's p-value."""
    sizes = {"vocab_size": 4, "num_layers": 1, "num_blocks": 4096}
    target = make_executor(device, num_heads=1, num_kv_heads=1, head_dim=4, **sizes)
    draft = make_executor(device, num_heads=2, num_kv_heads=2, head_dim=2, **sizes, embedding="sinusoidal")
    config = EngineConfig(token_budget=8192, max_num_seqs=2048)
    engine = SpeculativeDecoder(
        target, draft, num_draft_tokens=3, config=config, draft_min_probability=draft_min_probability
    )
    prompt, shares = [1, 2, 1, 3, 1], {(): 1.0}
    params = [SamplingParams(temperature=0.25, max_tokens=4, seed=seed) for seed in range(800)]
    counts = Counter(tuple(ids[:3]) for ids in run(engine, [prompt] * len(params), params))
    assert 0.05 < engine.metrics.accepted_tokens / engine.metrics.draft_tokens < 0.95
    for _ in range(3):
        shares = {
            (*ids, token): share * chance
            for ids, share in shares.items()
            for token, chance in enumerate((expected_logits(target.config, [*prompt, *ids]) / 0.25).softmax(0).tolist())
        }
    common = [ids for ids, share in shares.items() if share * len(params) >= 10]
    assert len(common) > 10
    found, expected = ([each[ids] for ids in common] for each in (counts, shares))
    return chi_square_p([*found, len(params) - sum(found)], [*expected, 1 - sum(expected)])


def test_sampled_output_has_the_targets_distribution(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """And has not where drafts are accepted half as hard as they should be."""
    assert _fit(device) > 1e-4
    monkeypatch.setattr("paged.executors.sampling.sampler.uniform", lambda keys: uniform(keys) / 2)
    assert _fit(device) < 1e-4


@pytest.mark.thorough
def test_what_is_verified_leaves_the_distribution(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not if a draft's own probability decided whether it is verified."""
    assert _fit(device, 0.18) > 1e-4
    drawn: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    propose = Sampler.propose

    def noting(
        sampler: Sampler, logits: torch.Tensor, completions: list[Completion], drafts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        drawn.append(propose(sampler, logits, completions, drafts))
        return drawn[-1]

    def estimate(logits: torch.Tensor, confidences: object) -> torch.Tensor:
        tokens, probs = drawn[-1]
        assert probs is not None
        return probs.gather(1, tokens[:, None])[:, 0]

    monkeypatch.setattr(Sampler, "propose", noting)
    monkeypatch.setattr("paged.executors.speculation.drafting._estimate", estimate)
    assert _fit(device, 0.5) < 1e-4


def test_rejected_drafts_leave_the_cache(device: torch.device) -> None:
    """After every step each sequence holds all of its tokens but the newest, and no more."""
    executor = make_executor(device, num_blocks=64)
    engine = Engine(executor, proposer=PromptLookup(4))
    outputs = [engine.add_request([i, 3, i, 5, i], SamplingParams(temperature=0, max_tokens=20)) for i in range(4)]
    while engine.num_unfinished:
        engine.step()
        for output in outputs:
            request = engine._requests.by_id.get(output.request_id)
            if request is not None and (handle := request.completions[0].handle) is not None:
                assert handle.num_tokens == len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
    assert 0 < engine.metrics.accepted_tokens < engine.metrics.draft_tokens
    check_pool_empty(executor)


def test_drafts_beside_a_prompt_that_forks() -> None:
    """In one step, a row of logits is for each draft, or for several completions."""
    repeating, params = [7, 8, 9] * 4, SamplingParams(temperature=0, max_tokens=24)
    answers = []
    for proposer in (None, PromptLookup(4)):
        engine = Engine(recall_engine().executor, eos_token_ids=(), proposer=proposer)
        outputs = [engine.add_request(repeating, params)]
        for prompt in ([3, 1, 4], [1, 5, 9, 2], [6, 5]):
            engine.step()
            outputs.append(engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=4, n=2)))
        run_to_end(engine)
        answers.append([one.token_ids for output in outputs for one in output.outputs])
    assert answers[0] == answers[1]
    assert engine.metrics.draft_tokens > 0


def test_anothers_model_verifies_through_its_own_calls() -> None:
    """It has neither a cache manager nor a unified forward: `forward_verify` runs drafts, what fails is truncated."""
    prompts, params = [[0, 0, 9, 52], [7, 7]], SamplingParams(temperature=0, max_tokens=8)
    executor = other_executor(Parrot())
    engine = Engine(executor, proposer=PromptLookup(2))
    assert tokens_of(engine.generate(prompts, params, progress=False)) == [parrot_tokens(one, 8) for one in prompts]
    assert 0 < engine.metrics.accepted_tokens < engine.metrics.draft_tokens
    assert executor.model.caches == {}


def test_what_cannot_speculate_is_refused(device: torch.device) -> None:
    target = make_executor(device)
    with pytest.raises(InvalidInputError, match="vocabulary of 64, expected 256"):
        SpeculativeDecoder(target, make_executor(device, vocab_size=64))
    with pytest.raises(InvalidInputError, match="token_budget: 4, expected at least 5"):
        SpeculativeDecoder(target, config=EngineConfig(token_budget=4))
    with pytest.raises(InvalidInputError, match="num_tokens"):
        SpeculativeDecoder(target, num_draft_tokens=0)
    with pytest.raises(InvalidInputError, match=r"draft_min_probability: 0\.5, expected 0 for n-grams"):
        SpeculativeDecoder(target, draft_min_probability=0.5)
    with pytest.raises(InvalidInputError, match=r"min_probability: -1, expected a number in 0\.\.1"):
        SpeculativeDecoder(target, target, draft_min_probability=-1)
    with pytest.raises(UnsupportedError, match="cache manager"):
        SpeculativeDecoder(target, other_executor(Parrot()))
    SpeculativeDecoder(target, make_executor(device), config=EngineConfig(token_budget=5))
