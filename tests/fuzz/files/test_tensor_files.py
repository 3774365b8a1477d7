"""Files of weights with bits flipped, cut short, or with a header that says anything are refused by name, or load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.fuzz.children import call_in_child
from tests.fuzz.files.checkpoint_folders import load_changed, load_changed_adapter, num_layers_of
from tests.fuzz.files.odd_files import put
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.values import value
from tests.models.families import FAMILIES, save_checkpoint
from tests.models.lora.folders import Adapter

WEIGHTS, ADAPTER_WEIGHTS = "model.safetensors", "adapter_model.safetensors"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(FAMILIES["llama"], folder)
    return folder


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Adapter(("q_proj", "down_proj")).save(tmp_path_factory.mktemp("adapters") / "a", folder)


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and the data behind it."""
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def with_header(text: str, data: bytes, size: int | None = None) -> bytes:
    """A file of this header, which gives `size` as its own."""
    header = text.encode("utf-8", "surrogatepass")
    return (len(header) if size is None else size).to_bytes(8, "little") + header + data


# JSON as text, by an expression: what a field of a tensor, or a whole one, or the header, is replaced with.
FIELDS = st.one_of(
    st.integers(-2, 70_000).map(str).map(repr),
    st.sampled_from(
        [
            "'null'",
            "'{}'",
            "'[]'",
            "'\"\"'",
            "'true'",
            "'1.5'",
            "'NaN'",
            "'9' * 400",
            "str(2**63)",
            "str(2**64)",
            "'-1'",
            "'[' * 1000",
            "'[64]'",
            "'[63]'",
            "'[8, 8]'",
            "'[64, 0]'",
            "'[0]'",
            "'[-64]'",
            "'[18446744073709551615, 0]'",
            "'[' + '1,' * 100_000 + '64]'",
            "'[0, 256]'",
            "'[256, 0]'",
            "'[0, 18446744073709551615]'",
            "'[1, 257]'",
            "'[4294967296, 4294967296, 4294967296]'",
            "'\"F32\"'",
            "'\"F16\"'",
            "'\"I64\"'",
            "'\"U8\"'",
            "'\"F8_E4M3\"'",
            "'\"F4\"'",
            "'\"BOOL\"'",
            "'\"C64\"'",
            "'\"float32\"'",
            "'\"' + 'F' * 10**6 + '\"'",
            "'\"\\\\u001b[2J\"'",
        ]
    ),
)
CHANGES = st.one_of(
    st.fixed_dictionaries({"flip": st.lists(st.integers(0, 8 * 3000), min_size=1, max_size=4)}),
    st.fixed_dictionaries({"keep": st.integers(-300, 3000)}),
    st.fixed_dictionaries(
        {"size": st.sampled_from(["0", "1", "7", "2**16", "10**7", "10**8", "2**31", "2**63", "2**64 - 1"])}
    ),
    st.fixed_dictionaries(
        {
            "tensor": st.integers(0, 20),
            "field": st.sampled_from(["shape", "dtype", "data_offsets", "foo", ""]),
            "text": FIELDS,
        }
    ),
    st.fixed_dictionaries({"tensor": st.integers(0, 20), "swap": st.integers(0, 20)}),
    st.fixed_dictionaries(
        {"tensor": st.integers(0, 20), "name": st.sampled_from(["", "x", "__metadata__", "lm_head.weight"])}
    ),
    st.fixed_dictionaries({"repeat": st.integers(0, 20)}),
    st.fixed_dictionaries({"metadata": FIELDS}),
)


