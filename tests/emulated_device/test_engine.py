"""An engine on an emulated GPU: for hundreds of steps without a kernel run, and for a few with all of them."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from paged import Engine, EngineConfig, LlmExecutor, SamplingParams, SpeculativeDecoder
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.emulated_device.emulator.report import Report
from tests.executors.engine_cases import GREEDY, check_empty, tokens_of
from tests.models.families import FAMILIES, save_checkpoint, tokens
from tests.models.lora.folders import Adapter

BLOCK = 4
# Where a step waits for the tokens it chose, once; before that for all drafts of a draft model, once.
WAITS = "executors/sampling/sampler.py:"
WAITS_FOR_DRAFTS = "executors/speculation/draft_model.py:"
SAMPLED: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "min_tokens": 2,
    "logit_bias": {5: 1.0},
    "logprobs": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_checkpoint(FAMILIES["llama"], path)
    return path


def executor_of(folder: Path, **options: Any) -> LlmExecutor:
    made = LlmExecutor.from_pretrained(
        folder, **{"device": "cuda", "block_size": BLOCK, "num_blocks": 96, "cuda_graphs": [1, 2, 4, 8], **options}
    )
    made.warmup()
    return made


def plain(folder: Path, _: Path) -> Engine:
    return Engine(executor_of(folder), EngineConfig(token_budget=64), seed=0)


def swapping(folder: Path, _: Path) -> Engine:
    config = EngineConfig(token_budget=64, admission_tokens=0, preemption="swap")
    return Engine(executor_of(folder, num_blocks=24, num_swap_blocks=64), config, seed=0)


def with_adapters(folder: Path, adapters: Path) -> Engine:
    engine = plain(folder, adapters)
    for seed, name in enumerate(("french", "poetry")):
        engine.load_lora(name, Adapter(("q_proj", "down_proj"), seed=seed).save(adapters / name, folder))
    return engine


def looking_up(folder: Path, _: Path) -> Engine:
    return SpeculativeDecoder(executor_of(folder), num_draft_tokens=3, config=EngineConfig(token_budget=64), seed=0)


def drafting(folder: Path, _: Path) -> Engine:
    draft = executor_of(folder)
    return SpeculativeDecoder(executor_of(folder), draft, num_draft_tokens=4, config=EngineConfig(token_budget=64))


# What makes the engine, and parameters of every second request.
KINDS: dict[str, tuple[Callable[[Path, Path], Engine], dict[str, Any]]] = {
    "greedy": (plain, {}),
    "forks": (plain, {"n": 2}),
    "sampled": (plain, SAMPLED),
    "swap": (swapping, {}),
    "adapters": (with_adapters, {}),
    "prompt lookup": (looking_up, {}),
    "prompt lookup, sampled": (looking_up, SAMPLED),
    "draft model": (drafting, {}),
    "draft model, sampled": (drafting, SAMPLED),
}


@dataclass(frozen=True)
class Served:
    """What was seen of a run. waits: of each step, by the place of the code. late: kernels compiled meanwhile."""

    report: Report
    finished: Counter[str]
    preempted: Counter[str]
    waits: list[Counter[str]]
    late: list[str]


def serve(engine: Engine, cuda: EmulatedCuda, num_steps: int, others: dict[str, Any]) -> Served:
    """Requests that come and go at random for so many steps, one in eight aborted; then until none is left."""
    random_ = random.Random(0)
    names = [None, *engine.list_loras()]
    begun, waits, begin = 0, [], cuda.report.mark()
    while len(waits) < num_steps or engine.num_unfinished:
        while len(waits) < num_steps and random_.random() < 0.3:
            begun += 1
            given = {"temperature": 0, "max_tokens": random_.randrange(2, 24), **(others if begun % 2 else {})}
            # Beginnings are shared, but no prompt is cached as a whole: the block of its last token would be copied.
            length = BLOCK * random_.randrange(10) + random_.randrange(1, BLOCK)
            engine.add_request(
                tokens(length, seed=random_.randrange(6)),
                SamplingParams(**given),
                request_id=begun,
                metadata={"lora_adapter": name} if (name := random_.choice(names)) else None,
            )
            if begun % 8 == 0:
                engine.abort(begun - 1)
        mark = cuda.report.mark()
        engine.step()
        waits.append(Counter(wait.place for wait in cuda.report.synchronised_after(mark).elements()))
    check_empty(engine)
    late = [f"{kernel.name}: {cuda.report.nearest(kernel)}" for kernel in cuda.report.compiled_after(begin)]
    return Served(cuda.report, engine.metrics.finished, engine.metrics.preempted, waits, late)


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    """One run of a kind, which several tests look at. Kernels are launched and not run: all tokens are 0."""

    @functools.cache
    def run(kind: str) -> Served:
        make, others = KINDS[kind]
        with EmulatedCuda(executes=False) as cuda:
            engine = make(folder, tmp_path_factory.mktemp("adapters"))
            return serve(engine, cuda, {"greedy": 400, "swap": 80}.get(kind, 40), others)

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_is_a_hazard(kind: str, served: Callable[[str], Served]) -> None:
    run = served(kind)
    run.report.check()
    assert {"length"} <= set(run.finished) <= {"length", "abort"}
    assert bool(run.preempted["swap"]) == (kind == "swap")
    assert run.report.num_replays > 20


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_compiled_while_serving(kind: str, served: Callable[[str], Served]) -> None:
    """Adapters come after the warm-up, and are warmed up as they come."""
    assert served(kind).late == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_once(kind: str, served: Callable[[str], Served]) -> None:
    """For its tokens, which are looked at in one place; a draft model's are, all of a step, in another."""
    places = [WAITS, WAITS_FOR_DRAFTS] if kind.startswith("draft model") else [WAITS]
    waits = served(kind).waits
    for place in places:
        assert max(sum(step[where] for where in step if where.startswith(place)) for step in waits) == 1
    assert max(step.total() for step in waits) == len(places)


