"""The attention benchmark: its cases, its peers, its goals, and that nothing wrong gets a speed."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import paged
from paged.bench.attention import peers as attention_peers
from paged.bench.attention import run as bench_attention
from paged.bench.attention.cases import CASES, AttentionCase, Layer, Step, expected, expected_spots, ours
from paged.bench.attention.goals import goals
from paged.bench.attention.peers import PEERS
from paged.bench.attention.run import check, contest, main, measure, per_sequence_bound
from paged.bench.benchmark import Setting
from paged.bench.check import WrongResultError, compare
from paged.bench.contest import Peer
from paged.bench.limits import Ceilings
from paged.kernels.attention.config import DECODE_MAX_ROWS
from tests.bench.kernels.test_run import run_command

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LIMITS = Ceilings(copy=4e12, read=4.2e12, matmul=8e14)
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
SMALL = {"heads": (4, 2), "head_dim": 16}
DECODE = AttentionCase("decode", "3x70", ((3, 1, 70),), **SMALL)
PREFILL = AttentionCase("prefill", "2x33", ((2, 33, 33),), **SMALL, compiled=True)
MIXED = AttentionCase("mixed", "20+2x40", ((1, 20, 50), (2, 1, 40)), **SMALL)
UNEQUAL = AttentionCase("mixed", "unequal", ((1, 20, 50), (2, 1, 40)), **SMALL, v_head_dim=24)


@pytest.fixture(autouse=True)
def _by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    check.cache_clear()


@pytest.fixture
def _two_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode and a mixed batch instead of all cases; `main` takes a 64th of their lengths."""
    cases = (
        AttentionCase("decode", "2x3k", ((2, 1, 3072),), **SMALL),
        AttentionCase("mixed", "chunk", ((1, 1024, 2048), (2, 1, 1024)), **SMALL),
    )
    monkeypatch.setattr(bench_attention, "CASES", cases)


def _peer(name: str) -> Peer:
    (peer,) = (peer for peer in PEERS if peer.name == name)
    return peer


def _check_calls(peer: Peer, case: AttentionCase) -> None:
    step, layers = case.tensors(CPU, torch.float32, 2)
    for call, layer in zip(peer.make(step, layers), layers, strict=True):
        compare(call().reshape(layer.q.shape), expected(step, layer))


def test_cases_are_told_apart_by_their_names() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.kind for case in CASES} == {"prefill", "decode", "mixed"}


@EACH_CASE
def test_sibling_takes_the_tiles_of_its_case(case: AttentionCase) -> None:
    group = case.heads[0] // case.heads[1]
    sibling = case.sibling()
    takes_prefill_tile = [{q_len * group > DECODE_MAX_ROWS for q_len, _ in x.lengths} for x in (case, sibling)]
    assert takes_prefill_tile[0] == takes_prefill_tile[1]
    assert (sibling.heads, sibling.head_dim, sibling.block_size) == (case.heads, case.head_dim, case.block_size)
    assert all(seq_len <= 700 for _, seq_len in sibling.lengths)
    assert any(q_len < seq_len for q_len, seq_len in case.lengths) == any(q < k for q, k in sibling.lengths)


