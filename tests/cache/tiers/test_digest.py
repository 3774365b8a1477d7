"""The digest of a model in a cache folder: whatever changes K/V changes it."""

import builtins
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import LlmExecutor, PagedError, PagedKvCacheManager
from paged.cache.tiers.folder import CacheFolder
from paged.errors import CheckpointError
from paged.models.loading.load_options import LoadOptions
from paged.models.paged_lm import PagedCausalLM
from paged.models.parallel import fingerprint
from paged.models.parallel.fingerprint import LEFT_OUT
from paged.models.registry import load_model
from paged.serving.command_line.cli import RECALL
from tests.models.drafts.heads import save_head
from tests.models.edits import WEIGHTS, edit_config
from tests.models.families import FAMILIES, save_checkpoint, tokens
from tests.models.lora.folders import Adapter

PROMPT = tokens(24)
# Of the largest element; another rotation or weight changes more than a hundredth of it.
ROUNDING = 1e-4
SIZES: dict[str, Any] = {"num_blocks": 16, "block_size": 4}


class Loaded:
    """A model with a cache folder: the digest of its blocks, and its K/V of a prompt."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.model: PagedCausalLM = load_model(folder, cache_folder=folder.parent / "cache", **SIZES | options)
        files = self.model.kv_manager.files
        assert files is not None
        self.digest = files.digest

    def keys_and_values(self) -> list[torch.Tensor]:
        self.model.prefill("a", PROMPT)
        manager = self.model.kv_manager
        handle = manager.get_handle("a")
        assert handle is not None
        rows = []
        for layer in range(self.model.network.config.num_layers):
            rows += [tensor.float() for tensor in manager.tensors.read(layer, handle.blocks, 0, len(PROMPT))]
        self.model.release("a")
        return rows


def assert_safe(before: Loaded, after: Loaded) -> None:
    """Where a file of one is a hit of the other, it holds the same within rounding."""
    if before.digest == after.digest:
        for expected, rows in zip(before.keys_and_values(), after.keys_and_values(), strict=True):
            difference = (rows - expected).abs().max() / expected.abs().max()
            assert difference <= ROUNDING, f"other K/V, by {difference:.1e} of the largest"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose weights are in two files, one of them in a folder below."""
    folder = tmp_path_factory.mktemp("digest") / "model"
    save_checkpoint(FAMILIES["llama"], folder, max_shard_size="150KB")
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    shards = sorted(set(values["weight_map"].values()))
    assert len(shards) > 1
    (folder / "below").mkdir()
    (folder / shards[0]).rename(folder / "below" / shards[0])
    values["weight_map"] = {
        name: f"below/{file}" if file == shards[0] else file for name, file in values["weight_map"].items()
    }
    index.write_text(json.dumps(values))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def test_a_copy_has_the_same_digest(saved: Path, folder: Path) -> None:
    """Wherever it lies and whenever it was written, with another tokenizer."""
    expected = Loaded(saved).digest
    for file in folder.rglob("*.*"):
        os.utime(file, (1, 1))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("new")
    assert Loaded(folder).digest == expected


@pytest.mark.parametrize("seed", range(3))
def test_any_byte_of_the_weights_changes_it(seed: int, saved: Path, folder: Path) -> None:
    draw = random.Random(seed)
    expected = Loaded(saved).digest
    file = draw.choice(sorted(folder.rglob("*.safetensors")))
    content = bytearray(file.read_bytes())
    first = 8 + int.from_bytes(content[:8], "little")
    content[draw.randrange(first, len(content))] ^= 1 << draw.randrange(8)
    status = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert Loaded(folder).digest != expected


