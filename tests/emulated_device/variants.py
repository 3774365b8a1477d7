"""Puts the kernel variants that tests and steps launch through the compiler's front end for sm_90; needs no GPU.

    python -m tests.emulated_device.variants [--all | --sample] [--record]

The interpreter runs what no compiler accepts, and the compile cases are only some of the variants that are launched.
The tests run on an emulated device that computes nothing: their launches count, not their results. A kernel is skipped
while clean.txt has the hash of its sources and Triton's version; --record adds those whose variants are all accepted.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import triton
from triton.compiler import ASTSource
from triton.compiler.compiler import ir, make_backend

from paged.bench.compilation.ahead import Variant
from paged.bench.compilation.compile import all_cases, sources
from paged.bench.compilation.machine_code import GPU_TARGETS

if TYPE_CHECKING:
    from tests.emulated_device.emulator.device import EmulatedCuda

CLEAN = Path(__file__).with_name("clean.txt")
TARGET = GPU_TARGETS["sm_90"]
# What is compiled of a Triton whose kernels have not been recorded.
SAMPLE = "tests/kernels/layers"
# Of an H100, so that what fits it is seen; an H200 differs in that alone.
_MEMORY = 78 << 30
STEPS = "tests/models/test_same_logits.py", "tests/models/test_step_graphs.py"


@contextmanager
def noted(note: Callable[[bytes], object]) -> Iterator[EmulatedCuda]:
    """On an emulated H100 that computes nothing, in a process with TRITON_INTERPRET=1: every variant that is launched
    inside is given to `note`, pickled."""
    from tests.emulated_device.emulator import kernels
    from tests.emulated_device.emulator.device import EmulatedCuda

    compile_kernel = kernels._Kernel._do_compile

    def compile_noted(
        self: Any, key: Any, sig: Any, device: Any, consts: Any, options: Any, attrs: Any, *rest: Any
    ) -> Any:
        function = self.function.fn
        chosen = {name: getattr(options, name) for name in ("num_warps", "num_stages", "launch_pdl")}
        if function.__module__.startswith("paged."):  # not the copies with planted faults
            variant = Variant(function.__module__, function.__name__, dict(sig), dict(consts), dict(attrs), chosen)
            note(pickle.dumps(variant))
        return compile_kernel(self, key, sig, device, consts, options, attrs, *rest)

    with (
        mock.patch.object(kernels._Kernel, "_do_compile", compile_noted),
        EmulatedCuda(executes=False, num_sms=132, total_memory=_MEMORY) as machine,
    ):
        yield machine


def record(path: Path, tests: list[str]) -> None:
    """Write the variants that `tests`, with options of pytest, launch."""
    import pytest

    found: set[bytes] = set()
    with noted(found.add):
        pytest.main(["-p", "no:cacheprovider", "-q", "--tb=no", "-rN", *tests])
    path.write_bytes(pickle.dumps(sorted(found)))


def launched(tests: Iterable[str], marked: str) -> list[Variant]:
    """The distinct variants that those of `tests` launch that are so marked."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "variants")
        command = [sys.executable, "-m", "tests.emulated_device.variants", "--into", str(path), "-m", marked, *tests]
        subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, stdout=subprocess.DEVNULL)
        return [pickle.loads(each) for each in pickle.loads(path.read_bytes())]


def compile_front_end(kernel: Any, variant: Variant) -> None:
    """Make Triton's IR of a variant; raises what the compiler raises."""
    backend, context = make_backend(TARGET), ir.context()
    options = backend.parse_options(dict(variant.options))
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(kernel, variant.signature, variant.constexprs, variant.attrs)
    source.make_ir(TARGET, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)


def key_of(kernel: Any) -> str:
    """Hash of a kernel's sources and of Triton's version."""
    return hashlib.sha256(repr((triton.__version__, sources(kernel))).encode()).hexdigest()[:16]


def tests_of(modules: Iterable[str]) -> list[str]:
    """The tests that launch the kernels of modules such as paged.kernels.moe.gemv."""
    families = {module.split(".")[2] for module in modules}
    return [*sorted(f"tests/kernels/{family}" for family in families), *STEPS]


def main(argv: list[str]) -> int:
    """Print the variants that are not accepted; the exit code is 1 where there are any, or a kernel is not launched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="kernels that clean.txt names, too")
    parser.add_argument(
        "--sample", action="store_true", help=f"if clean.txt has none of this Triton: those of {SAMPLE}"
    )
    parser.add_argument("--record", action="store_true", help="add the kernels without a fault to clean.txt")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args, tests = parser.parse_known_args(argv)
    if args.into:
        record(args.into, tests)
        return 0
    clean = set(CLEAN.read_text().split())
    kernels = {(case.kernel.fn.__module__, case.kernel.fn.__name__): case.kernel for case in all_cases()}
    changed = {place: kernel for place, kernel in kernels.items() if args.all or key_of(kernel) not in clean}
    if not changed:
        return 0
    variants: list[Variant] = []
    if args.sample and len(changed) == len(kernels):
        print(f"a sample of {SAMPLE}, as triton {triton.__version__} has no record of clean kernels")
        variants = launched([SAMPLE], "not thorough")
        changed = {each[:2]: kernels[each[:2]] for each in variants if each[:2] in kernels}
    faulty = set(changed) - {each[:2] for each in variants}
    for marked in ("not thorough", "thorough"):  # the latter take ten times as long, and few kernels need them
        if faulty:
            variants += launched(tests_of(module for module, _ in faulty), marked)
        faulty -= {each[:2] for each in variants}
    variants = [each for each in variants if each[:2] in changed]
    for _, name in faulty:
        print(f"{name}: no test has launched it")
    for each in variants:
        try:
            compile_front_end(changed[each[:2]], each)
        except Exception as error:  # the compiler raises many kinds
            faulty.add(each[:2])
            print(f"{each.name}: {str(error).strip().splitlines()[-1]}\n    {each[2:]}")
    print(f"{len(variants)} variants of {len(changed)} kernels, {len(faulty)} kernels with a fault")
    if args.record:
        clean |= {key_of(kernel) for place, kernel in changed.items() if place not in faulty}
        CLEAN.write_text("".join(f"{key}\n" for key in sorted(clean)))
    return int(bool(faulty))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
