"""What `make llama-cpp` compiles llama.cpp for: what the processor has, and processes may use."""

import pytest

from paged.bench.llama_cpp_flags import cmake_options, cpu_flags

HASWELL = "sse4_2 avx f16c fma bmi2 avx2"
SKYLAKE = f"{HASWELL} avx512f avx512cd avx512vl avx512dq avx512bw"
SAPPHIRE_RAPIDS = f"{SKYLAKE} avx512vbmi avx512_vnni avx512_bf16 avx_vnni amx_tile amx_int8 amx_bf16"
AMX = {"GGML_AMX_TILE", "GGML_AMX_INT8", "GGML_AMX_BF16"}


def on(flags: str, *, may_use_amx: bool = True) -> set[str]:
    options = cmake_options(flags.split(), may_use_amx=may_use_amx)
    assert options[0] == "-DGGML_NATIVE=OFF"
    assert len(options) == 15
    return {option[2:-3] for option in options if option.endswith("=ON")}


def test_each_set_of_instructions_that_the_processor_has() -> None:
    assert on("") == set()
    assert on(HASWELL) == {f"GGML_{name}" for name in ("SSE42", "AVX", "F16C", "FMA", "BMI2", "AVX2")}
    assert on(SKYLAKE) - on(HASWELL) == {"GGML_AVX512"}
    assert on(SAPPHIRE_RAPIDS) > AMX


@pytest.mark.parametrize("missing", ["avx512vl", "avx512f", "avx512bw"])
def test_avx512_is_all_or_nothing(missing: str) -> None:
    """So are the sets that need it."""
    flags = " ".join(flag for flag in SAPPHIRE_RAPIDS.split() if flag != missing)
    assert on(flags) == on(f"{HASWELL} avx_vnni")


def test_amx_needs_a_permission() -> None:
    assert on(SAPPHIRE_RAPIDS) - on(SAPPHIRE_RAPIDS, may_use_amx=False) == AMX


def test_flags_are_those_of_all_processors() -> None:
    text = "processor\t: 0\nflags\t\t: avx avx2\nbugs\t: x\n\nprocessor\t: 1\nflags\t\t: avx fma\n"
    assert cpu_flags(text) == {"avx"}
    assert cpu_flags("Features : neon\n") == set()
