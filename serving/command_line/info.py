"""`paged info`: this machine's hardware, the backend and the reason for it, the supported features."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from paged.errors import PagedError
from paged.executors.cpu_threads import choose_threads
from paged.executors.thread_waits import wait_text
from paged.serving.command_line.safe_output import print_json
from paged.tools.printable import one_line

if TYPE_CHECKING:
    import torch

DESCRIPTION = "Show the device, versions, the backend of the operations and why, and the features of this machine."

_PACKAGES = (
    "paged torch triton numba numpy safetensors tokenizers jinja2 tqdm huggingface-hub transformers prometheus-client "
    "vllm"
).split()


class Feature(NamedTuple):
    """A feature. supported: whether this machine has it. reason: explanation or substitute."""

    name: str
    supported: bool
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the output format."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Collect and print the report."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend, reason = backend_of(device)
    features = _features(device, backend)
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        versions[package] = _version(package)
    report: dict[str, Any] = {
        "device": _device(device),
        "versions": versions,
        "backend": {"name": backend, "reason": reason},
        "features": [feature._asdict() for feature in features],
    }
    if args.json:
        print_json(report)
        return 0
    for title in ("device", "versions"):
        print(title)
        for name, value in report[title].items():
            text = "not installed"
            if value is not None:
                text = one_line(value)
            print(f"  {name:20} {text}")
    print(f"backend\n  {backend}: {reason}\nsupported")
    for feature in features:
        answer = "yes" if feature.supported else "no"
        print(f"  {answer:4} {feature.name:22} {one_line(feature.reason)}")
    return 0


def _version(package: str) -> str | None:
    if package in ("paged", "torch"):  # paged may not be installed, and torch's metadata may lack the build
        return str(importlib.import_module(package).__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device(device: torch.device) -> dict[str, Any]:
    import torch

    from paged.kernels.core.device import device_of

    threads = choose_threads(torch.get_num_threads())
    facts: dict[str, Any] = {
        "type": device.type,
        "host": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "cpu_threads": threads.num_threads,
        "cpu_threads_reason": threads.reason,
        "cpu_threads_wait": wait_text(),
    }
    if sys.platform == "linux":
        facts["cpu_cores"] = len(os.sched_getaffinity(0))
    if device.type == "cuda":
        known = device_of(device)
        free, total = torch.cuda.mem_get_info(device)
        runtime = f"CUDA {torch.version.cuda}"
        if torch.version.hip:
            runtime = f"ROCm {torch.version.hip}"
        facts |= {
            "count": torch.cuda.device_count(),
            "name": torch.cuda.get_device_name(device),
            "arch": known.arch,
            "processors": known.num_sms,
            "memory_bytes": total,
            "free_bytes": free,
            "runtime": runtime,
        }
    return facts


def backend_of(device: torch.device) -> tuple[str, str]:
    from paged.kernels.core.compat import HAS_TRITON
    from paged.kernels.core.device import use_triton

    choice = os.environ.get("PAGED_BACKEND")
    try:
        by_triton = use_triton(device)
    except PagedError as error:
        return "none", str(error)
    if choice:
        reason = f"PAGED_BACKEND={choice}"
    elif device.type == "cuda":
        reason = "tensors on a GPU run the Triton kernels"
    elif by_triton:
        reason = "TRITON_INTERPRET=1: the Triton kernels run in Triton's interpreter, slowly"
    elif not HAS_TRITON:
        reason = "no GPU, and triton is not installed: PyTorch operations"
    else:
        reason = "no GPU: PyTorch operations; TRITON_INTERPRET=1 runs the Triton kernels on CPU tensors"
    if by_triton:
        return "triton", reason
    return choice or "torch", reason


def _features(device: torch.device, backend: str) -> list[Feature]:
    import torch

    from paged.kernels.core.compat import interpreting
    from paged.kernels.core.device import LARGE_SHARED_MEMORY, device_of, has_numba
    from paged.kernels.core.dtypes import has_native_e4m3
    from paged.kernels.cpu.products import choose_product, this_cpu
    from paged.kernels.moe.config import FOLDER

    def product(form: str, group: int) -> str:
        return choose_product(form, (1, group), 128, 128, form == "int8", this_cpu())

    on_gpu = device.type == "cuda"
    arch = device_of(device).arch
    interpreted = backend == "triton" and not on_gpu and interpreting()
    if on_gpu:
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        where, bf16_reason = arch, arch
    else:
        has_bf16 = True
        where, bf16_reason = "no GPU that torch can use", "by PyTorch"
    if interpreted:
        bf16_reason = "in the interpreter, in float32, rounded"
    has_fp8 = on_gpu and has_native_e4m3(device)
    fp8_reason = "e4m3, converted by the GPU" if has_fp8 else "e4m3, converted in software"
    has_tma = on_gpu and arch in LARGE_SHARED_MEMORY
    has_kernels = backend in ("torch", "numba") and os.environ.get("PAGED_BACKEND") != "torch" and has_numba()
    int8, int4 = product("int8", 0), product("int4", 128)
    int4_product = "blocks of numba kernels" if int4 == "blocks" else int4
    tables = []
    name = device_of(device).name.replace(" ", "_")
    if name:
        tables = sorted(path.name for path in FOLDER.glob(f"*device_name={name},*.json"))
    tiles = ", ".join(tables) or "default tiles; `paged bench tune-moe` writes a table"
    return [
        Feature("bfloat16", has_bf16, bf16_reason),
        Feature("fp8 KV cache", backend != "none", fp8_reason),
        Feature("native fp8", has_fp8, f"{where}; from sm_89 on"),
        Feature("TMA and wgmma", has_tma, f"{where}; from sm_90 on"),
        Feature("CUDA graphs", on_gpu, where),
        Feature("numba kernels", has_kernels, "models on a CPU; installed by `pip install paged[cpu]`"),
        Feature("int8 on the CPU", int8 != "unpacked", f"int8 weights and activations: {int8}"),
        Feature("int4 on the CPU", int4 != "unpacked", f"int4 weights: {int4_product}"),
        Feature("tuned MoE tiles", bool(tables), tiles),
    ]
