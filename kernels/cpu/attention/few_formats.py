"""Formats of keys and values in the numba kernel of few queries: the steps that read them.

A format is plain, in the dtype of the queries, or codes with scales; see `few_queries.attention_by`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import kernel as nb
from ..code_pairs import (
    PAIR_CODES,
    QUERY_COPIES,
    PairCodes,
    columns_of_sums,
    pair_products,
    query_lanes,
    weighted_pair_sums,
)
from ..code_vectors import CODES, NUMBERS, Codes, code_products, weighted_code_sums
from ..vectors import (
    HAS_WIDE_VECTORS,
    LANES,
    fill,
    load_part,
    load_vector,
    multiply_add,
    prefetch_row,
    store_part,
    store_products,
    sum_of,
    weighted_sums,
)

# Keys whose scores a thread holds at once. With 16 rows of head_dim 128, scores and accumulators take 12 KB.
_KEYS = 64
# Pointer to a thread's copy of bfloat16 queries. With wide vectors the copy is bfloat16, because sums of pairs fit into
# registers; else it is float32.
_copied_bfloats = nb.bfloats if HAS_WIDE_VECTORS else nb.floats
_add_to_one, _add_to_two, _add_to_four = weighted_sums(1), weighted_sums(2), weighted_sums(4)
Step = Callable[..., Any]


class Format(NamedTuple):
    """A format of keys and of values: the steps that read them, and pointers to what they read.

    Attributes:
        copy_query: copies a query.
        query_copies: numbers of the copy of each number of a query.
        fetch: prefetches keys or values.
        fetch_scales: prefetches their scales.
        rows_scored: returns how many of a head's last rows `score` takes next.
        score: computes products of queries and keys.
        scale_weights: multiplies the weights of keys before `weigh`.
        rows_weighed: returns how many of a head's last rows `weigh` takes next.
        weigh: adds `columns` weighted values of keys.
        columns: values of a row that are weighed together.
        copy_sums: writes a row of sums, times a factor.
        unit: factor of all numbers, besides that of a table, for scores and for `copy_sums`.
        bfloats, floats: make pointers to a cache and to copied queries beside queries of this dtype.
        scales: makes a pointer to scales.
    """

    copy_query: Step
    query_copies: int
    fetch: Step
    fetch_scales: Step
    rows_scored: Step
    score: Step
    scale_weights: Step
    rows_weighed: Step
    weigh: Step
    columns: int
    copy_sums: Step
    unit: float
    bfloats: tuple[Any, Any]
    floats: tuple[Any, Any]
    scales: Any

    @property
    def query_floats(self) -> int:
        """Return how many float32 numbers of scratch memory a copied query takes for each of its numbers."""
        return -(-self.query_copies // 2)  # several copies are bfloat16


@nb.device_function
def _fetch_rows(rows, start, stride, head_stride, num_heads, size, begin, end):
    """Prefetch the rows of a range of keys that are `stride` apart. Adjacent heads are one row, and adjacent keys."""
    start += begin * stride
    num_keys = end - begin
    if head_stride == size:
        size *= num_heads
        num_heads = 1
    if stride == size:
        size *= num_keys
        num_keys = 1
    for key in range(num_keys):
        for head in range(num_heads):
            prefetch_row(rows, start + key * stride + head * head_stride, size)


def _fetch_step(numbers_per_element: int) -> Step:
    """Return the step that prefetches rows with so many numbers in an element, or scales of so many."""

    @nb.device_function
    def fetch(rows, start, stride, head_stride, num_heads, size, begin, end):
        _fetch_rows(rows, start, stride, head_stride, num_heads, size // numbers_per_element, begin, end)

    return fetch


@nb.device_function
def _fetch_row_scales(scales, start, stride, head_stride, num_heads, _size, begin, end):
    _fetch_rows(scales, start, stride, head_stride, num_heads, 1, begin, end)


@nb.inlined
def _fetch_no_scales(_scales, _start, _stride, _head_stride, _num_heads, _size, _begin, _end):
    pass


@nb.inlined
def _copy_query(q, start, queries, to, size):
    for i in range(0, size, LANES):
        store_part(queries, to + i, load_part(q, start + i, size - i), size - i)


@nb.device_function
def _copy_even_and_odd(q, start, queries, to, size):
    """Copy a query with the even ones of 32 numbers before the odd ones."""
    for chunk in range(0, size, 2 * LANES):
        for i in range(LANES):
            queries[to + chunk + i] = nb.load(q, start + chunk + 2 * i)
            queries[to + chunk + LANES + i] = nb.load(q, start + chunk + 2 * i + 1)


@nb.device_function
def _copy_in_turn(sums, start, factor, out, to, size):
    """Undo the order of `_copy_even_and_odd`, times a factor."""
    for chunk in range(0, size, 2 * LANES):
        for i in range(LANES):
            nb.store(out, to + chunk + 2 * i, sums[start + chunk + i] * factor)
            nb.store(out, to + chunk + 2 * i + 1, sums[start + chunk + LANES + i] * factor)


def _copy_query_of_pairs(numbers: int) -> Step:
    """Return the step that copies a query in the order of `pair_products`."""
    lanes = tuple(query_lanes(numbers))

    @nb.device_function
    def copy_query(q, start, queries, to, size):
        for chunk in range(0, size, numbers):
            for i in range(numbers * QUERY_COPIES):
                queries[to + chunk * QUERY_COPIES + i] = q[start + chunk + lanes[i]]

    return copy_query


def _copy_pair_sums(numbers: int) -> Step:
    """Return the step that undoes the order of `weighted_pair_sums`, times a factor."""
    columns = tuple(columns_of_sums(numbers))

    @nb.device_function
    def copy_sums(sums, start, factor, out, to, size):
        for chunk in range(0, size, numbers):
            for i in range(numbers):
                nb.store(out, to + chunk + columns[i], sums[start + chunk + i] * factor)

    return copy_sums


def _scores_by(codes: Codes, num_rows: int) -> Step:
    """Return a function that computes the products of `num_rows` queries with keys in codes."""
    num_together = LANES // num_rows  # as many vectors of sums fit into registers
    products, products_of_one = code_products(codes, num_together, num_rows), code_products(codes, 1, num_rows)

    @nb.inlined
    def score(queries, query, cache, key, stride, scales, place, scale_stride, num_keys, size, scratch, to):
        end_of_tiles = num_keys // num_together * num_together
        for i in range(0, end_of_tiles, num_together):
            products(
                queries, query, cache, key + i * stride, stride, scales, place + i * scale_stride, scale_stride, size,
                scratch, to + i, _KEYS,
            )  # fmt: skip
        for i in range(end_of_tiles, num_keys):
            products_of_one(
                queries, query, cache, key + i * stride, stride, scales, place + i * scale_stride, scale_stride, size,
                scratch, to + i, _KEYS,
            )  # fmt: skip

    return score


def _pair_scores_by(pair_codes: PairCodes, numbers: int, num_rows: int) -> Step:
    """Return a function that computes the products of `num_rows` queries with keys as pairs, 16 keys at once."""
    products = pair_products(pair_codes, numbers, num_rows)

    @nb.inlined
    def score(queries, query, cache, key, stride, scales, place, scale_stride, num_keys, size, scratch, to):
        for i in range(0, num_keys, LANES):
            products(
                queries, query, cache, key + i * stride, stride, scales, place + i * scale_stride, scale_stride, size,
                scratch, to + i, _KEYS, min(LANES, num_keys - i),
            )  # fmt: skip

    return score


def _score_step(scores_by: Callable[[int], Step]) -> Step:
    """Return the step that computes scores of keys in codes. scores_by: returns a function for a number of rows."""
    score_one, score_two, score_four = (scores_by(num_rows) for num_rows in (1, 2, 4))

    @nb.inlined
    def score(queries, query, cache, key, stride, scales, place, scale_stride, num_keys, size, scratch, to, num_rows):
        """Compute the products of 1, 2 or 4 queries with keys that are `stride` bytes apart; see `code_products`."""
        if num_rows == 4:
            score_four(queries, query, cache, key, stride, scales, place, scale_stride, num_keys, size, scratch, to)
        elif num_rows == 2:
            score_two(queries, query, cache, key, stride, scales, place, scale_stride, num_keys, size, scratch, to)
        else:
            score_one(queries, query, cache, key, stride, scales, place, scale_stride, num_keys, size, scratch, to)

    return score


def _weigh_step(sums_of: Callable[[int], Any], numbers_per_byte: int, num_scales: int) -> Step:
    """Return the step that adds weighted values in codes.

    sums_of: returns the intrinsic for a number of rows; see `weighted_code_sums`.
    num_scales: scales of 32 numbers.
    """
    add_to_one, add_to_two, add_to_four = sums_of(1), sums_of(2), sums_of(4)

    @nb.inlined
    def weigh(
        scratch,
        sums,
        step,
        cache,
        value,
        stride,
        scales,
        place,
        scale_stride,
        column,
        num_keys,
        size,
        weights,
        num_rows,
    ):
        """Add weighted values of keys, from a column on, to the sums of 1, 2 or 4 rows; see `_weigh`."""
        value += column // numbers_per_byte
        place = place + column // NUMBERS * num_scales
        if num_rows == 4:
            add_to_four(
                scratch, sums, step, weights, _KEYS, cache, value, stride, scales, place, scale_stride, num_keys
            )
        elif num_rows == 2:
            add_to_two(scratch, sums, step, weights, _KEYS, cache, value, stride, scales, place, scale_stride, num_keys)
        else:
            add_to_one(scratch, sums, step, weights, _KEYS, cache, value, stride, scales, place, scale_stride, num_keys)

    return weigh


def _scale_step(unit: float) -> Step:
    """Return the step that multiplies weights by their values' scales, of which each row has one, and by a unit."""

    @nb.device_function
    def scale_weights(scratch, weights, num_rows, scales, place, stride, num_keys):
        for key in range(num_keys):
            scale = scales[place + key * stride] * np.float32(unit)
            for row in range(num_rows):
                scratch[weights + row * _KEYS + key] *= scale

    return scale_weights


