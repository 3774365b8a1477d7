"""Compile every kernel configuration ahead of time, without a GPU, and report registers, spills and instructions.

    python -m bench.compilation.compile [--target sm_90 ...] [--only NAME] [--new [--again] [--sample N]] [--record]
        [--json FILE]

Registers, spills, shared memory and instructions come from the compiled code itself: through `cuobjdump` and `nvdisasm`
from the triton wheel for NVIDIA, from the assembly's metadata for AMD. The last column counts the instructions of the
inner loop. Run without TRITON_INTERPRET.

Compiling all cases takes about 35 minutes of one core. `--record` writes to clean/ which cases have no problem, by a
hash of everything that the result depends on. `--new` compiles the cases that are not in clean/; with `--again` also a
sixteenth of the others. If clean/ has no case of a target, as for a new Triton, `--sample` compiles N cases of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.compiler import ASTSource, CompiledKernel

from paged.bench.benchmark import check_only, option_parser
from paged.bench.cards.cards import CARDS
from paged.bench.compilation.cases import checks
from paged.bench.compilation.cases.case import TARGETS, CompileCase
from paged.bench.compilation.machine_code import GPU_TARGETS, SM_LIMITS, count, occupancy, read_code

# Target -> bytes of shared memory that one program may take: all unreserved memory of an SM.
SHARED_LIMIT = {target: limits.shared - limits.shared_reserved for target, limits in SM_LIMITS.items()}
CLEAN = Path(__file__).parent / "clean" / f"{triton.__version__}.txt"
# Number of kernels that are disassembled together, because nvdisasm takes half a second to start.
_AT_ONCE = 32
_INSTRUCTION_BYTES = 16
# Number of accepted spilling instructions outside the loop: ptxas spills a register or two there if one more program
# then fits on an SM.
_SPILLS_OUTSIDE_LOOP = 4
# Version of Triton -> case -> number of spilling instructions that are accepted outside the loop. Tiles without spills
# are slower, see bench/limits.md.
_KNOWN_SPILLS = {
    "3.6.0": {
        "paged_attention decode 16 x 64 D=128 bf16 int8 cache window options for sm_90": 8,
        "paged_attention decode 16 x 32 D=256 bf16 int8 cache window options for sm_90": 16,
        "paged_attention prefill 128 x 64 D=128 bf16 int8 cache for sm_90": 20,
        "paged_attention decode 16 x 64 D=128 bf16 int4 cache window options for sm_90": 10,
        "paged_attention decode 16 x 32 D=256 bf16 int4 cache window options for sm_90": 8,
        "paged_attention decode 16 x 32 D=256 bf16 nvfp4 cache for sm_90": 8,
        "paged_attention prefill 128 x 64 D=128 bf16 e4m3_rows cache for sm_90": 19,
        "paged_attention prefill 64 x 32 D=256 bf16 nvfp4 cache for sm_90": 58,
        "paged_attention prefill 128 x 64 D=128 bf16 int8 keys int4 values for sm_90": 30,
        "paged_attention chosen 64 x 64 D=128 bf16 blocks of 128 union int8 cache for sm_90": 6,
        "paged_attention chosen 64 x 64 D=128 bf16 blocks of 128 union e4m3_rows cache for sm_90": 6,
        "paged_compressed_attention 64 heads bf16 pools of 128 64 x 32 for sm_90": 8,
        "paged_compressed_attention 64 heads bf16 pools of 4 chosen 64 x 32 for sm_90": 23,
        "gated_delta_rule prepare chunks 40 x 64 x 64 bf16 erasing": 6,
    },
    "3.7.1": {
        "paged_attention decode 16 x 64 D=128 bf16 int4 cache window options for sm_89": 8,
        "paged_attention decode 16 x 64 D=128 bf16 int8 cache boxes for sm_90": 8,
        "paged_attention decode 16 x 64 D=128 bf16 int8 keys int4 values for sm_90": 6,
        "paged_attention decode 16 x 32 D=256 bf16 nvfp4 cache for sm_90": 6,
        "paged_attention decode 16 x 32 D=256 bf16 nvfp4 cache for sm_100": 10,
        "paged_attention decode 16 x 32 D=256 bf16 nvfp4 cache for sm_103": 10,
        # 32 x 32 spills none, but takes 883 instructions for 32 rows instead of 610 for 64.
        "paged_attention prefill 64 x 32 D=256 bf16 nvfp4 cache for sm_90": 58,
        "paged_attention prefill 64 x 32 D=128 bf16 nvfp4 cache window options for sm_120": 14,
        # On sm_100 alone, where a chunk's state is read and written, not in its loop.
        "gated_delta_rule i8 states, scan chunks 32 x 128 x 128 bf16": 19,
        "gated_delta_rule i8 states, scan chunks 64 x 128 x 128 bf16 bounded": 6,
        "paged_mla_attention 128 heads 64 x 32 512 + 64 bf16 for sm_100": 5,
        "paged_mla_attention 128 heads 64 x 32 512 + 64 bf16 for sm_103": 5,
        "paged_compressed_attention 64 heads bf16 pools of 128 64 x 32 for sm_90": 8,
        "paged_compressed_attention 64 heads bf16 pools of 4 chosen 64 x 32 for sm_90": 16,
        "paged_compressed_attention 64 heads bf16 pools of 4 chosen 32 x 16 for sm_120": 8,
    },
}


@dataclass(frozen=True)
class Report:
    """A case compiled for a target; memory in bytes, registers of a thread, tensor memory in columns.

    instructions, loop: number of each of `INSTRUCTIONS` in the kernel and in its inner loop (`machine_code.read_code`);
    "all" counts all instructions. loop_spills: spills in the inner loop; on AMD, all spills.
    """

    name: str
    kernel: str
    target: str
    registers: int
    spills: int
    shared: int
    num_warps: int
    instructions: dict[str, int]
    loop: dict[str, int] = field(default_factory=dict)
    tensor_columns: int = 0
    loop_spills: int = 0

    @property
    def occupancy(self) -> int:
        """Programs that reside on one SM at once."""
        return occupancy(self.target, self.num_warps, self.registers, self.shared, self.tensor_columns)


@cache
def all_cases() -> list[CompileCase]:
    """Return the cases of every card, and of the checks of ids."""
    cases = checks.cases()
    for card in CARDS.values():
        cases += card.compiled()
    return cases


def case_key(case: CompileCase, target: str) -> str:
    """Return a hash of everything that `problems` of a case depend on.

    It covers the kernel's source with the functions it calls, its arguments and options, the compiler's version, and
    the expected instructions.
    """
    parts: tuple[Any, ...] = (
        *(triton.__version__, sources(case.kernel), target, SM_LIMITS[target], _SPILLS_OUTSIDE_LOOP),
        *(case.signature, case.constexprs, case.num_warps, case.num_stages, case.divisible_by_16),
        *(case.expect.get(target), case.programs_per_sm),
    )
    if case.may_spill:
        parts = (*parts, "may spill")
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@cache
def sources(kernel: Any) -> list[tuple[str, str]]:
    """Return the sources of a kernel and of the functions that it calls, and the constants they use, by name.

    Triton's own `cache_key` would also depend on which kernels of the process were hashed before.
    """
    texts: dict[Any, str] = {}
    waiting = [(kernel.fn.__name__, kernel)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, tl.constexpr):
            texts[name, value] = repr(value.value)
        elif hasattr(value, "src") and (name, value) not in texts:
            texts[name, value] = value.src
            for used_name in value.fn.__code__.co_names:
                waiting.append((used_name, value.fn.__globals__.get(used_name)))
    return sorted((name, text) for (name, _), text in texts.items())


def needs_compiling(key: str, clean: set[str], again: bool = False) -> bool:
    """Return whether a case is not known to be clean, or is a known one that `again` chooses: every sixteenth."""
    return key not in clean or (again and int(key, 16) % 16 == 0)


def choose_new(
    cases: list[CompileCase], target: str, clean: set[str], again: bool = False, sample: int | None = None
) -> list[CompileCase]:
    """Return the cases of a target that `needs_compiling`.

    sample: if `clean` has no case of the target, return this many cases, spread over the list.
    """
    chosen = []
    has_clean = False
    for case in cases:
        key = case_key(case, target)
        has_clean = has_clean or key in clean
        if needs_compiling(key, clean, again):
            chosen.append(case)
    if sample is not None and sample < len(cases) and not has_clean:
        return [cases[index * len(cases) // sample] for index in range(sample)]
    return chosen


def reports(cases: dict[str, list[CompileCase]]) -> Iterator[tuple[CompileCase, Report]]:
    """Compile the cases of each target and read the results."""
    for target, chosen in cases.items():
        for start in range(0, len(chosen), _AT_ONCE):
            group = chosen[start : start + _AT_ONCE]
            yield from zip(group, _compile_group(group, target), strict=True)


def compile_case(case: CompileCase, target: str) -> Report:
    """Compile `case` for one of TARGETS and read the result."""
    (report,) = _compile_group([case], target)
    return report


def _compile_group(cases: list[CompileCase], target: str) -> list[Report]:
    kernels = [_compile(case, target) for case in cases]
    texts = _machine_code(kernels, target)
    reports = []
    for case, kernel, text in zip(cases, kernels, texts, strict=True):
        reports.append(_report(case, target, kernel, text))
    return reports


def _compile(case: CompileCase, target: str) -> CompiledKernel:
    constexprs = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for position, (name, kind) in enumerate(case.signature.items()):
        if kind == "constexpr":
            constexprs[position,] = case.constexprs[name]
        if kind.startswith("*") or name in case.divisible_by_16:
            attributes[position,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=case.kernel, signature=case.signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    return triton.compile(source, target=GPU_TARGETS[target], options=options)


def _report(case: CompileCase, target: str, compiled: CompiledKernel, text: str) -> Report:
    code, loop = read_code(text)
    if target.startswith("gfx"):
        registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[0])
        spills = loop_spills = int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)[0])
    else:
        registers = _registers(compiled.asm["cubin"])
        spills, loop_spills = _num_spills(code), _num_spills(loop)
    loop_counts = {}
    if loop:
        loop_counts = {"all": len(loop), **count(loop)}
    return Report(
        name=case.name,
        kernel=case.kernel.fn.__name__,
        target=target,
        registers=registers,
        spills=spills,
        shared=int(compiled.metadata.shared),
        num_warps=int(compiled.metadata.num_warps),
        instructions={"all": len(code), **count(code)},
        loop=loop_counts,
        tensor_columns=int(getattr(compiled.metadata, "tmem_size", 0)),
        loop_spills=loop_spills,
    )


def _num_spills(opcodes: list[str]) -> int:
    """Return the number of local loads and stores, which move spilled values; a stack frame alone is not a spill."""
    return sum(opcode.startswith(("LDL", "STL")) for opcode in opcodes)


def _machine_code(compiled: list[CompiledKernel], target: str) -> list[str]:
    """Return the machine code of each kernel: AMD's assembly or NVIDIA's SASS."""
    if target.startswith("gfx"):
        return [kernel.asm["amdgcn"] for kernel in compiled]
    sections = [_code_section(kernel.asm["cubin"]) for kernel in compiled]
    capability = GPU_TARGETS[target].arch
    architecture = f"SM{capability}"
    if capability >= 90:  # as Triton does when it compiles
        architecture += "a"
    sass = _nvidia_tool("nvdisasm", b"".join(sections), "--no-dataflow", "--binary", architecture)
    lines = [line for line in sass.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/", line)]
    texts = []
    start = 0
    for section in sections:
        end = start + len(section) // _INSTRUCTION_BYTES
        texts.append("\n".join(lines[start:end]))
        start = end
    assert start == len(lines)
    return texts


def _code_section(cubin: bytes) -> bytes:
    """Return the instructions in a cubin: an ELF file of 64 bits whose one `.text` section is the kernel's."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, num_entries, names = struct.unpack_from("<3H", cubin, 0x3A)
    # Fields of an ELF section header: name, type, flags, address, offset, size.
    headers = [struct.unpack_from("<2I4Q", cubin, table + entry * entry_bytes) for entry in range(num_entries)]
    texts = []
    for name, _, _, _, offset, size in headers:
        if cubin.startswith(b".text.", headers[names][4] + name):
            texts.append(cubin[offset : offset + size])
    (code,) = texts
    return code


