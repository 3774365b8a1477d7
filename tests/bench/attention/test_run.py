"""The attention benchmark: its cases, its limits, and that nothing wrong gets a speed."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import paged
from paged.bench.attention import run as bench_attention
from paged.bench.attention.cases import CASES, AttentionCase, Layer, Step, ours, parse_case
from paged.bench.attention.run import contest
from paged.bench.benchmark import Setting
from paged.bench.check import WrongResultError
from paged.bench.contest import Peer
from paged.bench.limits import Ceilings
from paged.errors import InvalidInputError
from paged.kernels.core.device import has_numba

pytestmark = pytest.mark.usefixtures("by_pytorch")
SETTING = Setting(torch.device("cpu"), 2)
SMALL = {"heads": (4, 2), "head_dim": 16}
DECODE = AttentionCase("decode", "3x70", ((3, 1, 70),), **SMALL)
PREFILL = AttentionCase("prefill", "2x33", ((2, 33, 33),), **SMALL)


def test_cases_are_told_apart() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.kind for case in CASES} == {"prefill", "decode", "mixed"}


def test_wrong_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = paged.paged_attention

    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = right(*args, **kwargs)
        out[-1] += 1
        return out

    monkeypatch.setattr(bench_attention, "PEERS", ())
    contest(DECODE, SETTING)
    monkeypatch.setattr(paged, "paged_attention", wrong)
    with pytest.raises(WrongResultError, match="elements are wrong"):
        contest(DECODE, SETTING)


def test_values_narrower_than_keys_get_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_attention, "PEERS", ())
    case = replace(DECODE, head_dim=24, v_head_dim=16)
    assert contest(case, SETTING).samples.keys() == {"ours", "planning"}
    step, layers = case.tensors(SETTING.device, SETTING.dtype, 1)
    assert ours(step, layers)[0]().shape == (3, 4, 16)


def test_latents_get_a_row_whose_keys_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_attention, "PEERS", ())
    case = replace(DECODE, heads=(4, 1), head_dim=48, v_head_dim=32, latent=True)
    assert contest(case, SETTING).samples.keys() == {"ours", "planning"}
    step, layers = case.tensors(SETTING.device, SETTING.dtype, 1)
    assert ours(step, layers)[0]().shape == (len(case.lengths), 4, 32)
    keys = sum(seq_len for _, seq_len in case.lengths)
    apart = replace(case, latent=False).cost(torch.float32)
    assert apart.num_bytes - case.cost(torch.float32).num_bytes == 4 * 32 * keys
    assert apart.flops == case.cost(torch.float32).flops


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
    entries = contest(PREFILL, SETTING)
    assert entries.absent.keys() == {"first", "between", "broken"}
    assert all(entries.absent[name].startswith("wrong: ") for name in ("first", "between"))
    assert entries.absent["broken"] == "failed: RuntimeError: no kernel image"
    assert entries.samples.keys() == {"ours", "planning", "sound"}


def test_shapes_of_ones_own() -> None:
    case = parse_case("decode:4x700,h8_2,d64")
    assert case == AttentionCase("decode", "4x700", ((4, 1, 700),), (8, 2), head_dim=64)
    assert case.name == "decode.4x700.h8_2.b16.d64"
    chunk = parse_case("mixed:1x64of700+8x300,b32")
    assert (chunk.groups, chunk.block_size, chunk.name) == (
        ((1, 64, 700), (8, 1, 300)),
        32,
        "mixed.1x64of700+8x300.h32_8.b32",
    )
    assert parse_case("prefill:2x33").groups == ((2, 33, 33),)
    for text in ("4x700", "decode:4", "decode:0x7", "decode:1x8of7", "decode:4x7,h8", "decode:4x7,d0", "decode:4x7,x1"):
        with pytest.raises(InvalidInputError, match=f"--shape {re.escape(text)}: expected"):
            parse_case(text)


def test_a_shape_is_measured_by_what_models_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By numba kernels where they can run; PyTorch chooses its own implementation; nothing is below 0."""
    monkeypatch.delenv("PAGED_BACKEND")
    monkeypatch.setattr(Setting, "limits", Ceilings(copy=2e10, read=2e10, matmul=1e11))
    lines: list[str] = []
    path = tmp_path / "rows.json"
    options = ["--device", "cpu", "--repeats", "5", "--shape", "decode:2x48,h4_2,d16", "--json", str(path)]
    assert bench_attention.main(options, lines.append) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["backend"] == ("numba" if has_numba() else "torch")
    assert row["peers"]["sdpa"]["backend"] == "flash_attention"
    assert row["planning_us"] >= 0
    assert "sdpa (flash_attention) " in lines[1]
    assert "GFLOP/s" in lines[1]
    assert "the peer's time over ours" in lines[0]
    assert "matmul: 100.0 GFLOP/s" in lines[0]


def test_run(results: dict[str, Path]) -> None:
    """Of two decodes and a mixed batch, at a 64th of their lengths, which their names say."""
    found = json.loads(results["attention"].read_text())
    names = ("decode.2x48", "decode.2x128", "mixed.1x16of32+2x16")
    assert [row["name"] for row in found["rows"]] == [f"{name}.h4_2.b16.d16" for name in names]
    assert (found["refused"], found["not_run"]) == ({}, [])
    assert [list(row["peers"]) for row in found["rows"]] == [["sdpa"], ["sdpa"], []]
    assert {(row["samples"], row["absent"]["vllm"]) for row in found["rows"]} == {(3, "needs a GPU")}
