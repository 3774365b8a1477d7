"""Print the CMake options with which llama.cpp runs on this machine; `make llama-cpp` builds it with them.

    python bench/llama_cpp_flags.py

By default llama.cpp uses every instruction set that the processor reports. The system may forbid a process one of them,
such as AMX; the library then ends with an illegal instruction. This file needs the standard library alone.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Collection
from pathlib import Path

# llama.cpp's option -> flags of /proc/cpuinfo. With the option, compiled code needs a processor with these flags.
_OPTIONS = {
    "GGML_SSE42": ("sse4_2",),
    "GGML_AVX": ("avx",),
    "GGML_F16C": ("f16c",),
    "GGML_FMA": ("fma",),
    "GGML_BMI2": ("bmi2",),
    "GGML_AVX2": ("avx2",),
    "GGML_AVX_VNNI": ("avx_vnni",),
    "GGML_AVX512": ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    "GGML_AVX512_VBMI": ("avx512vbmi",),
    "GGML_AVX512_VNNI": ("avx512_vnni",),
    "GGML_AVX512_BF16": ("avx512_bf16",),
    "GGML_AMX_TILE": ("amx_tile",),
    "GGML_AMX_INT8": ("amx_int8",),
    "GGML_AMX_BF16": ("amx_bf16",),
}
# Option -> other option that it needs: without it, it is OFF. llama.cpp's AMX products also use AVX-512 and VNNI.
_NEEDS = {
    "GGML_AVX512_VBMI": "GGML_AVX512",
    "GGML_AVX512_VNNI": "GGML_AVX512",
    "GGML_AVX512_BF16": "GGML_AVX512",
    "GGML_AMX_TILE": "GGML_AVX512_VNNI",
    "GGML_AMX_INT8": "GGML_AMX_TILE",
    "GGML_AMX_BF16": "GGML_AMX_TILE",
}
# Linux's numbers of the system call arch_prctl, of its request ARCH_REQ_XCOMP_PERM, and of AMX's tile data.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def cmake_options(cpu_flags: Collection[str], *, may_use_amx: bool) -> list[str]:
    """Return an option for every x86 instruction set: ON if the processor has it and processes may use it."""
    on: set[str] = set()
    options = ["-DGGML_NATIVE=OFF"]
    for option, flags in _OPTIONS.items():
        has_flags = all(flag in cpu_flags for flag in flags)
        is_allowed = may_use_amx or not option.startswith("GGML_AMX")
        needed = _NEEDS.get(option)
        state = "OFF"
        if has_flags and is_allowed and (needed is None or needed in on):
            on.add(option)
            state = "ON"
        options.append(f"-D{option}={state}")
    return options


def cpu_flags(text: str) -> set[str]:
    """Return the flags that all processors of /proc/cpuinfo have."""
    sets = []
    for line in text.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() == "flags":
            sets.append(set(flags.split()))
    if not sets:
        return set()
    return set.intersection(*sets)


def has_amx_permission() -> bool:
    """Return whether the system lets this process and its children use AMX's tiles on request."""
    call = ctypes.CDLL(None).syscall
    return bool(call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def main() -> None:
    options: list[str] = []
    if sys.platform == "linux" and platform.machine() == "x86_64":
        flags = cpu_flags(Path("/proc/cpuinfo").read_text())
        options = cmake_options(flags, may_use_amx="amx_tile" in flags and has_amx_permission())
    print(" ".join(options))


if __name__ == "__main__":
    main()
