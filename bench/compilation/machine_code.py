"""Machine code as text, NVIDIA's SASS or AMD's assembly: its instructions and loops, and programs that fit an SM."""

from __future__ import annotations

import re
from dataclasses import dataclass

from triton.backends.compiler import GPUTarget

from paged.bench.compilation.cases.case import TARGETS

GPU_TARGETS = {name: GPUTarget("cuda", int(name.removeprefix("sm_")), 32) for name in TARGETS if name.startswith("sm")}
GPU_TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
# Name of an instruction in tables and in `CompileCase.expect` -> pattern for the beginning of its opcode. LDGSTS is an
# asynchronous copy to shared memory; LDGSTS.128 copies 16 bytes a thread. UTMALDG is a copy by the tensor memory
# accelerator.
INSTRUCTIONS = {
    "HGMMA": r"HGMMA",
    "HMMA": r"HMMA",
    "QGMMA": r"QGMMA",
    "IGMMA": r"IGMMA",
    "IMMA": r"IMMA",
    "UTCHMMA": r"UTCHMMA",
    "v_mfma": r"v_mfma",
    "LDGSTS": r"LDGSTS",
    "LDGSTS.128": r"LDGSTS.*\.128",
    "UTMALDG": r"UTMALDG",
    "load_dwordx4": r"(global|buffer)_load_dwordx4",
    "exp2": r"MUFU\.EX2|v_exp_f32",
    "convert": r"F2F|F2I|I2F|v_cvt",
}
MATRIX = ("HGMMA", "HMMA", "QGMMA", "IGMMA", "IMMA", "UTCHMMA", "v_mfma")
_SASS_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)(.*?);")
_AMD_LINE = re.compile(r"^(?:(\.L\w+):|\t([a-z]\w+)(.*))", re.MULTILINE)


@dataclass(frozen=True)
class SmLimits:
    """Resources that the programs on an SM or compute unit share.

    They are warps, programs, registers of a lane of one of the four schedulers, bytes of shared memory, bytes of shared
    memory that every program takes for itself, and columns of tensor memory.
    """

    warps: int
    programs: int
    registers: int
    register_unit: int
    shared: int
    shared_reserved: int
    tensor_columns: int = 512


# Sources: for NVIDIA the CUDA C++ programming guide, technical specifications per compute capability; for gfx942 LLVM's
# occupancy model (llvm-calc-occupancy). bench/limits.md has their numbers.
_NVIDIA_100_KB = SmLimits(48, 24, 512, 8, 102_400, 1024)
_NVIDIA_228_KB = SmLimits(64, 32, 512, 8, 233_472, 1024)
SM_LIMITS = {
    "sm_80": SmLimits(64, 32, 512, 8, 167_936, 1024),
    "sm_89": _NVIDIA_100_KB,
    "sm_90": _NVIDIA_228_KB,
    "sm_100": _NVIDIA_228_KB,
    "sm_103": _NVIDIA_228_KB,
    "sm_120": _NVIDIA_100_KB,
    "gfx942": SmLimits(32, 16, 512, 8, 65_536, 0),
}


def occupancy(target: str, num_warps: int, registers: int, shared: int, tensor_columns: int = 0) -> int:
    """Return the programs that reside on one SM at once; registers are a thread's, shared is in bytes."""
    limits = SM_LIMITS[target]
    allocated = -(-max(registers, 1) // limits.register_unit) * limits.register_unit
    warps = min(limits.warps, 4 * (limits.registers // allocated))
    fitting = [limits.programs, warps // num_warps]
    if shared + limits.shared_reserved:
        fitting.append(limits.shared // (shared + limits.shared_reserved))
    if tensor_columns:
        fitting.append(limits.tensor_columns // tensor_columns)
    return min(fitting)


def count(opcodes: list[str]) -> dict[str, int]:
    """Return the number of each of INSTRUCTIONS that occurs."""
    totals = {}
    for name, pattern in INSTRUCTIONS.items():
        num_matches = sum(re.match(pattern, opcode) is not None for opcode in opcodes)
        if num_matches:
            totals[name] = num_matches
    return totals


def read_code(text: str) -> tuple[list[str], list[str]]:
    """Return all opcodes, and the opcodes of the shortest loop with a matrix instruction, or of none.

    The shortest loop is the one over full tiles, because masks make a loop longer. A loop lies between a backward
    branch and its target. It lacks code that the compiler moved out of line, such as the wait for a barrier.
    """
    if _SASS_LINE.search(text):
        opcodes, jumps = _read_sass(text)
    else:
        opcodes, jumps = _read_amd(text)
    matrix = "|".join(INSTRUCTIONS[name] for name in MATRIX)
    loops = []
    for source, target in jumps:
        loop = opcodes[target : source + 1]  # empty if the jump is forward
        if any(re.match(matrix, opcode) for opcode in loop):
            loops.append(loop)
    return opcodes, min(loops, key=len, default=[])


def _read_sass(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    lines = _SASS_LINE.findall(text)
    positions = {}
    for position, (address, _, _) in enumerate(lines):
        positions[int(address, 16)] = position
    opcodes = []
    jumps = []
    for position, (_, opcode, operands) in enumerate(lines):
        opcodes.append(opcode)
        target = re.search(r"0x([0-9a-f]+)\s*$", operands)
        if opcode.startswith("BRA") and target and int(target[1], 16) in positions:
            jumps.append((position, positions[int(target[1], 16)]))
    return opcodes, jumps


def _read_amd(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for label, opcode, operands in _AMD_LINE.findall(text):
        if label:
            labels[label] = len(opcodes)
            continue
        if opcode.startswith(("s_branch", "s_cbranch")):
            branches.append((len(opcodes), operands.split()[0]))
        opcodes.append(opcode)
    jumps = []
    for position, label in branches:
        if label in labels:
            jumps.append((position, labels[label]))
    return opcodes, jumps
