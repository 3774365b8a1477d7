"""Canaries: every backend against Python's whole numbers, and checks that see every kind of wrong slot."""

import random
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from paged import InvalidInputError, check_canaries, write_canaries
from paged.kernels.cache import canaries as canaries_module
from tests.kernels.faulty import planted, turns_red
from tests.kernels.refusals import assert_refuses

BLOCK_SIZE = 4
NUM_BLOCKS = 24
pytestmark = pytest.mark.usefixtures("backend")


def term(position: int, token_id: int) -> int:
    """SplitMix64 of a position and a token id of 32 bits."""
    bits = ((position << 32) + (token_id % 2**32) + 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


def signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def running_sums(seed: int, token_ids: list[int]) -> list[int]:
    """The sums before the first token and behind each token, int64."""
    sums = [seed]
    for position, token_id in enumerate(token_ids):
        sums.append(signed((sums[-1] + term(position, token_id)) % 2**64))
    return sums


class Sequences(NamedTuple):
    """Sequences with their blocks, and the canaries that belong there."""

    token_ids: list[list[int]]
    blocks: list[list[int]]
    seeds: list[int]
    canaries: torch.Tensor

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.token_ids]

    def slot(self, seq: int, position: int) -> tuple[int, int]:
        return self.blocks[seq][position // BLOCK_SIZE], position % BLOCK_SIZE

    def check(self, firsts: list[int] | None = None, *, ends: list[int] | None = None, width: int = 3) -> list[int]:
        """Run the check, from position 0 on unless `firsts` says else, with the first `width` columns of the table."""
        firsts = firsts or [0] * len(self.seeds)
        table = torch.tensor([[*blocks, 0, 0, 0, 0][:5] for blocks in self.blocks], dtype=torch.int32)[:, :width]
        sums = [running_sums(seed, ids) for seed, ids in zip(self.seeds, self.token_ids, strict=True)]
        before = [totals[max(first, 0)] for totals, first in zip(sums, firsts, strict=True)]
        device = self.canaries.device
        return check_canaries(
            self.canaries,
            table.to(device),
            torch.tensor(self.lengths, dtype=torch.int32, device=device),
            torch.tensor(firsts, dtype=torch.int32, device=device),
            torch.tensor(before, dtype=torch.int64, device=device),
            torch.tensor(ends or [totals[-1] for totals in sums], dtype=torch.int64, device=device),
        ).tolist()


def make_sequences(device: torch.device) -> Sequences:
    """Three sequences. The second begins with the first 6 tokens of the first, and has another seed."""
    draw = random.Random(3)
    first = [draw.randrange(2**31) for _ in range(11)]
    token_ids = [first, [*first[:6], 7, 0, -5, 7], [0]]
    blocks = [[5, 2, 9], [7, 20, 23], [1]]
    seeds = [draw.getrandbits(64) - 2**63, 0, -1]
    canaries = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.int64)
    for seq, ids in enumerate(token_ids):
        for position, total in enumerate(running_sums(seeds[seq], ids)[1:]):
            canary = signed(((total % 2**64) >> 32 << 32) | ids[position] % 2**32)
            canaries[blocks[seq][position // BLOCK_SIZE], position % BLOCK_SIZE] = canary
    return Sequences(token_ids, blocks, seeds, canaries.to(device))


@pytest.fixture
def sequences(device: torch.device) -> Sequences:
    return make_sequences(device)


@pytest.mark.parametrize("starts", [(0, 0, 0), (4, 9, 1), (11, 3, 0)])
def test_writes_the_canaries_of_new_tokens(sequences: Sequences, starts: tuple[int, ...]) -> None:
    device = sequences.canaries.device
    new_ids: list[int] = []
    slots: list[int] = []
    offsets = [0]
    sums = []
    for seq, start in enumerate(starts):
        ids = sequences.token_ids[seq]
        new_ids += ids[start:]
        for position in range(start, len(ids)):
            block, offset = sequences.slot(seq, position)
            slots.append(block * BLOCK_SIZE + offset)
        offsets.append(len(new_ids))
        sums.append(running_sums(sequences.seeds[seq], ids[:start])[-1])
    around = torch.full((NUM_BLOCKS + 2, BLOCK_SIZE), -1, dtype=torch.int64, device=device)
    written = around[1:-1]
    expected = written.clone()
    expected.view(-1)[slots] = sequences.canaries.view(-1)[slots]
    ends = write_canaries(
        written,
        torch.tensor([*new_ids, 17], dtype=torch.int64, device=device),  # with one row of padding
        torch.tensor([*slots, -1], dtype=torch.int64, device=device),
        torch.tensor(offsets, dtype=torch.int32, device=device),
        torch.tensor(sequences.lengths, dtype=torch.int32, device=device),
        torch.tensor(sums, dtype=torch.int64, device=device),
    )
    assert torch.equal(written, expected)
    assert around[[0, -1]].unique().tolist() == [-1]
    assert ends.tolist() == [running_sums(seed, ids)[-1] for seed, ids in zip(*sequences[2::-2], strict=True)]


def test_tokens_without_a_slot_count_in_the_sum(device: torch.device) -> None:
    written = torch.zeros(3, BLOCK_SIZE, dtype=torch.int64, device=device)[1:]
    offsets, lengths = torch.tensor([0, 3], device=device).int(), torch.tensor([3], device=device).int()
    ids, slots = torch.tensor([4, 5, 6], device=device), torch.tensor([4, -1, 6], device=device)
    ends = write_canaries(written, ids, slots, offsets, lengths, torch.tensor([9], device=device))
    assert ends.tolist() == running_sums(9, [4, 5, 6])[-1:]
    assert written.nonzero().tolist() == [[1, 0], [1, 2]]


def test_many_tokens_take_several_turns(device: torch.device) -> None:
    """More tokens than a program handles at once, and blocks that it crosses."""
    count, block_size = 2500, 16
    ids = torch.randint(0, 2**31, (count,))
    num_blocks = -(-count // block_size)
    blocks = torch.randperm(num_blocks)
    slots = blocks.repeat_interleave(block_size)[:count] * block_size + torch.arange(count) % block_size
    lengths, offsets = torch.tensor([count]).int(), torch.tensor([0, count]).int()
    canaries = torch.zeros(num_blocks, block_size, dtype=torch.int64, device=device)
    seed = torch.tensor([12345], device=device)
    on_device = [tensor.to(device) for tensor in (ids, slots, offsets, lengths)]
    ends = write_canaries(canaries, *on_device, seed)
    sums = running_sums(12345, ids.tolist())
    assert ends.tolist() == sums[-1:]
    table, firsts = blocks[None].int().to(device), torch.zeros(1, dtype=torch.int32, device=device)
    lengths = lengths.to(device)
    assert check_canaries(canaries, table, lengths, firsts, seed, ends).tolist() == [-1]
    for wrong in (0, 1023, 1024, 2047, 2048, 2499):
        canaries.view(-1)[slots[wrong]] += 1 << 32
        assert check_canaries(canaries, table, lengths, firsts, seed, ends).tolist() == [wrong]
        canaries.view(-1)[slots[wrong]] -= 1 << 32


@pytest.mark.parametrize("firsts", [[0, 0, 0], [4, 8, 0], [5, 9, 1], [11, -1, -1]])
def test_right_canaries_pass(sequences: Sequences, firsts: list[int]) -> None:
    assert sequences.check(firsts) == [-1, -1, -1]


@pytest.mark.parametrize("position", [0, 3, 4, 10])
@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_one_wrong_bit_is_found(sequences: Sequences, position: int, bit: int) -> None:
    """A token id also changes the sum behind it, so the position itself is found in every case."""
    block, offset = sequences.slot(0, position)
    sequences.canaries[block, offset] ^= signed(1 << bit)
    assert sequences.check() == [position, -1, -1]
    assert sequences.check([-1, 0, 0]) == [-1, -1, -1]


def test_a_block_of_another_sequence_is_found(sequences: Sequences) -> None:
    sequences.blocks[0][1] = 20
    assert sequences.check() == [4, -1, -1]


def test_a_block_with_the_same_beginning_is_found_behind_it(sequences: Sequences) -> None:
    """Position 10 with another token, whose canary is right behind the same tokens."""
    token_ids = [*sequences.token_ids[0][:10], 1]
    total = running_sums(sequences.seeds[0], token_ids)[-1]
    block, offset = sequences.slot(0, 10)
    sequences.canaries[block, offset] = signed((total % 2**64) >> 32 << 32 | 1)
    assert sequences.check() == [11, -1, -1]


def test_a_block_at_another_position_is_found(sequences: Sequences) -> None:
    sequences.blocks[0][0], sequences.blocks[0][1] = 2, 5
    assert sequences.check() == [0, -1, -1]


@pytest.mark.parametrize("block", [-1, NUM_BLOCKS, 2**31 - 1, -(2**31)])
def test_a_block_that_does_not_exist_is_wrong(sequences: Sequences, block: int) -> None:
    sequences.blocks[1][2] = block
    assert sequences.check() == [-1, 8, -1]
    assert sequences.check([0, -1, 0]) == [-1, -1, -1]


def test_a_table_that_is_too_narrow_is_wrong(sequences: Sequences) -> None:
    assert sequences.check(width=2) == [8, 8, -1]


def test_another_end_is_wrong(sequences: Sequences) -> None:
    assert sequences.check([0, 0, 1], ends=[1, 2, 3]) == [11, 10, 1]


def test_no_sequences(device: torch.device) -> None:
    canaries = torch.zeros(2, BLOCK_SIZE, dtype=torch.int64, device=device)
    longs = torch.zeros(0, dtype=torch.int64, device=device)
    ints = torch.zeros(0, dtype=torch.int32, device=device)
    offsets = torch.zeros(1, dtype=torch.int32, device=device)
    assert write_canaries(canaries, longs, longs, offsets, ints, longs).tolist() == []
    assert check_canaries(canaries, ints.view(0, 0), ints, ints, longs, longs).tolist() == []


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    canaries = torch.zeros(2, BLOCK_SIZE, dtype=torch.int64, device=device)
    ints = torch.tensor([1], dtype=torch.int32, device=device)
    longs = torch.tensor([1], device=device)
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=device)
    written = {
        "canaries": canaries,
        "token_ids": longs,
        "slot_mapping": longs,
        "cu_seqlens_q": offsets,
        "seq_lens": ints,
        "sums": longs,
    }
    assert_refuses(
        write_canaries,
        written,
        ("canaries", canaries.int(), "canaries: dtype"),
        ("canaries", canaries.view(-1), r"canaries: shape \[8\]"),
        ("canaries", canaries.T, "canaries: strides"),
        ("token_ids", ints, "token_ids: dtype"),
        ("slot_mapping", longs.repeat(2), r"slot_mapping: shape \[2\], expected \[1\]"),
        ("cu_seqlens_q", ints, r"cu_seqlens_q: shape \[1\], expected \[2\]"),
        ("seq_lens", longs, "seq_lens: dtype"),
        ("sums", ints, "sums: dtype"),
    )
    checked = {
        "canaries": canaries,
        "block_table": ints[:, None],
        "seq_lens": ints,
        "firsts": ints,
        "sums": longs,
        "ends": longs,
    }
    assert_refuses(
        check_canaries,
        checked,
        ("canaries", canaries.int(), "canaries: dtype"),
        ("block_table", ints.repeat(2)[:, None], r"block_table: shape \[2, 1\]"),
        ("block_table", ints.expand(1, 3), "block_table: last dimension has stride 0"),
        ("seq_lens", longs, "seq_lens: dtype"),
        ("firsts", longs, "firsts: dtype"),
        ("sums", longs.repeat(2), r"sums: shape \[2\], expected \[1\]"),
        ("ends", ints, "ends: dtype"),
    )


def test_slots_and_offsets_are_checked_on_a_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("ids on a GPU are trusted")
    canaries = torch.zeros(2, BLOCK_SIZE, dtype=torch.int64)
    longs, ints, offsets = torch.tensor([7]), torch.tensor([1]).int(), torch.tensor([0, 1]).int()
    arguments = {
        "canaries": canaries,
        "token_ids": longs,
        "slot_mapping": longs,
        "cu_seqlens_q": offsets,
        "seq_lens": ints,
        "sums": longs,
    }
    assert_refuses(
        write_canaries,
        arguments,
        ("slot_mapping", longs + 1, r"slot_mapping\[0\]: 8, expected 7 at most"),
        ("cu_seqlens_q", offsets * 2, r"cu_seqlens_q\[1\]: 2, expected 0 to 1"),
    )
    before = canaries.clone()
    with pytest.raises(InvalidInputError):
        write_canaries(**{**arguments, "slot_mapping": longs + 1})
    assert torch.equal(canaries, before)


# fault -> (text of the kernels, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", ""),
    "no position in the hash": ("(positions << 32) | token_ids", "(positions * 0) | token_ids"),
    "no token in the hash": ("(positions << 32) | token_ids", "(positions << 32) | (token_ids * 0)"),
    "another constant": ("0x9E3779B97F4A7C15", "0x9E3779B97F4A7C14"),
    "one factor twice": ("* _SECOND_FACTOR", "* _FIRST_FACTOR"),
    "an arithmetic shift": ("(bits ^ (bits >> 30))", "(bits ^ (bits.to(tl.int64) >> 30).to(tl.uint64))"),
    "no last step": ("(bits ^ (bits >> 31)).to(tl.int64)", "bits.to(tl.int64)"),
    "high bits with a sign": ("(sums >> 32) & 0xFFFFFFFF", "sums >> 33"),
    "positions of the row": ("_terms(before + rows, token_ids)", "_terms(rows, token_ids)"),
    "the sum before the token": ("tl.cumsum(terms, 0)\n        tl.store",
                                 "tl.cumsum(terms, 0) - terms\n        tl.store"),
    "a signed token": ("other=0) & 0xFFFFFFFF\n        slots", "other=0)\n        slots"),
    "tiles begin anew": ("        total += tl.sum(terms, 0)\n    tl.store", "        total += 0\n    tl.store"),
    "rows of the next sequence": ("is_new = rows < end", "is_new = rows <= end"),
    "padding is written": ("mask=slots >= 0", "mask=slots >= -1"),
    "no end": ("tl.store(ends_ptr + seq, total)", "tl.store(ends_ptr + seq, total * 0)"),
    "the first sequence's sum": ("tl.load(sums_ptr + seq)\n    for", "tl.load(sums_ptr)\n    for"),
    "a check from the start": ("in range(begin, seq_len, LANES)", "in range(0, seq_len, LANES)"),
    "the last position is not checked": ("is_held = positions < seq_len", "is_held = positions < seq_len - 1"),
    "every table is the first": ("seq * stride_table_seq + columns", "columns"),
    "the width is not seen": ("is_held & (columns < width)", "is_held"),
    "a missing block is right": ("(_high_bits(sums) != _high_bits(canaries)) | (blocks < 0) | (blocks >= num_blocks)",
                                 "(_high_bits(sums) != _high_bits(canaries)) & is_block"),
    "high bits are not compared": ("_high_bits(sums) != _high_bits(canaries)", "_high_bits(sums) != _high_bits(sums)"),
    "the end is not compared": ("(wrong == seq_len) & (total == tl.load(ends_ptr + seq))", "wrong == seq_len"),
    "a position within the block": ("positions % KV_BLOCK_SIZE", "positions % 2"),
    "the last wrong position": ("tl.minimum(wrong, tl.min(tl.where(is_wrong, positions, seq_len), 0))",
                                "tl.max(tl.where(is_wrong, positions, 0), 0)"),
    "checks begin anew": ("            total += tl.sum(terms, 0)\n    is_right",
                          "            total += 0\n    is_right"),
    "skipped sequences are checked": ("tl.where(is_right | (begin < 0), -1, wrong)", "tl.where(is_right, -1, wrong)"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    text, replacement = MUTATIONS[fault]
    with planted((canaries_module,), (sys.modules[__name__],), tmp_path, text, replacement):
        assert turns_red(_check_all, device) == bool(text)


def _check_all(device: torch.device) -> None:
    for starts in ((0, 0, 0), (4, 9, 1)):
        test_writes_the_canaries_of_new_tokens(make_sequences(device), starts)
    test_tokens_without_a_slot_count_in_the_sum(device)
    test_many_tokens_take_several_turns(device)
    test_right_canaries_pass(make_sequences(device), [5, -1, 1])
    for bit in (0, 63):
        test_one_wrong_bit_is_found(make_sequences(device), 10, bit)
    test_a_block_of_another_sequence_is_found(make_sequences(device))
    test_a_block_with_the_same_beginning_is_found_behind_it(make_sequences(device))
    for block in (-1, NUM_BLOCKS):
        test_a_block_that_does_not_exist_is_wrong(make_sequences(device), block)
    test_a_table_that_is_too_narrow_is_wrong(make_sequences(device))
    test_another_end_is_wrong(make_sequences(device))
