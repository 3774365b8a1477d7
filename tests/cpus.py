"""Runs tests as other processors would: under older instruction sets, other sums of MKL, other numbers of threads.

    python -m tests.cpus [--only NAME] [--tests FILE] [PYTEST ARGUMENTS]

Prints a table of seconds and failures; the exit code is 1 if a test fails somewhere. --tests: a file that --headroom
wrote, to run only the tests that compare numbers or are marked `by_cpu`; without such a file all run. Every run notes
its own headroom in build/headroom.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

_ROOT = Path(__file__).resolve().parents[1]
_WITHOUT_NUMBA = _ROOT / "build" / "without-numba"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "TEST_THREADS")
# oneDNN, PyTorch and numba are told separately.
SETTINGS = {
    "default": {},
    "AVX2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c",
    },
    "AVX-512 without VNNI and bfloat16": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "NUMBA_CPU_NAME": "skylake-avx512",
        "NUMBA_CPU_FEATURES": "+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl",
    },
    "one thread": dict.fromkeys(_THREADS, "1"),
    "four threads": dict.fromkeys(_THREADS, "4"),
    "MKL as on any processor": {"MKL_CBWR": "COMPATIBLE"},
    "without numba": {"PYTHONPATH": str(_WITHOUT_NUMBA)},
}
# The emulated device, which runs kernels by numba, is left out where there is none.
_LEFT_OUT = {"without numba": ["--deselect", "tests/emulated_device"]}
# What products are chosen by, by PyTorch's names. A processor without one cannot pretend to have it.
_FEATURES = {
    "AVX-512": ("avx512_f",),
    "int8 products (VNNI)": ("avx512_vnni", "avx_vnni"),
    "bfloat16 products": ("avx512_bf16",),
    "AMX": ("amx_int8", "amx_bf16"),
}


def features() -> dict[str, bool]:
    """What this processor has of what products are chosen by."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return {name: any(capabilities.get(key) is True for key in keys) for name, keys in _FEATURES.items()}


def run(name: str, arguments: list[str]) -> tuple[str, list[str]]:
    """Run pytest under a setting; return the row of the table, and the tests that failed."""
    headroom = _ROOT / "build" / "headroom" / f"{name.replace(' ', '-')}.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--headroom={headroom}"]
    command += [*_LEFT_OUT.get(name, ()), *arguments]
    begin = time.monotonic()
    result = subprocess.run(
        command, env=os.environ | SETTINGS[name], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - begin
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    if result.returncode and not failed:
        failed = [result.stdout[-2000:] + result.stderr[-2000:]]
    counts = result.stdout.strip().rpartition("\n")[2].strip("= ")
    return f"{name:34} {seconds:6.0f} s  {counts}", failed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=SETTINGS, metavar="NAME", help="a setting; may be repeated")
    parser.add_argument("--tests", type=Path, help="run the tests that this file of --headroom names")
    args, arguments = parser.parse_known_args(argv)
    _WITHOUT_NUMBA.mkdir(parents=True, exist_ok=True)
    (_WITHOUT_NUMBA / "numba.py").write_text("raise ImportError('hidden')")
    if args.tests is not None and args.tests.exists():
        listed = _ROOT / "build" / "numeric-tests.txt"
        listed.write_text("\n".join(json.loads(args.tests.read_text())))
        arguments.append(f"@{listed}")
    num_failed = 0
    for name in args.only or SETTINGS:
        if "AVX-512" in name and not features()["AVX-512"]:
            print(f"{name:34} not run: this processor has no AVX-512", flush=True)
            continue
        row, failed = run(name, arguments)
        num_failed += len(failed)
        print(row, *failed, sep="\n    ", flush=True)
    missing = [name for name, is_there in features().items() if not is_there]
    print(f"this processor has no {', '.join(missing)}: run this on one that has" if missing else "all features seen")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
