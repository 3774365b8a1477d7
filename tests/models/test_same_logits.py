"""Checkpoints saved by transformers give transformers' own logits, however the tokens are cut and batched."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.errors import InvalidInputError
from paged.models.layers import modules
from paged.models.registry import load_model
from paged.step.batch import GreedyArgmax, UnifiedBatchItem
from tests.backends import needs_numba
from tests.models.families import (
    FAMILIES,
    VARIANTS,
    Case,
    assert_same_logits,
    forward,
    logits_of,
    save_checkpoint,
    save_family,
    tokens,
)

# Every option of the kernels once: the interpreter takes about a second a forward.
IN_INTERPRETER = ("gemma3", "gpt_oss", "llama3_rope", "mistral", "qwen3_moe_normalised")
# Families beside them that give the kernels other options or shapes, in one forward.
ONCE_IN_INTERPRETER = [
    *("cohere2", "ernie4_5_moe", "gemma2", "gemma4_moe", "gemma4_shared_kv", "glm4_moe", "hunyuan_moe", "llama4"),
    *("deepseek_v4", "glm5_next", "hy_v4", "kimi_k3", "mimo_v2_flash", "minimax_m2", "minimax_m3", "ministral3"),
    *("dots3_note", "mistral_large4", "olmo2", "phi3", "qwen4_exp", "smollm3"),
]
# Windows, chunks, interleaved and partial rotation, norms of heads before and after it, experts.
BY_NUMBA = (
    "cohere2",
    "gemma3",
    "glm4",
    "gpt_oss",
    "hunyuan_moe",
    "llama",
    "llama4",
    "minimax_m2",
    "minimax_m3",
    "olmo2",
    "phi3",
    "qwen3",
)

# Families, and text parts whose layers no family has.
EVERY_WAY = (*FAMILIES, "glm5_next", "mistral_large4", "deepseek_v41")

# Longer than the sliding windows and several cache blocks of 8.
PROMPT = tokens(40)


def _rows(backend: str, names: Any, fast: Any = ()) -> list[Any]:
    """Those not among `fast` run in the thorough set."""
    numba = [needs_numba] if backend == "numba" else []
    return [pytest.param(one, backend, marks=numba if one in fast else [*numba, pytest.mark.thorough]) for one in names]


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = save_family(request.param, folder)
    return Case(theirs, load_model(folder, block_size=8, num_blocks=64, num_swap_blocks=16))


@pytest.fixture
def case(loaded: Case, backend: str) -> Iterator[Case]:
    yield loaded
    loaded.ours.reset()
    loaded.ours.kv_manager.check_integrity()
    assert loaded.ours.kv_manager.stats().used_blocks == 0


@pytest.mark.parametrize(
    ("loaded", "backend"),
    [
        *_rows("torch", EVERY_WAY, fast=EVERY_WAY[:-1]),
        *_rows("numba", (*BY_NUMBA, "deepseek_v32", "dots3_note"), fast=BY_NUMBA),
        *_rows("triton", IN_INTERPRETER, fast=("gemma3",)),
    ],
    indirect=True,
)
def test_chunks_and_decodes_in_one_forward(case: Case) -> None:
    first, second, third = tokens(21, 1), tokens(11, 2), tokens(9, 3)
    results = case.ours.unified_forward(
        [UnifiedBatchItem("first", first[:13], is_final_chunk=False), UnifiedBatchItem("second", second[:10])]
    )
    assert results[0] is None
    assert_same_logits(results[1], case.expected(second)[9])
    results = case.ours.unified_forward(
        [
            UnifiedBatchItem("second", second[10:], pos_offset=10, logits_policy=GreedyArgmax()),
            UnifiedBatchItem("first", first[13:], pos_offset=13),
            UnifiedBatchItem("third", third[:5], is_final_chunk=False),
        ]
    )
    assert results[0] is not None
    assert int(results[0]) == int(case.expected(second)[-1].argmax())
    assert_same_logits(results[1], case.expected(first)[-1])
    assert results[2] is None


@needs_numba
@pytest.mark.by_cpu
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "llama", "qwen3_moe_normalised"])
def test_bfloat16_by_loops_is_as_exact_as_without(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and decodes, packed, by PyTorch, by loops, and by loops on processors without AMX."""
    expected = logits_of(save_checkpoint(FAMILIES[name], tmp_path), PROMPT)
    tiles = import_module("paged.kernels.cpu.tiles")
    errors = []
    for backend, has_tiles in (("torch", tiles.has_tiles), ("numba", tiles.has_tiles), ("numba", lambda: False)):
        monkeypatch.setenv("PAGED_BACKEND", backend)
        monkeypatch.setattr(tiles, "has_tiles", has_tiles)
        model = load_model(tmp_path, block_size=8, num_blocks=64, dtype=torch.bfloat16)
        model.pack()
        logits = [*model.forward_verify("a", PROMPT[:36]), *(model.decode("a", PROMPT[at], at) for at in range(36, 40))]
        errors.append(float((torch.stack(logits).double() - expected).norm() / expected.norm()))
    assert errors[0] < 0.05
    assert max(errors[1:]) < 1.25 * errors[0]


