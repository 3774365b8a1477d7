"""Every kernel configuration compiles for every target without a GPU, and the compilers' reports hold no surprise."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="ahead-of-time compilation needs triton")

import triton.language as tl

from paged.bench.compilation.case import EVERY_CASE, TARGETS, CompileCase
from paged.bench.compilation.compile import (
    SHARED_LIMIT,
    Report,
    all_cases,
    case_key,
    needs_compiling,
    problems,
)
from paged.bench.compilation.machine_code import count, occupancy, read_code

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_every_configuration_compiles(target: str, tmp_path: Path) -> None:
    """In a process of its own: this one may have replaced the compiler by the interpreter."""
    path = tmp_path / "reports.json"
    command = [
        sys.executable,
        "-m",
        "paged.bench.compilation.compile",
        "--target",
        target,
        "--new",
        "--json",
        str(path),
    ]
    run = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    reports = json.loads(path.read_text())["reports"]
    assert any(report["loop"] for report in reports)
    assert {report["target"] for report in reports} == {target}


@pytest.mark.parametrize("target", EVERY_CASE)
def test_every_kernel_has_cases(target: str) -> None:
    kernels = {name for path in KERNELS.rglob("*.py") for name in re.findall(r"def (_\w+_kernel)\(", path.read_text())}
    assert len(kernels) > 10
    assert kernels == {case.kernel.fn.__name__ for case in all_cases() if target in case.targets}


class Source:
    """Of a kernel or of a function that one calls: its text, and what its names stand for."""

    def __init__(self, src: str, **names: object) -> None:
        self.src = src
        scope = dict(names)
        exec(src, scope)
        self.fn = scope["run"]


def test_key_of_a_case_tells_what_it_depends_on() -> None:
    called = "def run(): return SIZE"
    kernel = Source("def run(): return helper()", helper=Source(called, SIZE=tl.constexpr(4)))
    case = CompileCase("", kernel, {"x_ptr": "*bf16", "SIZE": "constexpr"}, {"SIZE": 32})
    changed = [
        replace(case, num_warps=case.num_warps * 2),
        replace(case, num_stages=case.num_stages + 1),
        replace(case, constexprs={"SIZE": 48}),
        replace(case, signature=case.signature | {"x_ptr": "*fp16"}),
        replace(case, divisible_by_16=("x_ptr",)),
        replace(case, expect={"sm_90": ("HGMMA",)}),
        replace(case, programs_per_sm=2),
        replace(case, kernel=Source("def run(): return 1 + helper()", helper=kernel.fn.__globals__["helper"])),
        replace(case, kernel=Source(kernel.src, helper=Source(called, SIZE=tl.constexpr(8)))),
        replace(case, kernel=Source(kernel.src, helper=Source(called + " + 1", SIZE=tl.constexpr(4)))),
    ]
    keys = [case_key(each, "sm_90") for each in (case, *changed)] + [case_key(case, "sm_80")]
    assert len(set(keys)) == len(keys)
    again = replace(case, kernel=Source(kernel.src, helper=Source(called, SIZE=tl.constexpr(4))))
    assert keys[0] == case_key(again, "sm_90")
    assert keys[0] == case_key(replace(case, name="renamed", expect={"sm_80": ("HMMA",)}), "sm_90")


def test_new_cases_are_compiled_and_some_of_the_known() -> None:
    keys = [f"{value:016x}" for value in range(64)]
    assert all(needs_compiling(key, set()) for key in keys)
    assert sum(needs_compiling(key, set(keys)) for key in keys) == 4


def test_problems_are_seen() -> None:
    case = CompileCase("", None, {}, {}, expect={"sm_90": ("HGMMA", "LDGSTS.128")}, programs_per_sm=1)
    limit = SHARED_LIMIT["sm_90"]
    found = {"HGMMA": 4, "LDGSTS": 6, "LDGSTS.128": 4}
    sound = Report("", "", "sm_90", registers=200, spills=0, shared=limit, num_warps=8, instructions=found)
    assert problems(case, sound) == []
    assert problems(case, replace(sound, spills=4)) == []
    assert problems(case, replace(sound, spills=5)) != []
    assert problems(case, replace(sound, spills=1, loop_spills=1)) != []
    found = {"HMMA": 4, "LDGSTS": 6}
    faulty = Report("", "", "sm_90", registers=255, spills=8, shared=limit + 1, num_warps=8, instructions=found)
    assert len(problems(case, faulty)) == 5


def test_instructions_and_loop_of_sass() -> None:
    """Two loops around matrix instructions and one without; the shorter one of the two is the inner loop."""
    lines = [
        *("LDG.E R4, desc[UR16][R4.64]", "@!P0 BRA 0x0000", "@P1 BRA 0x00b0"),  # 00 to 20: a loop, a way round
        *("HMMA.16816.F32.BF16 R4, R8, R6, R4", "@!P0 LDGSTS.E [R23], desc[UR16][R12.64], P4"),
        *("LDGSTS.E.BYPASS.128 [R171+0x8000], desc[UR16][R12.64]", "@P3 BRA 0x0030"),  # 30 to 60
        *("HMMA.16816.F32.BF16 R4, R8, R6, R4", "FADD R1, R1, R2", "MUFU.EX2 R1, R2", "UTMALDG.4D [UR8], [UR4]"),
        "@P3 BRA.U 0x0070",  # 70 to b0
    ]
    text = "\n".join(f"        /*{16 * i:04x}*/    {line} ;    /* 0x000fe2 */" for i, line in enumerate(lines))
    code, loop = read_code(text)
    assert len(code) == len(lines)
    assert count(code) == {"HMMA": 2, "LDGSTS": 2, "LDGSTS.128": 1, "UTMALDG": 1, "exp2": 1}
    assert loop == ["HMMA.16816.F32.BF16", "LDGSTS.E", "LDGSTS.E.BYPASS.128", "BRA"]


def test_instructions_and_loop_of_amd_assembly() -> None:
    lines = [
        "kernel:",
        *(
            "\tglobal_load_dword v1, v[2:3], off",
            ".LBB0_1:",
            "\tv_mfma_f32_16x16x16_bf16 a[0:3], v[1:2], v[3:4], a[0:3]",
        ),
        *("\tbuffer_load_dwordx4 v[2:5], v6, s[0:3], 0 offen", "\ts_cbranch_scc1 .LBB0_1", "\ts_endpgm"),
    ]
    code, loop = read_code("\n".join(lines))
    assert count(code) == {"v_mfma": 1, "load_dwordx4": 1}
    assert [opcode.split("_")[0] for opcode in loop] == ["v", "buffer", "s"]
    assert len(code) == 5


@pytest.mark.parametrize(
    ("target", "program", "expected"),
    [
        ("sm_90", {"num_warps": 4, "registers": 163, "shared": 39_168}, 3),  # 512 // 168 = 3 warps a scheduler
        ("sm_90", {"num_warps": 8, "registers": 213, "shared": 98_560}, 1),  # 512 // 216 = 2 warps a scheduler
        ("sm_90", {"num_warps": 4, "registers": 32, "shared": 39_168}, 5),  # 228 KB by 38.25 + 1 KB
        ("sm_90", {"num_warps": 1, "registers": 16, "shared": 0}, 32),  # programs
        ("sm_90", {"num_warps": 4, "registers": 16, "shared": 0}, 16),  # 64 warps
        ("sm_80", {"num_warps": 4, "registers": 64, "shared": 81_920}, 2),  # 164 KB hold two of 80 + 1 KB
        ("sm_89", {"num_warps": 8, "registers": 80, "shared": 39_168}, 2),  # 100 KB by 38.25 + 1 KB
        ("sm_120", {"num_warps": 8, "registers": 64, "shared": 0}, 4),  # 512 // 64 = 8 warps a scheduler
        ("sm_100", {"num_warps": 4, "registers": 64, "shared": 1024, "tensor_columns": 256}, 2),
        ("gfx942", {"num_warps": 4, "registers": 164, "shared": 16_384}, 3),  # 512 // 168 waves a SIMD
        ("gfx942", {"num_warps": 4, "registers": 100, "shared": 32_768}, 2),  # 64 KB
    ],
)
def test_occupancy(target: str, program: dict[str, int], expected: int) -> None:
    assert occupancy(target, **program) == expected


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM's Python files are not on the path")
def test_peer_compiles() -> None:
    command = [sys.executable, "-m", "paged.bench.compilation.compile", "--target", "sm_90", "--only", "vllm"]
    run = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(re.findall(r"^vllm unified attention .* HMMA", run.stdout, re.MULTILINE)) == 2


def test_missing_peer_is_said() -> None:
    environment = {**_environment(), "PYTHONPATH": ""}
    command = [sys.executable, "-m", "paged.bench.compilation.compile", "--only", "vllm"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert ("no rows of vLLM's kernel" in run.stdout) != ("vllm unified attention" in run.stdout)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
