"""add_lora against float64, on both backends, and the grouping of rows by adapter."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import InvalidInputError, LoraBatch, LoraWeights, add_lora
from tests.tolerance import DTYPES, assert_close

Adapter = dict[int, tuple[torch.Tensor, torch.Tensor, float]]
NAN = float("nan")
TWO_SLOTS = [[4, 4, 4], [20, 0, 7]]


@dataclass(frozen=True)
class Problem:
    """Slots of a layer and what lies in each: everything that is not an adapter's is NaN."""

    x: torch.Tensor
    base: torch.Tensor
    weights: LoraWeights
    adapters: list[Adapter]

    @staticmethod
    def make(
        device: torch.device,
        ranks: list[list[int]],
        *,
        part_sizes: tuple[int, ...] = (40, 24, 24),
        in_features: int = 48,
        num_rows: int = 12,
        dtype: torch.dtype = torch.float32,
    ) -> Problem:
        """ranks: of every part of every slot. Every product has about unit variance."""
        num_slots, num_parts, max_rank = len(ranks), len(part_sizes), max(20, *map(max, ranks))
        a = torch.full((num_slots, num_parts, max_rank, in_features), NAN, dtype=dtype, device=device)
        b = torch.full((num_slots, max_rank, sum(part_sizes)), NAN, dtype=dtype, device=device)
        scales = torch.full((num_slots, num_parts), NAN, device=device)
        adapters: list[Adapter] = []
        for slot, part_ranks in enumerate(ranks):
            adapters.append({})
            for part, (rank, size) in enumerate(zip(part_ranks, part_sizes, strict=True)):
                if rank == 0:
                    continue
                first, scale = sum(part_sizes[:part]), 0.5 + part + slot
                part_a = (torch.randn(rank, in_features, device=device) / math.sqrt(in_features)).to(dtype)
                part_b = (torch.randn(size, rank, device=device) / math.sqrt(rank)).to(dtype)
                a[slot, part, :rank], b[slot, :rank, first : first + size] = part_a, part_b.T
                scales[slot, part] = scale
                adapters[slot][part] = (part_a, part_b, scale)
        table = torch.tensor(ranks, dtype=torch.int32, device=device)
        x, base = (torch.randn(num_rows, size, device=device).to(dtype) for size in (in_features, sum(part_sizes)))
        return Problem(x, base, LoraWeights(a, b, table, scales, part_sizes), adapters)

    def batch(self, row_adapters: list[int]) -> LoraBatch:
        found = LoraBatch.group(torch.tensor(row_adapters, dtype=torch.int32))
        return LoraBatch(found.rows.to(self.x.device), found.slots.to(self.x.device))

    def run(self, row_adapters: list[int], **others: Any) -> torch.Tensor:
        """What is made of a copy of `base`, or of other arguments."""
        given = {"out": self.base.clone(), "x": self.x, "weights": self.weights, "batch": self.batch(row_adapters)}
        return add_lora(**given | others)

    def check(self, row_adapters: list[int], **others: Any) -> None:
        """Rows of adapters are right, and rows without one the same bits as before."""
        out = self.run(row_adapters, **others)
        rounded = None if out.dtype == torch.float32 else self.expected(row_adapters, out.dtype)
        assert_close(out, self.expected(row_adapters, torch.float64), rounded=rounded)
        without = torch.tensor(row_adapters) < 0
        assert torch.equal(out[without], self.base[without])

    def expected(self, row_adapters: list[int], dtype: torch.dtype) -> torch.Tensor:
        """The definition, by the adapters as they were before they were packed. dtype: of A x, between the products."""
        total = self.base.cpu().double()
        for row, adapter in enumerate(row_adapters):
            for part, (a, b, scale) in self.adapters[adapter].items() if adapter >= 0 else ():
                first = sum(self.weights.part_sizes[:part])
                shrunk = (a.cpu().double() @ self.x[row].cpu().double()).to(dtype).double()
                total[row, first : first + b.shape[0]] += scale * (b.cpu().double() @ shrunk)
        return total


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [*DTYPES[1:], pytest.param(torch.float32, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("part_sizes", "in_features", "ranks"),
    [
        ((40, 24, 24), 48, [[4, 4, 4], [20, 0, 7], [0, 9, 0]]),  # query, key and value
        ((136, 136), 72, [[8, 8], [16, 0], [1, 33]]),  # gate and up: two tiles of columns each
        ((65,), 511, [[1], [64], [17]]),  # split input with a tail
        ((300,), 1024, [[200], [65], [3]]),  # split input without
    ],
)
def test_matches_reference(
    part_sizes: tuple[int, ...], in_features: int, ranks: list[list[int]], dtype: torch.dtype, device: torch.device
) -> None:
    problem = Problem.make(device, ranks, part_sizes=part_sizes, in_features=in_features, dtype=dtype)
    problem.check([1, -1, 0, 2, 2, 1, -1, 0, 2, -1, 1, 1])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("row_adapters", [[0] * 12, [-1] * 12, [-1] * 11 + [1], [0] * 70 + [-1] * 9 + [1]], ids=len)
def test_one_adapter_or_none_or_many_rows_of_it(row_adapters: list[int], device: torch.device) -> None:
    """80 rows take blocks of 64, the last of an adapter ragged, beside an adapter with a single row."""
    Problem.make(device, TWO_SLOTS, num_rows=len(row_adapters), dtype=torch.float16).check(row_adapters)


@pytest.mark.usefixtures("backend")
def test_padding_blocks_are_skipped(device: torch.device) -> None:
    """As in a batch that is captured at a fixed number of blocks; the rows they name must not be written."""
    problem, row_adapters = Problem.make(device, TWO_SLOTS), [0, 0, 1, *[-1] * 9]
    batch = problem.batch(row_adapters)
    rows, slots = torch.full_like(batch.rows[:1], 5), torch.full_like(batch.slots[:1], -1)
    problem.check(row_adapters, batch=LoraBatch(torch.cat([rows, batch.rows]), torch.cat([slots, batch.slots])))


@pytest.mark.usefixtures("backend")
def test_nan_stays_in_its_row(device: torch.device) -> None:
    """Row 0 is computed where a block has no row."""
    problem = Problem.make(device, [[4, 4, 4]])
    problem.x[0] = NAN
    out = problem.run([0] * 12)
    assert out.isnan().all(1).tolist() == [True] + [False] * 11
    assert not out[1:].isnan().any()


@pytest.mark.usefixtures("backend")
def test_strided_rows(device: torch.device) -> None:
    """What lies between the rows is NaN: it must not be read, and must still be there."""
    problem = Problem.make(device, TWO_SLOTS)
    x, wide = (torch.nn.functional.pad(tensor, (8, 16), value=NAN) for tensor in (problem.x, problem.base))
    out = wide[:, 8:-16]
    assert problem.run([1, 0, -1] * 4, out=out, x=x[:, 8:-16]) is out
    assert torch.equal(out, problem.run([1, 0, -1] * 4))
    assert wide[:, :8].isnan().all()
    assert wide[:, -16:].isnan().all()


@pytest.mark.usefixtures("backend")
def test_weights_beyond_two_billion_elements(device: torch.device, tmp_path: Path) -> None:
    """The last of many slots begins more than 2^31 elements into a sparse file (or an untouched allocation)."""
    near = Problem.make(device, [[5]], part_sizes=(16,), in_features=2**15, num_rows=3, dtype=torch.float16)
    num_slots = 2**31 // near.weights.a[0].numel() + 2
    shape = (num_slots, *near.weights.a.shape[1:])
    if device.type == "cpu":
        path = str(tmp_path / "a")
        far_a = torch.from_file(path, shared=True, size=math.prod(shape), dtype=torch.float16).view(shape)
    else:
        far_a = torch.empty(shape, dtype=torch.float16, device=device)
    far_a[-1] = near.weights.a[0]
    others = (near.weights.b, near.weights.ranks, near.weights.scales)
    repeated = (each.expand(num_slots, *each.shape[1:]).contiguous() for each in others)
    weights = LoraWeights(far_a, *repeated, near.weights.part_sizes)
    far = near.run([], weights=weights, batch=near.batch([num_slots - 1, -1, num_slots - 1]))
    assert_close(far, near.run([0, -1, 0]).double())


@pytest.mark.parametrize(("num_rows", "most"), [(1, 8), (7, 8), (23, 8), (24, 8), (64, 3), (40, 1)])
def test_batches_of_one_size_have_one_shape(num_rows: int, most: int) -> None:
    """Whichever adapters their rows take. One row for each adapter but the last needs all of the blocks."""
    generator = torch.Generator().manual_seed(0)
    most_needed = torch.arange(num_rows, dtype=torch.int32).clamp(max=most - 1)
    draws = [torch.randint(-1, most, (num_rows,), generator=generator, dtype=torch.int32) for _ in range(50)]
    all_blocks = LoraBatch.group(most_needed, most_adapters=most)
    assert (all_blocks.slots >= 0).all()
    for slots in (most_needed, *draws, torch.full_like(most_needed, -1)):
        grouped = LoraBatch.group(slots, most_adapters=most)
        assert grouped.rows.shape == all_blocks.rows.shape == (len(grouped.slots), 16)
        found = torch.full_like(slots, -1)
        for slot, block in zip(grouped.slots.tolist(), grouped.rows.tolist(), strict=True):
            found[[row for row in block if row >= 0]] = slot
        assert torch.equal(found, slots)


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    problem = Problem.make(device, TWO_SLOTS)
    out, x, weights, batch = problem.base, problem.x, problem.weights, problem.batch([0, 1] * 6)
    add_lora(out, x, weights, batch)
    for name, bad, message in (
        ("a", weights.a[..., 1:].contiguous(), r"x: shape \[12, 48\], expected \[num_rows, 47\]"),
        ("a", weights.a[:, 1:], r"a: shape \[2, 2, 20, 48\], expected \[num_slots, 3, max_rank, in_features\]"),
        ("b", weights.b[:, 1:], r"b: shape \[2, 19, 88\], expected \[2, 20, 88\]"),
        ("ranks", weights.ranks.long(), "ranks: dtype"),
        ("scales", weights.scales[:1], "scales: shape"),
        ("part_sizes", (40, 24, 12, 12), "part_sizes"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            add_lora(out, x, replace(weights, **{name: bad}), batch)
    for call, message in (
        (lambda: add_lora(out[1:], x, weights, batch), r"out: shape \[11, 88\], expected \[12, 88\]"),
        (lambda: LoraBatch(batch.rows, batch.slots[1:]), "slots: shape"),
        (lambda: LoraBatch.group(torch.zeros(3, dtype=torch.int64)), "slots: dtype"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            call()