def _registers(cubin: bytes) -> int:
    """Return the registers of a thread."""
    (registers,) = re.findall(r"REG:(\d+)", _nvidia_tool("cuobjdump", cubin, "-res-usage"))
    return int(registers)


def _nvidia_tool(name: str, content: bytes, *options: str) -> str:
    """Run a program of the triton wheel on a file with this content, and return its output."""
    program = next(Path(triton.__file__).parent.glob(f"backends/nvidia/bin/{name}*"))
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return subprocess.run([program, *options, file.name], check=True, capture_output=True, text=True).stdout


def problems(case: CompileCase, report: Report) -> list[str]:
    """Return a report's problems: spills that cost time, shared memory, programs per SM, a missing instruction."""
    texts = []
    allowed = _KNOWN_SPILLS.get(triton.__version__, {}).get(report.name, _SPILLS_OUTSIDE_LOOP)
    if (report.loop_spills or report.spills > allowed) and not case.may_spill:
        texts.append(f"{report.spills} spills, {report.loop_spills} in the loop")
    if report.shared > SHARED_LIMIT[report.target]:
        texts.append(f"{report.shared} bytes of shared memory, limit {SHARED_LIMIT[report.target]}")
    if report.occupancy < case.programs_per_sm:
        texts.append(f"{report.occupancy} programs an SM, {case.programs_per_sm} counted on")
    for name in case.expect.get(report.target, ()):
        if name not in report.instructions:
            texts.append(f"no {name}")
    return texts


