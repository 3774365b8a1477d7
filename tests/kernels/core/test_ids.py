"""Ids out of range: refused on a CPU before anything is written, found on the device where PAGED_CHECK=1."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import paged
import paged.kernels.core.ids
from paged import InvalidInputError, paged_attention
from paged.bench.attention.problem import Problem, make
from paged.kernels.attention import definition
from paged.kernels.core import ids as id_checks
from paged.kernels.core.ids import Ids, Sequences, check_ids, check_ids_on_device, check_sequences_on_device
from tests.kernels.faulty import planted
from tests.tolerance import assert_close

PROBLEM = Problem("", ((1, 40), (3, 3), (0, 5), (9, 30)), block_size=8)


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# What is changed of sound arguments -> the message; None where nothing is wrong with it.
TABLES = {(0, 4): 2**20, (1, 0): -1, (3, 3): 34, (3, 0): 2**31 - 1}
FAULTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "nothing": ({}, None),
    "a larger bound": ({"max_seqlen_q": 1000}, None),
    "offsets that descend": ({"cu_seqlens_q": _int32(0, 4, 1, 4, 13)}, r"cu_seqlens_q\[2\]: 1, expected 4 to 13"),
    "offsets that wrap": ({"cu_seqlens_q": _int32(0, 2**31 - 1, -(2**31), 4, 13)}, r"cu_seqlens_q\[1\]: 2147483647"),
    "offsets from 1": ({"cu_seqlens_q": _int32(1, 1, 4, 4, 13)}, r"cu_seqlens_q\[0\]: 1, expected 0 to 0"),
    "offsets beyond q": ({"cu_seqlens_q": _int32(0, 1, 4, 4, 14)}, r"cu_seqlens_q\[4\]: 14, expected 0 to 13"),
    "a negative length": ({"seq_lens": _int32(40, 3, -1, 30)}, r"seq_lens\[2\]: -1, expected 0 to 40"),
    "a length beyond the table": ({"seq_lens": _int32(41, 3, 0, 30)}, r"seq_lens\[0\]: 41, expected 0 to 40"),
    "a longer query": ({"max_seqlen_q": 8}, "max_seqlen_q: 8, expected at least 9, the queries of sequence 3"),
    **{
        f"block {block} at {position}": (
            {"block_table": (position, block)},
            rf"block_table\[{position[0]}, {position[1]}\]: {block}, expected 0 to 33",
        )
        for position, block in TABLES.items()
    },
    "anything behind the end": ({"block_table": ((1, 1), -1)}, None),
    "anything in a sequence without queries": ({"block_table": ((2, 0), 2**30)}, None),
}


def _faulty(fault: str) -> tuple[dict[str, Any], str | None]:
    arguments: dict[str, Any] = {**vars(make(PROBLEM, torch.device("cpu"))), "max_seqlen_q": 9}
    changes, message = FAULTS[fault]
    for name, changed in changes.items():
        if name == "block_table":
            arguments[name][changed[0]] = changed[1]
        else:
            arguments[name] = changed
    return arguments, message


on_host = pytest.mark.skipif(torch.cuda.is_available(), reason="ids on a GPU are trusted")


@on_host
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("backend")
def test_attention_refuses_what_it_would_follow(fault: str) -> None:
    arguments, message = _faulty(fault)
    out = torch.full_like(arguments["q"], 7.0)
    if message is None:
        paged_attention(**arguments, out=out)
        del arguments["max_seqlen_q"]
        assert_close(out, definition.paged_attention(**arguments)[0])
        return
    with pytest.raises(InvalidInputError, match=message):
        paged_attention(**arguments, out=out)
    assert bool((out == 7.0).all())


def _verdict(sequences: Sequences) -> str:
    check_sequences_on_device(sequences)
    try:
        check_ids(sequences.block_table.device)
    except InvalidInputError as error:
        return str(error)
    return ""


def _first_difference(device: torch.device) -> str | None:
    """The first fault that the kernel on the device judges otherwise than the host does."""
    for fault in FAULTS:
        arguments, message = _faulty(fault)
        ids = (arguments[name].to(device) for name in ("block_table", "cu_seqlens_q", "seq_lens"))
        num_blocks, block_size = arguments["k_cache"].shape[:2]
        limits = num_blocks, block_size, arguments["max_seqlen_q"], 1 << 30, 1
        found = _verdict(Sequences(*ids, len(arguments["q"]), *limits))
        name = (message or "").partition(":")[0].partition("\\")[0]
        if bool(found) != bool(name) or not found.startswith(name):
            return f"{fault}: {found}"
    return None


def test_the_device_finds_what_the_host_does(device: torch.device) -> None:
    assert _first_difference(device) is None


def test_window_chunk_and_tiles_limit_what_is_read(device: torch.device) -> None:
    """Blocks before a window or a chunk may hold anything, but for those that a tile of keys begins in."""
    table, cu, lens = _int32(99, 99, 1, 2).view(1, 4), _int32(0, 1), _int32(30)
    sound = Sequences(table.to(device), cu.to(device), lens.to(device), 1, 3, 8, 1, 13, 1)
    assert _verdict(sound) == _verdict(sound._replace(window_left=1 << 30, chunk_size=10)) == ""
    assert "block_table[0, 1]: 99" in _verdict(sound._replace(window_left=14))
    assert "block_table[0, 0]: 99" in _verdict(sound._replace(keys_at_once=128))
    assert "block_table[0, 1]: 99" in _verdict(sound._replace(window_left=1 << 30, chunk_size=15))


def test_a_found_fault_is_raised_once_by_the_next_checked_call(device: torch.device) -> None:
    good, bad = torch.tensor([0, 5, -7], device=device), torch.tensor([0, 6, -7], device=device)
    check_ids_on_device("reshape_and_cache", Ids("slot_mapping", bad, None, 5))
    if device.type == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(InvalidInputError, match=r"slot_mapping\[1\]: 6, expected 5 at most .*reshape_and_cache"):
        check_ids_on_device("reshape_and_cache", Ids("slot_mapping", good, None, 5))
    check_ids_on_device("reshape_and_cache", Ids("slot_mapping", good, None, 5))
    check_ids(device)


@pytest.mark.parametrize("name", ["rows", "slots", "ranks"])
def test_each_array_has_its_range(name: str, device: torch.device) -> None:
    ids = {each: torch.zeros(2000, dtype=torch.int32, device=device) for each in ("rows", "slots", "ranks")}
    for value, message in ((-1, ""), (9, ""), (-2, "-2, expected -1 to 9"), (10, "10, expected -1 to 9")):
        ids[name][1999] = value
        check_ids_on_device("add_lora", *(Ids(each, tensor, -1, 9) for each, tensor in ids.items()))
        with pytest.raises(InvalidInputError, match=rf"{name}\[1999\]: {message}") if message else nullcontext():
            check_ids(device)


MUTATIONS = {
    "no fault": ("", ""),
    "the range is one too wide": ("(blocks >= num_blocks)", "(blocks > num_blocks)"),
    "negative blocks pass": ("((blocks < 0) | (blocks >= num_blocks))", "(blocks >= num_blocks)"),
    "the last block is not looked at": ("is_read = columns < last_block", "is_read = columns < last_block - 1"),
    "what is not read is looked at": ("is_read = columns < last_block", "is_read = columns < last_block + 1"),
    "descending offsets pass": ("end < start, operation", "end < 0, operation"),
    "the first offset may be any": ("tl.where(seq == 0, 0, num_tokens)", "num_tokens + 0 * seq"),
    "the end may lie beyond q": ("(end < 0) | (end > num_tokens)", "end < 0"),
    "longer queries pass": ("end - start > max_seqlen_q", "end - start > max_seqlen_q + 1"),
    "negative lengths pass": ("(seq_len < 0) | (seq_len > longest)", "seq_len > longest"),
    "lengths beyond the table pass": ("(seq_len < 0) | (seq_len > longest)", "seq_len < 0"),
    "sequences without queries are looked at": ("is_no_length) | (end <= start)", "is_no_length) | (end < start)"),
    "nothing is noted": ("tl.store(fault_ptr, operation,", "tl.store(fault_ptr, operation * 0,"),
}


@pytest.mark.parametrize("fault", MUTATIONS)
def test_comparison_sees_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    with planted([paged.kernels.core.ids], [id_checks], tmp_path, *MUTATIONS[fault]):
        difference = _first_difference(device)
    id_checks._fault_of(device).ticket.zero_()  # a copy that notes nothing may have taken it
    assert (difference is None) == (fault == "no fault"), difference


@on_host
@pytest.mark.usefixtures("backend")
def test_other_operations_refuse_ids_out_of_range() -> None:
    k_cache, v_cache = torch.zeros(2, 4, 8, 2, 16)
    key, table, in_table = torch.ones(3, 2, 16), torch.ones(5, 8), torch.tensor([0, 4, 2])
    written = {"k_cache": k_cache, "v_cache": v_cache, "slot_mapping": torch.tensor([0, -1, 31])}
    rotated = {**written, "q": key.clone(), "k": key, "v": key, "positions": in_table, "cos_sin_cache": table}
    turned = {"positions": in_table, "query": key.clone(), "key": None, "cos_sin_cache": table}
    beyond = "slot_mapping", torch.tensor([0, -1, 32]), r"slot_mapping\[2\]: 32, expected 31 at most"
    off = [
        ("positions", torch.tensor([0, wrong, 2]), rf"positions\[1\]: {wrong}, expected 0 to 4")
        for wrong in (-1, 5, 2**40)
    ]
    for operation, arguments, faults in (
        (paged.reshape_and_cache, {**written, "key": key, "value": key}, [beyond]),
        (paged.qk_norm_rope_and_cache, rotated, [beyond, *off]),
        (paged.rotary_embedding, turned, off),
    ):
        for name, wrong, message in faults:
            with pytest.raises(InvalidInputError, match=message):
                operation(**{**arguments, name: wrong})
        assert not k_cache.any()
        assert all(bool((arguments.get(name, key) == 1).all()) for name in ("q", "query"))
        operation(**arguments)
        assert k_cache[3, 7].any() or operation is paged.rotary_embedding
        k_cache.zero_()


def test_paged_check_is_a_word(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_CHECK", "yes")
    with pytest.raises(InvalidInputError, match="PAGED_CHECK='yes'"):
        id_checks.checks_on_device()
    for word, is_on in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("PAGED_CHECK", word)
        assert id_checks.checks_on_device() == is_on
        paged_attention(**vars(make(PROBLEM, device)), max_seqlen_q=9)
        check_ids(device)
