"""Random schedules of everything at once: what each request gets is what it gets alone.

SOAK=1 runs 10,000 of them, and 400 of each model.
"""

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig, InvalidInputError, LlmExecutor, RequestOutput, SamplingParams
from paged.executors.speculation.draft_model import DraftModel
from paged.executors.speculation.prompt_lookup import PromptLookup
from tests.executors.engine.test_token_rules import VOCAB, Rising
from tests.executors.engine_cases import check_empty
from tests.executors.oracle import make_executor
from tests.models.families import FAMILIES, PARTS, RECORDS, save_checkpoint
from tests.models.lora.folders import Adapter

SIZES = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "embedding": "sinusoidal"}
SEEDS = 10_000 if "SOAK" in os.environ else 16
MODEL_SEEDS = 400 if "SOAK" in os.environ else 6
# Two tables and sinks; latents and an indexer; recurrent layers and experts; keys wider than values; pooled keys;
# compressed entries; no K/V.
MODELS = ("gpt_oss", "deepseek_v32", "qwen3_next", "mimo_v2_flash", "glm5_next", "deepseek_v4", "rwkv7")
# Formats of their caches, beside that of the weights.
FORMATS: dict[str, tuple[dict[str, Any], ...]] = {
    "gpt_oss": (
        {"kv_cache_dtype": "int8,int4", "kv_cache_rotation": "hadamard"},
        {"kv_cache_dtype": "nvfp4", "kv_cache_keep_layers": [1]},
    ),
    "deepseek_v32": ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "nvfp4"}),
    "qwen3_next": ({"kv_cache_dtype": "int4", "kv_cache_rotation": "hadamard_keys"},),
    "mimo_v2_flash": ({"kv_cache_dtype": "fp8_per_token_head,fp8_e5m2", "kv_cache_keep_layers": [0]},),
    "glm5_next": ({"kv_cache_dtype": "fp8"},),
}
# Host memory of a tier, where it is not 1 MB: rows of published sizes are larger.
HOST_BYTES = {"deepseek_v32": 1 << 22}
# Logits of another batch differ by rounding. Where two tokens are nearer than this, either may come.
TIE = 1e-4
NUM_LOGPROBS = 200  # enough for tokens behind those that a mask excludes
ADAPTERS = ("first adapter", "second adapter")
# Steps of a schedule, at most: requests that wait for each other would run for ever.
MOST_STEPS = 3_000

Request = dict[str, Any]


def random_config(draw: random.Random, way: str, *, can_swap: bool) -> EngineConfig:
    return EngineConfig(
        token_budget=draw.choice((8, 16, 64, 2048)),
        chunk_size=draw.choice((None, 5)),
        max_num_seqs=draw.choice((2, 4, 16)),
        admission_tokens=draw.choice((0, 4, None)),
        preemption=draw.choice(("swap", "recompute")) if can_swap else "recompute",
        overlap="overlap" in way,
        batch_invariant=way == "apart",
    )


def random_oracle(draw: random.Random, device: torch.device) -> Engine:
    """With a cache that is nearly always too small."""
    way = draw.choice(("plain", "overlap", "overlap", "lookup", "draft", "recurrent", "recurrent overlap", "apart"))
    states = None
    if "recurrent" in way:
        states = {"num_slots": draw.choice((4, 6, 16)), "num_swap_slots": draw.choice((0, 8))}
    num_swap_blocks = draw.choice((0, 4, 40))
    executor = make_executor(
        device,
        num_blocks=draw.randint(10, 40),
        block_size=draw.choice((4, 8)),
        num_swap_blocks=num_swap_blocks,
        states=states,
        **SIZES,
    )
    config = random_config(draw, way, can_swap=num_swap_blocks > 0)
    proposer = {"lookup": PromptLookup(3), "draft": DraftModel(executor, 3)}.get(way)
    return Engine(executor, config, proposer=proposer, eos_token_ids=())