@pytest.mark.parametrize(
    ("loaded", "backend"),
    [*_rows("triton", ONCE_IN_INTERPRETER), *_rows("torch", VARIANTS, fast=VARIANTS)],
    indirect=True,
)
def test_other_options_and_shapes(case: Case) -> None:
    assert_same_logits(case.ours.forward_verify("a", PROMPT[:12]), case.expected(PROMPT[:12]))


def _verifies_a_row_a_token(case: Case) -> None:
    case.ours.prefill("a", PROMPT[:7])
    assert_same_logits(case.ours.forward_verify("a", PROMPT[7:]), case.expected(PROMPT)[7:])


def _greedy_tokens(case: Case) -> None:
    expected = case.theirs.generate(torch.tensor([PROMPT]), max_new_tokens=10, do_sample=False, eos_token_id=None)
    found = [int(case.ours.prefill("a", PROMPT).argmax())]
    while len(found) < 10:
        found.append(int(case.ours.decode("a", found[-1], len(PROMPT) + len(found) - 1).argmax()))
    assert found == expected[0, len(PROMPT) :].tolist()


def _small_chunks(case: Case) -> None:
    expected = case.expected(PROMPT)
    for start in range(0, len(PROMPT), 3):
        part = PROMPT[start : start + 3]
        assert_same_logits(case.ours.prefill("a", part), expected[start + len(part) - 1])


def _sequences_in_one_batch_do_not_see_each_other(case: Case) -> None:
    prompts = [tokens(length, seed) for seed, length in enumerate((5, 16, 1, 17))]
    for prompt, logits in zip(prompts, forward(case.ours, dict(enumerate(prompts))), strict=True):
        assert_same_logits(logits, case.expected(prompt)[-1])
    rows = case.ours.decode_batch([(i, i, len(prompt)) for i, prompt in enumerate(prompts)])
    for i, (prompt, logits) in enumerate(zip(prompts, rows, strict=True)):
        assert_same_logits(logits, case.expected([*prompt, i])[-1])


def _after_truncate(case: Case) -> None:
    if case.ours.kv_manager.config.recurrent is None:
        case.ours.prefill("a", PROMPT)
    else:  # of a prompt's chunk only the last state is kept
        case.ours.prefill("a", PROMPT[:17])
        case.ours.forward_verify("a", PROMPT[17:24])
        with pytest.raises(InvalidInputError, match="kept at positions 17 to 24 and at snapshots"):
            case.ours.truncate_kv("a", 15)
    case.ours.truncate_kv("a", 19)
    other = tokens(12, 7)
    assert_same_logits(case.ours.prefill("a", other), case.expected(PROMPT[:19] + other)[-1])


def _after_fork_both_go_their_own_way(case: Case) -> None:
    case.ours.prefill("a", PROMPT[:19])
    handle = case.ours.kv_manager.get_handle("a")
    assert handle is not None
    case.ours.kv_manager.fork(handle, "b")
    ways = {"a": tokens(9, 8), "b": tokens(12, 9)}
    for ids, logits in zip(ways.values(), forward(case.ours, ways), strict=True):
        assert_same_logits(logits, case.expected(PROMPT[:19] + ids)[-1])


def _after_a_swap_and_behind_a_cached_prefix(case: Case) -> None:
    expected, manager = case.expected(PROMPT), case.ours.kv_manager
    case.ours.prefill("a", PROMPT[:30])
    handle = manager.get_handle("a")
    assert handle is not None
    manager.swap_out(handle)
    for other in range(3):  # over what it left
        case.ours.prefill(other, tokens(40, other))
    manager.swap_in(handle)
    assert_same_logits(case.ours.prefill("a", PROMPT[30:]), expected[-1])
    manager.commit(handle, PROMPT)
    # Recurrent layers and pools begin at the end of a block.
    ids, cached = ([*PROMPT, 7], 40) if manager.config.has_slots else (PROMPT, 39)
    assert manager.allocate("b", token_ids=ids).num_cached_tokens == cached
    assert_same_logits(case.ours.forward_verify("b", ids[cached:]), case.expected(ids)[cached:])
    manager.clear_prefix_cache()


def _prepared_twice_and_mlps_in_parts(case: Case) -> None:
    num_parameters, expected = case.ours.num_parameters(), case.expected(PROMPT)
    for _ in range(2):
        case.ours.prepare()
        assert_same_logits(case.ours.prefill("a", PROMPT[:-2]), expected[-3])
        assert_same_logits(case.ours.decode("a", PROMPT[-2], 38), expected[-2])
        assert_same_logits(case.ours.decode("a", PROMPT[-1], 39), expected[-1])
        case.ours.reset()
    assert case.ours.num_parameters() == num_parameters


@pytest.mark.parametrize(("loaded", "backend"), _rows("torch", EVERY_WAY, fast=("gemma3",)), indirect=True)
def test_every_other_way(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels see in these ways what they see in a mixed batch, so that PyTorch's are enough."""
    monkeypatch.setattr(modules, "_CPU_ROWS", 7)
    for way in (
        _verifies_a_row_a_token,
        _greedy_tokens,
        _small_chunks,
        _sequences_in_one_batch_do_not_see_each_other,
        _after_truncate,
        _after_fork_both_go_their_own_way,
        _after_a_swap_and_behind_a_cached_prefix,
        _prepared_twice_and_mlps_in_parts,
    ):
        way(case)
        case.ours.reset()
