"""Counts, token ids, names and namespaces: what is one, and what is not."""

from typing import Any

import numpy as np
import pytest
import torch

from paged import InvalidInputError, UnifiedBatch, UnifiedBatchItem
from paged.kernels.core.errors import as_int
from paged.seq_id import as_namespace, as_seq_id
from paged.token_ids import as_token_ids
from tests.fuzz.values import Hostile


@pytest.mark.parametrize(
    "seven", [7, np.int8(7), np.uint64(7), np.array(7), torch.tensor(7), torch.tensor(7).to(torch.uint8)]
)
def test_counts_of_any_integer_type(seven: Any) -> None:
    assert type(as_int("n", seven)) is int
    assert as_int("n", seven, low=7, high=7) == 7
    assert as_token_ids("ids", [seven, 1]) == [7, 1]
    for limits in ({"low": 8}, {"high": 6}):
        with pytest.raises(InvalidInputError, match=r"n: .*expected an integer"):
            as_int("n", seven, **limits)


def test_what_is_no_integer() -> None:
    arrays = np.array([7]), torch.tensor([7]), torch.tensor(7.0), torch.tensor(True)
    for other in (True, np.True_, 7.0, np.float32(7), float("nan"), "7", b"7", None, [7], 7 + 0j, Hostile(), *arrays):
        with pytest.raises(InvalidInputError):
            as_int("n", other)
        with pytest.raises(InvalidInputError):
            as_token_ids("ids", [1, other])
    with pytest.raises(InvalidInputError, match="an object of type int"):
        as_int("n", 10**5000, high=5)  # has no repr


def test_token_ids_are_read_once_and_no_further_than_needed() -> None:
    read = []

    def endless() -> Any:
        while True:
            read.append(1)
            yield 1

    with pytest.raises(InvalidInputError, match="at most 4 token ids"):
        as_token_ids("ids", endless(), max_length=4)
    assert len(read) == 5
    for endless_range in (range(10**9), range(10**30)):
        with pytest.raises(InvalidInputError):
            as_token_ids("ids", endless_range)
    item = UnifiedBatchItem("a", (i for i in (1, 2)))
    assert UnifiedBatch([item]).total_q_tokens == UnifiedBatch([item]).total_q_tokens == 2
    given = [1, 2]
    assert as_token_ids("ids", given) is given


def test_what_is_no_list_of_token_ids() -> None:
    for other in ({1: 2}, {1}, "12", b"12", [[1]], torch.ones(2, 2, dtype=torch.int64), 3, None, Hostile()):
        with pytest.raises(InvalidInputError):
            as_token_ids("ids", other)


def test_names_and_namespaces() -> None:
    assert as_seq_id("id", "1") == "1"
    assert as_seq_id("id", np.int64(1)) == 1
    assert type(as_seq_id("id", np.str_("a"))) is str
    for other in (True, 1.0, None, (1,), [], b"a", 10**5000, Hostile()):
        with pytest.raises(InvalidInputError, match="id: "):
            as_seq_id("id", other)
    for namespace in (None, "a", 1, ("model", ("salt", 2)), b"x", frozenset("ab")):
        assert as_namespace("namespace", namespace) == namespace
    assert repr(as_namespace("namespace", ("m", np.int64(1)))) == "('m', 1)"
    for other in (True, 1.0, ("m", True), ("m", (1.0,)), [], frozenset({True}), float("nan"), Hostile(), int):
        with pytest.raises(InvalidInputError, match="namespace: "):
            as_namespace("namespace", other)
