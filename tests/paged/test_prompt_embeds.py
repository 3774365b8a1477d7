"""Rows in place of token embeddings: what they must be, and when sequences with rows share K/V."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paged import EmbedsLimits, InvalidInputError, PagedError, PromptEmbeds, UnsupportedError, mrope_positions
from paged.cache.manager import PagedKvCacheManager
from paged.cache.token_chain import content_id
from tests.cache.random_kv import make_manager

ROWS = torch.arange(8.0).reshape(4, 2)
LIMITS = EmbedsLimits(hidden_size=2, num_layers=2, max_positions=8, takes_rope_positions=True, longest_span=3)
ROPE = torch.arange(6).expand(3, 6)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"positions": (1, 1, 2, 3)}, "positions"),
        ({"positions": (-1, 1, 2, 3)}, "positions"),
        ({"positions": (0, 1, 2)}, "rows"),
        ({"rows": ROWS.long()}, "rows"),
        ({"rows": ROWS / 0}, "NaN or infinity"),
        ({"deepstack": torch.zeros(1, 3, 2)}, "deepstack"),
        ({"deepstack": torch.zeros(1, 4, 1)}, "deepstack"),
        ({"rope_positions": torch.zeros(2, 6, dtype=torch.long)}, "rope_positions"),
        ({"rope_positions": torch.zeros(3, 6)}, "rope_positions"),
        ({"rope_positions": torch.full((3, 6), 6)}, "expected 0 to 5"),
        ({"spans": [(1, 1)]}, "spans"),
        ({"spans": [(3, 6)]}, "spans"),
        ({"spans": [(2, 4), (1, 3)]}, "spans"),
    ],
)
def test_malformed_embeddings_are_refused(fields: dict[str, Any], text: str) -> None:
    PromptEmbeds(**(given := {"positions": (1, 2, 3, 5), "rows": ROWS}))
    with pytest.raises(InvalidInputError, match=text):
        PromptEmbeds(**given | fields)


@pytest.mark.parametrize(
    ("num_tokens", "changed", "error", "text"),
    [
        (6, {"hidden_size": 3}, InvalidInputError, "hidden size"),
        (5, {}, InvalidInputError, "less than 5"),
        (6, {"num_layers": 1}, InvalidInputError, "the model has 1"),
        (6, {"takes_rope_positions": False}, UnsupportedError, "one axis"),
        (7, {}, InvalidInputError, r"expected \[3, 7\]"),
        (6, {"max_positions": 5}, InvalidInputError, "at most 5 tokens"),
        (6, {"longest_span": 2}, UnsupportedError, "sliding window"),
    ],
)
def test_what_a_model_does_not_take_is_refused(
    num_tokens: int, changed: dict[str, Any], error: type[PagedError], text: str
) -> None:
    embeds = PromptEmbeds((1, 2, 3, 5), ROWS, torch.zeros(2, 4, 2), ROPE, [(1, 4)])
    embeds.check(6, LIMITS)
    with pytest.raises(error, match=text):
        embeds.check(num_tokens, LIMITS._replace(**changed))
    with pytest.raises(UnsupportedError, match="token ids only"):
        embeds.check(6, None)


def test_rows_are_copied() -> None:
    rows = ROWS.clone()
    embeds = PromptEmbeds((0, 1, 2, 3), rows)
    ids = embeds.ids([9] * 4, 0)
    rows.zero_()
    assert torch.equal(embeds.rows, ROWS)
    assert PromptEmbeds((0, 1, 2, 3), ROWS).ids([8] * 4, 0) == ids


def test_chunks_keep_spans_whole() -> None:
    embeds = PromptEmbeds(range(2, 10), torch.zeros(8, 2), spans=[(2, 5), (5, 9)])
    ends = [(0, 2), (0, 3), (0, 4), (0, 5), (2, 3), (3, 4), (2, 6), (5, 6), (0, 9), (0, 10), (9, 12)]
    assert [embeds.whole_spans(*chunk) for chunk in ends] == [2, 2, 2, 5, 5, 5, 5, 9, 9, 10, 12]


def test_positions_of_several_axes() -> None:
    """As the paper counts: 2 tokens of text, an image of 1 x 2 x 3, text, one of 2 x 1 x 1, text."""
    rope = mrope_positions(13, [2, 3, 4, 5, 6, 7, 9, 10], [[1, 4, 6], [2, 2, 2]])
    assert rope.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8, 9],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 8, 9],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 8, 9],
    ]
    assert PromptEmbeds([], torch.zeros(0, 2), rope_positions=rope).delta == 10 - 13


@pytest.mark.parametrize(
    ("positions", "grids"), [([2, 3], [[1, 4, 4]]), ([0, 1, 2, 4], [[1, 4, 4]]), ([3, 4, 5, 6], [[1, 4, 4]])]
)
def test_grids_that_do_not_fit_are_refused(positions: list[int], grids: list[list[int]]) -> None:
    mrope_positions(6, [2, 3, 4, 5], [[1, 4, 4]])
    with pytest.raises(InvalidInputError):
        mrope_positions(6, positions, grids)


# A prompt: tokens of text, and images of a few rows whose tokens may see each other both ways.
_IMAGE = st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=4), st.booleans())
_PROMPT = st.lists(st.integers(0, 1) | _IMAGE, min_size=1, max_size=6)
_Prompt = list[Any]


def _build(prompt: _Prompt, *, has_axes: bool) -> tuple[list[int], PromptEmbeds, list[Any]]:
    """Token ids, embeddings, and what K and V of each position depend on besides the positions before."""
    ids: list[int] = []
    positions, rows, spans, contents = [], [], [], []
    for part in prompt:
        if isinstance(part, int):
            ids.append(part)
            contents.append(part)
            continue
        values, is_span = part
        if is_span:
            spans.append((len(ids), len(ids) + len(values)))
        for row, value in enumerate(values):
            positions.append(len(ids))
            rows.append([value, 0.0])
            ids.append(0)
            contents.append((tuple(values), row) if is_span else (value,))
    rope = None
    if has_axes:
        grids = [[1, 2, 2 * len(part[0])] for part in prompt if not isinstance(part, int)]
        rope = mrope_positions(len(ids), positions, grids)
        contents = [*zip(contents, rope.T.tolist(), strict=True)]
    return ids, PromptEmbeds(positions, torch.tensor(rows).reshape(-1, 2), None, rope, spans), contents


def _num_shared(first: tuple[list[int], PromptEmbeds], second: tuple[list[int], PromptEmbeds | None]) -> int:
    manager = make_manager(block_size=2, num_blocks=64)
    _publish(manager, *first)
    ids, embeds = second
    return manager.allocate("b", token_ids=ids if embeds is None else embeds.ids(ids, 0)).num_tokens


def _publish(manager: PagedKvCacheManager, ids: list[int], embeds: PromptEmbeds) -> None:
    handle = manager.allocate("a", len(ids))
    manager.advance(handle, len(ids))
    manager.commit(handle, embeds.ids(ids, 0))


@settings(max_examples=60, deadline=None)
@given(_PROMPT, _PROMPT, st.booleans())
@example([([0, 1, 0, 0], False), 1], [([0, 1, 0, 1], False), 1], False)
@example([([0, 1, 0, 0], True), 1], [([0, 1, 0, 1], True), 1], False)
def test_sequences_share_exactly_what_is_equal(first: _Prompt, second: _Prompt, has_axes: bool) -> None:
    """Blocks are shared if and only if tokens, rows and rotary positions up to their ends are equal, and the rows that
    a span's tokens see."""
    a, b = (_build(prompt, has_axes=has_axes) for prompt in (first, second))
    same = 0
    while same < min(len(a[2]), len(b[2])) and a[2][same] == b[2][same]:
        same += 1
    assert _num_shared(a[:2], b[:2]) == min(same // 2 * 2, len(b[0]) - 1)
    if b[1].positions:
        assert _num_shared(b[:2], (b[0], None)) <= b[1].positions[0]


def test_a_row_elsewhere_in_the_grid_is_another() -> None:
    """The same rows as an image of 1 x 4 and of 2 x 2: only the first two stand at the same places."""
    wide, square = (
        ([0] * 5, PromptEmbeds(range(4), torch.ones(4, 2), rope_positions=mrope_positions(5, range(4), [grid])))
        for grid in ([1, 2, 8], [1, 4, 4])
    )
    assert _num_shared(wide, wide) == 4
    assert _num_shared(wide, square) == 2


def test_equal_last_bits_of_hashes_share_nothing() -> None:
    """The index hashes 31 bits of a row; all of them are compared."""
    manager = make_manager(block_size=2, num_blocks=64)
    ids = [content_id(bytes([1, 2, 3, 4, high] + [0] * 11)) for high in (0, 1)]
    for index, (first, second) in enumerate([ids, ids[::-1], [ids[0], ids[0]]]):
        handle = manager.allocate(f"a{index}", 2, token_ids=[first, second, 5])
        assert handle.num_tokens == 0
        manager.extend(handle, 2)
        manager.commit(handle, [first, second])
    short = -1 - (int.from_bytes(bytes([1, 2, 3, 4]), "little") & 0x7FFFFFFF)
    assert manager.allocate("text", token_ids=[short, short, 5]).num_tokens == 0
    assert manager.allocate("b", token_ids=[*ids, 5]).num_tokens == 2
    manager.check_integrity()


def test_ids_of_neither_are_refused() -> None:
    manager = make_manager(block_size=2, num_blocks=64)
    for wrong in (-(1 << 40), -(1 << 100), 1 << 31):
        handle = manager.allocate(f"a{wrong}")
        manager.extend(handle, 2)
        with pytest.raises(InvalidInputError, match="32 bits"):
            manager.commit(handle, [content_id(bytes(16)), wrong])
