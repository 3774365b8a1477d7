"""Write an entry for each pool of consecutive tokens that a step closes, from rows of a cache."""

from __future__ import annotations

from typing import Any

import torch

from ..core.checks import (
    FLOAT_DTYPES,
    check_eps,
    check_is_tensor,
    check_last_dim_contiguous,
    check_tensor,
    check_writable,
)
from ..core.compat import triton
from ..core.device import takes_numba, use_triton
from ..core.dtypes import has_native_e4m3
from ..core.errors import InvalidInputError, as_bool, as_int
from ..core.ids import Ids, check_all_ids, checks_ids
from ..core.launch import Compute, Launch, nothing, strides
from ..core.operation import Run, operation
from . import pooled_definition
from .latent_cache import (
    INDEX_SCALE_BYTES,
    RECORD_DIM,
    index_parts,
    record_form,
    record_parts,
    record_sizes,
)
from .pooled_entries import NUM_WARPS, TILE_SIZE, _pooled_entries_kernel

MAX_POOL_SIZE = 256
MAX_ENTRY_DIM = 512


def entry_kind(entry_cache: torch.Tensor, head_dim: int) -> str:
    """Return the form of entries of `head_dim` numbers: "" for plain ones, "index", or the kind of a `RecordForm`.

    Raises:
        InvalidInputError: the cache holds entries of no such form.
    """
    check_is_tensor("entry_cache", entry_cache)
    allowed = (*FLOAT_DTYPES, torch.uint8)
    check_tensor("entry_cache", entry_cache, ("num_blocks", "entries", "size"), allowed)
    check_last_dim_contiguous("entry_cache", entry_cache)
    check_writable("entry_cache", entry_cache)
    size = entry_cache.shape[2]
    if entry_cache.dtype != torch.uint8:
        check_tensor("entry_cache", entry_cache, (*entry_cache.shape[:2], head_dim))
        return ""
    form = record_form(entry_cache, head_dim)
    if form is not None:
        is_aligned = not any(number % 2 for number in (entry_cache.data_ptr(), *entry_cache.stride()[:2]))
        expected, kind = "multiples of 2 bytes", form.kind
    elif size == head_dim + INDEX_SCALE_BYTES:
        is_aligned = not any(number % 4 for number in (entry_cache.data_ptr(), head_dim, *entry_cache.stride()[:2]))
        expected, kind = "multiples of 4 bytes", "index"
    else:
        raise InvalidInputError(
            f"entry_cache: {size} bytes an entry of {head_dim}, expected head_dim + {INDEX_SCALE_BYTES}, or "
            f"{record_sizes(RECORD_DIM)} for {RECORD_DIM}"
        )
    if not is_aligned:
        raise InvalidInputError(f"entry_cache: strides {entry_cache.stride()}, expected {expected}")
    return kind


def entry_tensors(entry_cache: torch.Tensor, head_dim: int, kind: str) -> dict[str, torch.Tensor | None]:
    """Return the parts of a cache of entries, as the kernel takes them."""
    if kind not in ("", "index"):
        parts = record_parts(entry_cache)
        return {"entry_ptr": parts.codes, "rope_ptr": parts.rope, "scale_ptr": parts.scales}
    numbers, scales = index_parts(entry_cache, head_dim)
    return {"entry_ptr": numbers, "rope_ptr": None, "scale_ptr": scales}