def changed_values(value: Any) -> list[Any]:
    """Other values of a config.json's key."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, value + 1]
    if isinstance(value, float):
        return [value * 2]
    if isinstance(value, dict):
        changed = [{**value, key: other} for key in value for other in changed_values(value[key])]
        return [*changed, None]
    return [None]


def test_any_key_of_the_configuration_changes_it(saved: Path, folder: Path) -> None:
    """Or K/V are the same. Most changes are refused."""
    before = Loaded(saved)
    config = json.loads((folder / "config.json").read_text())
    num_loaded = 0
    for key, value in config.items():
        for other in changed_values(value):
            edit_config(folder, **config | {key: other})
            try:
                after = Loaded(folder)
            except PagedError:
                continue
            num_loaded += 1
            assert_safe(before, after)
    assert num_loaded > 5


# Another value of each option, and what it needs beside.
OPTIONS: dict[str, dict[str, Any]] = {
    "device": {"device": "cpu"},
    "dtype": {"dtype": "bfloat16"},
    "num_blocks": {"num_blocks": 9},
    "block_size": {"block_size": 8},
    "max_seq_len": {"max_seq_len": 30},
    "num_swap_blocks": {"num_swap_blocks": 4},
    "host_cache_bytes": {"host_cache_bytes": 1 << 20},
    "cache_folder": {},
    "cache_folder_bytes": {"cache_folder_bytes": 1 << 20},
    "enable_prefix_cache": {},
    "max_pinned_fraction": {"max_pinned_fraction": 0.5},
    "kv_cache_dtype": {"kv_cache_dtype": "int8"},
    "kv_cache_keep_layers": {"kv_cache_dtype": "int8", "kv_cache_keep_layers": "0"},
    "kv_cache_rotation": {"kv_cache_rotation": "hadamard_keys"},
    "max_loras": {"max_loras": 2},
    "max_lora_rank": {"max_lora_rank": 8},
    "cuda_graphs": {"cuda_graphs": False},
    "draft": {},
    "quantization": {"quantization": "int8"},
    "num_state_slots": {"num_state_slots": 4},
    "state_dtype": {},  # refused without recurrent layers
    "snapshot_interval": {"snapshot_interval": 8},
    "max_drafts": {"max_drafts": 3},
    "model_impl": {"model_impl": "native"},
    "trust_remote_code": {"trust_remote_code": True},
}


def test_any_option_changes_it_or_not_the_keys_and_values(saved: Path) -> None:
    assert OPTIONS.keys() == {field.name for field in fields(LoadOptions)}, "a new option: does it change K/V?"
    assert OPTIONS.keys() >= LEFT_OUT.keys()
    before = Loaded(saved)
    num_equal = 0
    for options in OPTIONS.values():
        after = Loaded(saved, **options)
        num_equal += after.digest == before.digest
        assert_safe(before, after)
    assert num_equal > 10, "an option that changes no K/V costs no files"


def test_a_draft_head_changes_it(tmp_path: Path) -> None:
    digests = set()
    for folder, seed in ((tmp_path / "a", 0), (tmp_path / "b", 1)):
        save_head("eagle3", folder)
        weights = folder / WEIGHTS
        weights.write_bytes(weights.read_bytes()[:-1] + bytes((seed,)))
        digests.add(Loaded(RECALL, draft=folder).digest)
    digests.add(Loaded(RECALL).digest)
    assert len(digests) == 3


@pytest.mark.parametrize(("original", "num_digests"), [(16, 1), (32, 2), (64, 1)])
def test_the_longest_sequence_of_longrope(original: int, num_digests: int, tmp_path: Path) -> None:
    """It chooses the factors, whether the option says it or the pool is small."""
    folder = tmp_path / "model"
    save_checkpoint(FAMILIES["phi3"], folder)
    edit_config(folder, original_max_position_embeddings=original)
    loaded = []
    for options in ({}, {"max_seq_len": 32}, {"num_blocks": 7}, {"num_blocks": 15}):  # 64, 32, 28 and 60 tokens
        loaded.append(Loaded(folder, **options))
    for before in loaded:
        for after in loaded:
            assert_safe(before, after)
    assert len({model.digest for model in loaded}) == num_digests


@pytest.mark.parametrize("name", fingerprint._ARITHMETIC)
def test_other_arithmetic_changes_it(name: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Loaded(saved).digest
    other = {"PAGED_BACKEND": "torch"}.get(name, "1")
    if os.environ.get(name) == other:
        other = ""
    monkeypatch.setenv(name, other)
    assert Loaded(saved).digest != expected


def test_other_programs_change_it(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Loaded(saved).digest
    for name, value in (("source_digest", "other"), ("program_parts", {"torch": "1.0"})):
        with monkeypatch.context() as context:
            context.setattr(fingerprint, name, lambda value=value: value)
            assert Loaded(saved).digest != expected


def opened_files(monkeypatch: pytest.MonkeyPatch, folder: Path, load: Callable[[], object]) -> set[Path]:
    """The files of a folder that Python opens while a model loads."""
    opened: set[Path] = set()

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(file: Any, *args: Any, **options: Any) -> Any:
            if isinstance(file, str | Path) and folder in Path(file).parents:
                opened.add(Path(file))
            return function(file, *args, **options)

        return run

    with monkeypatch.context() as context:
        for module in (io, os, builtins):
            context.setattr(module, "open", watched(module.open))
        load()
    return opened


def save_formats(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Save the checkpoints and return the options that make a load open different files."""
    save_checkpoint(FAMILIES["llama"], folder / "plain")
    yield "plain", {}
    yield "plain", {"model_impl": "transformers"}
    shutil.copytree(folder / "plain", folder / "modelopt")
    (folder / "modelopt" / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": None}}))
    yield "modelopt", {}
    shutil.copytree(folder / "plain", folder / "code")
    (folder / "code" / "modeling_own.py").write_text(CODE)
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edit_config(folder / "code", architectures=["OwnForCausalLM"], model_type="own", auto_map=auto_map)
    yield "code", {"trust_remote_code": True}


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = 'own'
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_any_file_that_is_opened_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name, options in save_formats(tmp_path):
        folder = tmp_path / name
        expected = Loaded(folder, **options).digest
        opened = opened_files(monkeypatch, folder, lambda folder=folder, options=options: Loaded(folder, **options))
        assert {folder / "config.json", folder / WEIGHTS} <= opened
        for file in opened:
            content = file.read_bytes()
            if file.name == WEIGHTS:
                file.write_bytes(content[:-1] + bytes((content[-1] ^ 1,)))
            else:
                file.write_bytes(content + b"\n")
            assert Loaded(folder, **options).digest != expected, (name, file)
            file.write_bytes(content)


@pytest.mark.thorough
def test_an_adapter_beside_the_weights_changes_it(tmp_path: Path) -> None:
    """transformers' own module takes it, if PEFT is installed."""
    folder = tmp_path / "model"
    save_checkpoint(FAMILIES["llama"], folder)
    digests = {Loaded(folder, model_impl="transformers").digest}
    for seed in (1, 2):
        adapter = Adapter(("q_proj", "v_proj"), seed=seed).save(tmp_path / str(seed), folder)
        shutil.copytree(adapter, folder, dirs_exist_ok=True)
        digests.add(Loaded(folder, model_impl="transformers").digest)
    assert len(digests) == 3


def test_a_file_that_changes_after_it_was_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights would be known by the digest of others."""
    make_model = PagedCausalLM.__init__

    def make_and_touch(*args: Any, **options: Any) -> None:
        make_model(*args, **options)
        next((folder / "below").iterdir()).touch()

    monkeypatch.setattr(PagedCausalLM, "__init__", make_and_touch)
    with pytest.raises(CheckpointError, match="changed after it was loaded"):
        Loaded(folder)


def test_a_store_that_is_attached_later_takes_the_digest(saved: Path) -> None:
    """Of the weights at that time, whether there was a folder before or none."""
    digests: list[bytes] = []
    with_folder = Loaded(saved)
    executor = LlmExecutor.from_pretrained(saved, host_cache_bytes=1 << 16, progress=False, **SIZES)
    assert executor.kv_manager is not None
    executor.update_weights(saved)
    for manager in (with_folder.model.kv_manager, executor.kv_manager):
        manager.attach_store(CacheFolder(saved.parent / "other", None))
        assert manager.files is not None
        digests.append(manager.files.digest)
    assert digests[0] == with_folder.digest
    fresh = PagedKvCacheManager(executor.kv_manager.config)
    fresh.attach_store(CacheFolder(saved.parent / "other", None))
    assert fresh.files is not None
    assert len({*digests, fresh.files.digest}) == 3
