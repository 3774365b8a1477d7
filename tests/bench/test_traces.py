"""Trace sets in FlashInfer-Bench's format: written, read, and solutions judged."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import paged
from paged.bench.cards.cards import CARDS
from paged.bench.cards.draw import Draw
from paged.bench.traces.schema import read_set
from paged.bench.traces.translations import TRANSLATIONS, translation_of
from paged.serving.command_line import cli

FLASHINFER_BENCH = Path(__file__).resolve().parents[2] / ".peers" / "flashinfer-bench-0.1.2"
NUM_PAGES, NUM_HEADS, HEAD_DIM = 40, (4, 2), 16

# A definition as the peer's data set has it, with pages of one token.
AXES = {"batch_size": None, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "num_pages": None, "page_size": 1}
CACHE = ["num_pages", "page_size", "num_kv_heads", "head_dim"]
SHAPES = {"q": ["batch_size", "num_qo_heads", "head_dim"], "k_cache": CACHE, "v_cache": CACHE}
DECODE: dict[str, Any] = {
    "name": "gqa_paged_decode_h4_kv2_d16_ps1",
    "op_type": "gqa_paged",
    "axes": {
        **{name: {"type": "const", "value": size} if size else {"type": "var"} for name, size in AXES.items()},
        "len_indptr": {"type": "var"},
        "num_kv_indices": {"type": "var"},
    },
    "inputs": {
        **{name: {"shape": shape, "dtype": "float32"} for name, shape in SHAPES.items()},
        "kv_indptr": {"shape": ["len_indptr"], "dtype": "int32"},
        "kv_indices": {"shape": ["num_kv_indices"], "dtype": "int32"},
        "sm_scale": {"shape": None, "dtype": "float32"},
    },
    "outputs": {
        "output": {"shape": ["batch_size", "num_qo_heads", "head_dim"], "dtype": "float32"},
        "lse": {"shape": ["batch_size", "num_qo_heads"], "dtype": "float32"},
    },
}
# base: of the log-sum-exp, 2 in the format.
ATTENTION = """
import math
import torch

def run(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale):
    output, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf)
    for seq, (first, end) in enumerate(zip(kv_indptr[:-1].tolist(), kv_indptr[1:].tolist())):
        pages = kv_indices[first:end].long()
        keys, values = (cache[pages, 0].repeat_interleave(2, dim=1) for cache in (k_cache, v_cache))
        scores = torch.einsum("hd,khd->hk", q[seq], keys) * sm_scale
        output[seq] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
        lse[seq] = scores.logsumexp(-1) / math.log({base})
    return output, lse
"""
IN_PLACE = """
from .attention import run

def write(*arguments):
    *inputs, output, lse = arguments
    for target, result in zip((output, lse), run(*inputs)):
        target.copy_(result)