HEADER = f"{'case':56} {'target':8} {'regs':>4} {'spills':>6} {'shared':>7} {'programs':>8}  instructions | in the loop"


def main(argv: list[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Print the table; the exit code is 1 if a report shows a problem."""
    parser = option_parser(__doc__, "only", "json")
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--new", action="store_true", help="compile only cases that are not in clean/")
    parser.add_argument(
        "--again", action="store_true", help="with --new: also compile a sixteenth of the cases in clean/"
    )
    parser.add_argument(
        "--sample", type=int, metavar="N", help="with --new: compile N cases of a target that has none in clean/"
    )
    parser.add_argument("--record", action="store_true", help="write cases without a problem to clean/")
    args = parser.parse_args(argv)
    every_case = all_cases()
    check_only(args.only, [case.name for case in every_case])
    clean = set()
    if CLEAN.exists():
        clean = set(CLEAN.read_text().split())
    done, failed = [], 0
    write(HEADER)
    chosen = {}
    for target in args.target:
        cases = [case for case in every_case if args.only in case.name and target in case.targets]
        chosen[target] = cases
        if args.new:
            chosen[target] = choose_new(cases, target, clean, args.again, args.sample)
            if args.sample is not None and len(chosen[target]) == args.sample < len(cases):
                write(
                    f"{target}: a sample of {args.sample}, as triton {triton.__version__} has no record of clean cases"
                )
    for case, report in reports(chosen):
        wrong = problems(case, report)
        key = case_key(case, report.target)
        if wrong:
            failed += 1
            clean.discard(key)
        else:
            clean.add(key)
        done.append({**asdict(report), "occupancy": report.occupancy, "problems": wrong})
        write("  <- ".join([_row(report), *wrong]))
    if args.record:
        known = set()
        for case in every_case:
            known |= {case_key(case, target) for target in case.targets}
        CLEAN.write_text("".join(f"{key}\n" for key in sorted(clean & known)))
    if args.json:
        args.json.write_text(json.dumps({"triton": triton.__version__, "reports": done}, indent=1) + "\n")
    return int(failed > 0)


def _row(report: Report) -> str:
    row = (
        f"{report.name:56} {report.target:8} {report.registers:4} {report.spills:6} {report.shared:7} "
        f"{report.occupancy:8}  {_counts(report.instructions)}"
    )
    if report.loop:
        row += f"  | loop {_counts(report.loop)}"
    return row


def _counts(instructions: dict[str, int]) -> str:
    return " ".join(f"{name}:{number}" for name, number in instructions.items())


if __name__ == "__main__":
    sys.exit(main())
