"""Which implementation an operation takes: the Triton kernels or their PyTorch twins."""

from __future__ import annotations

import os

import torch

from paged.kernels.common.compat import HAS_TRITON, interpreting
from paged.kernels.common.errors import InvalidInputError, UnsupportedError


def use_triton(tensor: torch.Tensor) -> bool:
    """Backend for operations on `tensor`: True for the Triton kernels, False for the PyTorch twins.

    CUDA and ROCm tensors take Triton; CPU tensors take PyTorch, or Triton's interpreter when TRITON_INTERPRET=1 was set
    before the first import. The environment variable PAGED_BACKEND (`triton` or `torch`) overrides both.

    Raises:
        InvalidInputError: PAGED_BACKEND holds another word.
        UnsupportedError: Triton was asked for where it cannot run, or the tensor has no memory ("meta").
    """
    if tensor.device.type == "meta":
        raise UnsupportedError("tensors on meta have no values to compute with")
    choice = os.environ.get("PAGED_BACKEND", "")
    if choice == "torch":
        return False
    if choice not in ("", "triton"):
        raise InvalidInputError(f"PAGED_BACKEND={choice!r}: expected 'triton' or 'torch'")
    on_gpu = tensor.device.type == "cuda"
    runnable = HAS_TRITON and (on_gpu or interpreting())
    if runnable:
        return True
    if choice == "triton" or on_gpu:
        reason = "triton is not installed" if not HAS_TRITON else "CPU tensors need TRITON_INTERPRET=1"
        raise UnsupportedError(f"the Triton backend cannot run on device {tensor.device}: {reason}")
    return False
