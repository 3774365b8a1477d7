"""Every call of the cache with arguments of any kind: it means what they mean as integers, or it changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from paged import (
    KvSlotRequest,
    PagedAttentionExecutor,
    PagedError,
    PagedExecutorConfig,
    PagedKvCacheConfig,
    PagedKvCacheManager,
    StaleHandleError,
    UnifiedBatch,
    UnifiedBatchItem,
)
from tests.cache.snapshot import snapshot
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.values import COLLECTIONS, INTEGERS, VALUES, value

IDS = ["'a'", "'b'", "1", "'1'"]
SMALL = st.sampled_from(["0", "1", "2", "4", "5", "np.int8(3)", "np.int64(4)", "torch.tensor(2)", "np.array(1)"])
COUNTS = SMALL | SMALL | INTEGERS | VALUES
NAMES = st.sampled_from(IDS) | st.sampled_from(IDS) | st.sampled_from(["True", "1.0", "np.int64(1)"]) | VALUES
TOKENS = st.sampled_from(
    ["range(9)", "list(range(9))", "np.arange(9)", "torch.arange(9)", "(i for i in range(9))", "iter(range(5))"]
) | st.sampled_from(["[np.int64(i) for i in range(9)]", "tuple(range(12))", "[3, torch.tensor(4), np.int8(5)]"])
# Each call with what draws its arguments; "handle" and "blocks" are looked up by a name of a sequence.
CALLS: dict[str, list[Any]] = {
    "allocate": [NAMES, COUNTS],
    "allocate_ids": [NAMES, TOKENS | COLLECTIONS | VALUES, NAMES],
    "extend": [st.sampled_from(IDS), COUNTS],
    "advance": [st.sampled_from(IDS), COUNTS],
    "truncate": [st.sampled_from(IDS), COUNTS],
    "commit": [st.sampled_from(IDS), TOKENS | COLLECTIONS | VALUES],
    "append_tokens": [st.sampled_from(IDS), TOKENS | COLLECTIONS | VALUES],
    "fork": [st.sampled_from(IDS), NAMES],
    "share_prefix_blocks": [st.sampled_from(IDS), st.sampled_from(IDS), COUNTS],
    "evict": [COUNTS],
    "can_allocate": [COUNTS],
    "get_handle": [NAMES],
    "forget_namespace": [NAMES],
    "reserve": [NAMES, COUNTS, st.just("None") | COUNTS],
    "reserve_and_commit": [st.sampled_from(IDS), COUNTS, TOKENS | COLLECTIONS | VALUES],
    "build_metadata": [st.sampled_from(IDS), COUNTS],
    "k_cache": [COUNTS],
    "v_cache": [COUNTS],
    "write_kv": [st.sampled_from(IDS), COUNTS, COUNTS],
    "read_kv": [st.sampled_from(IDS), COUNTS, COUNTS, COUNTS],
    "free": [st.sampled_from(IDS)],
    "odd_handle": [st.sampled_from(["free", "swap_out", "swap_in", "extend", "advance", "commit"]), VALUES],
}
CASES = st.lists(
    st.sampled_from(sorted(CALLS)).flatmap(lambda name: st.tuples(st.just(name), *CALLS[name]).map(list)), max_size=12
)


def _manager() -> PagedKvCacheManager:
    """One sequence of nine tokens, a second that shares its blocks, and an empty one."""
    manager = PagedKvCacheManager(
        PagedKvCacheConfig(num_layers=2, num_kv_heads=1, head_dim=2, block_size=4, num_blocks=12, max_seq_len=40)
    )
    for name in ("a", "b"):
        manager.allocate(name, token_ids=list(range(9)))
        with manager.reserve([KvSlotRequest(name, 9)]) as room:
            room.commit([list(range(manager.get_handle(name).num_tokens, 9))])
    manager.allocate(1, num_tokens=4)
    return manager


def _call(manager: PagedKvCacheManager, name: str, args: list[Any]) -> Any:
    def handle(of: Any) -> Any:
        found = manager.get_handle(of) or next(iter(manager.handles()), None)
        if found is None:
            raise StaleHandleError("no sequence is left")
        return found

    match name:
        case "allocate":
            return _seen(manager.allocate(args[0], args[1]))
        case "allocate_ids":
            return _seen(manager.allocate(args[0], token_ids=args[1], namespace=args[2]))
        case "append_tokens":
            return manager.append_tokens([(handle(args[0]), args[1])])
        case "fork":
            return _seen(manager.fork(handle(args[0]), args[1]))
        case "share_prefix_blocks":
            return manager.share_prefix_blocks(handle(args[0]), handle(args[1]), args[2])
        case "get_handle":
            found = manager.get_handle(args[0])
            return found and _seen(found)
        case "reserve":
            with manager.reserve([KvSlotRequest(*args)]):
                return None
        case "reserve_and_commit":
            sequence = handle(args[0])
            with manager.reserve([KvSlotRequest(sequence.cache_id, args[1])]) as room:
                return room.commit([args[2]])
        case "build_metadata":
            return manager.build_metadata([(handle(args[0]), args[1])]).slot_mapping.tolist()
        case "k_cache" | "v_cache":
            return getattr(manager, name)(args[0]).data_ptr() - manager._tensors.storage.data_ptr()
        case "write_kv":
            return manager.write_kv(handle(args[0]), args[1], args[2], torch.ones(1, 1, 2), torch.ones(1, 1, 2))
        case "read_kv":
            return [rows.shape for rows in manager.read_kv(handle(args[0]), *args[1:])]
        case "odd_handle":
            more = {"extend": [1], "advance": [1], "commit": [[1]]}.get(args[0], [])
            return getattr(manager, args[0])(args[1], *more)
        case "extend" | "advance" | "truncate" | "commit" | "free":
            return getattr(manager, name)(handle(args[0]), *args[1:])
        case _:
            return getattr(manager, name)(*args)


def _seen(handle: Any) -> Any:
    return handle.cache_id, handle.blocks, handle.num_tokens, handle.num_cached_tokens, handle.namespace


def _plain(given: Any) -> Any:
    """What a value that was accepted stands for, in Python's own types."""
    if given is None or isinstance(given, str | type | bytes):
        return given
    if hasattr(given, "tolist"):
        return given.tolist()
    if isinstance(given, bool | float):
        return given
    try:
        return int(given)
    except Exception:
        return [int(one) for one in given] if hasattr(given, "__iter__") and not isinstance(given, tuple) else given


