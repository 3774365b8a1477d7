"""Whatever a caller says of a model to load is refused before a file is read, or taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from paged.errors import InvalidInputError
from paged.models.registry import load_model
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.values import VALUES, value

NAMES = (
    *("device", "dtype", "num_blocks", "block_size", "max_seq_len", "num_swap_blocks", "enable_prefix_cache"),
    *("kv_cache_dtype", "max_loras", "max_lora_rank", "cuda_graphs"),
)
CASES = st.fixed_dictionaries({"name": st.sampled_from(NAMES), "given": VALUES})


class _ReadError(Exception):
    """The first file would be read now."""


@fuzz(CASES, examples=150)
def test_load_options(case: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def read(folder: Path) -> Any:
        raise _ReadError

    monkeypatch.setattr("paged.models.registry.read_model_config", read)
    options: dict[str, Any] = {case["name"]: value(case["given"])}
    with pytest.raises((_ReadError, InvalidInputError)) as caught:
        load_model("nowhere", **options)
    assert caught.type is _ReadError or str(caught.value).startswith(case["name"])
