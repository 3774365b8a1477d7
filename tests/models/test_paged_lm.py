"""The contract of PagedCausalLM beyond its numbers: answers, checks, and a cache that a failure leaves alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paged.errors import InvalidInputError, OutOfBlocksError, PagedError, SequenceTooLongError
from paged.models.paged_lm import PagedCausalLM
from paged.models.registry import load_model
from paged.step.batch import FullLogits, GreedyArgmax, UnifiedBatchItem, VerifyLogits
from paged.step.step import Step
from tests.models.families import VOCAB_SIZE, tokens
from tests.models.stepping import assert_same_results
from tests.tolerance import assert_within

SHORT_MASK = GreedyArgmax(token_mask=torch.ones(3, dtype=torch.bool))


@pytest.fixture(scope="module")
def loaded(llama_folder: Path) -> PagedCausalLM:
    return load_model(llama_folder, block_size=8, num_blocks=10, max_seq_len=64)


@pytest.fixture
def model(loaded: PagedCausalLM) -> Iterator[PagedCausalLM]:
    yield loaded
    loaded.reset()
    loaded.kv_manager.check_integrity()
    assert loaded.kv_manager.stats().used_blocks == 0


def lengths(model: PagedCausalLM) -> dict[str | int, int]:
    return {handle.cache_id: handle.num_tokens for handle in model.kv_manager.handles()}


def test_only_items_that_sample_are_projected(model: PagedCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, project = [], model.network.logits
    monkeypatch.setattr(model.network, "logits", lambda rows: (shapes.append(tuple(rows.shape)), project(rows))[1])
    model.unified_forward([UnifiedBatchItem("a", tokens(9)), UnifiedBatchItem("b", tokens(9), is_final_chunk=False)])
    model.forward_verify("a", tokens(3))
    assert shapes == [(1, 64), (3, 64)]


def test_the_last_layer_computes_what_is_read_alone(model: PagedCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits, also of sequences whose K and V were written by steps that want none or some rows."""
    batches = [
        [UnifiedBatchItem("a", tokens(9, 1), is_final_chunk=False), UnifiedBatchItem("b", tokens(12, 2))],
        [UnifiedBatchItem("a", tokens(5, 3), pos_offset=9, is_final_chunk=False)],
        [
            UnifiedBatchItem("a", tokens(4, 4), pos_offset=14),
            UnifiedBatchItem("b", tokens(3, 5), pos_offset=12, logits_policy=VerifyLogits()),
            UnifiedBatchItem("c", tokens(7, 6), is_final_chunk=False),
        ],
    ]
    counts: list[list[int]] = [[], []]
    for layer, found in zip((model.network.layers[0], model.network.layers[-1]), counts, strict=True):
        layer.ffn.register_forward_pre_hook(lambda _module, given, found=found: found.append(len(given[0])))
    got = [model.unified_forward(batch) for batch in batches]
    assert counts == [[21, 5, 14], [1, 0, 4]]
    model.reset()
    monkeypatch.setattr(Step, "outputs", None)
    want = [model.unified_forward(batch) for batch in batches]
    assert counts[1][3:] == [21, 5, 14]
    for results, expected in zip(got, want, strict=True):
        assert_same_results(results, expected)