@nb.inlined
def _keep_weights(_scratch, _weights, _num_rows, _scales, _place, _stride, _num_keys):
    pass


@nb.inlined
def _score(queries, query, cache, key, stride, num_keys, size, scratch, to):
    """Compute the products of a query with keys that are `stride` apart."""
    end_of_vectors, end_of_tiles = size // LANES * LANES, num_keys // LANES * LANES
    for index in range(0, end_of_tiles, LANES):
        store_products(queries, query, cache, key + index * stride, stride, end_of_vectors, scratch, to + index)
    for index in range(end_of_tiles, num_keys):
        products = fill(np.float32(0))
        for i in range(0, end_of_vectors, LANES):
            products = multiply_add(
                load_vector(queries, query + i), load_vector(cache, key + index * stride + i), products
            )
        scratch[to + index] = sum_of(products)
    if end_of_vectors < size:
        for index in range(num_keys):
            for i in range(end_of_vectors, size):
                scratch[to + index] += nb.load(queries, query + i) * nb.load(cache, key + index * stride + i)


@nb.device_function
def _rows_together(num_rows):
    """Return how many of a head's last `num_rows` rows share the next reads of values.

    More sums than 16 vectors of 512 bits do not fit into registers.
    """
    if HAS_WIDE_VECTORS and num_rows >= 4:
        return 4
    if HAS_WIDE_VECTORS and num_rows >= 2:
        return 2
    return 1


