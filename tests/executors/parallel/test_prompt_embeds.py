"""Prompts with images on two processes."""

from pathlib import Path

import pytest

from paged import Engine
from tests.executors.parallel.followers import Followers
from tests.serving.vision.test_prompt_embeds import SIZES, generate, two_images
from tests.serving.vision.towers import Tower


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
