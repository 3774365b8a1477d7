"""PagedAttentionExecutor against its closed form."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError
from paged.executors.closed_form import expected_logits
from paged.executors.paged_attention_executor import PagedAttentionExecutor, PagedExecutorConfig
from paged.step.batch import FullLogits, GreedyArgmax, PrefillInput, VerifyLogits
from tests.executors.oracle import check_logits, chunk, forward, item, make_executor, prompt, step
from tests.tolerance import assert_within

GROUPED = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 50}


def random_tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    """Few different ones, so that tokens repeat."""
    few = rng.sample(range(vocab_size), 5)
    return [rng.choice(few) for _ in range(count)]


def test_the_closed_form_by_hand() -> None:
    config = PagedExecutorConfig(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, vocab_size=6)
    e = 2.718281828459045 ** (8**-0.5)
    # Tokens 1 and 5 have indices 1 and 5; element 7 of the head falls on logit 7 mod 6 = 1.
    want = torch.tensor([0, 2 * e, 0, 0, 0, 1], dtype=torch.float64) / (2 * e + 1)
    assert_within(expected_logits(config, [1, 5, 1]), want, 1e-12)


@pytest.mark.parametrize(
    ("backend", "embedding"), [("triton", "sinusoidal"), ("torch", "one_hot")], indirect=["backend"]
)
def test_prefill_decode_verify_truncate(backend: str, embedding: str, device: torch.device) -> None:
    executor = make_executor(device, embedding=embedding, **GROUPED)
    tokens = random_tokens(random.Random(1), 16, 50)
    out = executor.prefill(prompt(tokens[:7]))
    assert out.logits.shape == (1, 1, 50)
    check_logits(executor, out.last_token_logits()[0], tokens[:7])
    handle = out.kv_cache
    for length in (8, 9):  # the second lies in a block of its own
        check_logits(executor, executor.decode(step(handle, tokens[length - 1])).logits[0], tokens[:length])
    verified = executor.forward_verify([step(handle, token) for token in tokens[9:13]])
    for length, one in zip(range(10, 14), verified, strict=True):
        check_logits(executor, one.logits[0], tokens[:length])
    executor.truncate_kv(handle, 6)
    verified = executor.forward_verify([step(handle, token) for token in tokens[13:]])
    check_logits(executor, verified[-1].logits[0], [*tokens[:6], *tokens[13:]])
    executor.kv_manager.check_integrity()


@pytest.mark.parametrize(
    ("backend", "embedding"), [("triton", "one_hot"), ("torch", "sinusoidal")], indirect=["backend"]
)
def test_mixed_batch_of_ragged_sequences(backend: str, embedding: str, device: torch.device) -> None:
    """New prompts, decode steps on block edges, middle and last chunks, drafts to verify."""
    executor, rng = make_executor(device, embedding=embedding, **GROUPED), random.Random(2)
    # Tokens before and now; the sixth is a middle chunk, and the last two are drafts.
    shapes = [(0, 1), (0, 9), (1, 1), (7, 1), (8, 1), (5, 4), (3, 6), (9, 8), (4, 1)]
    tokens = [random_tokens(rng, before + now, 50) for before, now in shapes]
    started = [chunk(i, tokens[i][:n]) for i, (n, _) in enumerate(shapes) if n]
    assert forward(executor, *started) == [None] * len(started)
    items = [item(i, tokens[i][n:], n, is_final_chunk=i != 5) for i, (n, _) in enumerate(shapes)]
    items[-2:] = [replace(one, logits_policy=VerifyLogits()) for one in items[-2:]]
    *results, many, one = forward(executor, *items)
    assert results.pop(5) is None
    for logits, ids in zip(results, [*tokens[:5], tokens[6]], strict=True):
        check_logits(executor, logits, ids)
    for length, logits in zip(range(10, 18), many, strict=True):
        check_logits(executor, logits, tokens[7][:length])
    check_logits(executor, *one, tokens[8])
    executor.kv_manager.check_integrity()


@pytest.mark.parametrize("embedding", ["one_hot", "sinusoidal"])
@pytest.mark.parametrize(
    "sizes", [{}, {"num_heads": 6, "num_kv_heads": 2}, {"num_layers": 1, "head_dim": 40, "vocab_size": 7}]
)
def test_sizes(sizes: dict[str, int], embedding: str, device: torch.device) -> None:
    executor = make_executor(device, embedding=embedding, **sizes)
    tokens = random_tokens(random.Random(3), 40, executor.config.vocab_size)
    logits = executor.prefill(prompt(tokens)).last_token_logits()
    assert logits.dtype == torch.float32
    check_logits(executor, logits[0], tokens)


@pytest.mark.parametrize(
    ("dtype", "row_bytes"), [(torch.float16, 16), (torch.float8_e4m3fn, 8), (torch.float8_e5m2, 8), (torch.int8, 8 + 4)]
)
def test_small_caches(dtype: torch.dtype, row_bytes: int, device: torch.device) -> None:
    """8-bit caches hold the embedding exactly."""
    executor = make_executor(device, dtype=dtype)
    assert executor.capabilities().memory_requirements.kv_bytes_per_token_per_layer == 2 * 4 * row_bytes
    tokens = random_tokens(random.Random(4), 20, 256)
    logits = executor.prefill(prompt(tokens)).last_token_logits()[0]
    check_logits(executor, logits.half() if dtype == torch.float16 else logits, tokens)


def test_every_layer_holds_the_embedding(device: torch.device) -> None:
    executor = make_executor(device, num_layers=3)
    handle = executor.prefill(prompt([3, 40])).kv_cache
    for layer in range(3):
        key, value = executor.kv_manager.read_kv(handle, layer, 0, 2)
        assert torch.equal(key, value)
        assert key.flatten(1).argmax(1).tolist() == [3, 8]  # 40 mod 32
        assert key.sum() == 2


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_dropped(side: str, device: torch.device) -> None:
    executor, sequences = make_executor(device), [[4, 5, 6, 4], [7], [8, 9, 8]]

    def padded(rows: list[list[int]]) -> torch.Tensor:
        pads = [[0] * (4 - len(row)) for row in rows]
        return torch.tensor([pad + row if side == "left" else row + pad for row, pad in zip(rows, pads, strict=True)])

    mask = padded([[1] * len(tokens) for tokens in sequences])
    for position_ids in (None, (mask.cumsum(1) - 1).clamp(min=0)):
        out = executor.prefill(PrefillInput(padded(sequences), mask, position_ids))
        assert [handle.num_tokens for handle in out.kv_caches] == [4, 1, 3]
        for tokens, logits in zip(sequences, out.last_token_logits(), strict=True):
            check_logits(executor, logits, tokens)


def test_prefill_continues_caches(device: torch.device) -> None:
    executor = make_executor(device)
    caches = executor.prefill(prompt([1, 2, 3], [4, 5, 6])).kv_caches

    def more(rows: list[list[int]], positions: list[list[int]]) -> Any:
        return executor.prefill(prompt(*rows, kv_caches=caches, position_ids=torch.tensor(positions)))

    out = more([[3, 2], [6, 5]], [[3, 4], [3, 4]])
    assert out.kv_caches == caches
    check_logits(executor, out.last_token_logits()[0], [1, 2, 3, 3, 2])
    check_logits(executor, out.last_token_logits()[1], [4, 5, 6, 6, 5])
    for wrong in ([[5, 7], [5, 6]], [[4, 5], [5, 6]], [[5, 6], [0, 1]]):
        with pytest.raises(InvalidInputError, match="pos"):
            more([[1, 1], [1, 1]], wrong)
    more([[1, 1], [1, 1]], [[5, 6], [5, 6]])


def test_calls_of_unequal_shape_in_one_batch(device: torch.device) -> None:
    executor = make_executor(device)
    assert executor.batch_prefill([]) == executor.batch_decode([]) == executor.forward_verify([]) == []
    one, two = executor.batch_prefill([prompt([1, 2, 3]), prompt([4], [5])])
    check_logits(executor, one.last_token_logits()[0], [1, 2, 3])
    check_logits(executor, two.last_token_logits()[1], [5])
    with pytest.raises(InvalidInputError, match="2 rows"):
        _ = two.kv_cache
    outs = executor.batch_decode([step(two.kv_caches, 4, 6), step(one.kv_cache, 1)])
    assert [tuple(out.logits.shape) for out in outs] == [(2, 256), (1, 256)]
    check_logits(executor, outs[0].logits[1], [5, 6])
    check_logits(executor, outs[1].logits[0], [1, 2, 3, 1])


def test_greedy_policy_gives_token_ids(device: torch.device) -> None:
    executor = make_executor(device)
    allowed = torch.ones(256, dtype=torch.bool, device=device)
    allowed[3] = False
    greedy, masked = GreedyArgmax(), GreedyArgmax(token_mask=allowed)
    items = [item(i, [3, 5, 3], logits_policy=one) for i, one in enumerate((greedy, FullLogits(), masked))]
    token, logits, other = forward(executor, *items)
    assert (token.dim(), token.dtype, int(token), int(other)) == (0, torch.int64, 3, 5)
    assert logits.shape == (256,)
    handle = executor.prefill(prompt([9, 9])).kv_cache
    assert executor.decode(step(handle, 9, logits_policy=greedy)).logits.tolist() == [9]
    verified = executor.forward_verify([step(handle, 9, logits_policy=greedy), step(handle, 9)])
    assert verified[0].logits.tolist() == [9]
    assert verified[1].logits.shape == (1, 256)


@pytest.mark.parametrize(
    "wrong", [{"vocab_size": 0}, {"num_heads": 3, "num_kv_heads": 2}, {"embedding": "random"}, {"head_dim": 8.0}]
)
def test_configuration_is_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        PagedExecutorConfig(**wrong)


@pytest.mark.parametrize("wrong", [{"num_layers": 3}, {"num_kv_heads": 2}, {"head_dim": 16}, {"dtype": torch.float64}])
def test_manager_must_fit(wrong: dict[str, Any]) -> None:
    fitting = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "num_blocks": 2, "dtype": torch.float32}
    fits, does_not = (PagedKvCacheManager(PagedKvCacheConfig(**fitting | changes)) for changes in ({}, wrong))
    PagedAttentionExecutor(PagedExecutorConfig(), fits)
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        PagedAttentionExecutor(PagedExecutorConfig(), does_not)
