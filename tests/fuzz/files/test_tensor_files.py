"""Files of weights with bits flipped, cut short, or with a header that says anything are refused by name, or load."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.fuzz.children import call_in_child
from tests.fuzz.files.checkpoint_folders import load_changed, num_layers_of, put, with_field
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.values import expressions, value
from tests.tolerance import assert_within

WEIGHTS, ADAPTER_WEIGHTS = "model.safetensors", "adapter_model.safetensors"


# JSON as text, by an expression: what a field of a tensor, or a whole one, or the header, is replaced with.
FIELDS = st.integers(-2, 70_000).map(str).map(repr) | expressions(r"""
    'null'; '{}'; '[]'; '""'; 'true'; '1.5'; 'NaN'; '9' * 400; str(2**63); str(2**64); '-1'; '[' * 1000; '[64]'; '[63]';
    '[8, 8]'; '[64, 0]'; '[0]'; '[-64]'; '[18446744073709551615, 0]'; '[' + '1,' * 100_000 + '64]'; '[0, 256]';
    '[256, 0]'; '[0, 18446744073709551615]'; '[1, 257]'; '[4294967296, 4294967296, 4294967296]'; '"F32"'; '"F16"';
    '"I64"'; '"U8"'; '"F8_E4M3"'; '"F4"'; '"BOOL"'; '"C64"'; '"float32"'; '"' + 'F' * 10**6 + '"'; '"\\u001b[2J"'
""")
SIZES = expressions("0; 1; 7; 2**16; 10**7; 10**8; 2**31; 2**63; 2**64 - 1")
TENSOR_FIELDS = st.sampled_from(["shape", "dtype", "data_offsets", "foo", ""])
NAMES = st.sampled_from(["", "x", "__metadata__", "lm_head.weight"])
# What to do, with which tensor, and how.
CHANGES = st.one_of(
    st.tuples(st.just("flip"), st.lists(st.integers(0, 8 * 3000), min_size=1, max_size=4)),
    st.tuples(st.just("keep"), st.integers(-300, 3000)),
    st.tuples(st.just("size"), SIZES),
    st.tuples(st.just("metadata"), FIELDS),
    st.tuples(st.just("repeat"), st.integers(0, 20)),
    st.tuples(st.just("swap"), st.integers(0, 20), st.integers(0, 20)),
    st.tuples(st.just("name"), st.integers(0, 20), NAMES),
    st.tuples(st.just("field"), st.integers(0, 20), TENSOR_FIELDS, FIELDS),
)


def changed(content: bytes, case: tuple[Any, ...]) -> bytes:
    """A safetensors file with a change. Flipped bits hit the header: those of weights make other weights."""
    kind, given, *how = case
    header_size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + header_size]), content[8 + header_size :]
    names = sorted(set(header) - {"__metadata__"})
    if kind == "flip":
        flipped = bytearray(content)
        for bit in given:
            flipped[bit % (8 * (8 + header_size)) // 8] ^= 1 << bit % 8
        return bytes(flipped)
    if kind == "keep":
        return content[:given]
    name = names[given % len(names)] if isinstance(given, int) else ""
    text, size = json.dumps(header).encode(), None
    if kind == "size":
        size = value(given)
    elif kind == "metadata":
        text = with_field(header, ["__metadata__"], value(given))
    elif kind == "repeat":
        text = text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}".encode()
    elif kind == "swap":
        other = names[how[0] % len(names)]
        text = json.dumps(header | {name: header[other], other: header[name]}).encode()
    elif kind == "name":
        text = json.dumps({how[0] if key == name else key: one for key, one in header.items()}).encode()
    else:
        text = with_field(header, [name, how[0]] if how[0] else [name], value(how[1]))
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


@fuzz(CHANGES, examples=8, thorough=30)
def test_headers_of_weights(case: Any, folder: Path) -> None:
    load_changed(folder, {WEIGHTS: changed((folder / WEIGHTS).read_bytes(), case)})


@fuzz(CHANGES, examples=3, thorough=20)
def test_headers_of_adapters(case: Any, folder: Path, adapter: Path) -> None:
    content = changed((adapter / ADAPTER_WEIGHTS).read_bytes(), case)
    load_changed(folder, {ADAPTER_WEIGHTS: content}, adapter)


# 1e39 is a float64 that the model's float32 cannot hold.
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 1e39, 0.5])
def test_adapters_that_are_not_finite(number: float, folder: Path, adapter: Path, tmp_path: Path) -> None:
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].double()
    tensors[name][0, 1] = number
    save_file(tensors, tmp_path / "file")
    outcome = load_changed(folder, {ADAPTER_WEIGHTS: (tmp_path / "file").read_bytes()}, adapter)
    assert re.search("^$" if number == 0.5 else "not all values are finite as torch.float32", outcome.error)


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
        put(file, kind)
        assert "CheckpointError" in call_in_child(num_layers_of, str(snapshot)).error, kind


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
        ({"rope_parameters": {"rope_theta": 1e-300}}, "cosines or sines that are not finite"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}}, "no rotation can be computed"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1e30}},
            "cosines or sines that are not finite",
        ),
    ],
)
def test_sizes_are_compared_before_memory_is_taken(values: dict[str, Any], message: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    outcome = load_changed(folder, {"config.json": json.dumps(config | values).encode()})
    assert re.search(f"CheckpointError: .*({message})", outcome.error), outcome.error


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_beside_a_tied_embedding(tied: bool, tmp_path: Path) -> None:
    """One that differs is what the checkpoint computes with, as in transformers, whatever its configuration says."""
    from paged.models.registry import load_model
    from tests.models.families import FAMILIES, save_checkpoint

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
    assert_within(model.prefill("a", [1, 2, 3]), expected, 1e-4 * expected.abs().max())
    assert (model.network.lm_head is None) == tied
