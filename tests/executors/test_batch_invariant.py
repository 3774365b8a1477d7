"""`EngineConfig.batch_invariant`: the same bits alone and beside others, in any budget and through preemptions."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import (
    Engine,
    EngineConfig,
    LlmExecutor,
    SamplingParams,
    UnifiedBatch,
    UnifiedBatchItem,
    UnsupportedError,
)
from paged.executors.requests import request
from paged.executors.speculation.prompt_lookup import PromptLookup
from paged.kernels.core import device
from paged.kernels.cpu import products
from paged.step.batch import VerifyLogits
from tests.backends import needs_numba
from tests.executors.oracle import make_executor, prompt
from tests.models.families import FAMILIES, save_checkpoint, tokens

Answer = list[tuple[list[int], Any, Any]]
# Options of `from_pretrained` of models whose steps are one forward by numba kernels, by family.
IN_ONE_FORWARD: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "experts": ("qwen3_moe", {}),
    "experts and a shared MLP": ("ernie4_5_moe", {}),
    "int8": ("llama", {"quantization": "int8"}),
    "int4": ("llama", {"quantization": "int4"}),
    "int4 experts": ("qwen3_moe", {"quantization": "int4"}),
    "int8 experts and a gated MLP": ("qwen2_moe", {"quantization": "int8"}),
    "groups of experts": ("dots1", {}),
}
# Experts, states and latents have kernels of their own.
OTHERS = ("qwen3_moe", "qwen3_next", "deepseek_v3", "gemma3")
# By budget: blocks of 8 tokens, and what a full cache does.
TOGETHER: dict[int, tuple[int, str]] = {16: (18, "recompute"), 64: (18, "swap"), 4096: (400, "recompute")}


def requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 44 tokens, some of which begin alike; greedy and random, some of several completions."""
    drawn = torch.randint(0, 1 << 30, (count, 3), generator=torch.Generator().manual_seed(5)).tolist()
    found = []
    for seed, (length, kind, more) in enumerate(drawn):
        prompt = tokens(30, 3)[: length % 25] + tokens(1 + length % 20, seed)
        options = {"temperature": kind % 2 * 0.8, "seed": seed, "logprobs": 2, "max_tokens": 1 + more % 6}
        options |= {"prompt_logprobs": 1} if kind % 5 == 0 else {"n": 2} if kind % 7 == 0 else {}
        found.append((prompt, SamplingParams(ignore_eos=True, **options)))
    return found


def answers(
    executor: LlmExecutor, given: list[Any], *, between_steps: Callable[[], object] = int, **config: Any
) -> tuple[list[Answer], Engine]:
    engine = Engine(executor, EngineConfig(**{"batch_invariant": True, **config}))
    outputs = [engine.add_request(prompt, params) for prompt, params in given]
    while engine.num_unfinished:
        engine.step()
        between_steps()
    assert [one.error for one in outputs] == [None] * len(given)
    return [[(o.token_ids, o.logprobs, each.prompt_logprobs) for o in each.outputs] for each in outputs], engine


def save(name: str, folder: Path) -> dict[str, Any]:
    """Save a checkpoint of `IN_ONE_FORWARD`; return its options."""
    family, options = IN_ONE_FORWARD[name]
    config = FAMILIES[family]
    if options:
        for name_of_size in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
            if hasattr(config, name_of_size):
                setattr(config, name_of_size, 192)  # full blocks of 64 columns
    save_checkpoint(config, folder)
    return options


def skip_without_blocks(executor: LlmExecutor, options: dict[str, Any]) -> None:
    """Skip the rest of a test if weights are quantised and not in the order that numba kernels multiply."""
    if "quantization" in options and not executor.capabilities().has_invariant_rows:
        pytest.skip("no numba kernels of blocks")


