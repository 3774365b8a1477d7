"""The contract of PagedCausalLM beyond its numbers: answers, checks, and a cache that a failure leaves alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paged.batch import FullLogits, GreedyArgmax, UnifiedBatchItem, VerifyLogits
from paged.errors import InvalidInputError, OutOfBlocksError, PagedError, SequenceTooLongError
from paged.forward_step import ForwardStep
from paged.models.paged_lm import PagedCausalLM
from paged.models.registry import load_model
from tests.models.families import VOCAB_SIZE, tokens

pytestmark = pytest.mark.usefixtures("_fast")


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
    shapes = []
    project = model.network.logits
    monkeypatch.setattr(
        model.network, "logits", lambda hidden: (shapes.append(tuple(hidden.shape)), project(hidden))[1]
    )
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
    monkeypatch.setattr(ForwardStep, "outputs", None)
    want = [model.unified_forward(batch) for batch in batches]
    assert counts[1][3:] == [21, 5, 14]
    for answers, wanted in zip(got, want, strict=True):
        for answer, one in zip(answers, wanted, strict=True):
            assert (answer is None) == (one is None)
            if answer is not None and one is not None:
                torch.testing.assert_close(answer, one, rtol=1e-4, atol=1e-5)


def test_greedy_items_beside_full_ones(model: PagedCausalLM) -> None:
    prompts = [tokens(5, seed) for seed in range(4)]
    full = [model.prefill("reference", prompt) for prompt in prompts if model.release("reference") is None]
    best = [int(row.argmax()) for row in full]
    mask = torch.ones(VOCAB_SIZE, dtype=torch.bool, device=model.device)
    mask[best[1]] = False
    penalty = torch.ones(VOCAB_SIZE, device=model.device)
    penalty[best[2]] = 1e6
    policies = [FullLogits(), GreedyArgmax(token_mask=mask), GreedyArgmax(repetition_penalty=penalty), GreedyArgmax()]
    model.reset()
    answers = model.unified_forward(
        [UnifiedBatchItem(i, prompts[i], logits_policy=policy) for i, policy in enumerate(policies)]
    )
    assert torch.allclose(answers[0], full[0], atol=1e-5)
    chosen = answers[1:]
    assert all(token.dtype == torch.int64 and token.shape == () for token in chosen)
    assert [int(token) for token in chosen] == [
        int(full[1].topk(2).indices[1]),
        int(full[2].topk(2).indices[1]),
        best[3],
    ]


def test_nothing_to_run(model: PagedCausalLM) -> None:
    assert model.unified_forward([]) == []
    assert model.decode_batch([]).shape == (0, VOCAB_SIZE)


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
        (
            [UnifiedBatchItem("b", [1], logits_policy=GreedyArgmax(token_mask=torch.ones(3, dtype=torch.bool)))],
            InvalidInputError,
            "token_mask",
        ),
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

    def fail(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model.network, "logits", fail)
        for run in (
            lambda: model.decode("a", 1, 8),
            lambda: model.forward_verify("a", [1, 2]),
            lambda: model.unified_forward([UnifiedBatchItem("a", [1], pos_offset=8), UnifiedBatchItem("new", [1])]),
        ):
            with pytest.raises(RuntimeError, match="out of memory"):
                run()
    assert lengths(model) == {"reference": 9, "a": 8}
    assert model.kv_manager.stats().used_blocks == 3
    assert torch.allclose(model.decode("a", 3, 8), expected, atol=1e-5)


def test_decode_at_the_wrong_position(model: PagedCausalLM) -> None:
    model.prefill("a", tokens(5))
    for pos in (4, 6):
        with pytest.raises(InvalidInputError, match=f"pos_offset {pos}, expected 5"):
            model.decode("a", 1, pos)
    model.decode("a", 1, 5)


def test_handle_of_the_caller(model: PagedCausalLM) -> None:
    handle = model.kv_manager.allocate("mine")
    model.unified_forward([UnifiedBatchItem("theirs", tokens(5), kv_cache=handle)])
    assert lengths(model) == {"mine": 5}
    model.decode("mine", 1, 5)
    assert handle.num_tokens == 6


def test_release_reset_and_prepare(model: PagedCausalLM) -> None:
    model.prefill("a", tokens(5))
    model.prepare()
    assert lengths(model) == {"a": 5}
    model.release("a")
    model.release("a")
    assert lengths(model) == {}
    model.prefill("b", tokens(5))
    model.reset()
    assert lengths(model) == {}


def test_truncate(model: PagedCausalLM) -> None:
    model.prefill("a", tokens(20))
    model.truncate_kv("a", 3)
    assert model.kv_manager.stats().used_blocks == 1
    for cache_id, length in (("a", 4), ("unknown", 0)):
        with pytest.raises(InvalidInputError):
            model.truncate_kv(cache_id, length)


def test_capacity_metrics_and_adapters(model: PagedCausalLM) -> None:
    assert model.kv_capacity() == 80
    before = model.cache_metrics_snapshot()
    model.prefill("a", tokens(20))
    after = model.cache_metrics_snapshot()
    assert (before["used_blocks"], after["used_blocks"], after["num_tokens"]) == (0, 3, 20)
    json.dumps(after)
    assert model.lora_metrics_snapshot()["adapters"] == {}
    model.set_lora_adapter_for_cache("a", None)
    with pytest.raises(InvalidInputError, match="'poetry': not loaded"):
        model.set_lora_adapter_for_cache("a", "poetry")


def test_logits_may_be_changed_in_place(model: PagedCausalLM) -> None:
    model.prefill("a", tokens(5))[3] = float("-inf")
