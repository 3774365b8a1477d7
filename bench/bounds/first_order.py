"""Error bounds of every operation's results, computed from one problem. docs/bounds.md derives every constant.

A bound is twice the first-order error: roundings of results and of documented intermediates, float32 sums, elementary
functions. Functions here return first-order errors of results by name, from arguments on the CPU and expected results.
A result without an error must be equal. Each card names its function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch

from paged.bench.problems.arguments import Arguments, Tensors, dtype_of

# Unit roundoff of float32.
U = 2.0**-24
# A sum of n independent errors exceeds this many root sums of squares once in 3e7 (Hoeffding).
LAMBDA = 6
# Roundings of an elementary function, of a division or of a root, beside its argument's.
ELEMENTARY = 4 * U
# Largest sigmoid that float32 may turn into 0: exp(-x) overflows, or the result is subnormal.
TINY = 2.0**-126
# Largest exponent's size that counts: float32 has no exp beyond it.
LARGEST_EXPONENT = 128
# Largest slope of an activation, gelu's. It multiplies the error of a gate, see docs/bounds.md.
SLOPE = 1.13


class Defined(Protocol):
    """What a bound needs of a card."""

    @property
    def name(self) -> str: ...

    @property
    def expected(self) -> Callable[[Arguments], Tensors]: ...


def gamma(num_terms: float) -> float:
    """Return the error of a float32 sum in any order, relative to the sum of magnitudes (Higham and Mary, 2019)."""
    return min(num_terms, LAMBDA * math.sqrt(num_terms)) * U


def unit(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a dtype of rows: 0 for float32, because its roundings are counted by `U`."""
    if dtype == torch.float32:
        return 0.0
    return torch.finfo(dtype).eps / 2


def rounding(want: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return half a unit in the last place, subnormal numbers included."""
    numbers = torch.finfo(dtype)
    return numbers.eps / 2 * want.abs() + numbers.smallest_normal * numbers.eps / 2


def independent(total: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """Return the size of a sum of independent errors, from the sums of their magnitudes and of their squares."""
    return torch.minimum(total, LAMBDA * squares.clamp(min=0).sqrt())


def product_in(dtype: torch.dtype, x: torch.Tensor, w: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return the error of x @ w^T whose scaled weights and sums of chunks are rounded to a dtype."""
    magnitude, squares = x.abs() @ w.abs().T, x.square() @ w.square().T
    return rounding(want, dtype) + 2 * unit(dtype) * independent(magnitude, squares) + gamma(x.shape[1]) * magnitude


def rounded_once(_: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    """Return the errors of floats that are rounded once, to the dtype of the first float argument."""
    errors = {}
    for name, result in want.items():
        errors[name] = rounding(result.double(), dtype_of(arguments)) + ELEMENTARY * result.double().abs()
    return errors


def equal(_card: Defined, _arguments: Arguments, _want: Tensors) -> Tensors:
    """Return no error for any result."""
    return {}