def changed(content: bytes, case: dict[str, Any]) -> bytes:
    """The file with the change of a case. Flipped bits hit the header: those of weights make other weights."""
    header, data = header_of(content)
    names = sorted(set(header) - {"__metadata__"})
    if "flip" in case:
        flipped, header_bits = bytearray(content), 8 * (len(content) - len(data))
        for bit in case["flip"]:
            flipped[bit % header_bits // 8] ^= 1 << bit % 8
        return bytes(flipped)
    if "keep" in case:
        return content[: case["keep"]]
    if "size" in case:
        return with_header(json.dumps(header), data, value(case["size"]))
    if "metadata" in case:
        return with_header(json.dumps(header | {"__metadata__": "@@"}).replace('"@@"', value(case["metadata"])), data)
    if "repeat" in case:
        name = names[case["repeat"] % len(names)]
        return with_header(json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}", data)
    name = names[case["tensor"] % len(names)]
    if "swap" in case:
        other = names[case["swap"] % len(names)]
        return with_header(json.dumps(header | {name: header[other], other: header[name]}), data)
    if "name" in case:
        return with_header(json.dumps({case["name"] if key == name else key: one for key, one in header.items()}), data)
    if case["field"]:
        header[name] = header[name] | {case["field"]: "@@"}
    else:
        header[name] = "@@"
    return with_header(json.dumps(header).replace('"@@"', value(case["text"])), data)


@fuzz(CHANGES, examples=10)
def test_headers_of_weights(case: dict[str, Any], folder: Path) -> None:
    load_changed(folder, {WEIGHTS: changed((folder / WEIGHTS).read_bytes(), case)})


@fuzz(CHANGES, examples=10)
def test_headers_of_adapters(case: dict[str, Any], folder: Path, adapter: Path) -> None:
    content = changed((adapter / ADAPTER_WEIGHTS).read_bytes(), case)
    load_changed_adapter(folder, adapter, {ADAPTER_WEIGHTS: content})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_adapters_that_are_not_finite(number: float, folder: Path, adapter: Path, tmp_path: Path) -> None:
    """1e39 is a float64 that the model's float32 cannot hold; 1e30 it can."""
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].double()
    for each, is_refused in ((number, True), (0.5, False)):
        tensors[name][0, 1] = each
        save_file(tensors, tmp_path / "file")
        outcome = load_changed_adapter(folder, adapter, {ADAPTER_WEIGHTS: (tmp_path / "file").read_bytes()})
        assert (outcome.error is not None) == is_refused
        assert not is_refused or "not all finite as torch.float32" in str(outcome.error)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_files_that_are_none(name: str, folder: Path, tmp_path: Path) -> None:
    """Neither read nor waited for; links to the files they stand for, as in the Hub's cache, load."""
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for file in folder.iterdir():
        (tmp_path / "blobs" / file.name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert call_in_child(num_layers_of, str(snapshot)).result == 2
    file = snapshot / name
    for kind in ("pipe", "folder", "sparse", "itself", "/dev/zero", "/dev/stdin", "/proc/self/pagemap", "/proc/kmsg"):
        if file.is_dir():
            file.rmdir()
        else:
            file.unlink()
        put(file, kind)
        outcome = call_in_child(num_layers_of, str(snapshot))
        assert "CheckpointError" in str(outcome.error), kind


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 10_000}, r"model\.layers\.2: no tensors in .*, expected 10000 layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, expected at most 10000"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings = 1000000000, expected at most 16777216"),
        ({"vocab_size": 10**9}, r"shape \[128, 64\] in .*, expected \[1000000000, 64\]"),
        ({"hidden_size": 2**31 - 1, "intermediate_size": 2**31 - 1, "vocab_size": 2**31 - 1}, "sizes beyond any|shape"),
        ({"hidden_size": 2**31}, "hidden_size = 2147483648, expected at most 2147483647"),
        ({"num_attention_heads": 2**31 - 1, "num_key_value_heads": 1, "head_dim": 256}, "sizes beyond any|shape"),
        ({"head_dim": 2**31 - 2}, "head_dim = 2147483646, expected at most 4096"),
        ({"head_dim": 31}, "head_dim 31, expected an even number"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0, expected a positive integer"),
        ({"rope_parameters": {"rope_theta": 1e-300}}, "no finite numbers"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}}, "no rotation can be computed"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1e30}}, "no finite numbers"),
    ],
)
def test_sizes_are_compared_before_memory_is_taken(values: dict[str, Any], message: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    outcome = load_changed(folder, {"config.json": json.dumps(config | values).encode()})
    assert re.search(message, str(outcome.error)), outcome.error
    assert "CheckpointError" in str(outcome.error)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_beside_a_tied_embedding(tied: bool, tmp_path: Path) -> None:
    """One that differs is what the checkpoint computes with, as in transformers, whatever its configuration says."""
    from paged.models.registry import load_model

    theirs = save_checkpoint(FAMILIES["llama"], tmp_path)
    if tied:
        theirs.lm_head.weight = theirs.model.embed_tokens.weight
        tensors = load_file(tmp_path / WEIGHTS)
        save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / WEIGHTS)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = load_model(tmp_path, device="cpu")
    with torch.no_grad():
        expected = theirs(torch.tensor([[1, 2, 3]])).logits[0, -1]
    assert torch.allclose(model.prefill("a", [1, 2, 3]), expected, atol=1e-4)
    assert (model.network.lm_head is None) == tied
