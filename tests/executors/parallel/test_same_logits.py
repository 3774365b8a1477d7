"""A model over several processes gives the logits that one process gives, in every way to run it."""

from collections.abc import Iterator

import pytest
import torch

from paged.step.batch import DrawToken, GreedyArgmax, UnifiedBatchItem, VerifyLogits
from tests.executors.parallel.followers import Followers
from tests.executors.parallel.spread import PROMPT, Case, cases_of, load_case
from tests.models.families import tokens

CASES = cases_of(
    "llama 2, qwen3_moe 2 experts", thorough="gemma3 4, gpt_oss 4, deepseek_v4 2 experts, deepseek_v41 2 experts"
)


@pytest.fixture(scope="module", params=CASES)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, followers: Followers
) -> Iterator[Case]:
    with load_case(request.param, tmp_path_factory.mktemp("checkpoint"), followers) as case:
        yield case


@pytest.fixture
def case(loaded: Case) -> Iterator[Case]:
    yield loaded
    for executor in (loaded.alone, loaded.spread):
        executor.model.reset()
        executor.kv_manager.check_integrity()
        executor.kv_manager.clear_prefix_cache()


def test_whole_prompts_chunks_and_decodes_in_one_batch(case: Case) -> None:
    first, second = tokens(21, 1), tokens(17, 2)
    case.same(UnifiedBatchItem("a", PROMPT), UnifiedBatchItem("b", first[:13], is_final_chunk=False))
    case.same(
        UnifiedBatchItem("a", [5], pos_offset=40),
        UnifiedBatchItem("b", first[13:], pos_offset=13),
        UnifiedBatchItem("c", second),
    )
    case.same(*(UnifiedBatchItem(name, [7], pos_offset=at) for name, at in (("a", 41), ("b", 21), ("c", 17))))


def test_drafts_are_verified_and_taken_back(case: Case) -> None:
    case.same(UnifiedBatchItem("a", PROMPT[:7]))
    case.same(UnifiedBatchItem("a", PROMPT[7:19], pos_offset=7, logits_policy=VerifyLogits()))
    for executor in (case.alone, case.spread):
        executor.truncate_kv_for_cache_id("a", 11)
    case.same(UnifiedBatchItem("a", tokens(12, 7), pos_offset=11))


def test_tokens_are_chosen_where_the_logits_are(case: Case) -> None:
    ranks = case.spread.model.ranks
    before = ranks.num_bytes["gather"]
    case.same(
        UnifiedBatchItem("a", PROMPT, logits_policy=GreedyArgmax()),
        UnifiedBatchItem("b", PROMPT, is_final_chunk=False, logits_policy=GreedyArgmax()),
    )
    assert ranks.num_bytes["gather"] - before == 32
    draws = [DrawToken(heat, (7 * seed, seed)) for seed, heat in enumerate((0.0, 0.5, 1.0, 2.0))]
    case.same(*(UnifiedBatchItem(f"{draw}", PROMPT[:9], logits_policy=draw) for draw in draws))
    assert ranks.num_bytes["gather"] - before == 5 * 32
    mask = torch.arange(128) % 7 == 0
    (token,) = case.same(UnifiedBatchItem("c", PROMPT, logits_policy=GreedyArgmax(token_mask=mask)))
    assert int(token) % 7 == 0


def test_padded_steps_are_those_of_graphs(case: Case) -> None:
    case.spread.warmup()
    test_whole_prompts_chunks_and_decodes_in_one_batch(case)
    assert case.spread.status().graph_replays == 1