"""


def solution(name: str, language: str, entry_point: str, in_place: bool, sources: dict[str, str]) -> dict[str, Any]:
    spec = {"language": language, "target_hardware": ["cpu"], "entry_point": entry_point}
    return {
        "name": name,
        "definition": DECODE["name"],
        "author": "a stranger",
        "spec": {**spec, "destination_passing_style": in_place},
        "sources": [{"path": path, "content": content} for path, content in sources.items()],
    }


def write_peers_set(root: Path) -> None:
    """Write a set as another would: a decode, and solutions that are right, wrong and not for Python."""
    right = ATTENTION.format(base=2)
    folders = [root / name / "gqa_paged" for name in ("definitions", "workloads", "solutions", "blob/workloads")]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[0] / "decode.json").write_text(json.dumps({**DECODE, "reference": right}))
    without_lse = {**DECODE, "name": "gqa_paged_decode_without_lse", "outputs": {"output": DECODE["outputs"]["output"]}}
    without_lse["reference"] = right.replace("return output, lse", "return output")
    (folders[0] / "without_lse.json").write_text(json.dumps(without_lse))
    save_file({"kv_indptr": torch.tensor([0, 7, 8], dtype=torch.int32),
               "kv_indices": torch.randperm(NUM_PAGES)[:8].int()}, folders[3] / "pages.safetensors")  # fmt: skip
    inputs: dict[str, Any] = {name: {"type": "random"} for name in SHAPES}
    for name in ("kv_indptr", "kv_indices"):
        path = "./blob/workloads/gqa_paged/pages.safetensors"
        inputs[name] = {"type": "safetensors", "path": path, "tensor_key": name}
    inputs["sm_scale"] = {"type": "scalar", "value": 0.3}
    axes = {"batch_size": 2, "num_pages": NUM_PAGES, "len_indptr": 3, "num_kv_indices": 8}
    workload = {"axes": axes, "inputs": inputs, "uuid": "12345678-0000"}
    line = {"definition": DECODE["name"], "workload": workload, "solution": None, "evaluation": None}
    lines = [line, {**line, "definition": without_lse["name"]}]
    (folders[1] / "decode.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    solutions = [
        solution("in_place", "python", "main.py::write", True, {"main.py": IN_PLACE, "attention.py": right}),
        solution("natural_logarithm", "triton", "main.py::run", False, {"main.py": ATTENTION.format(base="math.e")}),
        solution("other_shape", "python", "main.py::run", False,
                 {"main.py": right.replace("return output,", "return output[:1],")}),
        solution("unreadable", "python", "main.py::run", False, {"main.py": "import nowhere_at_all"}),
        solution("compiled", "cuda", "main.cu::run", True, {"main.cu": "// not Python"}),
    ]  # fmt: skip
    solutions.append({**solutions[0], "name": "misspelt", "definition": "gqa_paged_decoed"})
    for content in solutions:
        (folders[2] / f"{content['name']}.json").write_text(json.dumps(content))


@pytest.mark.thorough
def test_a_strangers_solutions_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_peers_set(tmp_path)
    command = ["verify", "--device", "cpu", "--trace", str(tmp_path / "workloads" / "gqa_paged" / "decode.jsonl")]
    assert cli.main([*command, "--backend", "torch", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    rows = {row["case"].removeprefix(f"{DECODE['name']} 12345678 by "): row for row in report["rows"]}
    without_lse = "gqa_paged_decode_without_lse 12345678 by "
    assert {name for name, row in rows.items() if row["worst"] is not None and row["ok"]} == {
        "torch", "its reference", "in_place", f"{without_lse}torch", f"{without_lse}its reference",
    }  # fmt: skip
    assert rows["natural_logarithm"]["first"].startswith("lse[")
    assert "output: [1, 4, 16], torch.float32, expected [2, 4, 16]" in rows["other_shape"]["error"]
    assert "No module named 'nowhere_at_all'" in rows["unreadable"]["error"]
    assert rows["gqa_paged_decoed by misspelt"]["error"] == "not checked: no definition gqa_paged_decoed"
    assert rows["compiled"]["error"] == "not checked: written in cuda, expected python or triton"

    assert cli.main(["bench", "--trace", str(tmp_path), "--repeats", "2"]) == 0
    printed = capsys.readouterr().out
    assert "in_place" in printed.partition("without")[0]
    assert "without natural_logarithm: 8 of 8 elements are wrong" in printed
    assert "without compiled: written in cuda" in printed


@pytest.mark.thorough
def test_rows_and_recorded_calls_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FlashInfer-Bench's own models read what we write, and the oracle accepts it again."""
    root = tmp_path / "set"
    assert cli.main(["bench", "trace-set", str(root), "--op", "rms_norm", "--scale", "check"]) == 0
    arguments = CARDS["paged_attention"].draw(
        Draw(torch.device("cpu"), torch.float16), lengths=((1, 40), (5, 5)), heads=(4, 2), dim=16
    )
    with paged.record(tmp_path / "calls"):
        paged.paged_attention(**arguments)
        paged.silu_and_mul(torch.randn(2, 8))
    calls = sorted(map(str, (tmp_path / "calls").iterdir()))
    assert cli.main(["bench", "trace-set", str(root), "--recorded", *calls]) == 0
    assert "not written: no definition of silu_and_mul" in capsys.readouterr().out
    assert cli.main(["verify", "--device", "cpu", "--backend", "torch", "--trace", str(root)]) == 0
    assert "4 of 4 right" in capsys.readouterr().out

    read = read_set(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FLASHINFER_BENCH))
        peer = pytest.importorskip("flashinfer_bench.data", reason="`make flashinfer-bench` installs it")
        utils = pytest.importorskip("flashinfer_bench.bench.utils")
        theirs = peer.TraceSet.from_path(str(root))
        assert theirs.definitions.keys() == read.definitions.keys()
        for workload in read.workloads:
            definition = theirs.definitions[workload.definition]
            (trace,) = theirs.workloads[workload.definition]
            stored = utils.load_safetensors(definition, trace.workload, root)
            inputs = workload.read(read.definitions[workload.definition], torch.device("cpu"))
            values = utils.gen_inputs(definition, trace.workload, "cpu", stored)
            for (name, value), their_value in zip(inputs.items(), values, strict=True):
                if name in stored or not isinstance(value, torch.Tensor):
                    torch.testing.assert_close(value, their_value, rtol=0, atol=0, equal_nan=True)
                else:
                    assert (value.shape, value.dtype) == (their_value.shape, their_value.dtype)


