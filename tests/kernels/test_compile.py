"""Every kernel configuration compiles for every target without a GPU, and the compilers' reports hold no surprise."""

import ast
import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="ahead-of-time compilation needs triton")

import triton
import triton.language as tl
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import paged
from paged.bench.compilation.cases.case import EVERY_CASE, TARGETS, CompileCase
from paged.bench.compilation.cases.launches import empty, launches_of
from paged.bench.compilation.compile import (
    SHARED_LIMIT,
    Report,
    all_cases,
    case_key,
    choose_new,
    needs_compiling,
    problems,
)
from paged.bench.compilation.machine_code import GPU_TARGETS, count, occupancy, read_code
from paged.kernels.core.device import device_of
from paged.kernels.core.errors import InvalidInputError

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def _compile(*options: str, **environment: str) -> str:
    """What is printed in a process of its own: this one may have replaced the compiler by the interpreter."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "paged.bench.compilation.compile", *options]
    run = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.long
def test_changed_configurations_compile() -> None:
    """For every target; a sample of those that have no record for this Triton."""
    printed = _compile("--new", "--sample", "2", PYTHONPATH="")
    assert printed.startswith("case")
    samples = [line for line in printed.splitlines() if "a sample" in line]
    if samples:
        warnings.warn("\n".join(samples), stacklevel=1)


@pytest.mark.long
@pytest.mark.thorough
@pytest.mark.parametrize("targets", [list(TARGETS)[::2], list(TARGETS)[1::2]], ids=str)
def test_a_share_of_all_configurations_compiles(targets: list[str], tmp_path: Path) -> None:
    path = tmp_path / "reports.json"
    _compile("--target", *targets, "--new", "--again", "--sample", "2", "--json", str(path), PYTHONPATH="")
    reports = json.loads(path.read_text())["reports"]
    assert {report["target"] for report in reports if report["loop"]} == set(targets)


def _kernels() -> list[ast.FunctionDef]:
    """Return the definitions of all Triton kernels: not those of functions that they call, which have other names."""
    trees = [ast.parse(path.read_text()) for path in KERNELS.rglob("*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    jitted = [function for function in functions if "triton.jit" in "".join(map(ast.unparse, function.decorator_list))]
    return [function for function in jitted if function.name.endswith("_kernel")]


def test_every_kernel_has_cases() -> None:
    kernels = {kernel.name for kernel in _kernels()}
    assert len(kernels) > 10
    cases = all_cases()
    for target in EVERY_CASE:
        assert kernels == {case.kernel.fn.__name__ for case in cases if target in case.targets}


def test_every_kernel_waits_first_for_the_one_before() -> None:
    """One that loaded or stored before it waits would race with the one before, if launched early."""
    late = []
    for kernel in _kernels():
        first = kernel.body[0 if ast.get_docstring(kernel) is None else 1]
        if ast.unparse(first) != "wait_for_inputs()":
            late.append(kernel.name)
    assert late == []


@pytest.mark.parametrize(("target", "options"), [("sm_90", {"launch_pdl": True}), ("sm_90", {}), ("sm_80", {})])
def test_only_early_launches_wait(target: str, options: dict[str, bool]) -> None:
    case = next(case for case in all_cases() if case.kernel.fn.__name__ == "_merge_attn_states_kernel")
    constexprs = {(list(case.signature).index(name),): value for name, value in case.constexprs.items()}
    source = ASTSource(JITFunction(case.kernel.fn), case.signature, constexprs)
    ptx = triton.compile(source, target=GPU_TARGETS[target], options=options).asm["ptx"]
    found = re.findall(r"griddepcontrol\.\w+|(?:ld|st)\.global", ptx)
    waits = ["griddepcontrol.wait", "griddepcontrol.launch_dependents"] if options else []
    assert found[: len(waits)] == waits
    assert {*found[len(waits) :]} == {"ld.global", "st.global"}


def test_launches_are_those_of_the_target_and_an_error_leaves_nothing_behind() -> None:
    rows, cache, slots = empty("bf16", 2, 1, 64), empty("fp8e4nv", 4, 16, 1, 64), empty("i64", 2)
    for target, is_native in (("sm_80", False), ("sm_90", True)):
        (launch,) = launches_of(target, paged.reshape_and_cache, rows, rows, cache, cache, slots)
        assert launch.arguments["NATIVE_FP8"] == is_native
        with pytest.raises(InvalidInputError):
            launches_of(target, paged.rms_norm, rows, slots)
        assert device_of(torch.device("cpu")).arch == "cpu"
        assert paged.greedy_argmax(torch.eye(3)).tolist() == [0, 1, 2]


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
    changes = (
        {"num_warps": case.num_warps * 2},
        {"num_stages": case.num_stages + 1},
        {"constexprs": {"SIZE": 48}},
        {"signature": case.signature | {"x_ptr": "*fp16"}},
        {"divisible_by_16": ("x_ptr",)},
        {"expect": {"sm_90": ("HGMMA",)}},
        {"programs_per_sm": 2},
        {"may_spill": True},
        {"kernel": Source("def run(): return 1 + helper()", helper=kernel.fn.__globals__["helper"])},
        {"kernel": Source(kernel.src, helper=Source(called, SIZE=tl.constexpr(8)))},
        {"kernel": Source(kernel.src, helper=Source(called + " + 1", SIZE=tl.constexpr(4)))},
    )
    keys = [case_key(case, "sm_90"), case_key(case, "sm_80")]
    keys += [case_key(replace(case, **change), "sm_90") for change in changes]
    assert len(set(keys)) == len(keys)
    again = replace(case, kernel=Source(kernel.src, helper=Source(called, SIZE=tl.constexpr(4))))
    assert keys[0] == case_key(again, "sm_90")
    assert keys[0] == case_key(replace(case, name="renamed", expect={"sm_80": ("HMMA",)}), "sm_90")


def test_new_cases_are_compiled_and_some_of_the_known_where_asked() -> None:
    keys = [f"{value:016x}" for value in range(64)]
    assert all(needs_compiling(key, set()) for key in keys)
    assert [sum(needs_compiling(key, set(keys), again) for key in keys) for again in (False, True)] == [0, 4]


def test_a_target_without_a_record_is_sampled() -> None:
    cases = [CompileCase(f"{index}", Source("def run(): return 0"), {}, {}, num_warps=index) for index in range(64)]
    known = {case_key(cases[5], "sm_90")}
    assert choose_new(cases, "sm_90", known, sample=4) == cases[:5] + cases[6:]
    assert choose_new(cases, "sm_80", known) == cases
    assert choose_new(cases, "sm_80", known, sample=4) == cases[::16]
    assert choose_new(cases, "sm_80", known, sample=100) == cases


def test_problems_are_seen() -> None:
    case = CompileCase("", None, {}, {}, expect={"sm_90": ("HGMMA", "LDGSTS.128")}, programs_per_sm=1)
    limit = SHARED_LIMIT["sm_90"]
    found = {"HGMMA": 4, "LDGSTS": 6, "LDGSTS.128": 4}
    sound = Report("", "", "sm_90", registers=200, spills=0, shared=limit, num_warps=8, instructions=found)
    assert problems(case, sound) == problems(case, replace(sound, spills=4)) == []
    assert problems(case, replace(sound, spills=5)) != []
    assert problems(case, replace(sound, spills=1, loop_spills=1)) != []
    assert problems(replace(case, may_spill=True), replace(sound, spills=5, loop_spills=1)) == []
    worse = {"registers": 255, "spills": 8, "shared": limit + 1, "instructions": {"HMMA": 4, "LDGSTS": 6}}
    assert len(problems(case, replace(sound, **worse))) == 5


def test_instructions_and_loop_of_sass() -> None:
    """Two loops around matrix instructions and one without; the shorter one of the two is the inner loop."""
    lines = [
        *("LDG.E R4, desc[UR16][R4.64]", "@!P0 BRA 0x0000", "@P1 BRA 0x00b0"),  # 00 to 20: a loop, a way round
        *("HMMA.16816.F32.BF16 R4, R8, R6, R4", "@!P0 LDGSTS.E [R23], desc[UR16][R12.64], P4"),
        *("LDGSTS.E.BYPASS.128 [R171+0x8000], desc[UR16][R12.64]", "@P3 BRA 0x0030"),  # 30 to 60
        *("HMMA.16816.F32.BF16 R4, R8, R6, R4", "FADD R1, R1, R2", "MUFU.EX2 R1, R2", "UTMALDG.4D [UR8], [UR4]"),
        "@P3 BRA.U 0x0070",  # 70 to b0
    ]
    code, loop = read_code(
        "\n".join(f"  /*{16 * i:04x}*/    {line} ;    /* 0x000fe2 */" for i, line in enumerate(lines))
    )
    assert len(code) == len(lines)
    assert count(code) == {"HMMA": 2, "LDGSTS": 2, "LDGSTS.128": 1, "UTMALDG": 1, "exp2": 1}
    assert loop == ["HMMA.16816.F32.BF16", "LDGSTS.E", "LDGSTS.E.BYPASS.128", "BRA"]


# target, warps, registers, shared memory, tensor memory -> programs
OCCUPANCIES = [
    ("sm_90", 4, 163, 39_168, 0, 3),  # 512 // 168 = 3 warps a scheduler
    ("sm_90", 1, 16, 0, 0, 32),  # programs
    ("sm_90", 4, 16, 0, 0, 16),  # 64 warps
    ("sm_89", 8, 80, 39_168, 0, 2),  # 100 KB by 38.25 + 1 KB
    ("sm_100", 4, 64, 1024, 256, 2),
    ("gfx942", 4, 100, 32_768, 0, 2),  # 64 KB
]


def test_occupancy() -> None:
    for target, num_warps, registers, shared, columns, expected in OCCUPANCIES:
        program = {"num_warps": num_warps, "registers": registers, "shared": shared, "tensor_columns": columns}
        assert occupancy(target, **program) == expected, (target, program)
