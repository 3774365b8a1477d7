"""A model over several processes gives the logits that one process gives, in every way to run it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.batch import DrawToken, GreedyArgmax, UnifiedBatch, UnifiedBatchItem, VerifyLogits
from paged.errors import CheckpointError, UnsupportedError
from paged.executors.llm_executor import LlmExecutor
from tests.executors.parallel.followers import OPTIONS, Followers
from tests.models.edits import edit_tensors
from tests.models.families import FAMILIES, save_checkpoint, tokens

PROMPT = tokens(40)


def _cases(fast: str, thorough: str) -> list[Any]:
    """The family, how many processes, and whether they hold whole experts."""
    marked = ((fast, []), (thorough, [pytest.mark.thorough]))
    return [pytest.param(case, marks=marks) for cases, marks in marked for case in cases.split(", ")]


CASES = _cases("llama 2, qwen3_moe 2 experts", thorough="gemma3 4, gpt_oss 4")
# What else layers are made of, each once. Where there are more processes than KV heads, some have the same ones.
OTHERS = _cases(
    "gemma4_moe 2 experts",
    thorough="apertus 2, ernie4_5_moe 2 experts, exaone4 2, hunyuan_moe 2, nemotron 4, starcoder2 2, "
    "cohere2 2, deepseek_v3 2, deepseek_v3 2 experts, "
    "gemma4_shared_kv 2, glm4_moe 4 experts, gpt_oss 2 experts, granite_moe_shared 2, olmo2 2, "
    "llama4 2 experts, llama_biases_linear_rope 4, minimax_m2 4, minimax_m2 2 experts, olmo3 4, phi3 2, qwen2_moe 2, "
    "qwen3_moe 4, lfm2_moe 2, falcon_h1 2, granite_moe_hybrid 2 experts, nemotron_h 2, olmo_hybrid 2, qwen3_next 2",
)


@dataclass(frozen=True)
class Case:
    """The same checkpoint in one process and in several."""

    alone: LlmExecutor
    spread: LlmExecutor

    def same(self, *items: UnifiedBatchItem) -> list[torch.Tensor]:
        """Run in both, and compare; the logits that are there."""
        expected, found = (one.unified_decode(UnifiedBatch(items)) for one in (self.alone, self.spread))
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
                assert float((mine - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())
        return [row for row in found if row is not None]

    def managers(self) -> list[Any]:
        return [self.alone.kv_manager, self.spread.kv_manager]


@contextmanager
def _load(case: str, folder: Path, followers: Followers) -> Iterator[Case]:
    name, size, *experts = case.split()
    save_checkpoint(FAMILIES[name], folder)
    with followers.load(folder, int(size), expert_parallel=bool(experts), **OPTIONS) as spread:
        yield Case(LlmExecutor.from_pretrained(folder, **OPTIONS), spread)


@pytest.fixture(scope="module", params=CASES)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, followers: Followers
) -> Iterator[Case]:
    with _load(request.param, tmp_path_factory.mktemp("checkpoint"), followers) as case:
        yield case


@pytest.fixture
def case(loaded: Case) -> Iterator[Case]:
    yield loaded
    for executor in (loaded.alone, loaded.spread):
        executor.model.reset()
        executor.kv_manager.check_integrity()
        executor.kv_manager.clear_prefix_cache()


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers(name: str, tmp_path: Path, followers: Followers) -> None:
    with _load(name, tmp_path, followers) as case:
        case.same(UnifiedBatchItem("a", PROMPT[:12]), UnifiedBatchItem("b", PROMPT[:9], is_final_chunk=False))
        case.same(UnifiedBatchItem("a", [5], pos_offset=12), UnifiedBatchItem("b", PROMPT[9:], pos_offset=9))


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


def test_fork_copies_the_blocks_of_every_process(case: Case) -> None:
    case.same(UnifiedBatchItem("a", PROMPT[:19]))
    for manager in case.managers():
        manager.fork(manager.get_handle("a"), "b")
    case.same(UnifiedBatchItem("a", tokens(9, 8), pos_offset=19), UnifiedBatchItem("b", tokens(12, 9), pos_offset=19))


def test_swap_and_cached_prefix(case: Case) -> None:
    case.same(UnifiedBatchItem("a", PROMPT[:30]))
    for manager in case.managers():
        manager.swap_out(manager.get_handle("a"))
    for other in range(3):  # over what it left
        case.same(UnifiedBatchItem(other, tokens(40, other)))
    for manager in case.managers():
        manager.swap_in(manager.get_handle("a"))
    case.same(UnifiedBatchItem("a", PROMPT[30:], pos_offset=30))
    for manager in case.managers():
        assert manager.allocate("b", token_ids=PROMPT).num_cached_tokens == 39
    case.same(UnifiedBatchItem("b", PROMPT[39:], pos_offset=39))


@pytest.mark.parametrize("name", ["qwen3_5 2"])
def test_states_are_forked_taken_back_swapped_and_found(name: str, tmp_path: Path, followers: Followers) -> None:
    with _load(name, tmp_path, followers) as case:
        case.same(UnifiedBatchItem("a", PROMPT[:20]))
        for manager in case.managers():
            manager.fork(manager.get_handle("a"), "b")
        drafts = UnifiedBatchItem("b", PROMPT[20:26], pos_offset=20, logits_policy=VerifyLogits())
        case.same(UnifiedBatchItem("a", tokens(9, 8), pos_offset=20), drafts)
        for executor in (case.alone, case.spread):
            executor.truncate_kv_for_cache_id("b", 22)
        for manager in case.managers():
            manager.swap_out(manager.get_handle("b"))
        for other in range(3):  # over what it left
            case.same(UnifiedBatchItem(other, tokens(24, other)))
        for manager in case.managers():
            manager.swap_in(manager.get_handle("b"))
        case.same(UnifiedBatchItem("b", PROMPT[22:], pos_offset=22))
        found = [manager.allocate("c", token_ids=PROMPT).num_cached_tokens for manager in case.managers()]
        assert found[0] == found[1] > 0
        case.same(UnifiedBatchItem("c", PROMPT[found[0] :], pos_offset=found[0]))


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


def test_new_weights_reach_every_process(tmp_path: Path, followers: Followers) -> None:
    """Or none: a folder that cannot be read leaves the old ones everywhere."""
    item = UnifiedBatchItem("a", PROMPT)
    with _load("llama 2", tmp_path / "old", followers) as case:
        shutil.copytree(tmp_path / "old", tmp_path / "new")
        edit_tensors(tmp_path / "new", lambda t: t.update({name: one.roll(1, 0) for name, one in t.items()}))
        (before,) = case.same(item)
        case.spread.model.reset()
        with pytest.raises(CheckpointError):
            case.spread.update_weights(tmp_path)
        with pytest.raises(UnsupportedError, match="a folder that every rank can read"):
            case.spread.update_weights([])
        case.alone.model.reset()
        case.same(item)
        for executor in (case.alone, case.spread):
            executor.model.reset()
            executor.update_weights(tmp_path / "new")
        (after,) = case.same(item)
        assert not torch.allclose(before, after, atol=0.01)