def check(
    folder: Path, dtype: torch.dtype, count: int, budgets: list[int], *, is_packed: bool = False, **options: Any
) -> int:
    """Return the number of preemptions.

    is_packed: by numba kernels, where a step is one forward, and a recording if it decodes; a model by PyTorch runs
        between the steps. options: of `from_pretrained`.
    """

    def load(num_blocks: int, *, is_recorded: bool = False, **swap: int) -> LlmExecutor:
        executor = LlmExecutor.from_pretrained(
            folder, dtype=dtype, block_size=8, num_blocks=num_blocks, progress=False, **options, **swap
        )
        if is_packed:
            executor.model.prepare() if is_recorded else executor.model.pack()
            skip_without_blocks(executor, options)
        assert executor.capabilities().has_invariant_rows == is_packed
        return executor

    given, preempted = requests(count), 0
    executor = load(400)
    alone = [answers(executor, [one])[0][0] for one in given]
    other = LlmExecutor.from_pretrained(folder, dtype=dtype, block_size=8, num_blocks=20, progress=False)

    def run_other() -> None:
        if is_packed:
            other.unified_decode(UnifiedBatch([UnifiedBatchItem("a", tokens(5))]))
            other.release_cache("a")

    for budget in budgets:
        num_blocks, preemption = TOGETHER[budget]
        executor = load(num_blocks, is_recorded=is_packed, **({"num_swap_blocks": 40} if preemption == "swap" else {}))
        config = {"token_budget": budget, "preemption": preemption, "admission_tokens": 0}
        together, engine = answers(executor, given, between_steps=run_other, **config)
        assert together == alone
        assert engine.metrics.cached_tokens, "no cached prefix"
        assert (executor.status().forwards == engine.metrics.steps) == is_packed
        assert (executor.status().graph_replays > 0) == is_packed
        preempted += sum(engine.metrics.preempted.values())
    return preempted


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "FIXED_CHUNK", 16)


@pytest.fixture
def numba_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGED_BACKEND", raising=False)
    monkeypatch.setattr(device, "interpreting", lambda: False)


@needs_numba
@pytest.mark.parametrize(
    ("name", "dtype", "count", "budgets"),
    [
        ("plain", torch.float32, 8, [64]),
        ("experts", torch.bfloat16, 8, [64]),
        ("int8", torch.float32, 8, [64]),
        ("int8 experts and a gated MLP", torch.bfloat16, 8, [64]),
        *(
            pytest.param(name, dtype, 150, [16, 64, 4096], marks=pytest.mark.thorough)
            for name, dtype in zip(IN_ONE_FORWARD, 4 * (torch.bfloat16, torch.float32), strict=True)
        ),
    ],
)
def test_in_one_forward(
    name: str, dtype: torch.dtype, count: int, budgets: list[int], numba_kernels: None, tmp_path: Path
) -> None:
    options = save(name, tmp_path)
    assert check(tmp_path, dtype, count, budgets, is_packed=True, **options) or count < 150, "no preemption"


