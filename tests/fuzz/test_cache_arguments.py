"""Every call of the cache with arguments of any kind: it means what they mean as integers, or it changes nothing."""

from typing import Any

import numpy as np
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
from tests.cache.snapshot import comparable, snapshot
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.values import COLLECTIONS, INTEGERS, VALUES, expressions, value

IDS = expressions("'a'; 'b'; 1; '1'")
SMALL = expressions("0; 1; 2; 4; 5; np.int8(3); np.int64(4); torch.tensor(2); np.array(1)")
COUNTS = SMALL | SMALL | INTEGERS | VALUES
NAMES = IDS | IDS | expressions("True; 1.0; np.int64(1)") | VALUES
SPELLED = expressions("""
    range(9); list(range(9)); np.arange(9); torch.arange(9); (i for i in range(9)); iter(range(5));
    [np.int64(i) for i in range(9)]; tuple(range(12)); [3, torch.tensor(4), np.int8(5)]
""")
TOKENS = SPELLED | SPELLED | COLLECTIONS | VALUES
# Calls of a manager m, with what draws their arguments; h looks a handle up by the id of a sequence.
CALLS: dict[str, list[Any]] = {
    "seen(m.allocate(x, y))": [NAMES, COUNTS],
    "seen(m.allocate(x, token_ids=y, namespace=z))": [NAMES, TOKENS, NAMES],
    "seen(m.get_handle(x))": [NAMES],
    "seen(m.fork(h(x), y))": [IDS, NAMES],
    "m.extend(h(x), y)": [IDS, COUNTS],
    "m.advance(h(x), y)": [IDS, COUNTS],
    "m.truncate(h(x), y)": [IDS, COUNTS],
    "m.commit(h(x), y)": [IDS, TOKENS],
    "m.append_tokens([(h(x), y)])": [IDS, TOKENS],
    "m.share_prefix_blocks(h(x), h(y), z)": [IDS, IDS, COUNTS],
    "m.evict(x)": [COUNTS],
    "m.can_allocate(x)": [COUNTS],
    "m.forget_namespace(x)": [NAMES],
    "reserve((x, y, z))": [NAMES, COUNTS, st.just("None") | COUNTS],
    "reserve((h(x).cache_id, y), z)": [IDS, COUNTS, TOKENS],
    "m.build_metadata([(h(x), y)]).slot_mapping.tolist()": [IDS, COUNTS],
    "m.k_cache(x).data_ptr() - m._tensors.storage.data_ptr()": [COUNTS],
    "m.v_cache(x).data_ptr() - m._tensors.storage.data_ptr()": [COUNTS],
    "m.write_kv(h(x), y, z, torch.ones(1, 1, 2), torch.ones(1, 1, 2))": [IDS, COUNTS, COUNTS],
    "[rows.shape for rows in m.read_kv(h(x), y, z, w)]": [IDS, COUNTS, COUNTS, COUNTS],
    "m.free(h(x))": [IDS],
}
ODD_HANDLES = ("m.free(x)", "m.swap_out(x)", "m.swap_in(x)", "m.extend(x, 1)", "m.advance(x, 1)", "m.commit(x, [1])")
CALLS |= {call: [VALUES] for call in ODD_HANDLES}
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


def _call(m: PagedKvCacheManager, expression: str, args: list[Any]) -> Any:
    def handle(of: Any) -> Any:
        found = m.get_handle(of) or next(iter(m.handles()), None)
        if found is None:
            raise StaleHandleError("no sequence is left")
        return found

    def reserve(request: tuple[Any, ...], *tokens: Any) -> Any:
        with m.reserve([KvSlotRequest(*request)]) as room:
            return room.commit(list(tokens)) if tokens else None

    return value(expression, m=m, h=handle, seen=_seen, reserve=reserve, **dict(zip("xyzw", args, strict=False)))


def _seen(handle: Any) -> Any:
    return handle and (handle.cache_id, handle.blocks, handle.num_tokens, handle.num_cached_tokens, handle.namespace)


def _plain(given: Any) -> Any:
    """What a value that was accepted stands for, in Python's own types."""
    if hasattr(given, "tolist"):
        return given.tolist()
    if given is None or isinstance(given, str | type | bytes | bool | float):
        return given
    try:
        return int(given)
    except Exception:
        return [int(one) for one in given] if hasattr(given, "__iter__") and not isinstance(given, tuple) else given


@fuzz(CASES, examples=30, thorough=80)
def test_cache_arguments(case: list[list[str]]) -> None:
    """Beside a cache that gets the same calls in Python's own integers."""
    manager, plain = _manager(), _manager()
    for name, *drawn in case:
        args = [value(one) for one in drawn]
        before = snapshot(manager)
        try:
            result = _call(manager, name, args)
        except PagedError:
            assert snapshot(manager) == before
            continue
        expected = _call(plain, name, [_plain(value(one)) for one in drawn])
        assert result == expected
        assert comparable(snapshot(manager)) == comparable(snapshot(plain))
        assert all(type(handle.cache_id) in (str, int) for handle in manager.handles())


SPELLINGS = expressions("""
    {0}; tuple({0}); iter({0}); (i for i in {0}); np.array({0}, dtype=np.int64); np.array({0}, dtype='u2');
    np.array({0}, dtype=object); torch.tensor({0}, dtype=torch.int64); torch.tensor({0}, dtype=torch.int32);
    [np.int16(i) for i in {0}]; [torch.tensor(i) for i in {0}]; [*map(np.int8, {0}[:1]), *{0}[1:]]
""")
CHUNKS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=5)


def _executor() -> PagedAttentionExecutor:
    config = PagedExecutorConfig(vocab_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=32)
    cache = PagedKvCacheConfig(num_layers=1, num_kv_heads=1, head_dim=32, block_size=2, num_blocks=40)
    return PagedAttentionExecutor(config, PagedKvCacheManager(cache))


@fuzz(st.tuples(CHUNKS, st.lists(SPELLINGS, min_size=5, max_size=5)), examples=15)
def test_token_spellings(case: Any) -> None:
    """Chunks and decode steps spelled in any way: the same blocks, hashes, logits, and prefix of a later prompt."""
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
    assert comparable(snapshot(managers[0])) == comparable(snapshot(managers[1]))
    assert managers[0].get_handle("a")._state.chain.ids == known
    spelled_prompt, prompt = value(spellings[0].format([*known, 5])), [*known, 5]
    handles = [managers[0].allocate("b", token_ids=spelled_prompt), managers[1].allocate("b", token_ids=prompt)]
    assert _seen(handles[0]) == _seen(handles[1])
    assert handles[0].num_cached_tokens == len(known) // 2 * 2
