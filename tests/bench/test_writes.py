"""What operations may write: as they declare it, and no other element changes in a call."""

from typing import Any

import pytest
import torch

from paged.bench.cards.cards import CARDS
from paged.kernels.core.operation import Call, watch_calls
from paged.tools.recorded_calls.encoder import tensors_in
from tests.fuzz.kernels.kernel_calls import CALLS


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_changes_what_it_may_write(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    torch.manual_seed(0)
    arguments = CALLS[name].pack(CALLS[name].arguments())
    before = {path: tensor.clone() for path, tensor in tensors_in("", arguments).items()}
    declared: list[str] = []

    def note(call: Call, run: Any) -> Any:
        if call.operation == name:
            declared.extend(call.mutates)
        return run()

    watch_calls(note)
    try:
        CARDS[name].call(arguments)
    finally:
        watch_calls(None)
    writes = CARDS[name].written(arguments)
    assert {path.rpartition(".")[2].partition("[")[0] for path in writes} <= set(declared)
    num_changed = 0
    tensors = tensors_in("", arguments)
    for path, tensor in tensors.items():
        changed = (tensor != before[path]) & ~(tensor.isnan() & before[path].isnan())
        num_changed += int(changed.any())
        if path in writes and writes[path] is None:
            continue
        if path in writes:
            changed[writes[path]] = False
        assert not changed.any(), path
    assert num_changed == len(writes.keys() & tensors.keys())


def test_scales_and_tickets_are_among_them() -> None:
    """Which calls with few options do not have."""
    cache = torch.zeros(2, 4, 1, 8, dtype=torch.int8)
    scale = torch.zeros(2, 4, 1)
    arguments = {"k_cache": cache, "v_cache": cache, "slot_mapping": torch.tensor([5, -1]), "k_scale": scale}
    for name in ("k_cache", "v_scale"):
        mask = CARDS["reshape_and_cache"].written(arguments)[name]
        assert mask is not None
        assert mask.nonzero().tolist() == [[1, 1]]
    assert CARDS["rms_norm"].written({"x": scale, "out": scale}) == {"out": None}
    assert CARDS["route_and_align"].written({"ticket": scale}) == {"ticket": None}