@operation(mutates=("entry_cache",))
def write_pooled_entries(
    row_cache: torch.Tensor,
    entry_cache: torch.Tensor,
    row_slots: torch.Tensor,
    entry_slots: torch.Tensor,
    *,
    pool_size: int,
    position_bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    interleaved: bool = False,
    rotates_last: bool = False,
    row_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    in_rings: bool = False,
) -> Run[None]:
    """Write the entry of the pool that each token of a step closes; tokens that close none write nothing.

    A pool is pool_size consecutive slots of a block; the token of the last one, by its entry slot, closes it. With
    position_bias, its entry is, for every channel, the sum over its tokens j of softmax_j(gate_j + position_bias_j) *
    value_j (KPool of GLM-5.3, Z.ai, 2026); without, the mean of the values (QSA of Qwen4Exp, Qwen team, 2026). Then
    follow an RMS norm and a rotation at the position of the pool's first token, each if its arguments are given. All is
    computed in float32 and rounded once.

    With row_table, pools overlap (CSA of DeepSeek-V4, DeepSeek-AI, 2026): values and gates have two halves, and one
    softmax goes over the first halves of the pool before and the second halves of the pool itself. A sequence's first
    pool has no pool before.

    Args:
        row_cache: [num_blocks, block_size, row_size], float32, float16 or bfloat16, last dimension contiguous;
            block_size is a multiple of pool_size. A row is a token's value, then its gate if there is a position_bias.
            The rows of the step's tokens are written already. Overlapping pools: two values, then two gates.
        entry_cache: [num_blocks, entries of a block, size], last dimension contiguous. Plain numbers of any float
            dtype, or uint8: head_dim e4m3 codes and a float32 scale, largest magnitude / 448, as in `choose_keys`; or
            records of 584, 528 or 384 bytes for a head_dim of 512, see `kernels.cache.latent_cache.RecordForm`.
        row_slots: int64 [num_tokens], block_id * block_size + offset of each token in row_cache; negative for padding.
        entry_slots: int64 [num_tokens], block_id * (entries of a block * pool_size) + offset of each token in blocks of
            entry_cache; negative for padding. Entry i of a block is of its positions i * pool_size and following.
        pool_size: tokens of a pool, 1 to 256.
        position_bias: [pool_size, head_dim], any float dtype, last dimension contiguous. head_dim is at most 512.
            Overlapping pools: [pool_size, 2 * head_dim], for the first halves, then for the second ones.
        norm_weight: [head_dim], any float dtype. eps: added to the mean square.
        positions: int64 [num_tokens], position of each token.
        cos_sin_cache, interleaved: as in `rotary_embedding`.
        rotates_last: whether the last rotary_dim elements rotate, in place of the first.
        row_table: int32 [num_seqs, blocks], the blocks of row_cache of each sequence, last dimension contiguous, beside
            position_bias, positions and cu_seqlens_q; None for pools that do not overlap. The pool before is read, so
            its rows must be in the cache: in the slots before the pool, or if a block begins with the pool, at the end
            of the block before in row_table.
        cu_seqlens_q: int32 [num_seqs + 1], offsets of each sequence's tokens.
        in_rings: whether blocks of row_cache are rings: a pool may begin at the end of its block and go on at its
            start. block_size is at least pool_size then, and pools do not overlap.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit, or a slot or position is out of range. On a
            GPU slots and positions are checked only with PAGED_CHECK=1.
        UnsupportedError: an argument requires a gradient.
    """
    check_tensor("row_cache", row_cache, ("num_blocks", "block_size", "row_size"), FLOAT_DTYPES)
    check_last_dim_contiguous("row_cache", row_cache)
    pool_size = as_int("pool_size", pool_size, low=1, high=MAX_POOL_SIZE)
    num_blocks, block_size, head_dim = row_cache.shape
    num_halves = 1
    if row_table is not None:
        _check_overlap(row_table, cu_seqlens_q, position_bias, positions, row_cache.device)
        num_halves = 2
    if position_bias is not None:
        head_dim //= 2 * num_halves
        bias_shape = pool_size, num_halves * head_dim
        check_tensor("position_bias", position_bias, bias_shape, FLOAT_DTYPES, row_cache.device)
        check_last_dim_contiguous("position_bias", position_bias)
        check_tensor("row_cache", row_cache, (num_blocks, block_size, 2 * num_halves * head_dim))
    if not 1 <= head_dim <= MAX_ENTRY_DIM:
        raise InvalidInputError(f"row_cache: values of {head_dim}, expected 1 to {MAX_ENTRY_DIM}")
    in_rings = as_bool("in_rings", in_rings)
    if in_rings:
        if block_size < pool_size:
            raise InvalidInputError(f"row_cache: rings of {block_size} rows, expected at least pool_size {pool_size}")
        if row_table is not None:
            raise InvalidInputError("row_table: given, expected None beside in_rings")
    elif block_size % pool_size or block_size == 0:
        raise InvalidInputError(f"row_cache: block_size {block_size}, expected a multiple of pool_size {pool_size}")
    check_tensor("row_slots", row_slots, ("num_tokens",), (torch.int64,), row_cache.device)
    check_tensor("entry_slots", entry_slots, (len(row_slots),), (torch.int64,), row_cache.device)
    check_tensor("entry_cache", entry_cache, None, None, row_cache.device)
    if positions is not None:
        check_tensor("positions", positions, (len(row_slots),), (torch.int64,), row_cache.device)
    finish = finish_options(
        entry_cache, head_dim, norm_weight, eps, positions, cos_sin_cache, interleaved, rotates_last
    )
    by_triton, checks = use_triton(row_cache), checks_ids(row_cache)
    launch: Compute | None = None
    sizes = {**strides("block slot", row=row_cache), "POOL_SIZE": pool_size, "HEAD_DIM": head_dim, **finish}
    if not len(row_slots):
        launch = nothing
    elif by_triton:
        dim_padded = triton.next_power_of_2(head_dim)
        options = {
            **strides("position", bias=position_bias),
            "CHUNK": min(triton.next_power_of_2(num_halves * pool_size), TILE_SIZE // dim_padded),
            "DIM_PADDED": dim_padded,
            "ROW_BLOCK_SIZE": block_size,
            "IN_RINGS": in_rings,
            "num_warps": NUM_WARPS,
            **sizes,
        }
        launch = Launch(_pooled_entries_kernel, (len(row_slots),), options)
    elif takes_numba(row_cache):  # weights of any dtype are widened
        from ..cpu.cache import write_pooled_entries as numba_write

        form = numba_write.form_of(entry_cache, finish["KIND"], head_dim)
        if form is not None:
            num_entry_slots = entry_cache.shape[0] * entry_cache.shape[1] * pool_size
            num_positions = 0 if cos_sin_cache is None else len(cos_sin_cache)
            launch = numba_write.launch_for(row_cache, len(row_slots), num_entry_slots, num_positions, form, sizes)

    def run(
        row_cache: torch.Tensor,
        entry_cache: torch.Tensor,
        row_slots: torch.Tensor,
        entry_slots: torch.Tensor,
        *,
        position_bias: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cos_sin_cache: torch.Tensor | None = None,
        row_table: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        **_: object,
    ) -> None:
        def check(*, by_triton: bool) -> None:
            ids = [
                Ids("row_slots", row_slots, None, row_cache.shape[0] * block_size - 1),
                Ids("entry_slots", entry_slots, None, entry_cache.shape[0] * entry_cache.shape[1] * pool_size - 1),
            ]
            if cos_sin_cache is not None and positions is not None:
                ids.append(Ids("positions", positions, 0, len(cos_sin_cache) - 1))
            check_all_ids("write_pooled_entries", *ids, by_triton=by_triton)

        if launch is None or (checks and by_triton):
            check(by_triton=by_triton)
        if launch is None:
            pooled_definition.write_entries(
                row_cache,
                entry_cache,
                row_slots,
                entry_slots,
                pool_size=pool_size,
                position_bias=position_bias,
                norm_weight=norm_weight,
                eps=eps,
                positions=positions,
                cos_sin_cache=cos_sin_cache,
                interleaved=interleaved,
                rotates_last=rotates_last,
                row_table=row_table,
                cu_seqlens_q=cu_seqlens_q,
                in_rings=in_rings,
            )
            return
        num_seqs = stride_table_seq = 0
        if row_table is not None:
            num_seqs, stride_table_seq = len(row_table), row_table.stride(0)
        status = launch(
            {
                # A bound call may follow with other sequences.
                "num_seqs": num_seqs,
                "stride_table_seq": stride_table_seq,
                "row_ptr": row_cache,
                "bias_ptr": position_bias,
                "weight_ptr": norm_weight if norm_weight is None else norm_weight.contiguous(),
                "row_slots_ptr": row_slots.contiguous(),
                "entry_slots_ptr": entry_slots.contiguous(),
                "positions_ptr": None if positions is None else positions.contiguous(),
                "row_table_ptr": row_table,
                "cu_seqlens_q_ptr": cu_seqlens_q,
                "cos_sin_ptr": cos_sin_cache,
                **entry_tensors(entry_cache, head_dim, finish["KIND"]),
            }
        )
        if status:  # the numba kernel has found an id out of range
            check(by_triton=False)
            raise InvalidInputError("row_table: it lacks a pool before one that the step closes")

    return run


def _check_overlap(
    row_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    positions: torch.Tensor | None,
    device: torch.device,
) -> None:
    """Raise InvalidInputError unless all that overlapping pools need is there."""
    if cu_seqlens_q is None or position_bias is None or positions is None:
        raise InvalidInputError("row_table: given, expected position_bias, positions and cu_seqlens_q beside it")
    check_tensor("row_table", row_table, ("num_seqs", "blocks"), (torch.int32,), device)
    check_last_dim_contiguous("row_table", row_table)
    check_tensor("cu_seqlens_q", cu_seqlens_q, (len(row_table) + 1,), (torch.int32,), device)
    check_last_dim_contiguous("cu_seqlens_q", cu_seqlens_q)


def finish_options(
    entry_cache: torch.Tensor,
    head_dim: int,
    norm_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    interleaved: bool,
    rotates_last: bool,
) -> dict[str, Any]:
    """Return the kernel's arguments for norm, rotation and form of entries.

    Raises:
        InvalidInputError: an argument does not fit entries of `head_dim`.
    """
    kind = entry_kind(entry_cache, head_dim)
    device = entry_cache.device
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight, (head_dim,), FLOAT_DTYPES, device)
    rotary_dim = 0
    if cos_sin_cache is not None:
        if positions is None:
            raise InvalidInputError("positions: None, expected them beside cos_sin_cache")
        check_tensor("cos_sin_cache", cos_sin_cache, ("max_position", "rotary_dim"), (torch.float32,), device)
        check_last_dim_contiguous("cos_sin_cache", cos_sin_cache)
        rotary_dim = cos_sin_cache.shape[1]
        if rotary_dim % 2 or rotary_dim > head_dim:
            expected = f"an even number up to {head_dim}"
            raise InvalidInputError(f"cos_sin_cache: rotary_dim {rotary_dim}, expected {expected}")
    first_rotated = 0
    if as_bool("rotates_last", rotates_last):
        first_rotated = head_dim - rotary_dim
    tensors = entry_tensors(entry_cache, head_dim, kind)
    return {
        "eps": check_eps(eps),
        **strides("position", cos_sin=cos_sin_cache),
        **strides("block slot", entry=tensors["entry_ptr"], rope=tensors["rope_ptr"], scale=tensors["scale_ptr"]),
        "ROTARY_DIM": rotary_dim,
        "FIRST_ROTATED": first_rotated,
        "INTERLEAVED": as_bool("interleaved", interleaved),
        "ENTRY_BLOCK_SIZE": entry_cache.shape[1],
        "KIND": kind,
        "NATIVE_FP8": has_native_e4m3(device),
    }
