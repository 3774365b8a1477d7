"""Greedy choice of the next token from a row of logits."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..core.checks import FLOAT_DTYPES, check_is_tensor, check_tensor
from ..core.compat import tl, triton
from ..core.device import use_triton
from ..core.launch import launch, num_warps, wait_for_inputs
from ..core.operation import Run, operation
from . import definition

# Tokens a program. A decode step has few rows, so several programs share a row, and a second kernel combines their
# results. See limits.md.
BLOCK_TOKENS = 4096


@triton.jit
def first_largest(values, tokens):
    """Return the largest value and the smallest token that has it; token -1 if all values are -inf."""
    best = tl.max(values, axis=0)
    token = tl.min(tl.where(values == best, tokens, 0x7FFFFFFF), axis=0)
    return best, tl.where(best == float("-inf"), -1, token)


@triton.jit
def _greedy_argmax_chunk_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    token_mask_ptr,  # bool [num_rows, vocab_size], or None
    repetition_penalty_ptr,  # float32 [num_rows, vocab_size], or None
    best_ptr,  # float32 [num_rows, num_chunks]
    token_ptr,  # int32 [num_rows, num_chunks]
    vocab_size,
    num_chunks,
    stride_logits_row,
    stride_token_mask_row,
    stride_repetition_penalty_row,
    BLOCK_TOKENS: tl.constexpr,
):
    """Find the best of BLOCK_TOKENS tokens of a row."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    tokens = chunk * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    mask = tokens < vocab_size
    values = tl.load(logits_ptr + row * stride_logits_row + tokens, mask=mask, other=float("-inf")).to(tl.float32)
    if repetition_penalty_ptr is not None:
        penalty_ptrs = repetition_penalty_ptr + row * stride_repetition_penalty_row + tokens
        penalty = tl.load(penalty_ptrs, mask=mask, other=1.0)
        # Use IEEE division: the default division is off by up to 2 units, so ties could differ from a CPU's.
        values = tl.where(values > 0.0, tl.div_rn(values, penalty), values * penalty)
    allowed = values == values  # not NaN
    if token_mask_ptr is not None:
        allowed &= tl.load(token_mask_ptr + row * stride_token_mask_row + tokens, mask=mask, other=0) != 0
    best, token = first_largest(tl.where(allowed, values, float("-inf")), tokens)
    tl.store(best_ptr + row * num_chunks + chunk, best)
    tl.store(token_ptr + row * num_chunks + chunk, token)


@triton.jit
def _greedy_argmax_reduce_kernel(
    best_ptr,  # float32 [num_rows, num_chunks]
    token_ptr,  # int32 [num_rows, num_chunks]
    out_ptr,  # int64 [num_rows]
    num_chunks,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Find the best of a row's chunks."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_CHUNKS)
    mask = offs < num_chunks
    best = tl.load(best_ptr + row * num_chunks + offs, mask=mask, other=float("-inf"))
    tokens = tl.load(token_ptr + row * num_chunks + offs, mask=mask, other=0)
    _, token = first_largest(best, tokens)
    tl.store(out_ptr + row, token.to(tl.int64))


@operation(lambda logits, **_: logits.new_empty(logits.shape[0], dtype=torch.int64))
def greedy_argmax(
    logits: torch.Tensor, *, token_mask: torch.Tensor | None = None, repetition_penalty: torch.Tensor | None = None
) -> Run[torch.Tensor]:
    """Return the token with the largest logit of every row, ties to the smaller id; -1 if none can be chosen.

    Args:
        logits: [num_rows, vocab_size], float32, float16 or bfloat16, any strides. NaN and -inf are never chosen.
        token_mask: bool [vocab_size] or [num_rows, vocab_size]; False forbids a token.
        repetition_penalty: float32 [vocab_size] or [num_rows, vocab_size], above 0, 1 for none. Positive logits are
            divided by it, others multiplied, in float32 (Keskar et al., 2019).

    Returns:
        int64 [num_rows].

    Raises:
        InvalidInputError: a shape, dtype or device does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    check_tensor("logits", logits, ("num_rows", "vocab_size"), FLOAT_DTYPES)
    _check_per_row("token_mask", token_mask, torch.bool, logits)
    _check_per_row("repetition_penalty", repetition_penalty, torch.float32, logits)
    if logits.numel() == 0:
        return _no_token
    if use_triton(logits):
        return _launch
    return functools.partial(definition.greedy_argmax, compute=torch.float32)


def _no_token(logits: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return torch.full((len(logits),), -1, dtype=torch.int64, device=logits.device)


def _check_per_row(name: str, tensor: torch.Tensor | None, dtype: torch.dtype, logits: torch.Tensor) -> None:
    """Raise InvalidInputError unless the tensor has one row, or a row for each row of logits."""
    if tensor is not None:
        check_is_tensor(name, tensor)
        expected = logits.shape
        if tensor.dim() == 1:
            expected = logits.shape[1:]
        check_tensor(name, tensor, expected, (dtype,), logits.device)


def _launch(
    logits: torch.Tensor, token_mask: torch.Tensor | None = None, repetition_penalty: torch.Tensor | None = None
) -> torch.Tensor:
    (num_rows, vocab_size), device = logits.shape, logits.device
    num_chunks = triton.cdiv(vocab_size, BLOCK_TOKENS)
    block_chunks = triton.next_power_of_2(num_chunks)
    best = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device)
    token = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    rows: dict[str, Any] = {}
    for name, tensor in (("logits", logits), ("token_mask", token_mask), ("repetition_penalty", repetition_penalty)):
        if tensor is not None and tensor.stride(-1) != 1:
            tensor = tensor.contiguous()
        rows[f"{name}_ptr"] = tensor
        rows[f"stride_{name}_row"] = 0  # all rows of logits share one row
        if tensor is not None and tensor.dim() == 2:
            rows[f"stride_{name}_row"] = tensor.stride(0)
    launch(
        _greedy_argmax_chunk_kernel,
        (num_rows, num_chunks),
        **rows,
        best_ptr=best,
        token_ptr=token,
        vocab_size=vocab_size,
        num_chunks=num_chunks,
        BLOCK_TOKENS=BLOCK_TOKENS,
        num_warps=num_warps(BLOCK_TOKENS),
    )
    launch(
        _greedy_argmax_reduce_kernel,
        (num_rows,),
        best_ptr=best,
        token_ptr=token,
        out_ptr=out,
        num_chunks=num_chunks,
        BLOCK_CHUNKS=block_chunks,
        num_warps=num_warps(block_chunks),
    )
    return out
