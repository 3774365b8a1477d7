"""The tuner: what it tries, what it picks, and that its table is what fused_moe looks up."""

import json
import logging
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="tuning needs triton")

from paged.bench.moe import tune as tune_module
from paged.bench.moe.cases import MODELS
from paged.bench.moe.tune import Candidate, by_promise, compiled, new_table, search_space, shape_of, timer, tune
from paged.bench.problems.experts import MoeCase, MoeModel
from paged.kernels.core.device import Device
from paged.kernels.moe import config as moe_config
from paged.kernels.moe.config import MoeTile, MoeTiles, fallback_tiles, load_table, moe_tiles, table_name

QWEN3 = MODELS[0]
H200 = Device("sm_90", 132, "NVIDIA H200")
TILE = MoeTile(64, 64, 64, 8, 4, 3)


@pytest.mark.parametrize(
    ("num_tokens", "packed"), [(16, ""), (256, ""), (1024, ""), (32768, ""), (16, "mxfp4"), (512, "int4")]
)
def test_search_space_holds_the_fallback(num_tokens: int, packed: str) -> None:
    """What is computed from the shape could be found by measuring, too, so that tuning never loses to it."""
    shape = shape_of(QWEN3, num_tokens, packed)
    space, tiles = search_space(shape, "sm_90"), fallback_tiles(shape, H200)
    assert len(space) == len(set(space)) < 800
    for gated, tile in ((True, tiles.gate_up), (False, tiles.down)):
        assert replace(tile, group_m=0) in {replace(each.tile, group_m=0) for each in space if each.gated == gated}


def test_best_guesses_come_first_and_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module, "compile_ahead", lambda *_: [])
    shape = shape_of(QWEN3, 64)
    guess = fallback_tiles(shape, H200)
    space = by_promise(search_space(shape, "sm_90"), guess)
    late = list(compiled(space, lambda _: 0.0, -math.inf))
    assert {(each.gated, each.tile) for each in late[:2]} == {(True, guess.gate_up), (False, guess.down)}
    assert len(late) < 10 < len(list(compiled(space, lambda _: 0.0, math.inf))) == len(space)


def test_rows_are_shared_by_the_least_sum() -> None:
    """The best tile of one GEMM loses where the other has none as good with the same rows."""
    few, many = (replace(TILE, block_m=rows) for rows in (16, 128))
    times = {Candidate(True, few): 1.0, Candidate(False, few): 9.0, Candidate(False, many): 0.5}
    times |= {Candidate(True, TILE): 3.0, Candidate(True, replace(TILE, num_warps=8)): 2.0, Candidate(False, TILE): 4.0}
    tiles, microseconds = tune(times, lambda candidate: times[candidate])
    assert tiles == {"gate_up": replace(TILE, num_warps=8), "down": TILE}
    assert microseconds == {"gate_up": 2e6, "down": 4e6}


def test_wrong_and_refused_tiles_take_no_time_and_a_lost_device_ends_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    case = MoeCase(MoeModel("small", 4, 2, 64, 32, 4), 5, "balanced")
    wrong, refused, lost = (replace(TILE, num_warps=warps) for warps in (1, 2, 8))
    multiply = tune_module.expert_gemm

    def faulty(x: torch.Tensor, linear: Any, out: torch.Tensor, aligned: Any, tile: MoeTile, **options: Any) -> None:
        if tile in (refused, lost):
            raise RuntimeError("an illegal memory access was encountered")
        if tile != wrong:  # which writes nothing
            multiply(x, linear, out, aligned, tile, **options)

    monkeypatch.setattr(tune_module, "expert_gemm", faulty)
    layer, batch = case.layer(device, torch.float32), case.batch(device, torch.float32)
    seconds = timer(layer, batch, MoeTiles(TILE, TILE), 2)
    for gated in (True, False):
        other = replace(TILE, block_m=16, block_n=32)
        assert seconds(Candidate(gated, other)) < math.inf
        assert seconds(Candidate(gated, wrong)) == seconds(Candidate(gated, refused)) == math.inf
    monkeypatch.setattr(tune_module, "released", lambda _: False)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        seconds(Candidate(True, lost))


def test_table_is_looked_up_by_the_nearest_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = new_table(QWEN3, "sm_90")
    for num_tokens, rows in ((64, 16), (512, 32), (4096, 128)):
        tile = asdict(replace(TILE, block_m=rows))
        table["tiles"][str(num_tokens)] = {"gate_up": tile, "down": tile, "microseconds": {}}
    name = "E=128,N=768,device_name=NVIDIA_H200,dtype=bfloat16.json"
    assert table_name(128, 768, "NVIDIA H200", "bfloat16") == name
    (tmp_path / name).write_text(json.dumps(table))
    monkeypatch.setattr(moe_config, "FOLDER", tmp_path)
    for num_tokens, rows in ((1, 16), (64, 16), (280, 16), (300, 32), (1 << 17, 128)):
        tiles = moe_tiles(shape_of(QWEN3, num_tokens), torch.bfloat16, H200)
        assert tiles.gate_up == tiles.down == replace(TILE, block_m=rows)
    packed = moe_tiles(shape_of(QWEN3, 64, "mxfp4"), torch.bfloat16, H200)
    assert packed != tiles, "tables of other weights are others"
    (tmp_path / name.replace("bfloat16", "mxfp4_w4a16")).write_text(json.dumps(table))
    load_table.cache_clear()
    moe_config._tiles.cache_clear()
    assert moe_tiles(shape_of(QWEN3, 64, "mxfp4"), torch.bfloat16, H200).gate_up == replace(TILE, block_m=16)
    assert load_table(tmp_path / name)[64 * QWEN3.top_k].down.block_m == 16


def test_missing_table_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(moe_config, "FOLDER", tmp_path)
    with caplog.at_level(logging.WARNING):
        for num_tokens in (16, 4096):
            shape = shape_of(QWEN3, num_tokens)
            assert moe_tiles(shape, torch.bfloat16, H200) == fallback_tiles(shape, H200)
            assert moe_tiles(shape, torch.bfloat16, replace(H200, name="")) == fallback_tiles(shape, H200)
    (record,) = caplog.records
    assert "E=128,N=768,device_name=NVIDIA_H200,dtype=bfloat16.json" in record.getMessage()