@pytest.mark.thorough
def test_in_triton_kernels(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    check(llama_folder, torch.float32, 6, [16])


@pytest.mark.thorough
def test_experts(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES["qwen3_moe"], tmp_path)
    check(tmp_path, torch.float32, 20, [64])


@pytest.mark.skipif(products._multiply is None, reason="no oneDNN")
@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("is_packed", [pytest.param(True, marks=needs_numba), False])
def test_a_product_that_depends_on_its_rows(
    llama_folder: Path, numba_kernels: None, is_packed: bool, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tiles chosen by the number of rows do, in the last bits."""
    multiply = products._multiply

    def product(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return multiply(x, *rest) * (1 + len(x) * 2.0**-22)

    monkeypatch.setattr(products, "_HAS_INTEL_MKL", False)
    monkeypatch.setattr(products, "_multiply", product)
    given = requests(4)
    executor = LlmExecutor.from_pretrained(
        llama_folder, dtype=torch.float32, block_size=8, num_blocks=100, progress=False
    )
    if is_packed:
        executor.model.pack()
    alone = [answers(executor, [one], batch_invariant=invariant)[0][0] for one in given]
    assert (answers(executor, given, batch_invariant=invariant)[0] == alone) == invariant


@needs_numba
@pytest.mark.parametrize(
    ("name", "module", "function"),
    [
        ("experts", "cpu.layers.linear", "grouped_linear"),
        ("int8", "cpu.quantization.block_product", "int8_product"),
        ("int4", "cpu.quantization.block_product", "code_product"),
    ],
)
def test_checks_see_products_that_depend_on_their_rows(
    name: str, module: str, function: str, numba_kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last bits, as those of tiles do that are chosen by the number of rows."""
    kernels = import_module(f"paged.kernels.{module}")
    multiply = getattr(kernels, function)

    def product(*args: Any, **options: Any) -> torch.Tensor:
        out: torch.Tensor = multiply(*args, **options)
        return out * (1 + len(out) * 2.0**-22)

    monkeypatch.setattr(kernels, function, product)
    options, given = save(name, tmp_path), requests(4)
    executor = LlmExecutor.from_pretrained(
        tmp_path, dtype=torch.float32, block_size=8, num_blocks=100, progress=False, **options
    )
    executor.model.pack()
    skip_without_blocks(executor, options)
    alone = [answers(executor, [one])[0][0] for one in given]
    assert answers(executor, given)[0] != alone


@needs_numba
def test_float16_has_no_invariant_rows(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba kernels do not take it."""
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    executor = LlmExecutor.from_pretrained(llama_folder, dtype=torch.float16, num_blocks=10, progress=False)
    executor.model.pack()
    assert not executor.capabilities().has_invariant_rows


def test_speculation_is_refused(llama_folder: Path) -> None:
    executor = LlmExecutor.from_pretrained(llama_folder, block_size=8, num_blocks=10)
    with pytest.raises(UnsupportedError, match="batch_invariant is not supported with a proposer"):
        Engine(executor, EngineConfig(batch_invariant=True), proposer=PromptLookup(2))


def test_scores_are_refused(llama_folder: Path) -> None:
    executor = LlmExecutor.from_pretrained(llama_folder, block_size=8, num_blocks=10, progress=False)
    with pytest.raises(UnsupportedError, match="has no invariant rows"):
        Engine(executor).score([1], [2])


@needs_numba
@pytest.mark.usefixtures("numba_kernels")
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS)])
def test_bits_do_not_depend_on_other_executors(name: str, tmp_path: Path) -> None:
    """One that was warmed up and one that was not keep their kernels, whatever others do between their steps."""
    save_checkpoint(FAMILIES[name], tmp_path)

    def load() -> LlmExecutor:
        return LlmExecutor.from_pretrained(tmp_path, block_size=8, num_blocks=20, progress=False)

    def logits(executor: LlmExecutor) -> torch.Tensor:
        """Of a prompt and of decode steps, in which kernels differ."""
        handle, rows = None, []
        for token_ids in (tokens(30, 1), [3], [5]):
            start = 0 if handle is None else handle.num_tokens
            item = UnifiedBatchItem("a", token_ids, pos_offset=start, logits_policy=VerifyLogits())
            rows += executor.unified_decode(UnifiedBatch([item]))
            handle = executor.kv_manager.get_handle("a")
        executor.release_cache("a")
        return torch.cat(rows)

    cold, warm = load(), load()
    expected = logits(cold)
    warm.warmup()
    of_warm = logits(warm)
    assert not torch.equal(of_warm, expected), "other kernels"
    for _ in range(2):
        assert torch.equal(logits(cold), expected)
        assert torch.equal(logits(warm), of_warm)
    oracle = make_executor(torch.device("cpu"), embedding="sinusoidal", num_layers=1)
    alone = oracle.prefill(prompt(tokens(30, 1))).logits
    load().warmup()
    assert torch.equal(logits(load()), expected)
    assert torch.equal(oracle.prefill(prompt(tokens(30, 1))).logits, alone)
