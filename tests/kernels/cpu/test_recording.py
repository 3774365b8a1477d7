"""Recordings: what they repeat, on other values, and what they know that they cannot."""

from collections.abc import Callable

import pytest
import torch

import paged
from paged.errors import InvalidInputError
from paged.kernels.core.operation import Bound
from paged.kernels.cpu.recording import Recording
from paged.kernels.cpu.step_memory import StepMemory
from tests.backends import needs_numba

pytestmark = pytest.mark.by_cpu


@pytest.fixture(autouse=True)
def _numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "numba")


def test_operations_are_repeated_on_other_values() -> None:
    """Results, one or several, new or in place, views, memory that holds nothing yet, rows by ids, and products."""
    x, weight, bias, out = torch.randn(3, 4), torch.randn(8, 4), torch.randn(8), torch.empty(3, 4)

    def run() -> None:
        wide = torch.nn.functional.linear(x, weight, bias)
        left, right = wide.split_with_sizes([4, 4], -1)
        left += right.exp()
        kept = torch.empty_like(left).copy_(left)
        out.copy_(torch.nn.functional.linear(kept.unflatten(-1, (2, 2)).flatten(-2), weight[:4]).bfloat16())
        values, ids = out.topk(2)
        out[:, :2].add_(values * bias[ids])

    recording = Recording(run, StepMemory())
    assert recording.obstacle == ""
    for _ in range(2):
        x.normal_()
        run()
        expected = out.clone()
        out.zero_()
        assert recording.repeat()
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("read", "obstacle"),
    [
        (torch.Tensor.item, "aten::_local_scalar_dense"), (torch.Tensor.tolist, "Tensor.tolist"),
        (torch.Tensor.numpy, "Tensor.numpy"), (torch.Tensor.nonzero, "aten::nonzero"),
        (bool, "aten::_local_scalar_dense"), (float, "aten::_local_scalar_dense"),
        (lambda x: torch.equal(x, x), "aten::equal"), (lambda x: x.clone().uniform_(), "aten::uniform_"),
        (lambda x: x.reshape(1)[x.reshape(1) > 0], "aten::index"),
        (lambda x: (x.add_(1).item(), x.nonzero()), "aten::_local_scalar_dense"),
    ],
)  # fmt: skip
def test_what_reads_values_is_an_obstacle(read: Callable[[torch.Tensor], object], obstacle: str) -> None:
    """So is what is drawn. The first one is named."""
    x = torch.ones(())
    assert Recording(lambda: read(x), StepMemory()).obstacle.startswith(obstacle)  # type: ignore[arg-type,return-value]
    assert Recording(lambda: x.add_(1), StepMemory()).obstacle == ""  # type: ignore[arg-type,return-value]


def test_a_recording_that_raises_is_over() -> None:
    with pytest.raises(ZeroDivisionError):
        Recording(lambda: 1 / 0, StepMemory())  # type: ignore[arg-type,return-value]
    assert Recording(lambda: None, StepMemory()).repeat()


@needs_numba
class TestAttention:
    """A decode step of one layer over 4 sequences: norm, cache write, attention."""

    def setup_method(self) -> None:
        self.x, self.weight, self.out = torch.randn(4, 64), torch.randn(64), torch.zeros(4, 4, 16)
        self.caches = torch.randn(9, 8, 2, 16), torch.randn(9, 8, 2, 16)
        self.angles = torch.randn(64, 16)
        self.slots, self.positions = torch.zeros(2, 4, dtype=torch.int64).unbind()
        int32 = {"block_table": torch.zeros(4, 2), "seq_lens": torch.zeros(4), "cu_seqlens_q": torch.zeros(5)}
        self.ids = ids = {name: each.int() for name, each in int32.items()}
        self.plan = paged.AttentionPlan(ids["cu_seqlens_q"], ids["seq_lens"], max_seqlen_q=1, max_seqlen_k=16)
        self.norm, self.attend = Bound(paged.rms_norm), Bound(paged.paged_attention)
        self.write = Bound(paged.qk_norm_rope_and_cache)
        self.run()

    def run(self) -> None:
        for _ in range(2):  # layers
            normed = self.norm(self.x, self.weight)
            q, k, v = normed.view(4, 4, 16), normed[:, :32].view(4, 2, 16), normed[:, 32:].view(4, 2, 16)
            self.write(q, k, v, *self.caches, self.slots, self.positions, self.angles)
            self.attend(q, *self.caches, **self.ids, max_seqlen_q=1, plan=self.plan, out=self.out)

    def fill(self, lengths: list[int]) -> None:
        """A query of each sequence that has a length; the others are padding."""
        self.x.normal_()
        table, own = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]), torch.tensor(lengths)
        self.ids["block_table"].copy_(table)
        self.ids["seq_lens"].copy_(own)
        self.ids["cu_seqlens_q"][1:] = (own > 0).cumsum(0)
        self.positions.copy_(own - 1).clamp_(min=0)
        slots = table[torch.arange(4), self.positions // 8] * 8 + self.positions % 8
        self.slots.copy_(slots.masked_fill(own == 0, -1))

    def test_a_step_of_any_lengths_is_repeated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """By any number of threads."""
        recording = Recording(self.run, StepMemory())  # over padding alone
        assert recording.obstacle == ""
        for num_threads, lengths in enumerate(([5, 9, 16, 1], [3, 0, 0, 0], [16, 16, 0, 0]), 1):
            monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
            self.fill(lengths)
            before = [cache.clone() for cache in self.caches]
            self.run()
            expected = [x.clone() for x in (self.out, *self.caches)]
            for cache, old in zip(self.caches, before, strict=True):
                cache.copy_(old)
            assert recording.repeat()
            assert all(map(torch.equal, (self.out, *self.caches), expected))

    @pytest.mark.parametrize("wrong", ["slot", "position"])
    def test_places_to_write_to_are_checked_in_every_repetition(self, wrong: str) -> None:
        recording = Recording(self.run, StepMemory())
        self.fill([5, 9, 16, 1])
        assert recording.repeat()
        before = [cache.clone() for cache in self.caches]
        tensor, value = {"slot": (self.slots[:1], 72), "position": (self.positions[3:], 64)}[wrong]
        tensor.fill_(value)
        assert not recording.repeat()
        assert all(map(torch.equal, self.caches, before))
        with pytest.raises(InvalidInputError):
            self.run()
        self.fill([5, 9, 16, 1])
        assert recording.repeat()

    def test_what_pytorch_computes_is_an_obstacle(self) -> None:
        """It looks at the lengths in every call."""
        options = {**self.ids, "max_seqlen_q": 1, "plan": self.plan, "mask": torch.ones(4, 1, dtype=torch.bool)}
        attend = Bound(paged.paged_attention)
        for _ in range(2):
            recording = Recording(lambda: attend(self.out.clone(), *self.caches, **options), StepMemory())  # type: ignore[arg-type,return-value]
        assert recording.obstacle.startswith("paged_attention")
