"""`paged info`: this machine's hardware, the backend that runs here and why, and the supported features."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

from paged.errors import PagedError
from paged.executors.command_line.safe_output import print_json
from paged.printable import one_line

if TYPE_CHECKING:
    import torch

DESCRIPTION = "Show the device, versions, the backend of the operations and why, and the features of this machine."

_PACKAGES = (
    "paged torch triton numba numpy safetensors tokenizers jinja2 tqdm huggingface-hub transformers prometheus-client "
    "vllm"
).split()


# Name, whether this machine has it, and the reason or the substitute.
Feature = tuple[str, bool, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the output format."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Gather the report and print it."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend, reason = backend_of(device)
    features = _features(device, backend)
    report: dict[str, Any] = {
        "device": _device(device),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "backend": {"name": backend, "reason": reason},
        "features": [dict(zip(("name", "supported", "reason"), feature, strict=True)) for feature in features],
    }
    if args.json:
        print_json(report)
        return 0
    for title in ("device", "versions"):
        print(title)
        for name, value in report[title].items():
            print(f"  {name:20} {'not installed' if value is None else one_line(value)}")
    print(f"backend\n  {backend}: {reason}\nsupported")
    for name, supported, why in features:
        print(f"  {'yes' if supported else 'no':4} {name:22} {one_line(why)}")
    return 0


def _version(package: str) -> str | None:
    if package in ("paged", "torch"):  # paged may not be installed; torch's metadata may not name the build
        return str(importlib.import_module(package).__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device(device: torch.device) -> dict[str, Any]:
    import torch

    from paged.kernels.common.device import device_of

    facts: dict[str, Any] = {
        "type": device.type,
        "host": f"{platform.system()} {platform.machine()}",
        "cpu_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        known = device_of(device)
        free, total = torch.cuda.mem_get_info(device)
        facts |= {
            "count": torch.cuda.device_count(),
            "name": torch.cuda.get_device_name(device),
            "arch": known.arch,
            "processors": known.num_sms,
            "memory_bytes": total,
            "free_bytes": free,
            "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        }
    return facts


def backend_of(device: torch.device) -> tuple[str, str]:
    from paged.kernels.common.compat import HAS_TRITON
    from paged.kernels.common.device import use_triton

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
    return "triton" if by_triton else choice or "torch", reason


def _features(device: torch.device, backend: str) -> list[Feature]:
    import torch

    from paged.kernels.common.compat import interpreting
    from paged.kernels.common.device import LARGE_SHARED_MEMORY, device_of, has_numba
    from paged.kernels.common.fp8 import has_native_e4m3
    from paged.kernels.moe.config import FOLDER
    from paged.kernels.quantization.cpu_product import choose_product, this_cpu

    def product(form: str, group: int) -> str:
        return choose_product(form, (1, group), 128, 128, form == "int8", this_cpu())

    on_gpu, arch, name = device.type == "cuda", device_of(device).arch, device_of(device).name.replace(" ", "_")
    interpreted = backend == "triton" and not on_gpu and interpreting()
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else not interpreted
    has_fp8 = on_gpu and has_native_e4m3(device)
    has_tma = on_gpu and arch in LARGE_SHARED_MEMORY
    tables = sorted(path.name for path in FOLDER.glob(f"*device_name={name},*.json")) if name else []
    has_kernels = backend in ("torch", "numba") and os.environ.get("PAGED_BACKEND") != "torch" and has_numba()
    where, by = (arch, arch) if on_gpu else ("no GPU that torch can use", "by PyTorch")
    return [
        ("bfloat16", has_bf16, "the interpreter multiplies its raw bits" if interpreted else by),
        ("fp8 KV cache", backend != "none", "e4m3, converted by the GPU" if has_fp8 else "e4m3, converted in software"),
        ("native fp8", has_fp8, f"{where}; from sm_89 on"),
        ("TMA and wgmma", has_tma, f"{where}; from sm_90 on"),
        ("CUDA graphs", on_gpu, where),
        (
            "numba kernels",
            has_kernels,
            "models on a CPU; installed by `pip install paged[cpu]`",
        ),
        ("int8 on the CPU", product("int8", 0) == "int8", f"int8 weights and activations: {product('int8', 0)}"),
        ("int4 on the CPU", product("int4", 128) == "int4", f"int4 weights: {product('int4', 128)}"),
        ("tuned MoE tiles", bool(tables), ", ".join(tables) or "default tiles; `paged bench tune-moe` writes a table"),
    ]
