"""PagedAttentionExecutor against its closed form."""

from __future__ import annotations

import random

import pytest
import torch

from paged.batch import FullLogits, GreedyArgmax, PrefillInput, UnifiedBatchItem
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError
from paged.executors.command_line.closed_form import expected_logits
from paged.executors.paged_attention_executor import PagedAttentionExecutor, PagedExecutorConfig
from tests.executors.oracle import batch, make_executor, prompt, step
from tests.tolerance import assert_close

EMBEDDINGS = ("one_hot", "sinusoidal")
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
    assert torch.allclose(expected_logits(config, [1, 5, 1]), want)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_prefill_decode_verify_truncate(embedding: str, device: torch.device) -> None:
    executor = make_executor(device, embedding=embedding, **GROUPED)
    tokens = random_tokens(random.Random(1), 16, 50)
    out = executor.prefill(prompt(tokens[:7]))
    assert out.logits.shape == (1, 1, 50)
    assert_close(out.last_token_logits()[0], expected_logits(executor.config, tokens[:7]))
    handle = out.kv_cache
    for length in (8, 9):  # the second lies in a block of its own
        logits = executor.decode(step(handle, tokens[length - 1])).logits
        assert_close(logits[0], expected_logits(executor.config, tokens[:length]))
    for length, one in zip(
        range(10, 14), executor.forward_verify([step(handle, t) for t in tokens[9:13]]), strict=True
    ):
        assert_close(one.logits[0], expected_logits(executor.config, tokens[:length]))
    executor.truncate_kv(handle, 6)
    other = [*tokens[:6], *tokens[13:]]
    logits = executor.forward_verify([step(handle, token) for token in tokens[13:]])[-1].logits
    assert_close(logits[0], expected_logits(executor.config, other))
    executor.kv_manager.check_integrity()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_mixed_batch_of_ragged_sequences(embedding: str, device: torch.device) -> None:
    executor = make_executor(device, embedding=embedding, **GROUPED)
    rng = random.Random(2)
    # (tokens before, tokens now, final): new prompts, decode steps on block edges, middle and last chunks.
    shapes = [
        (0, 1, True),
        (0, 9, True),
        (1, 1, True),
        (7, 1, True),
        (8, 1, True),
        (5, 4, False),
        (3, 6, True),
        (9, 8, True),
    ]
    tokens = [random_tokens(rng, before + now, 50) for before, now, _ in shapes]
    started = [(i, before) for i, (before, _, _) in enumerate(shapes) if before]
    nothing = executor.unified_decode(
        batch(*(UnifiedBatchItem(i, tokens[i][:n], is_final_chunk=False) for i, n in started))
    )
    assert nothing == [None] * len(started)
    results = executor.unified_decode(
        batch(
            *(
                UnifiedBatchItem(i, tokens[i][before:], pos_offset=before, is_final_chunk=final)
                for i, (before, _, final) in enumerate(shapes)
            )
        )
    )
    for i, (_, _, final) in enumerate(shapes):
        assert (results[i] is not None) == final
        if results[i] is not None:
            assert_close(results[i], expected_logits(executor.config, tokens[i]))
    executor.kv_manager.check_integrity()


@pytest.mark.parametrize(
    "sizes", [{}, {"num_heads": 6, "num_kv_heads": 2}, {"num_layers": 1, "head_dim": 40, "vocab_size": 7}]
)
@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_sizes(sizes: dict[str, int], embedding: str, device: torch.device) -> None:
    executor = make_executor(device, embedding=embedding, **sizes)
    tokens = random_tokens(random.Random(3), 40, executor.config.vocab_size)
    logits = executor.prefill(prompt(tokens)).last_token_logits()
    assert logits.dtype == torch.float32
    assert_close(logits[0], expected_logits(executor.config, tokens))


def test_16_bit_cache(device: torch.device) -> None:
    executor = make_executor(device, dtype=torch.float16)
    tokens = random_tokens(random.Random(4), 20, 256)
    logits = executor.prefill(prompt(tokens)).last_token_logits()[0]
    assert_close(logits.half(), expected_logits(executor.config, tokens))


@pytest.mark.parametrize(
    ("dtype", "row_bytes"), [(torch.float8_e4m3fn, 8), (torch.float8_e5m2, 8), (torch.int8, 8 + 4)], ids=str
)
def test_8_bit_cache(dtype: torch.dtype, row_bytes: int, device: torch.device) -> None:
    executor = make_executor(device, dtype=dtype)
    assert executor.capabilities().memory_requirements.kv_bytes_per_token_per_layer == 2 * 4 * row_bytes
    tokens = random_tokens(random.Random(4), 20, 256)
    logits = executor.prefill(prompt(tokens)).last_token_logits()[0]
    assert_close(logits, expected_logits(executor.config, tokens))


def test_every_layer_holds_the_embedding(device: torch.device) -> None:
    executor = make_executor(device, num_layers=3)
    handle = executor.prefill(prompt([3, 40])).kv_cache
    for layer in range(3):
        key, value = executor.kv_manager.read_kv(handle, layer, 0, 2)
        assert torch.equal(key, value)
        assert key.flatten(1).argmax(1).tolist() == [3, 8]  # 40 mod 32
        assert key.sum() == 2


