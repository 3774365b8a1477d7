"""Canaries: 8 bytes a slot that tell which token of which sequence the slot's keys and values belong to.

A canary holds a token id in its low 32 bits. Its high 32 bits are those of a running sum: it begins with a number of
the sequence, and every token adds a hash of its position and id. So a block of another sequence, namespace or position
differs in all its slots, even if it holds the same tokens.
"""

from __future__ import annotations

import torch

from ..core.checks import check_contiguous, check_last_dim_contiguous, check_tensor
from ..core.compat import tl, triton
from ..core.device import takes_numba, use_triton
from ..core.ids import Ids, check_all_ids, check_rising_on_host, checks_ids, checks_on_host
from ..core.launch import Compute, Launch, nothing, wait_for_inputs
from ..core.operation import Run, operation
from . import definition

# Positions that a program handles at once: 8 of each thread of 4 warps.
LANES = 1024
# Constants of SplitMix64 (Steele, Lea and Flood, 2014), whose mixing function hashes a position and a token id.
_INCREMENT: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST_FACTOR: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_FACTOR: tl.constexpr = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _terms(positions, token_ids):
    """What tokens add to the running sum, int64. Token ids are 32 bits without a sign."""
    bits = ((positions << 32) | token_ids).to(tl.uint64) + _INCREMENT
    bits = (bits ^ (bits >> 30)) * _FIRST_FACTOR
    bits = (bits ^ (bits >> 27)) * _SECOND_FACTOR
    return (bits ^ (bits >> 31)).to(tl.int64)


@triton.jit
def _high_bits(sums):
    """The high 32 bits of sums, without a sign."""
    return (sums >> 32) & 0xFFFFFFFF


# Rows of a step's tables begin at any address. One compiled kernel takes them all.
@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr", "sums_ptr"])
def _write_canaries_kernel(
    canaries_ptr,  # int64 [num_blocks, block_size], contiguous
    token_ids_ptr,  # int64 [num_tokens]
    slot_mapping_ptr,  # int64 [num_tokens], negative to skip
    cu_seqlens_q_ptr,  # int32 [num_seqs + 1]
    seq_lens_ptr,  # int32 [num_seqs]
    sums_ptr,  # int64 [num_seqs]
    ends_ptr,  # int64 [num_seqs]
    LANES: tl.constexpr,
):
    """Write the canaries of one sequence's new tokens."""
    wait_for_inputs()
    seq = tl.program_id(0).to(tl.int64)
    begin = tl.load(cu_seqlens_q_ptr + seq).to(tl.int64)
    end = tl.load(cu_seqlens_q_ptr + seq + 1).to(tl.int64)
    before = tl.load(seq_lens_ptr + seq).to(tl.int64) - end  # the position of row 0, if it were the sequence's
    total = tl.load(sums_ptr + seq)
    for first in range(begin, end, LANES):
        rows = (first + tl.arange(0, LANES)).to(tl.int64)
        is_new = rows < end
        token_ids = tl.load(token_ids_ptr + rows, mask=is_new, other=0) & 0xFFFFFFFF
        slots = tl.load(slot_mapping_ptr + rows, mask=is_new, other=-1)
        terms = tl.where(is_new, _terms(before + rows, token_ids), 0)
        sums = total + tl.cumsum(terms, 0)
        tl.store(canaries_ptr + slots, (_high_bits(sums) << 32) | token_ids, mask=slots >= 0)
        total += tl.sum(terms, 0)
    tl.store(ends_ptr + seq, total)


