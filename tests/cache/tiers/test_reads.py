"""Prompts of an engine that wait for files: others run meanwhile, and no wait is without a deadline."""

from collections.abc import Iterator
from threading import Event

import pytest
import torch

from paged import Engine, EngineConfig, SamplingParams
from paged.cache.tiers import files
from paged.executors.requests.output import RequestOutput
from tests.cache.tiers.patience import patience_of_users
from tests.cache.tiers.test_files import DictStore
from tests.deadline import HANG_S
from tests.executors.oracle import make_executor

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPT = [token % 13 for token in range(41)]
OTHER = [7, 8, 9]


class SlowStore(DictStore):
    """Answers a load when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = Event()

    def load(self, name: str) -> bytes | None:
        assert self.answer.wait(HANG_S)
        return super().load(name)


def start(store: DictStore) -> Engine:
    sizes = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "vocab_size": 32, "max_sequence_length": 128}
    executor = make_executor(torch.device("cpu"), **sizes, host_cache_bytes=1 << 20)
    executor.kv_manager.attach_store(store)
    return Engine(executor, EngineConfig(), eos_token_ids=())


def files_of(engine: Engine) -> files.FileTier:
    tier = engine.executor.kv_manager.files
    assert tier is not None
    return tier


def run(engine: Engine, output: RequestOutput) -> list[int]:
    while not output.finished:
        engine.step()
    return output.outputs[0].token_ids


@pytest.fixture
def store() -> Iterator[SlowStore]:
    """What a process leaves that has run PROMPT."""
    store = SlowStore()
    store.answer.set()
    engine = start(store)
    run(engine, engine.add_request(PROMPT, GREEDY))
    engine.executor.kv_manager.close_tiers(HANG_S)
    store.answer.clear()
    yield store
    store.answer.set()


def test_others_run_while_a_prompt_waits(store: SlowStore) -> None:
    engine = start(store)
    first, other = engine.add_request(PROMPT, GREEDY), engine.add_request(OTHER, GREEDY)
    run(engine, other)
    for _ in range(3):  # nothing else is there to run
        assert engine.step() == []
    assert not first.outputs[0].token_ids
    store.answer.set()
    assert run(engine, first) == run(engine, engine.add_request(PROMPT, GREEDY))
    assert (first.num_loaded_tokens, files_of(engine).num_late) == (40, 0)


@pytest.mark.parametrize("num_requests", [1, 3, 12])
def test_a_folder_that_does_not_answer(num_requests: int, store: SlowStore) -> None:
    """The first prompts give up together, and the next ones do not wait."""
    engine = start(store)
    with patience_of_users(files_of(engine)):
        outputs = [engine.add_request([index, *PROMPT], GREEDY) for index in range(num_requests)]
        for output in outputs:
            run(engine, output)
            assert output.num_loaded_tokens == 0
    assert files_of(engine).num_late == num_requests
    engine.executor.kv_manager.clear_prefix_cache()
    run(engine, engine.add_request(PROMPT, GREEDY))
    assert files_of(engine).num_late == num_requests + 1


def test_a_wait_is_as_long_as_the_forward_that_it_saves() -> None:
    assert files.longest_wait_s(0, 100.0) == files.PATIENCE_S
    assert files.longest_wait_s(500, 100.0) == 5.0 + files.PATIENCE_S


def test_no_slow_step_makes_waits_longer() -> None:
    """As those behind hits, which run few tokens."""
    tier = files_of(start(DictStore()))
    least = tier.prefill_rate
    rates = []
    for num_tokens, seconds in ((1, 0.1), (4000, 0.1), (1000, 0.1)):
        tier.observe_prefill(num_tokens, seconds)
        rates.append(tier.prefill_rate)
    assert rates == [least, 40_000.0, 40_000.0]