@nb.inlined
def _weigh(scratch, sums, step, cache, value, stride, num_keys, size, weights, num_rows):
    """Add the weighted values of keys, `stride` apart, to the sums of 1, 2 or 4 rows.

    It adds the first 32 elements of `size`, or all if there are fewer.
    """
    if size >= 2 * LANES and num_rows == 4:
        _add_to_four(scratch, sums, step, weights, _KEYS, cache, value, stride, num_keys)
    elif size >= 2 * LANES and num_rows == 2:
        _add_to_two(scratch, sums, step, weights, _KEYS, cache, value, stride, num_keys)
    elif size >= 2 * LANES:
        _add_to_one(scratch, sums, step, weights, _KEYS, cache, value, stride, num_keys)
    else:
        for row in range(num_rows):
            for i in range(0, size, LANES):
                total = load_part(scratch, sums + row * step + i, size - i)
                for key in range(num_keys):
                    values = load_part(cache, value + key * stride + i, size - i)
                    total = multiply_add(fill(scratch[weights + row * _KEYS + key]), values, total)
                store_part(scratch, sums + row * step + i, total, size - i)


@nb.inlined
def _one_row(_num_rows):
    """Return how many rows share the next reads of keys: plain ones are read again, from the L1 cache."""
    return 1


@nb.inlined
def _score_unscaled(
    queries, query, cache, key, stride, _scales, _place, _scale_stride, num_keys, size, scratch, to, _num_rows
):
    _score(queries, query, cache, key, stride, num_keys, size, scratch, to)


