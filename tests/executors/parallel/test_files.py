"""A cache folder that several processes use: what all of them have is a hit, all else a miss on all of them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged import Engine, EngineConfig, LlmExecutor, SamplingParams
from paged.cache.tiers import files
from paged.cache.tiers.files import FileTier
from tests.deadline import HANG_S
from tests.executors.parallel.followers import Followers, gate_of
from tests.models.edits import copy_with_rolled_weights
from tests.models.families import FAMILIES, save_checkpoint, tokens
from tests.processes import wait_until

BLOCK = 8
OPTIONS: dict[str, Any] = {"block_size": BLOCK, "num_blocks": 12, "progress": False}
GREEDY = SamplingParams(temperature=0, max_tokens=4)
PROMPTS = [tokens(41, seed) for seed in (1, 2, 3)]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", HANG_S)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "old"
    save_checkpoint(FAMILIES["llama"], path)
    return path


@pytest.fixture(scope="module")
def other_checkpoint(checkpoint: Path) -> Path:
    """The same model with the rows of its weights in another order."""
    return copy_with_rolled_weights(checkpoint, checkpoint.parent / "new")


def answers(executor: LlmExecutor, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    engine = Engine(executor, EngineConfig(), eos_token_ids=())
    return [output.outputs[0].token_ids for output in engine.generate(prompts, GREEDY, progress=False)]


def num_hits(executor: LlmExecutor) -> int:
    assert executor.kv_manager is not None
    return executor.kv_manager.stats().host_hit_tokens


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return answers(LlmExecutor.from_pretrained(checkpoint, **OPTIONS))


@pytest.fixture(scope="module")
def filled(followers: Followers, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes leave that have run PROMPTS."""
    folder = tmp_path_factory.mktemp("filled")
    with followers.load(checkpoint, 2, cache_folder=folder, **OPTIONS) as executor:
        answers(executor)
    return folder


def files_of(executor: LlmExecutor) -> FileTier:
    assert executor.kv_manager is not None
    assert executor.kv_manager.files is not None
    return executor.kv_manager.files


def paths_of_first_prompt(executor: LlmExecutor) -> list[list[Path]]:
    """Its files by rank and position."""
    assert executor.kv_manager is not None
    folder = executor.kv_manager.config.cache_folder
    assert isinstance(folder, Path)
    digest = files_of(executor).digest.hex()[:32]
    index = executor.kv_manager._prefixes.index
    hash_ = index.root_hash(None)
    paths: list[list[Path]] = [[], []]
    for start in range(0, 40, BLOCK):
        hash_ = index.next_hash(hash_, PROMPTS[0][start : start + BLOCK])
        assert isinstance(hash_, bytes)
        for path in folder.glob(f"*/{hash_.hex()}-0.kv"):
            paths[path.parent.name != digest].append(path)
    return paths


def num_readable(executor: LlmExecutor, prompt: list[int]) -> int:
    """How many positions of a prompt all ranks have read."""
    assert executor.kv_manager is not None
    read = executor.kv_manager.read_files(prompt)
    assert read is not None
    assert read.wait()
    return read.num_positions


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("rank", "damage"), [(1, Path.unlink), (0, flip)], ids=["gone", "changed"])
def test_a_file_that_one_rank_lacks_is_a_miss_on_both(
    rank: int,
    damage: Callable[[Path], None],
    followers: Followers,
    checkpoint: Path,
    expected: list[list[int]],
    filled: Path,
    tmp_path: Path,
) -> None:
    """What comes before it is used, all else is computed, and written anew."""
    folder = shutil.copytree(filled, tmp_path / "cache")
    position = 3
    for num_expected in (position * BLOCK, 40):
        with followers.load(checkpoint, 2, cache_folder=folder, **OPTIONS) as executor:
            if num_expected < 40:
                paths = paths_of_first_prompt(executor)
                assert [len(of_rank) for of_rank in paths] == [5, 5]
                damage(paths[rank][position])
            assert answers(executor) == expected
            assert num_hits(executor) == num_expected + 2 * 40


def test_a_folder_that_is_gone_is_a_miss(
    followers: Followers, checkpoint: Path, expected: list[list[int]], filled: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(filled, tmp_path / "cache")
    with followers.load(checkpoint, 2, cache_folder=folder, **OPTIONS) as executor:
        folder.rename(tmp_path / "elsewhere")
        assert answers(executor) == expected
        assert num_hits(executor) == 0


def test_a_rank_whose_folder_does_not_answer(
    followers: Followers,
    checkpoint: Path,
    expected: list[list[int]],
    filled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds up one prompt for a moment, and no later one; when it answers, there are hits."""
    folder = shutil.copytree(filled, tmp_path / "cache")
    with followers.load(checkpoint, 2, cache_folder=folder, **OPTIONS) as executor:
        gate = gate_of(paths_of_first_prompt(executor)[1][0])
        os.mkfifo(gate)
        try:
            monkeypatch.setattr(files, "PATIENCE_S", 1.0)
            assert answers(executor, PROMPTS[:1]) == expected[:1]
            assert files_of(executor).num_late == 1
            monkeypatch.setattr(files, "PATIENCE_S", HANG_S)
            assert answers(executor, PROMPTS[1:2]) == expected[1:2]
            assert (num_hits(executor), files_of(executor).num_late) == (0, 1)
        finally:
            writer = os.open(gate, os.O_WRONLY)
            gate.unlink()
            os.close(writer)
        wait_until(lambda: num_readable(executor, PROMPTS[2]) == 5)
        assert answers(executor, PROMPTS[2:]) == expected[2:]
        assert num_hits(executor) == 40


def test_a_restart_begins_with_hits(
    followers: Followers, checkpoint: Path, other_checkpoint: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """Of as many ranks and the same weights alone."""
    expected_new = answers(LlmExecutor.from_pretrained(other_checkpoint, **OPTIONS))
    assert expected != expected_new
    options = OPTIONS | {"host_cache_bytes": 1 << 20, "cache_folder": tmp_path}
    found = []
    for size, is_updated in ((2, False), (2, False), (4, False), (2, True), (2, False)):
        with followers.load(checkpoint, size, **options) as executor:
            if is_updated:
                executor.update_weights(other_checkpoint)
            assert answers(executor) == (expected_new if is_updated else expected)
            found.append(num_hits(executor))
    assert found == [0, 3 * 40, 0, 0, 3 * 40]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_next",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gemma3", "deepseek_v3", "glm_moe_dsa")),
    ],
)
def test_models_of_every_kind_of_cache(name: str, followers: Followers, tmp_path: Path) -> None:
    """States, windows, latents and indexer keys."""
    save_checkpoint(FAMILIES[name], tmp_path)
    options = OPTIONS | {"num_blocks": 20, "host_cache_bytes": 1 << 24, "cache_folder": tmp_path / "cache"}
    expected = answers(LlmExecutor.from_pretrained(tmp_path, **OPTIONS | {"num_blocks": 20}))
    loaded = []
    for _ in range(2):
        with followers.load(tmp_path, 2, **options) as executor:
            assert answers(executor) == expected
            assert executor.kv_manager is not None
            stats = executor.kv_manager.stats()
            loaded.append((stats.host_hit_tokens > 0, stats.host_loaded_states > 0))
            assert stats.folder_faults == 0
    assert loaded == [(False, False), (True, name == "qwen3_next")]