def test_answers_are_right(folder: Path) -> None:
    """Chunks, decodes from graphs prepared ahead, and swap, every kernel run: the tokens of PyTorch alone."""
    prompts = [tokens(length, seed=length) for length in (4, 9, 3)]
    params = replace(GREEDY, max_tokens=4)

    def answers(**options: Any) -> Engine:
        executor = LlmExecutor.from_pretrained(folder, block_size=BLOCK, num_blocks=5, num_swap_blocks=8, **options)
        config = EngineConfig(chunk_size=7, admission_tokens=0, preemption="swap")
        if "cuda_graphs" in options:
            executor.warmup()
        return Engine(executor, config, seed=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGED_BACKEND", "torch")
        expected = tokens_of(answers().generate(prompts, params, progress=False))
    with EmulatedCuda(num_sms=2) as cuda:
        engine = answers(device="cuda", cuda_graphs=[2])
        assert tokens_of(engine.generate(prompts, params, progress=False)) == expected
        cuda.report.check()
        assert cuda.report.num_replays > 0
        assert engine.metrics.preempted["swap"] > 0
        check_empty(engine)


def test_answers_with_a_draft_model_are_right(folder: Path) -> None:
    """Drafts that the device alone knows, and their verification, from graphs: the target is its own draft model."""
    prompts, params = [tokens(4, seed=4)], replace(GREEDY, max_tokens=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGED_BACKEND", "torch")
        plain = Engine(LlmExecutor.from_pretrained(folder, block_size=BLOCK, num_blocks=16), seed=0)
        expected = tokens_of(plain.generate(prompts, params, progress=False))
    with EmulatedCuda(num_sms=2) as cuda:
        executor = LlmExecutor.from_pretrained(folder, block_size=BLOCK, num_blocks=32, device="cuda", cuda_graphs=[4])
        executor.model.graphs.capture()  # type: ignore[attr-defined]
        engine = SpeculativeDecoder(executor, executor, num_draft_tokens=2, seed=0)
        assert tokens_of(engine.generate(prompts, params, progress=False)) == expected
        cuda.report.check()
        assert engine.acceptance_rate == 1
        assert executor.status().graph_replays == executor.status().forwards == cuda.report.num_replays
        check_empty(engine)
