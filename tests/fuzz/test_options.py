"""Any value for any option of a cache or of a model to load: refused by name, or taken for what it means."""

from typing import Any

import pytest
from hypothesis import strategies as st

from paged import PagedError, PagedKvCacheConfig, PagedKvCacheManager
from paged.errors import InvalidInputError
from paged.models.registry import load_model
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.values import VALUES, value

SIZES = ("num_layers", "num_kv_heads", "head_dim", "block_size", "num_blocks", "num_swap_blocks", "host_cache_bytes")
LIMITS = ("max_seq_len", "sliding_window")
OTHERS = "low_watermark high_watermark max_pinned_fraction enable_prefix_cache prefix_hash dtype device".split()
OF_MODELS = (
    *("device", "dtype", "num_blocks", "block_size", "max_seq_len", "num_swap_blocks", "enable_prefix_cache"),
    *("kv_cache_dtype", "max_loras", "max_lora_rank", "cuda_graphs", "host_cache_bytes"),
)


@fuzz(st.dictionaries(st.sampled_from([*SIZES, *LIMITS, *OTHERS]), VALUES, min_size=1, max_size=2), examples=150)
def test_cache_config(case: dict[str, str]) -> None:
    """A configuration is refused, or holds Python's own numbers."""
    sizes: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2}
    try:
        config = PagedKvCacheConfig(**sizes | {name: value(expression) for name, expression in case.items()})
    except PagedError:
        return
    assert {type(getattr(config, name)) for name in SIZES} == {int}
    assert {type(getattr(config, name)) for name in LIMITS} <= {int, type(None)}
    assert 0 <= config.high_watermark <= config.low_watermark <= 1
    assert 0 <= config.num_pinned_blocks < config.num_blocks
    assert type(config.enable_prefix_cache) is bool
    if max(getattr(config, name) for name in SIZES if name != "num_kv_heads") < 2000:
        try:
            PagedKvCacheManager(config).check_integrity()
        except PagedError:
            return


class _ReadError(Exception):
    """The first file would be read now."""


@fuzz(st.tuples(st.sampled_from(OF_MODELS), VALUES), examples=150)
def test_load_options(case: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a caller says of a model to load is refused before a file is read, or taken."""

    def read(folder: Any) -> Any:
        raise _ReadError

    monkeypatch.setattr("paged.models.registry.read_model_config", read)
    name, expression = case
    with pytest.raises((_ReadError, InvalidInputError)) as caught:
        load_model("nowhere", **{name: value(expression)})
    assert caught.type is _ReadError or str(caught.value).startswith(name)