def _comparable(parts: dict[str, Any]) -> dict[str, Any]:
    return parts | {"handles": [(name, state[:3]) for name, _, state in parts["handles"]]}


@fuzz(CASES, examples=80)
def test_cache_arguments(case: list[list[str]]) -> None:
    """Beside a cache that gets the same calls in Python's own integers."""
    manager, plain = _manager(), _manager()
    for name, *expressions in case:
        literal = name == "odd_handle"
        args = [one if literal and i == 0 else value(one) for i, one in enumerate(expressions)]
        before = snapshot(manager)
        try:
            result = _call(manager, name, args)
        except PagedError:
            after = snapshot(manager)
            for part in before:
                assert after[part] == before[part], part
            continue
        expected = _call(plain, name, [_plain(value(one)) for one in expressions])
        assert result == expected
        assert _comparable(snapshot(manager)) == _comparable(snapshot(plain))
        assert all(type(handle.cache_id) in (str, int) for handle in manager.handles())


SPELLINGS = [
    "{0}",
    "tuple({0})",
    "iter({0})",
    "(i for i in {0})",
    "np.array({0}, dtype=np.int64)",
    "np.array({0}, dtype='u2')",
    "np.array({0}, dtype=object)",
    "torch.tensor({0}, dtype=torch.int64)",
    "torch.tensor({0}, dtype=torch.int32)",
    "[np.int16(i) for i in {0}]",
    "[torch.tensor(i) for i in {0}]",
    "[*map(np.int8, {0}[:1]), *{0}[1:]]",
]
SPELLED = st.tuples(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=5),
    st.lists(st.sampled_from(SPELLINGS), min_size=5, max_size=5),
).map(list)


def _executor() -> PagedAttentionExecutor:
    config = PagedExecutorConfig(vocab_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=32)
    cache = PagedKvCacheConfig(num_layers=1, num_kv_heads=1, head_dim=32, block_size=2, num_blocks=40)
    return PagedAttentionExecutor(config, PagedKvCacheManager(cache))


@fuzz(SPELLED, examples=15)
def test_token_spellings(case: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and decode steps spelled in any way: the same blocks, hashes, logits, and prefix of a later prompt."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    chunks, spellings = case
    ours, plain = _executor(), _executor()
    known: list[int] = []
    for chunk, spelling in zip(chunks, spellings, strict=False):
        spelled = UnifiedBatchItem("a", value(spelling.format(chunk)), pos_offset=np.int32(len(known)))
        (got,) = ours.unified_decode(UnifiedBatch([spelled]))
        (expected,) = plain.unified_decode(UnifiedBatch([UnifiedBatchItem("a", list(chunk), pos_offset=len(known))]))
        assert got is not None
        assert expected is not None
        assert torch.equal(got, expected)
        known += chunk
    managers = [one.kv_manager for one in (ours, plain)]
    assert _comparable(snapshot(managers[0])) == _comparable(snapshot(managers[1]))
    assert managers[0].get_handle("a")._state.chain.ids == known
    spelled_prompt, prompt = value(spellings[0].format([*known, 5])), [*known, 5]
    handles = [managers[0].allocate("b", token_ids=spelled_prompt), managers[1].allocate("b", token_ids=prompt)]
    assert _seen(handles[0]) == _seen(handles[1])
    assert handles[0].num_cached_tokens == len(known) // 2 * 2


FIELDS = ["num_layers", "num_kv_heads", "head_dim", "block_size", "num_blocks", "num_swap_blocks", "max_seq_len"]
FIELDS += ["sliding_window", "low_watermark", "high_watermark", "enable_prefix_cache", "prefix_hash", "dtype", "device"]


@fuzz(st.lists(st.tuples(st.sampled_from(FIELDS), VALUES).map(list), min_size=1, max_size=2), examples=150)
def test_cache_config(case: list[list[str]]) -> None:
    """A configuration is refused, or holds Python's own numbers."""
    sizes: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2}
    try:
        config = PagedKvCacheConfig(**sizes | {name: value(expression) for name, expression in case})
    except PagedError:
        return
    for name in FIELDS[:8]:
        assert type(getattr(config, name)) is int or (name in FIELDS[6:8] and getattr(config, name) is None)
    assert 0 <= config.high_watermark <= config.low_watermark <= 1
    assert type(config.enable_prefix_cache) is bool
    if max(config.num_layers, config.head_dim, config.num_blocks, config.block_size, config.num_swap_blocks) < 2000:
        try:
            PagedKvCacheManager(config).check_integrity()
        except PagedError:
            return
