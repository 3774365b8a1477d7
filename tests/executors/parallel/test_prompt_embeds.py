"""Prompts with images on two processes, and with an adapter."""

from pathlib import Path

import pytest

from paged import Engine, LlmExecutor
from tests.executors.engine_cases import run_to_end
from tests.executors.parallel.followers import Followers
from tests.executors.vision.test_prompt_embeds import SIZES, TEN, as_rows, generate, two_images
from tests.executors.vision.towers import Tower
from tests.models.families import FAMILIES, save_checkpoint, tokens
from tests.models.lora.folders import Adapter


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_two_ranks_give_the_tokens_of_transformers(name: str, tmp_path: Path, followers: Followers) -> None:
    """Twice, so that a prefix is found the second time."""
    tower = Tower(name, tmp_path)
    prompt = two_images(tower)
    expected = tower.greedy(prompt, 10)
    options = {key: value for key, value in SIZES.items() if key != "progress"}
    with followers.load(tmp_path, 2, **options) as executor:
        engine = Engine(executor, eos_token_ids=())
        assert [generate(engine, prompt), generate(engine, prompt)] == [[expected]] * 2
        assert executor.kv_manager.stats().prefix_hits > 0


@pytest.mark.thorough
def test_rows_that_are_token_embeddings_change_nothing_with_an_adapter(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["llama"], tmp_path / "base")
    executor = LlmExecutor.from_pretrained(tmp_path / "base", **SIZES)
    Adapter(("q_proj", "v_proj", "down_proj"), rank=4, seed=1).save(tmp_path / "one", tmp_path / "base")
    executor.load_lora("one", tmp_path / "one")
    ids, engine = tokens(30, 4), Engine(executor, eos_token_ids=())
    placeholders, embeds = as_rows(executor, ids)
    outputs = [
        engine.add_request(given, TEN, prompt_embeds=rows, metadata={"lora_adapter": name} if name else None)
        for given, rows, name in [(ids, None, "one"), (placeholders, embeds, "one"), (placeholders, embeds, None)]
    ]
    run_to_end(engine)
    plain, adapted, without = [output.outputs[0].token_ids for output in outputs]
    assert adapted == plain != without
