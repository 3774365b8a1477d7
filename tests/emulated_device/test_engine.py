"""An engine on an emulated GPU: for hundreds of steps without a kernel run, and for a few with all of them."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paged import Engine, EngineConfig, LlmExecutor, SamplingParams, SpeculativeDecoder
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.executors.engine_cases import GREEDY, check_empty, tokens_of
from tests.models.families import FAMILIES, save_checkpoint, tokens
from tests.models.lora.folders import Adapter

BLOCK = 4
# Where a step waits for the tokens it chose, once; before that for all drafts of a draft model, once.
WAITS, WAITS_FOR_DRAFTS = "paged/step/staging.py:", "executors/speculation/drafting.py:"
SAMPLED: dict[str, Any] = {
    "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "min_tokens": 2,
    "logit_bias": {5: 1.0}, "logprobs": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer."""
    config, path = FAMILIES["llama"], tmp_path_factory.mktemp("llama")
    config.num_hidden_layers = 1
    save_checkpoint(config, path)
    return path


def executor_of(folder: Path, **options: Any) -> LlmExecutor:
    sizes = {"device": "cuda", "block_size": BLOCK, "num_blocks": 96, "cuda_graphs": [1, 2, 4, 8]}
    return LlmExecutor.from_pretrained(folder, **{**sizes, **options})


def warm(folder: Path, **options: Any) -> LlmExecutor:
    made = executor_of(folder, **options)
    made.warmup()
    return made


def plain(folder: Path, _: Path) -> Engine:
    return Engine(warm(folder), EngineConfig(token_budget=64), seed=0)


def swapping(folder: Path, _: Path) -> Engine:
    config = EngineConfig(token_budget=64, admission_tokens=0, preemption="swap")
    return Engine(warm(folder, num_blocks=24, num_swap_blocks=64), config, seed=0)


def with_adapters(folder: Path, adapters: Path) -> Engine:
    """Adapters come after the warm-up, and are warmed up as they come."""
    engine = plain(folder, adapters)
    for seed, name in enumerate(("french", "poetry")):
        engine.load_lora(name, Adapter(("q_proj", "down_proj"), seed=seed).save(adapters / name, folder))
    return engine


def looking_up(folder: Path, _: Path) -> Engine:
    return SpeculativeDecoder(warm(folder), num_draft_tokens=3, config=EngineConfig(token_budget=64), seed=0)


def drafting(folder: Path, _: Path) -> Engine:
    draft = warm(folder)
    config = EngineConfig(token_budget=64)
    # The probability is low enough to verify all drafts. The estimates must not add a wait.
    return SpeculativeDecoder(warm(folder), draft, num_draft_tokens=4, draft_min_probability=1e-30, config=config)


