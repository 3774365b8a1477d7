"""Patterns of names match as `re.match` does, in bounded time, or are refused by name."""

import re
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.errors import CheckpointError, UnsupportedError
from paged.models.loading.hf_config import HfConfig
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


@pytest.mark.parametrize("expression", _HARD)
def test_none_takes_long(expression: str) -> None:
    """Through every key that holds some: milliseconds a name, or refused by name."""
    start = time.perf_counter()
    for config in _configurations(expression):
        with suppress(UnsupportedError):
            quantization = read_quantization(HfConfig({"quantization_config": config}, "config.json"))
            assert quantization is not None
            quantization.layout("a" * 100)
    assert time.perf_counter() - start < 2


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
