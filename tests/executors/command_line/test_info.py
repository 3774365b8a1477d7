"""`paged info`: the backend and its reason, and features that follow the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import paged
from paged.executors.command_line import cli, info
from paged.kernels.common import device, fp8
from paged.kernels.common.device import Device, has_numba
from paged.kernels.moe import config as moe_config

CPU = torch.device("cpu")


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["info", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_backend_and_its_reason(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for interpret, backend, name, reason in (
        ("1", "", "triton", "Triton's interpreter"),
        ("0", "", "torch", "no GPU: operations of PyTorch"),
        ("1", "torch", "torch", "PAGED_BACKEND=torch"),
        ("1", "numba", "numba", "PAGED_BACKEND=numba"),
        ("0", "triton", "none", "CPU tensors need TRITON_INTERPRET=1"),
    ):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        monkeypatch.setenv("PAGED_BACKEND", backend)
        found = report(capsys)
        assert found["backend"]["name"] == name
        assert reason in found["backend"]["reason"]
        supported = {feature["name"]: feature["supported"] for feature in found["features"]}
        assert supported["bfloat16"] == (name != "triton"), "not in the interpreter"
        assert not supported["native fp8"]
        assert supported["loops by numba"] == (name in ("torch", "numba") and backend != "torch" and has_numba())
    assert found["versions"]["paged"] == paged.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["device"]["cpu_threads"] == torch.get_num_threads()


def test_table_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    found = capsys.readouterr().out
    assert f"paged                {paged.__version__}" in found
    assert "tuned MoE tiles" in found


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("sm_80", {"bfloat16"}),
        ("sm_89", {"bfloat16", "native fp8"}),
        ("sm_90", {"bfloat16", "native fp8", "TMA and wgmma"}),
    ],
)
def test_features_follow_the_chip(
    arch: str, expected: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (device, fp8):
        monkeypatch.setattr(module, "device_of", lambda _: Device(arch, 100, "NVIDIA H200"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    gpu = torch.device("cuda")
    found = {feature.name for feature in info._features(gpu, "triton") if feature.supported}
    assert found & {"bfloat16", "native fp8", "TMA and wgmma"} == expected
    assert "CUDA graphs" in found
    monkeypatch.setattr(moe_config, "FOLDER", tmp_path)
    assert not info._tables(gpu)[0].supported
    for chip in ("NVIDIA H200", "NVIDIA H100"):
        (tmp_path / moe_config.table_name(128, 768, chip, "bfloat16")).write_text("{}")
    (tables,) = info._tables(gpu)
    assert tables.supported
    assert tables.reason == "E=128,N=768,device_name=NVIDIA_H200,dtype=bfloat16.json"
