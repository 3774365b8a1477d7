"""Numba kernel that unpacks 4-bit weights in blocks of 64 outputs into rows of plain weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir

from .. import kernel as nb
from ..launch import NumbaLaunch
from ..vectors import LANES, VECTOR, WORDS, at, emitted, fill, load_vector, multiples, multiply_add, round_pairs
from .block_product import E2M1_NUMBERS, E2M1_OFFSET, INT4_OFFSET
from .block_tiles import BLOCK, numbers_of_codes

_INT, _BYTE = ir.IntType(32), ir.IntType(8)
# Columns of an output whose codes are stored together.
_OCTET = 8


def _store_rows(builder: ir.IRBuilder, words: Sequence[ir.Value], rows: Sequence[ir.Value]) -> None:
    """Store the words of each lane one after another, from the lane's pointer on."""
    low = builder.shuffle_vector(
        words[0], words[1], ir.Constant(ir.VectorType(_INT, 2 * LANES), list(range(2 * LANES)))
    )
    high = builder.shuffle_vector(
        words[2], words[3], ir.Constant(ir.VectorType(_INT, 2 * LANES), list(range(2 * LANES)))
    )
    for lane, row in enumerate(rows):
        lanes = ir.Constant(ir.VectorType(_INT, 4), [lane + part * LANES for part in range(4)])
        four = builder.shuffle_vector(low, high, lanes)
        builder.store(four, builder.bitcast(row, four.type.as_pointer()), align=2)


def _octet(numbers: Sequence[int]) -> Any:
    """Return an intrinsic that writes 16 outputs of 8 columns: value of the code * scale + base, a row every `stride`.

    `stride` is in elements. w: 64 bytes at `place`.
    """

    @emitted()
    def unpack(builder, w, place, scale, base, out, to, stride):
        is_float = out.type.pointee == ir.FloatType()
        source = builder.bitcast(builder.gep(w, [place]), WORDS.as_pointer())
        words, mask = builder.load(source, align=1), ir.Constant(WORDS, [255] * LANES)
        weights: list[ir.Value] = []
        for half in numbers_of_codes(builder, words, numbers):
            for byte in range(4):
                shifted = builder.lshr(half, ir.Constant(WORDS, [8 * byte] * LANES))
                number = builder.sitofp(builder.and_(shifted, mask), VECTOR)
                weights.append(multiply_add.emit(builder, number, scale, base))
        rows = multiples(builder, builder.gep(out, [to]), stride, LANES)
        if not is_float:
            pairs = zip(weights[::2], weights[1::2], strict=True)
            _store_rows(builder, [round_pairs(builder, a, b) for a, b in pairs], rows)
            return
        for first in range(0, _OCTET, 4):
            four = [builder.bitcast(weight, WORDS) for weight in weights[first : first + 4]]
            _store_rows(builder, four, [at(builder, row, ir.Constant(_INT, first), _INT) for row in rows])

    return unpack


def _unpack_by(numbers: Sequence[int], offset: int) -> Any:
    """Return a function for codes that stand for these numbers minus the offset."""
    unpack_octet = _octet(numbers)

    @nb.device_function
    def unpack_blocks(w, scales, zeros, has_zeros, factor, out, sizes):
        num_blocks, first_output, num_outputs, width, columns = sizes
        begin, end = nb.share(num_blocks * BLOCK // LANES)
        of_all, nothing, less = fill(factor), fill(np.float32(0)), fill(np.float32(-offset))
        for part in range(begin, end):
            output = part * LANES
            block = output // BLOCK * BLOCK * (width // 2) + output % BLOCK * 4
            for first in range(0, width, columns):
                at_scale = first // columns * num_outputs + first_output + output
                scale = multiply_add(of_all, load_vector(scales, at_scale), nothing)
                base = multiply_add(less, scale, nothing)
                if has_zeros:
                    base = multiply_add(less, multiply_add(of_all, load_vector(zeros, at_scale), nothing), base)
                for column in range(first, first + columns, _OCTET):
                    place = block + column * (BLOCK // 2)
                    unpack_octet(w, place, scale, base, out, output * width + column, width)

    return unpack_blocks


_unpack_int4 = _unpack_by(range(16), INT4_OFFSET)
_unpack_e2m1 = _unpack_by(E2M1_NUMBERS, E2M1_OFFSET)


@nb.Kernel
def _unpack(arguments):
    values = nb.unpack(arguments, 13)
    is_int4, is_bf16, w, scales, zeros, factor, out = values[1:8]
    numbers = nb.uint8s(w), nb.bfloats(scales), nb.bfloats(zeros), zeros != 0
    of_all = nb.floats(factor)[0] if factor else np.float32(1)
    if is_int4 and is_bf16:
        _unpack_int4(*numbers, of_all, nb.bfloats(out), values[8:])
    elif is_int4:
        _unpack_int4(*numbers, of_all, nb.floats(out), values[8:])
    elif is_bf16:
        _unpack_e2m1(*numbers, of_all, nb.bfloats(out), values[8:])
    else:
        _unpack_e2m1(*numbers, of_all, nb.floats(out), values[8:])


def unpack_rows(
    form: str,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zeros: torch.Tensor | None,
    factor: torch.Tensor | None,
    rows: slice,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return full blocks of rows of the weights of `code_product`, [rows, columns] of float32 or bfloat16."""
    part = codes[rows]
    out = torch.empty(len(part), 2 * part.shape[1], dtype=dtype)
    launch = _launch(form == "int4", dtype == torch.bfloat16, len(part), rows.start, *scale.T.shape, out.shape[1])
    launch({"w": part, "scale": scale, "zeros": zeros, "factor": factor, "out": out})
    return out


@lru_cache(maxsize=1024)
def _launch(
    is_int4: bool, is_bf16: bool, num_rows: int, start: int, num_outputs: int, groups: int, width: int
) -> NumbaLaunch:
    sizes = num_rows // BLOCK, start, num_outputs, width, width // groups
    return NumbaLaunch(
        _unpack.address, num_rows * width, (is_int4, is_bf16, "w", "scale", "zeros", "factor", "out", *sizes)
    )
