"""Hidden states, routed experts and log probabilities of tokens: those of transformers, however the requests run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig, LlmExecutor, PromptLookup, RequestOutput, SamplingParams, UnsupportedError
from paged.executors.requests.token_states import TokenStates
from tests.executors.engine_cases import check_empty, run_to_end
from tests.executors.minimal_executor import MinimalExecutor
from tests.models.families import FAMILIES, save_checkpoint, tokens
from tests.tolerance import assert_logprobs, assert_within

PROMPTS = [tokens(count, count) * repeats for count, repeats in ((1, 1), (17, 1), (6, 3), (30, 1), (6, 3))]
TIGHT = {"num_blocks": 23, "num_swap_blocks": 64}
# Engine configuration, and executor options.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "together": ({}, {}),
    "ahead": ({"overlap": True, "chunk_size": 7}, {}),
    "recorded": ({}, {"cuda_graphs": (8, 32)}),
    "recompute": ({"admission_tokens": 0, "chunk_size": 3}, TIGHT),
    "swap": ({"admission_tokens": 0, "chunk_size": 3, "preemption": "swap"}, TIGHT),
    "drafts": ({}, {}),
    "apart": ({"batch_invariant": True}, {}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """transformers' model, of whose layers every second has experts, and its folder."""
    folder = tmp_path_factory.mktemp("experts")
    return save_checkpoint(FAMILIES["qwen3_moe_every_second_layer"], folder), folder


def check(output: RequestOutput, theirs: Any) -> None:
    for one in output.outputs:
        ids = [*output.prompt_token_ids, *one.token_ids]
        with torch.no_grad():
            expected = theirs(torch.tensor([ids[:-1]]), output_hidden_states=True, output_router_logits=True)
        states = expected.hidden_states[-1][0]
        assert_within(one.hidden_states, states, 1e-4 * states.abs().max())
        chosen = [logits.view(len(ids) - 1, -1).topk(2).indices.sort().values for logits in expected.router_logits]
        assert one.routed_experts is not None
        assert one.routed_experts[:, 0].unique().tolist() == [-1]
        assert torch.equal(one.routed_experts[:, 1].sort().values.long(), chosen[0])
        rows = expected.logits[0].log_softmax(-1)
        tables = [*(output.prompt_logprobs or [])[1:], *(one.logprobs or [])]
        own = rows[-len(tables) :].gather(1, torch.tensor(ids)[-len(tables) :, None])[:, 0]
        found = [table[token] for table, token in zip(tables, ids[-len(tables) :], strict=True) if table is not None]
        assert_logprobs(found, own)


@pytest.mark.parametrize(
    "way", [way if way in ("ahead", "recompute") else pytest.param(way, marks=pytest.mark.thorough) for way in WAYS]
)
def test_same_as_a_plain_forward(checkpoint: tuple[Any, Path], way: str) -> None:
    """Beside requests without them, and with prompts that are cached; forks share the prompt's."""
    (theirs, folder), (config, options) = checkpoint, WAYS[way]
    executor = LlmExecutor.from_pretrained(folder, **{"num_blocks": 256, "block_size": 4} | options)
    if "cuda_graphs" in options:
        executor.warmup()
    proposer = PromptLookup(3) if way == "drafts" else None
    engine = Engine(executor, EngineConfig(**config), eos_token_ids=(), proposer=proposer)
    plain = SamplingParams(temperature=0, max_tokens=9, n=2)
    options = {"max_tokens": 9, "logprobs": 0, "return_hidden_states": True, "return_routed_experts": True}
    asking = [
        SamplingParams(n=2, seed=1, **options),
        SamplingParams(temperature=0, prompt_logprobs=0, **options),
    ]
    expected = engine.generate(PROMPTS, plain, progress=False)
    outputs = [engine.add_request(prompt, params) for prompt in PROMPTS for params in (plain, *asking)]
    run_to_end(engine)
    for index, output in enumerate(outputs):
        assert output.error is None
        if index % 3:
            check(output, theirs)
            assert output.num_cached_tokens == 0
        else:
            assert output.outputs[0].hidden_states is output.outputs[0].routed_experts is None
            assert output.outputs[0].token_ids == expected[index // 3].outputs[0].token_ids
    assert engine.metrics.failed_forwards == 0
    assert bool(engine.metrics.preempted) == (way in ("recompute", "swap"))
    assert (engine.metrics.accepted_tokens > 0) == (way == "drafts")
    replays = executor.status().graph_replays
    engine.generate(PROMPTS, plain, progress=False)
    assert (executor.status().graph_replays > replays) == (way == "recorded")  # nobody asks any more
    check_empty(engine)


@pytest.mark.parametrize("num_failures", [0, 1, 2])
def test_states_that_cannot_be_copied(
    checkpoint: tuple[Any, Path], num_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copied once more. If this fails, too, their request ends, and the others keep their tokens."""
    theirs, folder = checkpoint
    engine = Engine(LlmExecutor.from_pretrained(folder, num_blocks=256, block_size=4), eos_token_ids=())
    params = SamplingParams(
        temperature=0, max_tokens=6, logprobs=0, return_hidden_states=True, return_routed_experts=True
    )
    outputs = [engine.add_request(prompt, params) for prompt in PROMPTS[1:4]]
    add, failures = TokenStates.add, []

    def failing(states: TokenStates, position: int, *rest: Any) -> None:
        is_victim = states is outputs[1].outputs[0].growth.states and position > len(PROMPTS[2])
        if is_victim and len(failures) < num_failures:
            failures.append(position)
            raise MemoryError
        add(states, position, *rest)

    monkeypatch.setattr(TokenStates, "add", failing)
    run_to_end(engine)
    assert [output.error for output in outputs] == [None, "MemoryError: " if num_failures == 2 else None, None]
    for output in outputs:
        if output.error is None:
            assert len(output.outputs[0].token_ids) == 6
            check(output, theirs)


def test_refused_where_there_are_none(llama_folder: Path) -> None:
    engine = Engine(LlmExecutor.from_pretrained(llama_folder, num_blocks=16))
    with pytest.raises(UnsupportedError, match="returns no routed experts"):
        engine.add_request([1, 2], SamplingParams(return_routed_experts=True))
    with pytest.raises(UnsupportedError, match="returns no hidden states"):
        Engine(MinimalExecutor()).add_request([1, 2], SamplingParams(return_hidden_states=True))
