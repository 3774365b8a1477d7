"""What a caller may say of a model to load, in which types, and that nothing is read where one is wrong."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.errors import InvalidInputError
from paged.executors.llm_executor import LlmExecutor
from paged.kernels.core.device import Device
from paged.models import cache_sizes
from paged.models.loading.load_options import LoadOptions
from paged.models.registry import load_model


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_dtypes_by_name(name: str, llama_folder: Path) -> None:
    dtype = getattr(torch, name)
    for given in (name, f"torch.{name}", dtype):
        model = load_model(llama_folder, dtype=given, num_blocks=4)
        assert model.dtype == model.kv_manager.k_cache(0).dtype == dtype
    executor = LlmExecutor.from_pretrained(llama_folder, dtype=name, kv_cache_dtype="float8_e4m3fn", num_blocks=4)
    assert executor.kv_manager is not None
    assert (executor.info().dtype, executor.kv_manager.k_cache(0).dtype) == (dtype, torch.float8_e4m3fn)
    assert LoadOptions(kv_cache_dtype="fp8").kv_cache_dtype == torch.float8_e4m3fn
    assert LoadOptions(kv_cache_dtype="fp8_e5m2").kv_cache_dtype == torch.float8_e5m2
    assert LoadOptions(kv_cache_dtype="torch.int8").kv_cache_dtype == torch.int8
    assert LoadOptions(state_dtype="auto").state_dtype == torch.float32


def test_block_size_of_the_device(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arch, expected in {"cpu": 16, "sm_80": 16, "sm_89": 16, "sm_90": 64, "sm_103": 64, "sm_120": 16}.items():
        monkeypatch.setattr(cache_sizes, "device_of", lambda _, arch=arch: Device(arch, 100))
        for given, block_size in ((None, expected), (32, 32)):
            model = load_model(llama_folder, device="cpu", num_blocks=4, block_size=given)
            assert model.kv_manager.config.block_size == block_size, arch


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("device", ["gpu", "", "meta", 0, 1.5, {}, "cuda:99", "cpu:x", ["cpu"]]),
        ("dtype", ["half", "fp8", "int8", "float64", torch.int8, torch.float8_e4m3fn, 16, {}, "Tensor"]),
        ("kv_cache_dtype", ["fp7", torch.uint8, 8, "bfloat16"]),
        ("state_dtype", ["float16", "fp8", torch.uint8, 16]),
        ("num_blocks", ["12", 1.0, 0, -1, True, {}, [4], 2**31, float("nan")]),
        ("block_size", ["16", 16.0, 0, True, {}, 2**40]),
        ("max_seq_len", ["12", 1.5, 0, -1, True, 129, {}]),
        ("num_swap_blocks", ["0", 0.0, -1, None, False]),
        ("max_pinned_fraction", ["0.5", -0.1, 1.5, None]),
        ("enable_prefix_cache", ["yes", 1, 0, None, []]),
        ("max_loras", ["8", 8.0, 0, None, True]),
        ("max_lora_rank", ["8", 8.0, 0, None, True]),
        ("cuda_graphs", ["yes", 1, 2.0, [0], ["1"], [1.0], [True], {"a": 1}, b"x", range(10**9)]),
    ],
)
def test_arguments_that_are_refused_by_name(name: str, values: list[Any], llama_folder: Path) -> None:
    load_model(llama_folder, num_blocks=4)
    for wrong in values:
        for load in (load_model, LlmExecutor.from_pretrained):
            with pytest.raises(InvalidInputError, match=f"^{name}"):
                load(llama_folder, **{name: wrong})


@pytest.mark.parametrize("path", [None, 5, 1.5, b"x", [], {}, "a\0b"])
def test_paths_that_are_none(path: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^path: "):
        load_model(path)


def test_help_names_every_option() -> None:
    words = set(re.findall(r"\w+", str(LlmExecutor.from_pretrained.__doc__)))
    assert {field.name for field in fields(LoadOptions)} <= words