@pytest.mark.usefixtures("backend")
def test_fork_diverges(device: torch.device) -> None:
    executor = make_executor(device)
    handle = executor.prefill(prompt([1, 2, 3, 4, 5])).kv_cache
    forked = executor.kv_manager.fork(handle, "fork")
    left, right = executor.batch_decode([step(handle, 1), step(forked, 9)])
    assert_close(left.logits[0], expected_logits(executor.config, [1, 2, 3, 4, 5, 1]))
    assert_close(right.logits[0], expected_logits(executor.config, [1, 2, 3, 4, 5, 9]))
    both = executor.decode(step([handle, forked], 7, 7)).logits
    assert_close(both[0], expected_logits(executor.config, [1, 2, 3, 4, 5, 1, 7]))
    assert_close(both[1], expected_logits(executor.config, [1, 2, 3, 4, 5, 9, 7]))
    executor.kv_manager.check_integrity()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_dropped(side: str, device: torch.device) -> None:
    executor = make_executor(device)
    sequences = [[4, 5, 6, 4], [7], [8, 9, 8]]
    pads = [[0] * (4 - len(tokens)) for tokens in sequences]
    rows = [pad + tokens if side == "left" else tokens + pad for tokens, pad in zip(sequences, pads, strict=True)]
    ones = [[1] * len(tokens) for tokens in sequences]
    mask = [pad + one if side == "left" else one + pad for one, pad in zip(ones, pads, strict=True)]
    mask_ids = torch.tensor(mask)
    positions = (mask_ids.cumsum(1) - 1).clamp(min=0)
    for position_ids in (None, positions):
        out = executor.prefill(PrefillInput(torch.tensor(rows), mask_ids, position_ids))
        assert [handle.num_tokens for handle in out.kv_caches] == [4, 1, 3]
        for tokens, logits in zip(sequences, out.last_token_logits(), strict=True):
            assert_close(logits, expected_logits(executor.config, tokens))


def test_prefill_continues_caches(device: torch.device) -> None:
    executor = make_executor(device)
    first = executor.prefill(prompt([1, 2, 3], [4, 5, 6]))
    positions = torch.tensor([[3, 4], [3, 4]])
    out = executor.prefill(prompt([3, 2], [6, 5], kv_caches=first.kv_caches, position_ids=positions))
    assert out.kv_caches == first.kv_caches
    assert_close(out.last_token_logits()[0], expected_logits(executor.config, [1, 2, 3, 3, 2]))
    assert_close(out.last_token_logits()[1], expected_logits(executor.config, [4, 5, 6, 6, 5]))
    for wrong in ([[5, 7], [5, 6]], [[4, 5], [5, 6]], [[5, 6], [0, 1]]):
        with pytest.raises(InvalidInputError, match="pos"):
            executor.prefill(prompt([1, 1], [1, 1], kv_caches=first.kv_caches, position_ids=torch.tensor(wrong)))
    executor.prefill(prompt([1, 1], [1, 1], kv_caches=first.kv_caches, position_ids=torch.tensor([[5, 6], [5, 6]])))


def test_calls_of_unequal_shape_in_one_batch(device: torch.device) -> None:
    executor = make_executor(device)
    assert executor.batch_prefill([]) == executor.batch_decode([]) == executor.forward_verify([]) == []
    one, two = executor.batch_prefill([prompt([1, 2, 3]), prompt([4], [5])])
    assert_close(one.last_token_logits()[0], expected_logits(executor.config, [1, 2, 3]))
    assert_close(two.last_token_logits()[1], expected_logits(executor.config, [5]))
    with pytest.raises(InvalidInputError, match="2 rows"):
        _ = two.kv_cache
    outs = executor.batch_decode([step(two.kv_caches, 4, 6), step(one.kv_cache, 1)])
    assert [tuple(out.logits.shape) for out in outs] == [(2, 256), (1, 256)]
    assert_close(outs[0].logits[1], expected_logits(executor.config, [5, 6]))
    assert_close(outs[1].logits[0], expected_logits(executor.config, [1, 2, 3, 1]))


def test_greedy_policy_gives_token_ids(device: torch.device) -> None:
    executor = make_executor(device)
    allowed = torch.ones(256, dtype=torch.bool, device=device)
    allowed[3] = False
    greedy, masked = GreedyArgmax(), GreedyArgmax(token_mask=allowed)
    policies = [greedy, FullLogits(), masked]
    results = executor.unified_decode(
        batch(*(UnifiedBatchItem(i, [3, 5, 3], logits_policy=policy) for i, policy in enumerate(policies)))
    )
    token, logits, other = results
    assert token is not None
    assert logits is not None
    assert other is not None
    assert (token.dim(), token.dtype, int(token), int(other)) == (0, torch.int64, 3, 5)
    assert logits.shape == (256,)
    handle = executor.prefill(prompt([9, 9])).kv_cache
    assert executor.decode(step(handle, 9, logits_policy=greedy)).logits.tolist() == [9]
    verified = executor.forward_verify([step(handle, 9, logits_policy=greedy), step(handle, 9)])
    assert verified[0].logits.tolist() == [9]
    assert verified[1].logits.shape == (1, 256)


@pytest.mark.parametrize(
    "wrong",
    [{"vocab_size": 0}, {"num_heads": 3, "num_kv_heads": 2}, {"embedding": "random"}, {"head_dim": 8.0}],
)
def test_configuration_is_checked(wrong: dict[str, object]) -> None:
    PagedExecutorConfig()
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        PagedExecutorConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"num_layers": 3}, {"num_kv_heads": 2}, {"head_dim": 16}, {"dtype": torch.float64}])
def test_manager_must_fit(wrong: dict[str, object]) -> None:
    fitting = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "num_blocks": 2, "dtype": torch.float32}
    PagedAttentionExecutor(PagedExecutorConfig(), PagedKvCacheManager(PagedKvCacheConfig(**fitting)))  # type: ignore[arg-type]
    manager = PagedKvCacheManager(PagedKvCacheConfig(**{**fitting, **wrong}))  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        PagedAttentionExecutor(PagedExecutorConfig(), manager)