@triton.jit(
    do_not_specialize=["num_blocks", "width", "stride_table_seq"],
    do_not_specialize_on_alignment=["block_table_ptr", "firsts_ptr", "sums_ptr"],
)
def _check_canaries_kernel(
    canaries_ptr,  # int64 [num_blocks, KV_BLOCK_SIZE], contiguous
    block_table_ptr,  # int32 [num_seqs, width]
    seq_lens_ptr,  # int32 [num_seqs]
    firsts_ptr,  # int32 [num_seqs], negative to skip
    sums_ptr,  # int64 [num_seqs]
    ends_ptr,  # int64 [num_seqs]
    wrong_ptr,  # int32 [num_seqs]
    num_blocks,
    width,
    stride_table_seq,
    KV_BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Check the canaries of one sequence."""
    wait_for_inputs()
    seq = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + seq).to(tl.int64)
    begin = tl.load(firsts_ptr + seq).to(tl.int64)
    total = tl.load(sums_ptr + seq)
    wrong = seq_len
    if begin >= 0:
        for first in range(begin, seq_len, LANES):
            positions = (first + tl.arange(0, LANES)).to(tl.int64)
            is_held = positions < seq_len
            columns = positions // KV_BLOCK_SIZE
            table_ptrs = block_table_ptr + seq * stride_table_seq + columns
            blocks = tl.load(table_ptrs, mask=is_held & (columns < width), other=-1).to(tl.int64)
            is_block = is_held & (blocks >= 0) & (blocks < num_blocks)
            slots = blocks * KV_BLOCK_SIZE + positions % KV_BLOCK_SIZE
            canaries = tl.load(canaries_ptr + slots, mask=is_block, other=0)
            terms = tl.where(is_held, _terms(positions, canaries & 0xFFFFFFFF), 0)
            sums = total + tl.cumsum(terms, 0)
            is_wrong = is_held & ((_high_bits(sums) != _high_bits(canaries)) | (blocks < 0) | (blocks >= num_blocks))
            wrong = tl.minimum(wrong, tl.min(tl.where(is_wrong, positions, seq_len), 0))
            total += tl.sum(terms, 0)
    is_right = (wrong == seq_len) & (total == tl.load(ends_ptr + seq))
    wrong = tl.where(is_right | (begin < 0), -1, wrong)
    tl.store(wrong_ptr + seq, wrong.to(tl.int32))


def _new_ends(*, sums: torch.Tensor, **_: object) -> torch.Tensor:
    return torch.empty_like(sums)


@operation(_new_ends, mutates=("canaries",))
def write_canaries(
    canaries: torch.Tensor,
    token_ids: torch.Tensor,
    slot_mapping: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    sums: torch.Tensor,
) -> Run[torch.Tensor]:
    """Write the canaries of new tokens, the last of each sequence, to their slots. Return the sequences' sums, int64.

    Args:
        canaries: int64 [num_blocks, block_size], contiguous.
        token_ids: int64 [num_tokens], of which the low 32 bits count.
        slot_mapping: int64 [num_tokens], block_id * block_size + offset; negative to skip the token. Slots are
            distinct.
        cu_seqlens_q: int32 [num_seqs + 1], offsets of each sequence's new tokens.
        seq_lens: int32 [num_seqs], lengths with the new tokens.
        sums: int64 [num_seqs], the running sum of each sequence before its new tokens. It begins with any number that
            tells the sequence apart.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit, a slot or offset is out of range, or offsets
            fall. On a GPU slots and offsets are checked only with PAGED_CHECK=1.
    """
    num_seqs, device = _check_canaries(canaries, seq_lens), canaries.device
    check_tensor("token_ids", token_ids, ("num_tokens",), (torch.int64,), device)
    check_tensor("slot_mapping", slot_mapping, token_ids.shape, (torch.int64,), device)
    check_tensor("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), (torch.int32,), device)
    check_tensor("sums", sums, (num_seqs,), (torch.int64,), device)
    launch: Compute = nothing
    if use_triton(canaries):
        if num_seqs:
            launch = Launch(_write_canaries_kernel, (num_seqs,), {"LANES": LANES}, num_warps=4)
    elif takes_numba(canaries, dtypes=(torch.int64,)):
        from ..cpu.cache import canaries as numba_canaries

        launch = numba_canaries.write_launch(len(token_ids), num_seqs)
    else:
        return definition.write_canaries
    checks = checks_ids(canaries)

    def run(
        canaries: torch.Tensor,
        token_ids: torch.Tensor,
        slot_mapping: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        sums: torch.Tensor,
    ) -> torch.Tensor:
        if checks:
            slots = Ids("slot_mapping", slot_mapping, None, canaries.numel() - 1)
            offsets = Ids("cu_seqlens_q", cu_seqlens_q, 0, len(token_ids))
            check_all_ids("write_canaries", slots, offsets, by_triton=True)
            if checks_on_host(canaries, by_triton=True):
                check_rising_on_host("cu_seqlens_q", cu_seqlens_q, len(token_ids))
        ends = _new_ends(sums=sums)
        launch(
            {
                "canaries_ptr": canaries,
                "token_ids_ptr": token_ids.contiguous(),
                "slot_mapping_ptr": slot_mapping.contiguous(),
                "cu_seqlens_q_ptr": cu_seqlens_q.contiguous(),
                "seq_lens_ptr": seq_lens.contiguous(),
                "sums_ptr": sums.contiguous(),
                "ends_ptr": ends,
            }
        )
        return ends

    return run


def _new_wrong(*, seq_lens: torch.Tensor, **_: object) -> torch.Tensor:
    return torch.empty_like(seq_lens)


@operation(_new_wrong)
def check_canaries(
    canaries: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    firsts: torch.Tensor,
    sums: torch.Tensor,
    ends: torch.Tensor,
) -> Run[torch.Tensor]:
    """Return for each sequence the first position whose canary is wrong, int32 [num_seqs]; -1 if all are right.

    A position is wrong if its block does not exist, or if the high bits of its canary are not those of the running sum
    over the token ids in the canaries. If all positions fit but the sum after the last one is not the expected one, the
    result is the sequence's length: a token, and maybe all behind it, is another one.

    Args:
        canaries: int64 [num_blocks, block_size], contiguous.
        block_table: int32 [num_seqs, max_blocks_per_seq], last dimension contiguous.
        seq_lens: int32 [num_seqs], at most the slots of a row of block_table, or of all blocks.
        firsts: int32 [num_seqs], the first position to check, a multiple of block_size or any other; negative to skip
            the sequence.
        sums: int64 [num_seqs], the running sum before `firsts`.
        ends: int64 [num_seqs], the expected sum after the last position, as `write_canaries` returns it.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit, or a length is out of range. On a GPU lengths
            are checked only with PAGED_CHECK=1.
    """
    num_seqs, device = _check_canaries(canaries, seq_lens), canaries.device
    check_tensor("block_table", block_table, (num_seqs, "max_blocks_per_seq"), (torch.int32,), device)
    check_last_dim_contiguous("block_table", block_table)
    check_tensor("firsts", firsts, (num_seqs,), (torch.int32,), device)
    check_tensor("sums", sums, (num_seqs,), (torch.int64,), device)
    check_tensor("ends", ends, (num_seqs,), (torch.int64,), device)
    sizes = {
        "num_blocks": canaries.shape[0],
        "width": block_table.shape[1],
        "stride_table_seq": block_table.stride(0),
        "KV_BLOCK_SIZE": canaries.shape[1],
    }
    launch: Compute = nothing
    if use_triton(canaries):
        if num_seqs:
            launch = Launch(_check_canaries_kernel, (num_seqs,), {**sizes, "LANES": LANES}, num_warps=4)
    elif takes_numba(canaries, dtypes=(torch.int64,)):
        from ..cpu.cache import canaries as numba_canaries

        launch = numba_canaries.check_launch(num_seqs, *sizes.values())
    else:
        return definition.check_canaries
    checks = checks_ids(canaries)

    def run(
        canaries: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        firsts: torch.Tensor,
        sums: torch.Tensor,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        if checks:
            lengths = Ids("seq_lens", seq_lens, 0, definition.most_positions(canaries, block_table))
            check_all_ids("check_canaries", lengths, by_triton=True)
        wrong = _new_wrong(seq_lens=seq_lens)
        launch(
            {
                "canaries_ptr": canaries,
                "block_table_ptr": block_table,
                "seq_lens_ptr": seq_lens.contiguous(),
                "firsts_ptr": firsts.contiguous(),
                "sums_ptr": sums.contiguous(),
                "ends_ptr": ends.contiguous(),
                "wrong_ptr": wrong,
            }
        )
        return wrong

    return run


def _check_canaries(canaries: torch.Tensor, seq_lens: torch.Tensor) -> int:
    """Check both, and return the number of sequences."""
    check_tensor("canaries", canaries, ("num_blocks", "block_size"), (torch.int64,))
    check_contiguous("canaries", canaries)
    check_tensor("seq_lens", seq_lens, ("num_seqs",), (torch.int32,), canaries.device)
    return len(seq_lens)
