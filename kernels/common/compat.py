"""Triton where it is installed; where it is not (macOS, CPU-only), names that let the kernel files load.

Kernel files import `triton` and `tl` from here. Without Triton a launch raises UnsupportedError, and every public
operation still works on CPU tensors through the PyTorch implementations.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedError

if TYPE_CHECKING:
    triton: Any
    tl: Any
    TensorDescriptor: Any
    HAS_TRITON: bool
else:
    try:
        import triton
        import triton.language as tl
        from triton.tools.tensor_descriptor import TensorDescriptor

        HAS_TRITON = True
        if os.environ.get("TRITON_INTERPRET") == "1" and not triton.__version__.startswith(("3.6", "3.7")):
            from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

            def with_bool(access, position):
                """Triton 3.9's interpreter makes integers of a bool that it spreads over a block, but takes bools."""

                def run(self, *args, **options):
                    if isinstance(mask := args[position], TensorHandle):
                        mask = TensorHandle(mask.data.astype(bool), tl.int1)
                    return access(self, *args[:position], mask, *args[position + 1 :], **options)

                return run

            InterpreterBuilder.create_masked_load = with_bool(InterpreterBuilder.create_masked_load, 1)
            InterpreterBuilder.create_masked_store = with_bool(InterpreterBuilder.create_masked_store, 2)
    except ImportError:
        HAS_TRITON = False

        class _MissingKernel:
            """Stands for a kernel; fails when launched, not when its file is imported."""

            def __init__(self, fn):
                self.fn = fn

            def run(self, **_):
                raise UnsupportedError(f"{self.fn.__name__} needs triton, which is not installed here")

        TensorDescriptor = None

        class triton:  # noqa: N801
            @staticmethod
            def jit(fn=None, **_options):
                return _MissingKernel if fn is None else _MissingKernel(fn)

        class tl:  # noqa: N801
            class constexpr:  # noqa: N801
                def __init__(self, value):
                    self.value = value


def interpreting() -> bool:
    """Return whether Triton kernels run in the interpreter (TRITON_INTERPRET=1), on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"