@pytest.mark.parametrize("lengths", [((1, 33), (1, 1)), ((0, 5), (3, 20), (1, 16))], ids=["decode", "mixed"])
def test_a_call_of_attention_comes_back(lengths: Any) -> None:
    """As inputs of a definition and as arguments again; unused columns of the table do not."""
    draw = Draw(torch.device("cpu"), torch.float32)
    arguments = CARDS["paged_attention"].draw(draw, lengths=lengths, heads=(4, 2), dim=16)
    _, translation = TRANSLATIONS
    definition = translation.define(arguments)
    assert translation_of(definition) is translation
    again = translation.arguments(definition, translation.inputs(definition, arguments))
    for name in ("q", "k_cache", "v_cache", "cu_seqlens_q", "seq_lens"):
        torch.testing.assert_close(again[name], arguments[name], rtol=0, atol=0)
    results = [paged.paged_attention(**call)[0] for call in (again, {**arguments, "return_lse": True})]
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("./blob/", "../../", "expected a file of the set"),
        ("pages.safetensors", "nothing.safetensors", "nothing.safetensors"),
        ('"num_pages": 40, ', "", "no axis num_pages"),
        ('"num_kv_indices": 8', '"num_kv_indices": 9', r"\[8\], torch.int32, the definition says \[9\]"),
        ('"type": "scalar", "value": 0.3', '"type": "scalar", "value": "0.3"', "sm_scale: expected a number"),
        ('"q": {"type": "random"}', '"q": {"type": "scalar", "value": 1}', "q: type 'scalar', expected random or saf"),
    ],
)
def test_a_wrong_workload_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    write_peers_set(tmp_path)
    file = tmp_path / "workloads" / "gqa_paged" / "decode.jsonl"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    traces = read_set(file)
    with pytest.raises(paged.InvalidInputError, match=message):
        traces.workloads[0].read(traces.definitions[DECODE["name"]], torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("kv_indices", [*range(7), NUM_PAGES], "kv_indices: expected pages below 40"),
        ("kv_indices", [*range(7), -1], "kv_indices: expected pages below 40"),
        ("kv_indptr", [0, 9, 8], "kv_indptr: expected growing offsets"),
        ("kv_indptr", [0, 7, 8, 8], "expected 4 offsets from 0 to 2"),
    ],
)
def test_a_workload_that_is_no_call_is_refused(tmp_path: Path, name: str, values: list[int], message: str) -> None:
    """A page outside of the cache would be read by kernels, which take the oracle with them."""
    write_peers_set(tmp_path)
    traces = read_set(tmp_path)
    definition = traces.definitions[DECODE["name"]]
    inputs = traces.workloads[0].read(definition, torch.device("cpu"))
    inputs[name] = torch.tensor(values, dtype=torch.int32)
    with pytest.raises(paged.InvalidInputError, match=message):
        translation_of(definition).arguments(definition, inputs)


@pytest.mark.parametrize("constant", ["EPS: float = 1e-5", "EPS = float('1e-5')"])
def test_eps_of_a_reference(constant: str) -> None:
    """A constant is read, whatever its form; other Python is not run."""
    arguments = {"x": torch.ones(2, 8), "weight": torch.ones(8), "eps": 1e-6}
    definition = replace(TRANSLATIONS[0].define(arguments), reference=constant)
    inputs = {"hidden_states": arguments["x"], "weight": arguments["weight"]}
    if "float(" in constant:
        with pytest.raises(paged.UnsupportedError, match="computes EPS"):
            TRANSLATIONS[0].arguments(definition, inputs)
    else:
        assert TRANSLATIONS[0].arguments(definition, inputs)["eps"] == 1e-5


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("definitions/gqa_paged/decode.json", '"batch_size", "num_qo', '"nothing", "num_qo', "no axis nothing"),
        ("definitions/gqa_paged/decode.json", '"float32"', '"complex64"', "dtype complex64"),
        ("definitions/gqa_paged/decode.json", '"value": 16', '"value": 16.5', "axis head_dim: 16.5, expected a whole"),
        (
            "definitions/gqa_paged/decode.json",
            '"type": "var"',
            '"type": "dynamic"',
            "of type 'dynamic', expected const",
        ),
        ("solutions/gqa_paged/in_place.json", '"path": "main.py"', '"path": "../main.py"', "source ../main.py"),
        ("solutions/gqa_paged/in_place.json", "main.py::", "other.py::", "entry point other.py::write"),
        ("solutions/gqa_paged/in_place.json", "main.py::write", "main.py", "entry point main.py, expected file::func"),
        ("solutions/gqa_paged/in_place.json", '"path": "attention.py"', '"path": "./main.py"', "two sources main.py"),
        ("workloads/gqa_paged/decode.jsonl", '"uuid"', '"id"', "KeyError: 'uuid'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    write_peers_set(tmp_path)
    path = tmp_path / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(
        paged.InvalidInputError, match=f"{path.name}: not in the format of FlashInfer-Bench: .*{message}"
    ):
        read_set(tmp_path)