@pytest.mark.parametrize("case", [DECODE, PREFILL, MIXED, UNEQUAL], ids=lambda case: case.batch)
def test_tables_are_shuffled_and_share_no_block(case: AttentionCase) -> None:
    step, (layer,) = case.tensors(CPU, torch.float32, 1)
    used = [step.block_table[seq, : -(-seq_len // 16)].tolist() for seq, (_, seq_len) in enumerate(case.lengths)]
    blocks = list(itertools.chain(*used))
    assert sorted(blocks) == list(range(1, layer.k_cache.shape[0]))
    assert blocks != sorted(blocks)
    compare(ours(step, [layer])[0](), expected(step, layer))


@pytest.mark.parametrize("case", [DECODE, PREFILL, MIXED, UNEQUAL], ids=lambda case: case.batch)
def test_spots_are_rows_of_the_whole_output(case: AttentionCase) -> None:
    step, (layer,) = case.tensors(CPU, torch.float32, 1)
    whole, spots = expected(step, layer), expected_spots(step, layer)
    assert {0, whole.shape[0] - 1} <= {token for token, _, _ in spots}
    for token, heads, out in spots:
        assert torch.allclose(out, whole[token, heads])


def test_row_of_a_batch_that_a_peer_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dataclasses.replace(_peer("vllm"), name="absent", refuses=lambda *_: "is not here")
    monkeypatch.setattr(bench_attention, "PEERS", (_peer("sdpa_math"), absent))
    row = measure(DECODE, Setting(CPU, 4))
    assert json.loads(json.dumps(row))["name"] == "decode.3x70.h4_2.b16"
    assert row["samples"] == 4
    assert row["peers"].keys() == {"sdpa_math"}
    assert row["absent"] == {"absent": "is not here"}
    assert row["peers"]["sdpa_math"]["ratio"] == row["peers"]["sdpa_math"]["median_us"] / row["median_us"]
    assert row["percent"] == pytest.approx(100 * row["bound_us"] / row["median_us"])


def test_bound_of_sequences_one_by_one_is_the_larger() -> None:
    """A chunk bound by the matrix unit and decode steps bound by memory: together they could overlap."""
    case = AttentionCase("mixed", "chunk", ((1, 64, 64), (3, 1, 640)), **SMALL)
    chunk, step = (case.cost(torch.float32, [lengths]) for lengths in ((64, 64), (1, 640)))
    limits = Ceilings(copy=1e9, read=1e9, matmul=1e10)
    bound = per_sequence_bound(case, torch.float32, limits)
    assert bound == pytest.approx(chunk.flops / 1e10 + 3 * step.num_bytes / 1e9)
    assert bound > limits.bound(case.cost(torch.float32))[0]


@pytest.mark.parametrize("seen_by", ["check", "expected_spots"])
def test_wrong_result_is_refused(monkeypatch: pytest.MonkeyPatch, seen_by: str) -> None:
    """By the small batch, and by single rows of the whole one."""
    right = paged.paged_attention

    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = right(*args, **kwargs)
        out[-1] += 1
        return out

    if seen_by == "check":
        monkeypatch.setattr(bench_attention, "expected_spots", lambda *_: [])
    else:
        monkeypatch.setattr(bench_attention, "check", lambda *_: None)
    monkeypatch.setattr(bench_attention, "PEERS", ())
    contest(DECODE, CPU)
    check.cache_clear()
    monkeypatch.setattr(paged, "paged_attention", wrong)
    with pytest.raises(WrongResultError, match="elements off"):
        contest(DECODE, CPU)


def test_wrong_and_failing_peers_get_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong in a row that is compared with the reference, wrong in one that is compared with ours alone, and broken."""

    def off_at(token: int) -> Callable[[Step, list[Layer]], list[Any]]:
        def make(step: Step, layers: list[Layer]) -> list[Any]:
            def call() -> torch.Tensor:
                out = ours(step, layers)[0]()
                out[token] += 1
                return out

            return [call]

        return make

    def broken(step: Step, layers: list[Layer]) -> list[Any]:
        raise RuntimeError("no kernel image")

    peers = (("first", off_at(0)), ("between", off_at(5)), ("broken", broken), ("sound", ours))
    monkeypatch.setattr(bench_attention, "PEERS", [Peer(name, lambda *_: None, make) for name, make in peers])
    found, _ = contest(PREFILL, CPU)
    assert found.absent.keys() == {"first", "between", "broken"}
    assert all(found.absent[name].startswith("wrong: ") for name in ("first", "between"))
    assert found.absent["broken"] == "failed: RuntimeError: no kernel image"
    assert found.calls.keys() == {"ours", "planning", "sound"}


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=lambda case: case.kind)
@pytest.mark.parametrize("name", ["sdpa_math", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_dense_peers_compute_the_same(case: AttentionCase, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    _check_calls(_peer(name), case)


def test_what_dense_peers_refuse() -> None:
    large = AttentionCase("decode", "256x32k", ((256, 1, 1 << 15),))
    for name, device in (("sdpa_cudnn", CUDA), ("sdpa_flash", CUDA), ("sdpa_math", CPU)):
        refusals = [_peer(name).refuses(case, torch.bfloat16, device) for case in (DECODE, PREFILL, MIXED, large)]
        assert [reason is None for reason in refusals] == [True, True, False, False]
    assert [_peer("flex").refuses(case, torch.bfloat16, CUDA) is None for case in (DECODE, PREFILL)] == [False, True]
    assert _peer("sdpa_math").refuses(DECODE, torch.bfloat16, CUDA) == "is compared on cpu devices only"


@pytest.mark.parametrize("case", [DECODE, PREFILL, MIXED], ids=lambda case: case.kind)
def test_vllm_is_given_the_batch(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our operation stands in for it, called with vLLM's arguments."""

    def attend(**given: Any) -> None:
        names = {"q": "q", "k": "k_cache", "v": "v_cache", "seqused_k": "seq_lens", "out": "out"}
        names |= {name: name for name in ("block_table", "cu_seqlens_q", "max_seqlen_q", "softmax_scale", "causal")}
        paged.paged_attention(**{names[name]: given[name] for name in names})
        rows = given["seq_threshold_3D"] * min(given["max_seqlen_q"], 8)
        assert given["softmax_segm_output"].shape == (rows, 4, 16, 16)
        assert given["softmax_segm_max"].shape == given["softmax_segm_expsum"].shape == (rows, 4, 16)

    monkeypatch.setattr(attention_peers, "vllm_attention", lambda: attend)
    _check_calls(_peer("vllm"), case)


class _Wrapper:
    """FlashInfer's wrappers as their documentation has them, over our operation."""

    def __init__(self, workspace: torch.Tensor, layout: str, **_: Any) -> None:
        assert layout == "NHD"

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return paged.paged_attention(q, *caches, **self._batch)

    def _plan(self, qo_indptr: torch.Tensor, *pages: torch.Tensor, page_size: int) -> None:
        indptr, indices, last_page_len = pages
        counts = indptr.diff()
        table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for seq, count in enumerate(counts.tolist()):
            table[seq, :count] = indices[indptr[seq] : indptr[seq + 1]]
        self._batch = {
            "block_table": table,
            "cu_seqlens_q": qo_indptr,
            "seq_lens": ((counts - 1) * page_size + last_page_len).int(),
            "max_seqlen_q": int(qo_indptr.diff().max()),
        }


class _Prefill(_Wrapper):
    def plan(self, *args: Any, causal: bool, **_: Any) -> None:
        tensors, sizes = args[:4], args[4:]
        assert (sizes, causal) == ((4, 2, 16, 16), True)
        self._plan(*tensors, page_size=16)


class _Decode(_Wrapper):
    def plan(self, *args: Any, **_: Any) -> None:
        tensors, sizes = args[:3], args[3:]
        assert sizes == (4, 2, 16, 16)
        self._plan(torch.arange(len(tensors[0]), dtype=torch.int32), *tensors, page_size=16)


@pytest.mark.parametrize("case", [DECODE, PREFILL, MIXED], ids=lambda case: case.kind)
def test_flashinfer_is_given_the_batch(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper, module.BatchPrefillWithPagedKVCacheWrapper = _Decode, _Prefill
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    _check_calls(_peer("flashinfer"), case)


def test_peers_that_are_not_there_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("vllm", "flashinfer"):
        monkeypatch.setitem(sys.modules, module, None)
    attention_peers.vllm_attention.cache_clear()
    attention_peers.missing.cache_clear()
    assert _peer("vllm").refuses(MIXED, torch.bfloat16, CPU) == "needs a GPU"
    for name, said in (("vllm", "vLLM cannot be imported"), ("flashinfer", "FlashInfer cannot be imported")):
        assert str(_peer(name).refuses(MIXED, torch.bfloat16, CUDA)).startswith(said)
    attention_peers.missing.cache_clear()


def _row(case: AttentionCase, **measured: Any) -> dict[str, Any]:
    longest = max(seq_len for _, seq_len in case.lengths)
    row = {"longest_key": longest, "num_bytes": case.cost(torch.bfloat16).num_bytes, "tflop_per_s": 510.0}
    row |= {"gb_per_s": 3700.0, "median_us": 100.0, "bound_us": 90.0, "host_us": 29.0}
    return {**row, "peers": {"vllm": {"ratio": 2.0}, "sdpa_cudnn": {"ratio": 0.9}}, **measured}


def test_goals_of_each_kind() -> None:
    by_name = {case.name: case for case in CASES}
    prefill, short = by_name["prefill.1x8k.h32_8.b16"], by_name["prefill.1x2k.h32_8.b16"]
    decode, tiny = by_name["decode.64x1k.h32_8.b16"], by_name["decode.1x1k.h32_8.b16"]
    mixed = by_name["mixed.verify_64x5x8k.h32_8.b16"]

    def met(case: AttentionCase, **measured: Any) -> list[bool | None]:
        return [goal["met"] for goal in goals(case, _row(case, **measured), LIMITS)]

    assert met(prefill) == [False, True, True]  # 2.5x vLLM, 500 TFLOP/s, 0.85x cuDNN
    assert met(prefill, tflop_per_s=499.0, peers={}) == [None, False, None]
    assert met(short) == [False]
    assert met(decode) == [True, True, True]  # 1.3x vLLM, 90 % of 4 TB/s, 30 us
    assert met(decode, gb_per_s=3500.0, host_us=31.0) == [True, False, False]
    assert met(tiny) == [True, True]  # 4 MB of keys and values
    assert met(mixed) == [True, True, True]  # 2x vLLM, 1.15x the bound, 30 us
    assert met(mixed, median_us=104.0, peers={"vllm": {"ratio": 1.9}}) == [False, False, True]


@pytest.mark.usefixtures("_two_cases")
def test_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    lines: list[str] = []
    assert main(["--device", "cpu", "--repeats", "2", "--json", str(path)], lines.append) == 0
    results = json.loads(path.read_text())
    assert [row["name"] for row in results["rows"]] == ["decode.2x3k.small.h4_2.b16", "mixed.chunk.small.h4_2.b16"]
    assert (results["refused"], results["not_run"]) == ({}, [])
    assert [list(row["peers"]) for row in results["rows"]] == [["sdpa_math"], []]
    assert "vllm: needs a GPU" in "\n".join(lines)
    for row in results["rows"]:
        assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
        assert any(line.startswith(row["name"]) for line in lines)


@pytest.mark.usefixtures("_two_cases")
def test_refused_case_gets_no_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paged, "paged_attention", lambda q, *_, **__: torch.full_like(q, float("nan")))
    path = tmp_path / "rows.json"
    lines: list[str] = []
    assert main(["--device", "cpu", "--repeats", "2", "--only", "decode", "--json", str(path)], lines.append) == 1
    results = json.loads(path.read_text())
    assert results["rows"] == []
    assert list(results["refused"]) == ["decode.2x3k.h4_2.b16"]
    assert any("refused: WrongResultError" in line for line in lines)


@pytest.mark.usefixtures("_two_cases")
def test_run_out_of_time_says_what_is_missing() -> None:
    lines: list[str] = []
    assert main(["--device", "cpu", "--repeats", "2", "--budget", "0"], lines.append) == 0
    assert lines[-1] == "0 rows, 0 refused, 2 not run"


def test_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="times mean nothing"):
        measure(DECODE, Setting(CPU, 2))
    with pytest.raises(SystemExit):
        main(["--device", "cpu"])
    assert "times mean nothing" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("pytest_benchmark") is None, reason="pytest-benchmark is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the suite runs at full size")
def test_run_under_pytest_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "suite.json"
    suite = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "bench/attention/run.py", "-k", "decode.1x1k")
    result = run_command(*suite, f"--benchmark-json={path}")
    assert result.returncode == 0, result.stdout + result.stderr
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
    assert benchmark["extra_info"]["name"] == "decode.1x1k.small.h32_8.b16"
    assert benchmark["extra_info"]["samples"] == bench_attention.BENCHMARK.repeats["cpu"]
