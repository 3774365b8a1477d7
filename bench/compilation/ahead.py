"""Compile recorded launches on all cores, so that a benchmark finds its kernels in Triton's cache.

    python -m bench.compilation.ahead VARIANTS ... [--budget SECONDS]

A process compiles the kernels that it meets one by one, which takes 3 seconds each. VARIANTS are files that
`tests.emulated_device.machine` writes. On a machine with a GPU, the launchers are compiled too; on another machine, the
kernels are compiled for an H200.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.compiler import ASTSource

from paged.bench.benchmark import option_parser
from paged.bench.compilation.machine_code import GPU_TARGETS
from paged.bench.watchdog import WATCHDOG
from paged.kernels.core.launch import compile_all


class Variant(NamedTuple):
    """A kernel and everything that Triton specialises it for."""

    module: str
    name: str
    signature: Mapping[str, str]
    constexprs: Mapping[tuple[int, ...], Any]
    attrs: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]


def read_variants(paths: Iterable[Path]) -> list[bytes]:
    """Return the distinct variants of files, pickled as in the files, in the order of their first launch."""
    variants: dict[bytes, None] = {}
    for path in paths:
        with path.open("rb") as file:
            while file.peek(1):
                variants[pickle.dumps(pickle.load(file))] = None
    return list(variants)


def variants_of(run: Callable[[], object]) -> list[bytes]:
    """Return the variants that `run` would launch and that this process has not compiled.

    `run` is called without its launches, see `compile_all`.
    """
    variants: dict[bytes, None] = {}

    def note(*, fn: Any, compile: Mapping[str, Any], **_: Any) -> bool:  # noqa: A002
        options = {name: compile[name] for name in ("num_warps", "num_stages")}
        parts = (compile["signature"], compile["constants"], compile["configs"][0], options)
        variants[pickle.dumps(Variant(fn.module, fn.jit_function.fn.__name__, *map(dict, parts)))] = None
        return True  # tells Triton not to compile

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = note
        compile_all(run)
    return list(variants)


def compile_variant(pickled: bytes) -> str:
    """Compile a variant for this machine's GPU into Triton's cache; return the error, or ""."""
    variant = Variant(*pickle.loads(pickled))
    try:
        kernel = getattr(importlib.import_module(variant.module), variant.name)
        has_gpu = torch.cuda.is_available()
        target = GPU_TARGETS["sm_90"]
        if has_gpu:
            target = triton.runtime.driver.active.get_current_target()
        source = ASTSource(kernel, variant.signature, variant.constexprs, variant.attrs)
        options = {**variant.options, "instrumentation_mode": triton.knobs.compilation.instrumentation_mode}
        compiled = triton.compile(source, target=target, options=options)
        if has_gpu:
            triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)
    except Exception as error:  # the compiler raises many kinds, and a launch raises them again
        return f"{variant.name}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def compile_ahead(variants: Sequence[bytes], seconds: float) -> list[str]:
    """Compile variants in order, in as many processes as there are cores, and start none after so many seconds.

    Return the error, or "", of each compiled variant.
    """
    end, done = time.monotonic() + seconds, []
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for error in pool.map(compile_variant, variants):
            done.append(error)
            WATCHDOG.progress()
            if time.monotonic() > end:
                pool.shutdown(cancel_futures=True)
                break
    return done


def main(argv: list[str] | None = None) -> int:
    """Print the errors; the exit code is 1 if there is one."""
    parser = option_parser(__doc__, "budget")
    parser.add_argument("files", type=Path, nargs="*", metavar="VARIANTS")
    args = parser.parse_args(argv)
    variants = read_variants(args.files)
    done = compile_ahead(variants, args.budget)
    errors = list(filter(None, done))
    print("\n".join([*errors, f"{len(done)} of {len(variants)} kernels compiled, {len(errors)} errors"]))
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
