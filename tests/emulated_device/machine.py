"""Runs a program of the project on an emulated H200 that computes nothing: all of its host's work, and no result.

    python -m tests.emulated_device.machine FOLDER MODULE [ARGUMENTS]

Every result counts as right. The kernel variants that a benchmark or `paged verify` launches go into FOLDER/variants,
for `bench.compilation.ahead`. Tests are collected and not run. `bench.gpu` works in FOLDER, which it empties, and its
steps run on such a device, too.
"""

import importlib
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch

from paged.bench import check, gpu, suite
from tests.emulated_device.variants import noted


def main(argv: list[str]) -> int:
    folder, name, *arguments = argv
    again = ["-m", "tests.emulated_device.machine", folder]
    check.error_shares = lambda *_: torch.zeros(1)
    suite._PYTEST[1:3] = [*again, "pytest"]
    gpu.PYTHON, gpu.WORK = [sys.executable, *again], Path(folder)
    if name == "pytest":
        arguments.append("--collect-only")
    path = Path(folder, "variants", name.removeprefix("paged.bench.").removesuffix(".run"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file, noted(file.write):
        module = importlib.import_module("paged.executors.command_line.cli" if name == "paged" else name)
        if name == "paged.bench.engine.run":  # models of transformers cannot be saved from here
            module.CASES[:] = [case for case in module.CASES if not case.name.startswith("throughput")]
        return int(module.main(arguments) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
