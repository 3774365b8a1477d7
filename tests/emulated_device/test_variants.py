"""Every variant of a changed kernel passes the compiler's front end, which says no to what the interpreter runs."""

import os
import subprocess
import sys
import warnings

import pytest
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from paged.bench.compilation.ahead import Variant
from tests.emulated_device.variants import compile_front_end


@pytest.mark.long
@pytest.mark.thorough
def test_variants_of_changed_kernels() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.emulated_device.variants", "--sample"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    if "a sample" in run.stdout:
        assert " of 0 kernels" not in run.stdout
        warnings.warn(run.stdout, stacklevel=1)


def _copy_kernel(x_ptr, out_ptr, size, OTHER: tl.constexpr):
    offs = tl.arange(0, 16)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < size, other=OTHER).to(tl.float32))


@pytest.mark.parametrize(("other", "is_accepted"), [(0.0, True), (0, False)])
def test_an_integer_for_masked_e4m3_is_refused(other: float, is_accepted: bool) -> None:
    signature = {"x_ptr": "*fp8e4nv", "out_ptr": "*fp32", "size": "i32", "OTHER": "constexpr"}
    variant = Variant(__name__, "_copy_kernel", signature, {(3,): other}, {}, {"num_warps": 4, "num_stages": 3})
    if is_accepted:
        compile_front_end(JITFunction(_copy_kernel), variant)
    else:
        with pytest.raises(triton.CompilationError):
            compile_front_end(JITFunction(_copy_kernel), variant)
