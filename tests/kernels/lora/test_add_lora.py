"""add_lora against float64, on both backends, and the grouping of rows by adapter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from paged import InvalidInputError, LoraBatch, LoraWeights, add_lora
from paged.kernels.common.device import Device
from paged.kernels.lora import reference
from paged.kernels.lora.config import shrink_tile
from tests.tolerance import assert_close, dtypes

Adapter = dict[int, tuple[torch.Tensor, torch.Tensor, float]]
NAN = float("nan")


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
        max_rank: int = 20,
        dtype: torch.dtype = torch.float32,
    ) -> Problem:
        """ranks: of every part of every slot. Every product has about unit variance."""
        num_slots, num_parts = len(ranks), len(part_sizes)
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

    def batch(self, row_slots: list[int]) -> LoraBatch:
        found = LoraBatch.group(torch.tensor(row_slots, dtype=torch.int32))
        return LoraBatch(found.rows.to(self.x.device), found.slots.to(self.x.device))

    def check(self, row_slots: list[int]) -> None:
        """Rows of adapters are right, and rows without one the same bits as before."""
        want = reference.add_lora(self.base, self.x, self.adapters, self.weights.part_sizes, row_slots)
        out = self.base.clone()
        assert add_lora(out, self.x, self.weights, self.batch(row_slots)) is out
        assert_close(out, want, rounded=None if out.dtype == torch.float32 else self.rounded(row_slots))
        without = torch.tensor(row_slots) < 0
        assert torch.equal(out[without], self.base[without])

    def rounded(self, row_slots: list[int]) -> torch.Tensor:
        """The definition with A x rounded, as it is between the two products."""
        total = self.base.cpu().double()
        for row, slot in enumerate(row_slots):
            for part, (a, b, scale) in self.adapters[slot].items() if slot >= 0 else ():
                first = sum(self.weights.part_sizes[:part])
                shrunk = (a.cpu().double() @ self.x[row].cpu().double()).to(self.x.dtype).double()
                total[row, first : first + b.shape[0]] += scale * (b.cpu().double() @ shrunk)
        return total


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize(
    ("part_sizes", "in_features", "ranks", "max_rank"),
    [
        ((40, 24, 24), 48, [[4, 4, 4], [20, 0, 7], [0, 9, 0]], 20),  # query, key and value
        ((136, 136), 72, [[8, 8], [16, 0], [1, 33]], 33),  # gate and up: two tiles of columns each
        ((65,), 511, [[1], [64], [17]], 64),  # split input with a tail
        ((300,), 1024, [[256], [130], [3]], 256),  # split input without
    ],
)
def test_matches_reference(
    part_sizes: tuple[int, ...],
    in_features: int,
    ranks: list[list[int]],
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    problem = Problem.make(
        device, ranks, part_sizes=part_sizes, in_features=in_features, max_rank=max_rank, dtype=dtype
    )
    problem.check([1, -1, 0, 2, 2, 1, -1, 0, 2, -1, 1, 1])


@pytest.mark.usefixtures("backend")
def test_many_rows_of_an_adapter(device: torch.device) -> None:
    """Blocks of 64 rows, the last of an adapter ragged, beside an adapter with a single row."""
    problem = Problem.make(device, [[4, 4, 4], [20, 0, 7]], num_rows=80, dtype=torch.float16)
    row_slots = [0] * 70 + [-1] * 9 + [1]
    assert problem.batch(row_slots).rows.shape == (3, 64)
    problem.check(row_slots)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("row_slots", [[0] * 12, [-1] * 12, [-1] * 11 + [1]])
def test_one_adapter_or_none(row_slots: list[int], device: torch.device) -> None:
    Problem.make(device, [[4, 4, 4], [20, 0, 7]]).check(row_slots)


@pytest.mark.usefixtures("backend")
def test_padding_blocks_are_skipped(device: torch.device) -> None:
    """As in a batch that is captured at a fixed number of blocks; the rows they name must not be written."""
    problem = Problem.make(device, [[4, 4, 4], [20, 0, 7]])
    want = problem.base.clone()
    batch = problem.batch([0, 0, 1, *[-1] * 9])
    add_lora(want, problem.x, problem.weights, batch)
    padding = torch.full_like(batch.rows[:1], 5), torch.full_like(batch.slots[:1], -1)
    out = problem.base.clone()
    padded = LoraBatch(torch.cat([padding[0], batch.rows]), torch.cat([padding[1], batch.slots]))
    assert torch.equal(add_lora(out, problem.x, problem.weights, padded), want)


def test_layers_of_one_shape_share_their_launches(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """And one of another shape in between has its own."""
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    problems = [Problem.make(device, [[4, 4, 4], [20, 0, 7]], in_features=size) for size in (48, 64, 48)]
    row_slots = [1, 0, -1] * 4
    batch = problems[0].batch(row_slots)
    for problem in problems:
        want = reference.add_lora(problem.base, problem.x, problem.adapters, problem.weights.part_sizes, row_slots)
        assert_close(add_lora(problem.base, problem.x, problem.weights, batch), want)
    assert len(batch.launches) == 2


@pytest.mark.usefixtures("backend")
def test_nan_stays_in_its_row(device: torch.device) -> None:
    """Row 0 is computed where a block has no row."""
    problem = Problem.make(device, [[4, 4, 4]])
    problem.x[0] = NAN
    out = add_lora(problem.base.clone(), problem.x, problem.weights, problem.batch([0] * 12))
    assert out.isnan().all(1).tolist() == [True] + [False] * 11
    assert not out[1:].isnan().any()


@pytest.mark.usefixtures("backend")
def test_strided_rows(device: torch.device) -> None:
    """What lies between the rows is NaN: it must not be read, and must still be there."""
    problem = Problem.make(device, [[4, 4, 4], [20, 0, 7]])
    row_slots = [1, 0, -1] * 4
    want = add_lora(problem.base.clone(), problem.x, problem.weights, problem.batch(row_slots))
    x, wide = (torch.nn.functional.pad(tensor, (8, 16), value=NAN) for tensor in (problem.x, problem.base))
    out = wide[:, 8:-16]
    assert torch.equal(add_lora(out, x[:, 8:-16], problem.weights, problem.batch(row_slots)), want)
    assert wide[:, :8].isnan().all()
    assert wide[:, -16:].isnan().all()


@pytest.mark.usefixtures("backend")
def test_weights_beyond_two_billion_elements(device: torch.device, tmp_path: Path) -> None:
    """The last of many slots begins more than 2^31 elements into a sparse file (or an untouched allocation)."""
    near = Problem.make(
        device, [[5]], part_sizes=(16,), in_features=2**15, num_rows=3, max_rank=16, dtype=torch.float16
    )
    num_slots = 2**31 // near.weights.a[0].numel() + 2
    shape = (num_slots, *near.weights.a.shape[1:])
    if device.type == "cpu":
        size = math.prod(shape)
        far_a = torch.from_file(str(tmp_path / "a"), shared=True, size=size, dtype=torch.float16).view(shape)
    else:
        far_a = torch.empty(shape, dtype=torch.float16, device=device)
    far_a[-1] = near.weights.a[0]
    weights = LoraWeights(
        far_a,
        near.weights.b.expand(num_slots, -1, -1).contiguous(),
        near.weights.ranks.expand(num_slots, -1).contiguous(),
        near.weights.scales.expand(num_slots, -1).contiguous(),
        near.weights.part_sizes,
    )
    last = num_slots - 1
    want = add_lora(near.base.clone(), near.x, near.weights, near.batch([0, -1, 0]))
    assert torch.equal(add_lora(near.base.clone(), near.x, weights, near.batch([last, -1, last])), want)


def test_rows_are_grouped_by_adapter() -> None:
    grouped = LoraBatch.group(torch.tensor([2, -1, 0, 2, 0, -1, 2], dtype=torch.int32))
    assert grouped.slots.tolist() == [0, 2]
    assert [[row for row in block if row >= 0] for block in grouped.rows.tolist()] == [[2, 4], [0, 3, 6]]
    assert grouped.rows.shape == (2, 16)
    assert grouped.rows.dtype == grouped.slots.dtype == torch.int32


@pytest.mark.parametrize(
    ("num_rows", "shape"), [(1, (1, 16)), (16, (1, 16)), (17, (1, 64)), (65, (2, 64)), (0, (0, 16))]
)
def test_size_of_blocks(num_rows: int, shape: tuple[int, int]) -> None:
    grouped = LoraBatch.group(torch.full((num_rows,), 3, dtype=torch.int32))
    assert grouped.rows.shape == shape
    assert grouped.rows[grouped.rows >= 0].tolist() == list(range(num_rows))


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


def test_input_is_split_for_few_programs_only() -> None:
    splits = [shrink_tile(blocks, 16, 1, 16, 4096, 2, Device("sm_90", 132)).num_splits for blocks in (1, 33, 66, 500)]
    assert splits == [8, 8, 4, 1]
    assert shrink_tile(1, 16, 1, 16, 256, 2, Device("sm_90", 132)).num_splits == 1


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    problem = Problem.make(device, [[4, 4, 4], [20, 0, 7]])
    weights, batch = problem.weights, problem.batch([0, 1] * 6)
    good = {
        "a": weights.a,
        "b": weights.b,
        "ranks": weights.ranks,
        "scales": weights.scales,
        "part_sizes": (40, 24, 24),
    }
    add_lora(problem.base, problem.x, LoraWeights(**good), batch)
    for name, bad, message in (
        ("a", weights.a[..., 1:].contiguous(), r"x: shape \[12, 48\], expected \[num_rows, 47\]"),
        ("a", weights.a[:, 1:], r"a: shape \[2, 2, 20, 48\], expected \[num_slots, 3, max_rank, in_features\]"),
        ("a", weights.a.mT.contiguous().mT, "a: strides"),
        ("b", weights.b[:, 1:], r"b: shape \[2, 19, 88\], expected \[2, 20, 88\]"),
        ("b", weights.b.half(), "b: dtype"),
        ("ranks", weights.ranks.long(), "ranks: dtype"),
        ("scales", weights.scales[:1], "scales: shape"),
        ("part_sizes", (40, 24, 12, 12), "part_sizes"),
        ("part_sizes", (40, 48), "a: shape"),
        ("part_sizes", (40, 24, 23), "b: shape"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            add_lora(problem.base, problem.x, LoraWeights(**(good | {name: bad})), batch)
    with pytest.raises(InvalidInputError, match=r"out: shape \[11, 88\], expected \[12, 88\]"):
        add_lora(problem.base[1:], problem.x, weights, batch)
    with pytest.raises(InvalidInputError, match="x: dtype"):
        add_lora(problem.base, problem.x.half(), weights, batch)
    with pytest.raises(InvalidInputError, match="slots: shape"):
        LoraBatch(batch.rows, batch.slots[1:])
    with pytest.raises(InvalidInputError, match="rows: strides"):
        LoraBatch(batch.rows.T.contiguous().T, batch.slots)
    with pytest.raises(InvalidInputError, match="slots: dtype"):
        LoraBatch.group(torch.zeros(3, dtype=torch.int64))
