"""Patterns of names match as `re.match` does, in bounded time, or are refused by name."""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.errors import CheckpointError, UnsupportedError
from paged.models.loading.hf_config import HfConfig
from paged.models.quantization import name_patterns
from paged.models.quantization.name_patterns import NamePattern
from paged.models.quantization.read import read_quantization
from tests.models.quantization.packers import FORMATS

_PIECES = r"""a b ab . \. \d [ab] [^a] [a-c1] x? (?:a|ab) (a|b|) a* b+ .* .+? \w+ (?:ab)* (?:a*b)* (?:a*)* a{2,3}
    (?:a|b){2} (?:a?){3,} (?:(?:a|)b){0,2} (?=a) (?!b) (?=.*b) (?<=a) (?<!ab) \b \B ^ $ \Z \D \s""".split()
_HARD = [
    "(a+)+$",
    "(?:a|a)*(?:a|aa)*x",
    ".*" * 50 + "x",
    "(?:a{1,50}){1,50}b",
    "(?:a?){60}a{60}b",
    "(?:a|a)" * 100 + "b",
]


@given(st.lists(st.sampled_from(_PIECES), max_size=6).map("".join), st.text("ab.1x ", max_size=9))
def test_as_re_matches(expression: str, name: str) -> None:
    assert NamePattern(expression).match(name) == (re.match(expression, name) is not None)


@given(st.sampled_from(["b", "a.b", r"a\.\d", "a.*", ""]), st.text("ab.1", max_size=9))
def test_modules(expression: str, name: str) -> None:
    """As transformers reads `modules_to_not_convert`."""
    plain = re.escape(expression)
    whole = rf"(?:{expression})(?:(?<=\.)|(?=\.|$))|.*{plain}$|.*\.{plain}\."
    assert NamePattern(expression, is_module=True).match(name) == (re.match(whole, name) is not None)


def _configurations(expression: str) -> list[dict[str, object]]:
    ignored = {"ignore": [f"re:{expression}"]}
    return [
        FORMATS["awq"].config | {"modules_to_not_convert": [expression]},
        FORMATS["gptq"].config | {"dynamic": {f"-:{expression}": {}}},
        FORMATS["pack-quantized"].config | ignored,
    ]


def _matched_within(limit: int, match: Callable[[], object]) -> int:
    """How many sets of positions a call computes; it is ended at the limit, as one that takes 2^60 would not end."""
    num_sets, ends = 0, name_patterns._ends

    def counted(*args: Any) -> int:
        nonlocal num_sets
        num_sets += 1
        assert num_sets <= limit
        return ends(*args)

    with mock.patch.object(name_patterns, "_ends", counted):
        match()
    return num_sets


@pytest.mark.parametrize("expression", _HARD)
def test_none_takes_long(expression: str) -> None:
    """Through every key that holds some: few steps a name, or refused by name. Its cost is the most that a name of 63
    characters takes, and what all patterns of a configuration may cost has a limit."""
    for config in _configurations(expression):
        with suppress(UnsupportedError):
            quantization = read_quantization(HfConfig({"quantization_config": config}, "config.json"))
            assert quantization is not None
            assert _matched_within(name_patterns._MAX_COST, partial(quantization.layout, "a" * 63)) > 0
    pattern = NamePattern(expression)
    assert _matched_within(pattern.cost, partial(pattern.match, "a" * 63)) > 0


@given(st.lists(st.sampled_from(_PIECES), max_size=6).map("".join), st.text("ab.1x ", max_size=63))
def test_a_cost_is_the_most_that_a_match_takes(expression: str, name: str) -> None:
    pattern = NamePattern(expression)
    assert _matched_within(pattern.cost + 1, partial(pattern.match, name)) > 0


@pytest.mark.parametrize("expression", [r"(a)\1", "(?i:a)", "(?>a)", "a*+", "(((a*b)*c)*d)*" * 9])
def test_what_is_not_matched_is_named(expression: str) -> None:
    for config in _configurations(expression):
        with pytest.raises(UnsupportedError, match=re.escape(expression.replace("\\", "\\\\")[:9])):
            read_quantization(HfConfig({"quantization_config": config}, "config.json"))


def test_all_together() -> None:
    config = FORMATS["awq"].config | {"modules_to_not_convert": [f"(?:a|b{number})+" for number in range(999)]}
    with pytest.raises(UnsupportedError, match=r"999 patterns|1000 patterns|1001 patterns"):
        read_quantization(HfConfig({"quantization_config": config}, "config.json"))
    with pytest.raises(CheckpointError, match="not a pattern"):
        NamePattern("(?<=a*)b").check("key")