def random_model(
    draw: random.Random, device: torch.device, folder: Path, cache_folder: Path, cache_format: dict[str, Any]
) -> Engine:
    """With a cache that is nearly always too small, and tiers below it."""
    way = draw.choice(("plain", "overlap", "lookup"))
    num_swap_blocks = draw.choice((0, 0, 4, 20))
    options: dict[str, Any] = {}
    if draw.random() < 0.5:
        options = {
            "host_cache_bytes": HOST_BYTES.get(folder.name, 1 << 20),
            "cache_folder": draw.choice((None, cache_folder)),
        }
    if way == "lookup":
        options["max_drafts"] = 3
    executor = LlmExecutor.from_pretrained(
        folder,
        device=device,
        num_blocks=draw.randint(8, 30),
        block_size=draw.choice((8, 16)),
        num_swap_blocks=num_swap_blocks,
        num_state_slots=draw.choice((4, 6, 16)),
        snapshot_interval=draw.choice((None, 32)),
        enable_prefix_cache="host_cache_bytes" in options or draw.random() < 0.8,
        max_loras=2,
        **options,
        **cache_format,
    )
    config = random_config(draw, way, can_swap=num_swap_blocks > 0)
    proposer = PromptLookup(3) if way == "lookup" else None
    return with_adapters(Engine(executor, config, proposer=proposer, eos_token_ids=()), folder)


def with_adapters(engine: Engine, folder: Path) -> Engine:
    for name in ADAPTERS:
        if (folder / name).is_dir():
            engine.load_lora(name, folder / name)
    return engine


def random_request(draw: random.Random) -> Request:
    """Arguments of `add_request`; prompts begin alike, so that they share blocks."""
    common = [3, 1, 4, 1, 5, 9, 2, 6] * draw.choice((0, 0, 1, 2))
    prompt = common + [draw.randrange(200) for _ in range(draw.randint(1, 12))]
    params = SamplingParams(
        temperature=0,
        n=draw.choice((1, 1, 1, 2)),
        max_tokens=draw.randint(1, 10),
        presence_penalty=draw.choice((0.0, 0.0, 0.5)),
        min_tokens=draw.choice((0, 1)),
        prompt_logprobs=draw.choice((None, None, None, 1)),
    )
    return {
        "prompt_token_ids": prompt,
        "params": params,
        "priority": draw.choice((0, 0, 1)),
        "token_mask": draw.choice((None, None, None, Rising)),
        "cache_salt": draw.choice((None, None, "salt")),
    }


def add(engine: Engine, request: Request) -> RequestOutput | None:
    """The request's output; None if it does not fit the cache or the configuration."""
    mask = request["token_mask"]
    try:
        return engine.add_request(**request | {"token_mask": mask and mask()})
    except InvalidInputError:
        return None


def run_schedule(
    draw: random.Random, engine: Engine, events: list[Callable[[], object]], adapters: tuple[str, ...] = ()
) -> list[tuple[Request, RequestOutput]]:
    """Add requests and step until all have ended, while others take blocks of the cache, requests are aborted and one
    of `events` may come between two steps; each request ends once, and nothing is left."""
    manager = engine.executor.kv_manager
    assert manager is not None
    ran: list[tuple[Request, RequestOutput]] = []
    ended: list[Any] = []
    aborted: set[Any] = set()
    left = draw.randint(2, 7)
    num_steps = 0
    while left or engine.num_unfinished:
        num_steps += 1
        assert num_steps < MOST_STEPS
        while left and draw.random() < 0.5:
            left -= 1
            request = random_request(draw) | {"adapter": draw.choice((None, *adapters))}
            output = add(engine, request)
            if output is not None:
                ran.append((request, output))
        others = manager.get_handle("another's")
        if others is not None:
            manager.free(others)
        elif draw.random() < 0.04:
            draw.choice(events)()
        elif draw.random() < 0.2 and manager.can_allocate(16):
            manager.allocate("another's", 16)
        finished = [output for output in engine.step() if output.finished]
        ended += [output.request_id for output in finished]
        if manager.get_handle("another's") is None:
            assert not any(output.error for output in finished), "they have the cache to themselves"
        if ran and draw.random() < 0.04:
            victim = draw.choice(ran)[1].request_id
            if engine.abort(victim):
                ended.append(victim)
                aborted.add(victim)
            assert not engine.abort(victim)
    others = manager.get_handle("another's")
    if others is not None:
        manager.free(others)
    assert sorted(ended, key=str) == sorted((output.request_id for _, output in ran), key=str), "each ends once"
    check_empty(engine)
    for _, output in ran:
        if output.error is None:
            has_aborted = any(answer.finish_reason == "abort" for answer in output.outputs)
            assert has_aborted == (output.request_id in aborted)
        else:  # others hold the blocks that it, or the next token of the only one, needs
            assert "no request here holds any" in output.error or "OutOfBlocksError" in output.error
    return ran