# What makes the engine, parameters of every second request, and the number of steps.
KINDS: dict[str, tuple[Callable[[Path, Path], Engine], dict[str, Any], int]] = {
    "greedy": (plain, {}, 40),
    "forks": (plain, {"n": 2}, 40),
    "sampled": (plain, SAMPLED, 40),
    "swap": (swapping, {}, 60),
    "adapters": (with_adapters, {}, 40),
    "prompt lookup": (looking_up, {}, 40),
    "prompt lookup, sampled": (looking_up, SAMPLED, 20),
    "draft model": (drafting, {}, 20),
    "greedy, for long": (plain, {}, 150),
    "draft model, sampled": (drafting, SAMPLED, 40),
}
ALWAYS = ("sampled", "swap")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ALWAYS else pytest.mark.thorough) for kind in KINDS]
)
def test_steps(kind: str, folder: Path, tmp_path: Path) -> None:
    """Requests that come and go at random for so many steps, one in eight aborted; then until none is left.

    Nothing is a hazard or compiled meanwhile, and a step waits once: for its tokens, which are looked at in one place;
    a draft model's are, all of a step, in another. Kernels are launched and not run: all tokens are 0.
    """
    make, others, num_steps = KINDS[kind]
    random_, begun, waits = random.Random(0), 0, []
    with EmulatedCuda(executes=False) as cuda:
        engine = make(folder, tmp_path)
        names, begin = [None, *engine.list_loras()], cuda.report.mark()
        while len(waits) < num_steps or engine.num_unfinished:
            while len(waits) < num_steps and random_.random() < 0.3:
                begun += 1
                given = {"temperature": 0, "max_tokens": random_.randrange(2, 24), **(others if begun % 2 else {})}
                # Beginnings are shared, but no prompt is cached whole: the block of its last token would be copied.
                length = BLOCK * random_.randrange(10) + random_.randrange(1, BLOCK)
                prompt, name = tokens(length, seed=random_.randrange(6)), random_.choice(names)
                metadata = {"lora_adapter": name} if name else None
                engine.add_request(prompt, SamplingParams(**given), request_id=begun, metadata=metadata)
                if begun % 8 == 0:
                    engine.abort(begun - 1)
            mark = cuda.report.mark()
            engine.step()
            waits.append(Counter(wait.place for wait in cuda.report.synchronised_after(mark).elements()))
        check_empty(engine)
        cuda.report.check()
        late = [f"{kernel.name}: {cuda.report.nearest(kernel)}" for kernel in cuda.report.compiled_after(begin)]
        assert late == []
    assert {"length"} <= set(engine.metrics.finished) <= {"length", "abort"}
    assert bool(engine.metrics.preempted["swap"]) == (kind == "swap")
    assert cuda.report.num_replays > 20
    assert 3 * engine.metrics.overlapped_steps > engine.metrics.steps or "prompt lookup" in kind or "draft" in kind
    places = [WAITS, WAITS_FOR_DRAFTS] if kind.startswith("draft model") else [WAITS]
    for place in places:
        assert max(sum(step[where] for where in step if where.startswith(place)) for step in waits) == 1
    assert max(step.total() for step in waits) == len(places)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_work_goes_to_the_device_of_its_tensors(family: str, tmp_path: Path) -> None:
    """A model on the second of two emulated GPUs while the first is current."""
    save_checkpoint(FAMILIES[family], tmp_path)
    with EmulatedCuda(num_devices=2, executes=False) as cuda:
        engine = Engine(warm(tmp_path, device="cuda:1", cuda_graphs=[1, 2]), EngineConfig(), seed=0)
        engine.generate([tokens(9), tokens(5, 1)], replace(GREEDY, max_tokens=4), progress=False)
        assert cuda.report.hazards == []
        assert {kernel.device for kernel in cuda.report.compiled} == {1}


def expected_tokens(folder: Path, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """What PyTorch alone answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGED_BACKEND", "torch")
        engine = Engine(LlmExecutor.from_pretrained(folder, block_size=BLOCK, num_blocks=32), seed=0)
        return tokens_of(engine.generate(prompts, params, progress=False))


@pytest.mark.parametrize("canaries", ["0", pytest.param("1", marks=pytest.mark.thorough)])
def test_answers_are_right(canaries: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, decodes from graphs prepared ahead, and swap, every kernel run: the tokens of PyTorch alone."""
    prompts, params = [tokens(length, seed=length) for length in (4, 9, 3)], replace(GREEDY, max_tokens=4)
    expected = expected_tokens(folder, prompts, params)
    monkeypatch.setenv("PAGED_CANARY", canaries)
    with EmulatedCuda(num_sms=2) as cuda:
        executor = executor_of(folder, num_blocks=5, num_swap_blocks=8, cuda_graphs=[2])
        executor.model.graphs.capture()  # type: ignore[attr-defined]
        engine = Engine(executor, EngineConfig(chunk_size=7, admission_tokens=0, preemption="swap"), seed=0)
        assert tokens_of(engine.generate(prompts, params, progress=False)) == expected
        cuda.report.check()
        assert cuda.report.num_replays > 0
        assert engine.metrics.preempted["swap"] > 0
        check_empty(engine)


@pytest.mark.thorough
def test_answers_with_a_draft_model_are_right(folder: Path) -> None:
    """Drafts that the device alone knows, and their verification, from graphs: the target is its own draft model."""
    prompts, params = [tokens(4, seed=4)], replace(GREEDY, max_tokens=4)
    expected = expected_tokens(folder, prompts, params)
    with EmulatedCuda(num_sms=2) as cuda:
        executor = executor_of(folder, num_blocks=32, cuda_graphs=[4])
        executor.model.graphs.capture()  # type: ignore[attr-defined]
        engine = SpeculativeDecoder(executor, executor, num_draft_tokens=2, seed=0)
        assert tokens_of(engine.generate(prompts, params, progress=False)) == expected
        cuda.report.check()
        assert engine.acceptance_rate == 1
        assert executor.status().graph_replays == executor.status().forwards == cuda.report.num_replays
        check_empty(engine)