@nb.inlined
def _weigh_unscaled(
    scratch, sums, step, cache, value, stride, _scales, _place, _scale_stride, column, num_keys, size, weights, num_rows
):
    _weigh(scratch, sums, step, cache, value + column, stride, num_keys, size, weights, num_rows)


@nb.inlined
def _copy_scaled(source, start, factor, target, to, size):
    for i in range(0, size, LANES):
        scaled = multiply_add(load_part(source, start + i, size - i), fill(factor), fill(np.float32(0)))
        store_part(target, to + i, scaled, size - i)


def _format_of(codes: Codes) -> Format:
    """Return the steps for rows in codes, which are read as bytes and multiplied as float32."""
    pointers = nb.uint8s, nb.floats
    copy_query, copy_sums = _copy_query, _copy_scaled
    if codes.numbers_per_byte == 2:
        copy_query, copy_sums = _copy_even_and_odd, _copy_in_turn
    fetch_scales, scale_weights, unit = _fetch_row_scales, _scale_step(codes.unit), 1.0
    if codes.group_scales is not None:
        fetch_scales, scale_weights, unit = _fetch_step(NUMBERS // codes.num_scales), _keep_weights, codes.unit
    return Format(
        copy_query=copy_query,
        query_copies=1,
        fetch=_fetch_step(codes.numbers_per_byte),
        fetch_scales=fetch_scales,
        rows_scored=_rows_together,
        score=_score_step(partial(_scores_by, codes)),
        scale_weights=scale_weights,
        rows_weighed=_rows_together,
        weigh=_weigh_step(partial(weighted_code_sums, codes), codes.numbers_per_byte, codes.num_scales),
        columns=NUMBERS,
        copy_sums=copy_sums,
        unit=unit,
        bfloats=pointers,
        floats=pointers,
        scales=codes.scales,
    )


def _format_of_pairs(pair_codes: PairCodes, numbers: int) -> Format:
    """Return the steps for rows of 4-bit codes beside bfloat16 queries, `numbers` at once."""
    pointers, codes = (nb.uint8s, nb.bfloats), pair_codes.codes
    return Format(
        copy_query=_copy_query_of_pairs(numbers),
        query_copies=QUERY_COPIES,
        fetch=_fetch_step(codes.numbers_per_byte),
        fetch_scales=_fetch_step(NUMBERS // codes.num_scales),
        rows_scored=_rows_together,
        score=_score_step(partial(_pair_scores_by, pair_codes, numbers)),
        scale_weights=_keep_weights,
        rows_weighed=_rows_together,
        weigh=_weigh_step(
            partial(weighted_pair_sums, pair_codes, numbers, _KEYS), codes.numbers_per_byte, codes.num_scales
        ),
        columns=numbers,
        copy_sums=_copy_pair_sums(numbers),
        unit=codes.unit,
        bfloats=pointers,
        floats=pointers,
        scales=codes.scales,
    )


# Formats by names of `KvKind`; "" is the dtype of the queries, without scales.
FORMATS = {name: _format_of(codes) for name, codes in CODES.items()}
# Formats of 4 bits beside bfloat16 queries, by numbers that are read at once, and names.
FORMATS_OF_PAIRS = {
    numbers: {name: _format_of_pairs(pair_codes, numbers) for name, pair_codes in PAIR_CODES.items()}
    for numbers in (128, 64)
}
FORMATS[""] = Format(
    copy_query=_copy_query,
    query_copies=1,
    fetch=_fetch_step(1),
    fetch_scales=_fetch_no_scales,
    rows_scored=_one_row,
    score=_score_unscaled,
    scale_weights=_keep_weights,
    rows_weighed=_rows_together,
    weigh=_weigh_unscaled,
    columns=NUMBERS,
    copy_sums=_copy_scaled,
    unit=1.0,
    bfloats=(nb.bfloats, _copied_bfloats),
    floats=(nb.floats, nb.floats),
    scales=nb.floats,
)