def check_like_alone(alone: Engine, request: Request, output: RequestOutput) -> None:
    """Equal tokens, up to a tie of two. alone: an engine with room for one request at a time."""
    params = request["params"]
    fields = {name: getattr(params, name) for name in ("max_tokens", "presence_penalty", "min_tokens")}
    changed = request | {"params": SamplingParams(temperature=0, logprobs=NUM_LOGPROBS, **fields)}
    expected = add(alone, changed)
    assert expected is not None
    while alone.num_unfinished:
        alone.step()
    (completion,) = expected.outputs
    logprobs = completion.logprobs
    assert logprobs is not None
    for answer in output.outputs:
        if answer.finish_reason == "abort":
            continue
        assert answer.finish_reason in ("stop", "length")
        first = _first_difference(completion.token_ids, answer.token_ids)
        if first is None:
            assert answer.token_ids == completion.token_ids
            continue
        scores = []
        for token in (completion.token_ids[first], answer.token_ids[first]):
            is_repeated = token in completion.token_ids[:first]
            scores.append(logprobs[first][token] - params.presence_penalty * is_repeated)
        assert scores[0] - scores[1] < TIE


def _first_difference(tokens: list[int], others: list[int]) -> int | None:
    for index, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return index
    return None


@pytest.mark.parametrize("part", range(4))
def test_random_schedules(part: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over chunks, forks, masks, drafts, states, swaps, preemptions and aborts, in a cache that is too small and that
    others take blocks of."""
    monkeypatch.setenv("PAGED_CHECK", "1")
    for seed in range(part, SEEDS, 4):
        draw = random.Random(seed)
        engine = random_oracle(draw, device)
        manager = engine.executor.kv_manager
        assert manager is not None
        ran = run_schedule(draw, engine, [manager.clear_prefix_cache, partial(manager.evict, 5)])
        states = None if manager.config.recurrent is None else {"num_slots": 8}
        executor = make_executor(device, num_blocks=64, states=states, **SIZES)
        alone = Engine(executor, EngineConfig(overlap=False), eos_token_ids=())
        for request, output in ran:
            if output.error is None:
                check_like_alone(alone, request, output)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_random_schedules_of_models(
    name: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same over tables, latents and states of real models, with adapters, tiers, new weights and sleep, in several
    formats of the cache, whose files lie in one folder."""
    monkeypatch.setenv("PAGED_CHECK", "1")
    config = (PARTS | FAMILIES | RECORDS)[name]
    config.vocab_size = VOCAB
    folder = tmp_path / name
    save_checkpoint(config, folder)
    # Those of a text part have other names than the checkpoint's, and compressed attention takes none.
    adapters = ADAPTERS if name in FAMILIES and name != "deepseek_v4" else ()
    for seed, adapter in enumerate(adapters):
        Adapter(["o_proj"], seed=seed).save(folder / adapter, folder)
    formats = ({}, *FORMATS.get(name, ()))
    engines: list[Engine] = []
    for cache_format in formats:
        executor = LlmExecutor.from_pretrained(
            folder, device=device, num_blocks=64, num_state_slots=8, max_loras=2, **cache_format
        )
        engines.append(with_adapters(Engine(executor, EngineConfig(overlap=False), eos_token_ids=()), folder))
    for seed in range(MODEL_SEEDS):
        draw = random.Random(f"{name} {seed}")
        cache_format, alone = formats[seed % len(formats)], engines[seed % len(formats)]
        engine = random_model(draw, device, folder, tmp_path / "cache", cache_format)
        manager = engine.executor.kv_manager
        assert manager is not None
        events = [
            manager.clear_prefix_cache,
            partial(manager.evict, 5),
            partial(engine.update_weights, folder),
            partial(_sleep_and_wake, engine),
        ]
        ran = run_schedule(draw, engine, events, adapters)
        engine.executor.shutdown()
        for request, output in ran:
            if output.error is None:
                check_like_alone(alone, request, output)


def _sleep_and_wake(engine: Engine) -> None:
    if not engine.num_unfinished:  # else it is refused
        engine.sleep()
        engine.wake()