def test_greedy_items_beside_full_ones(model: PagedCausalLM) -> None:
    prompts = [tokens(5, seed) for seed in range(4)]
    full = [model.prefill(f"reference {seed}", prompt) for seed, prompt in enumerate(prompts)]
    best = [int(row.argmax()) for row in full]
    mask = torch.ones(VOCAB_SIZE, dtype=torch.bool, device=model.device)
    mask[best[1]] = False
    penalty = torch.ones(VOCAB_SIZE, device=model.device)
    penalty[best[2]] = 1e6
    policies = [FullLogits(), GreedyArgmax(token_mask=mask), GreedyArgmax(repetition_penalty=penalty), GreedyArgmax()]
    model.reset()
    items = [UnifiedBatchItem(i, prompts[i], logits_policy=policy) for i, policy in enumerate(policies)]
    logits, *chosen = model.unified_forward(items)
    assert_within(logits, full[0], 1e-4)
    assert all(token.dtype == torch.int64 and token.shape == () for token in chosen)
    second = [int(row.topk(2).indices[1]) for row in full]
    assert [int(token) for token in chosen] == [second[1], second[2], best[3]]


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        ([UnifiedBatchItem("b", [])], InvalidInputError, "empty"),
        ([UnifiedBatchItem("b", [0, VOCAB_SIZE])], InvalidInputError, "token id 128"),
        ([UnifiedBatchItem("b", [-1])], InvalidInputError, "token id -1"),
        ([UnifiedBatchItem("a", [1], pos_offset=4)], InvalidInputError, "pos_offset 4, expected 5"),
        ([UnifiedBatchItem("b", [1]), UnifiedBatchItem("b", [1])], InvalidInputError, "twice"),
        ([UnifiedBatchItem("b", [1] * 65)], SequenceTooLongError, "65"),
        ([UnifiedBatchItem("b", [1] * 64), UnifiedBatchItem("c", [1] * 16)], OutOfBlocksError, "needs 11 more"),
        ([UnifiedBatchItem("b", [1], logits_policy=SHORT_MASK)], InvalidInputError, "token_mask"),
    ],
)
def test_a_refused_batch_changes_nothing(
    model: PagedCausalLM, items: list[UnifiedBatchItem], error: type[PagedError], message: str
) -> None:
    model.prefill("a", tokens(5))
    with pytest.raises(error, match=message):
        model.unified_forward([UnifiedBatchItem("z", [1, 2], is_final_chunk=False), *items])
    assert lengths(model) == {"a": 5}
    assert model.kv_manager.stats().used_blocks == 1
    model.unified_forward([UnifiedBatchItem("a", [1], pos_offset=5), UnifiedBatchItem("b", [1])])
    assert lengths(model) == {"a": 6, "b": 1}


def test_a_forward_that_fails_changes_nothing(model: PagedCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tokens(8)
    expected = model.prefill("reference", [*prompt, 3])
    model.prefill("a", prompt)

    with monkeypatch.context() as patch:
        patch.setattr(model.network, "logits", lambda hidden: 1 // 0)
        for run in (
            lambda: model.decode("a", 1, 8),
            lambda: model.forward_verify("a", [1, 2]),
            lambda: model.unified_forward([UnifiedBatchItem("a", [1], pos_offset=8), UnifiedBatchItem("new", [1])]),
        ):
            with pytest.raises(ZeroDivisionError):
                run()
    assert lengths(model) == {"reference": 9, "a": 8}
    assert model.kv_manager.stats().used_blocks == 3
    assert_within(model.decode("a", 3, 8), expected, 1e-4)


def test_decode_of_nothing_and_at_the_wrong_position(model: PagedCausalLM) -> None:
    assert model.unified_forward([]) == []
    assert model.decode_batch([]).shape == (0, VOCAB_SIZE)
    model.prefill("a", tokens(5))
    for pos in (4, 6):
        with pytest.raises(InvalidInputError, match=f"pos_offset {pos}, expected 5"):
            model.decode("a", 1, pos)
    model.decode("a", 1, 5)


def test_release_reset_prepare_and_truncate(model: PagedCausalLM) -> None:
    model.prefill("a", tokens(20))
    model.prepare()
    assert lengths(model) == {"a": 20}
    model.truncate_kv("a", 3)
    assert model.kv_manager.stats().used_blocks == 1
    for cache_id, length in (("a", 4), ("unknown", 0)):
        with pytest.raises(InvalidInputError):
            model.truncate_kv(cache_id, length)
    for _ in range(2):
        model.release("a")
        assert lengths(model) == {}
    model.prefill("b", tokens(5))
    model.reset()
    assert lengths(model) == {}
