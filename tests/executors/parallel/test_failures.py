"""What the processes of a model are told when one of them is lost, or does not fit the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from paged import (
    Engine,
    InvalidInputError,
    LlmExecutor,
    ParallelConfig,
    RankFailedError,
    SamplingParams,
    UnsupportedError,
)
from paged.batch import FullLogits, GreedyArgmax, UnifiedBatch, UnifiedBatchItem
from tests.executors.parallel.followers import Followers
from tests.models.families import FAMILIES, save_checkpoint, tokens

OPTIONS: dict[str, Any] = {"block_size": 8, "num_blocks": 64}
LIMIT_S = 15


@pytest.fixture
def mortals() -> Iterator[Followers]:
    started = Followers(2)
    yield started
    started.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three ranks the last has fewer rows of the vocabulary, and all have the same KV head."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
    save_checkpoint(LlamaConfig.from_dict(FAMILIES["llama"].to_dict() | sizes), folder)
    return folder


def _lose(mortals: Followers, folder: Path, timeout_s: float, sign: signal.Signals) -> str:
    """Three processes, of which the last is lost in the middle of the engine's work; what the other one answers."""
    config = {"tensor_parallel_size": 3, "timeout_s": timeout_s}
    executor = mortals.order(folder, 3, config, OPTIONS)
    engine = Engine(executor, eos_token_ids=())
    outputs = [engine.add_request(tokens(9, seed), SamplingParams(max_tokens=100)) for seed in range(4)]
    for _ in range(5):
        engine.step()
    victim = mortals.processes[1]
    assert victim.pid is not None
    os.kill(victim.pid, sign)
    lost = monotonic()
    with pytest.raises(RankFailedError, match="rank 0 of 3 cannot go on: another rank has ended, or did not answer"):
        list(iter(engine.step, []))
    answer = mortals.answers(2)[0]
    assert monotonic() - lost < LIMIT_S
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 4
    with pytest.raises(RankFailedError):
        executor.load_lora("any", folder)
    executor.shutdown()
    victim.kill()
    victim.join(5)
    assert victim.exitcode is not None
    return answer


def test_a_process_that_is_killed(mortals: Followers, folder: Path) -> None:
    answer = _lose(mortals, folder, 60.0, signal.SIGKILL)
    assert answer.startswith("RankFailedError: rank 1 of 3 cannot go on")


def test_a_process_that_stalls(mortals: Followers, folder: Path) -> None:
    answer = _lose(mortals, folder, 4.0, signal.SIGSTOP)
    assert answer.startswith("RankFailedError: rank 1 of 3 cannot go on")


def test_idle_processes_wait_longer_than_the_timeout(followers: Followers, folder: Path) -> None:
    executor = followers.order(folder, 3, {"tensor_parallel_size": 3, "timeout_s": 4.0}, OPTIONS)
    sleep(5)
    engine = Engine(executor, eos_token_ids=())
    engine.generate([tokens(5)], SamplingParams(max_tokens=2), progress=False)
    executor.shutdown()
    executor.shutdown()
    assert followers.answers(3) == ["served"] * 2


def test_rank_0_that_gives_up_ends_the_others(followers: Followers, folder: Path) -> None:
    executor = followers.order(folder, 3, {"tensor_parallel_size": 3}, OPTIONS)
    with pytest.raises(UnsupportedError, match="rank"):
        executor.serve()
    executor.model.ranks.fail("a test wants so")
    assert all(answer.startswith("RankFailedError: rank") for answer in followers.answers(3))
    with pytest.raises(RankFailedError, match="a test wants so"):
        executor.warmup()
    executor.shutdown()


def test_processes_with_other_options(followers: Followers, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = LlmExecutor.from_pretrained

    def with_other_blocks(*args: Any, **options: Any) -> LlmExecutor:
        return load(*args, **options | {"num_blocks": 65})

    monkeypatch.setattr(LlmExecutor, "from_pretrained", with_other_blocks)
    with pytest.raises(InvalidInputError, match=r"ranks \[1\] were given others"):
        followers.order(folder, 2, {"tensor_parallel_size": 2}, OPTIONS)
    assert followers.answers(2)[0].startswith("InvalidInputError: options: ranks [0]")


def test_a_model_that_does_not_divide(followers: Followers, folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="tensor_parallel_size 2: num_attention_heads 3"):
        followers.order(folder, 2, {"tensor_parallel_size": 2}, OPTIONS)
    assert followers.answers(2)[0].startswith("UnsupportedError: tensor_parallel_size 2")


@pytest.mark.parametrize(
    "given", [{"tensor_parallel_size": 0}, {"expert_parallel": 1}, {"timeout_s": 0}, {"check_steps": 0}]
)
def test_configurations_out_of_range(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(given))):
        ParallelConfig(**given)


def test_three_ranks_of_an_odd_vocabulary(followers: Followers, folder: Path) -> None:
    prompts = [tokens(9, seed) for seed in range(3)]
    alone = LlmExecutor.from_pretrained(folder, **OPTIONS)
    with followers.load(folder, 3, **OPTIONS) as spread:
        for policy in (FullLogits(), GreedyArgmax()):
            items = [UnifiedBatchItem(f"{policy} {i}", ids, logits_policy=policy) for i, ids in enumerate(prompts)]
            expected, found = (one.unified_decode(UnifiedBatch(items)) for one in (alone, spread))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
