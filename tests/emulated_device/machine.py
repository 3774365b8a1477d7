"""Runs a program of the project on an emulated H100 that computes nothing: all of its host's work, and no result.

    python -m tests.emulated_device.machine FOLDER MODULE [ARGUMENTS]

Every result counts as right. Tests are collected and not run. `bench.gpu` works in FOLDER, which it empties, and its
steps run on such a device, too; the kernel variants that each launches go into FOLDER/variants, for
`bench.compilation.ahead`. EMULATED_FAULTS, such as {"rms_norm": "hangs"}, has the device hang, or its context be lost,
in cases of benchmarks.
"""

import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch

from paged.bench import check, gpu, suite
from paged.bench.benchmark import Benchmark
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.emulated_device.variants import noted

# Capturing the graphs of a model of 48 layers takes minutes here.
_CASE_SECONDS = 600.0
# Steps that compile what they launch on all cores: hundreds of tiles, or kernels with a sanitizer's checks.
_COMPILE_THEMSELVES = ("tune", "sanitize")


def planted(machine: EmulatedCuda, faults: Mapping[str, str]) -> Any:
    """Return a context in which the device has a fault from the beginning of a case on."""
    row = Benchmark._row

    def faulty_row(benchmark: Benchmark, case: Any, setting: Any) -> Any:
        machine.fault = faults.get(case.name, "")
        return row(benchmark, case, setting)

    return mock.patch.object(Benchmark, "_row", faulty_row)


def main(argv: list[str]) -> int:
    folder, name, *arguments = argv
    variants = Path(folder, "variants")
    run_step = gpu.run_step

    def run_noted_step(step: gpu.Step, seconds: float, variables: Mapping[str, str], log: Any) -> gpu.Outcome:
        variants.mkdir(exist_ok=True)
        path = os.devnull if step.name in _COMPILE_THEMSELVES else str(variants / f"{step.slice}.{step.name}")
        return run_step(step, seconds, {**variables, "EMULATED_VARIANTS": path}, log)

    again = ["-m", "tests.emulated_device.machine", folder]
    check.error_shares = lambda *_: torch.zeros(1)
    suite._PYTEST[1:3] = [*again, "pytest"]
    gpu.PYTHON, gpu.WORK, gpu.run_step = [sys.executable, *again], Path(folder).resolve(), run_noted_step
    gpu.CASE_SECONDS = _CASE_SECONDS
    if name == "pytest":
        arguments.append("--collect-only")
    faults = json.loads(os.environ.get("EMULATED_FAULTS", "{}"))
    with (
        open(os.environ.get("EMULATED_VARIANTS", os.devnull), "ab", buffering=0) as file,
        noted(file.write) as machine,
        planted(machine, faults),
    ):
        module = importlib.import_module("paged.serving.command_line.cli" if name == "paged" else name)
        if name == "paged.bench.engine.run":  # models of transformers cannot be saved from here
            module.CASES[:] = [case for case in module.CASES if not case.name.startswith("throughput")]
        return int(module.main(arguments) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
