"""Token ids wherever they are taken: every form means the same, and every wrong one is the same error."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from paged import (
    DecodeInput,
    Engine,
    InvalidInputError,
    KvSlotRequest,
    LlmExecutor,
    PagedAttentionExecutor,
    PagedKvCacheManager,
    PrefillInput,
    SamplingParams,
    SpeculativeDecoder,
    UnifiedBatchItem,
)
from paged.serving.command_line.cli import RECALL
from tests.executors.oracle import make_executor

IDS = [3, 1, 4, 1, 5, 9]
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FORMS: dict[str, Callable[[], Any]] = {
    "list": lambda: list(IDS),
    "tuple": lambda: tuple(IDS),
    "mixture": lambda: [3, np.int8(1), torch.tensor(4), np.array(1), np.uint64(5), 9],
    "not contiguous": lambda: np.repeat(IDS, 2)[::2],
    **{f"array {name}": lambda name=name: np.array(IDS, name) for name in INTEGERS},
    **{f"tensor {name}": lambda name=name: torch.tensor(IDS).to(getattr(torch, name)) for name in INTEGERS},
}
WRONG: dict[str, Any] = {
    "floats": [3.0, 1.0],
    "array of floats": np.array([3.0, 1.0]),
    "tensor of floats": torch.tensor([3.0, 1.0]),
    "bools": [True, False],
    "array of bools": np.array([True, False]),
    "tensor of bools": torch.tensor([True, False]),
    "None inside": [3, None],
    "string": "31",
    "bytes": b"31",
    "strings": ["3", "1"],
    "nested": [[3, 1]],
    "array of two axes": np.array([[3, 1]]),
    "tensor of two axes": torch.tensor([[3, 1]]),
    "number": 3,
    "array without axes": np.array(3),
    "mapping": {3: 1},
    "beyond 64 bits": [3, 1 << 70],
}
Door = Callable[[Any], Any]


def a_manager() -> PagedKvCacheManager:
    manager = an_executor().kv_manager
    assert manager is not None
    return manager


def an_executor() -> PagedAttentionExecutor:
    return make_executor(torch.device("cpu"), block_size=2, num_layers=1)


@cache
def bundled() -> LlmExecutor:
    return LlmExecutor.from_pretrained(RECALL, num_blocks=16)


@pytest.fixture(autouse=True)
def _torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")


def tokens_of(engine: Engine, prompt: Any, **fields: Any) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=4, **fields)
    (output,) = engine.generate([prompt], params, progress=False)
    assert output.error is None
    return output.outputs[0].token_ids


def allocated(ids: Any) -> Any:
    manager = a_manager()
    first = manager.allocate("a", token_ids=IDS)
    manager.advance(first, len(IDS))
    manager.commit(first, IDS)
    return manager.allocate("b", token_ids=ids).num_tokens


def committed(ids: Any) -> Any:
    manager = a_manager()
    handle = manager.allocate("a", len(IDS))
    manager.advance(handle, len(IDS))
    manager.commit(handle, ids)
    return manager.allocate("b", token_ids=IDS).num_tokens


def appended(ids: Any) -> Any:
    manager = a_manager()
    handle = manager.allocate("a", len(IDS))
    manager.advance(handle, len(IDS))
    manager.append_tokens([(handle, ids)])
    return manager.allocate("b", token_ids=IDS).num_tokens


def reserved(ids: Any) -> Any:
    manager = a_manager()
    manager.allocate("a", len(IDS))
    manager.allocate("b", 1)
    manager.reserve([KvSlotRequest("a", len(IDS)), KvSlotRequest("b", 1)]).commit([ids, None])
    return manager.allocate("c", token_ids=IDS).num_tokens


def verified(ids: Any) -> Any:
    model = bundled().model
    model.prefill("a", [2, 7])
    try:
        return model.forward_verify("a", ids).argmax(-1).tolist()
    finally:
        model.release("a")


def prefilled(ids: Any) -> Any:
    model = bundled().model
    try:
        return int(model.prefill("a", ids).argmax())
    finally:
        model.release("a")


def run_by_executor(ids: Any) -> Any:
    executor = an_executor()
    prefill = executor.prefill(PrefillInput([ids]))  # type: ignore[arg-type]
    first = int(prefill.last_token_logits().argmax())
    decoded = executor.decode(DecodeInput([list(ids)[:1]], prefill.kv_cache))  # type: ignore[arg-type]
    return first, int(decoded.logits.argmax())


DOORS: dict[str, Door] = {
    "allocate": allocated,
    "commit": committed,
    "append_tokens": appended,
    "reservation": reserved,
    "q_tokens": lambda ids: UnifiedBatchItem("a", ids).q_tokens,
    "PrefillInput and DecodeInput": run_by_executor,
    "generate": lambda ids: tokens_of(Engine(an_executor(), eos_token_ids=()), ids),
    "prompt lookup": lambda ids: tokens_of(SpeculativeDecoder(an_executor(), eos_token_ids=()), ids),
    "beam_search": lambda ids: Engine(an_executor(), eos_token_ids=()).beam_search(ids, 2, 3)[0].token_ids,
    "eos_token_ids": lambda ids: tokens_of(Engine(an_executor(), eos_token_ids=ids), [2, 7], allowed_token_ids=[9]),
    "stop_token_ids": lambda ids: SamplingParams(stop_token_ids=ids).stop_token_ids,
    "allowed_token_ids": lambda ids: SamplingParams(allowed_token_ids=ids).allowed_token_ids,
    "model.prefill": prefilled,
    "model.forward_verify": verified,
}
SETS = ("eos_token_ids", "stop_token_ids", "allowed_token_ids")


@pytest.mark.parametrize("name", DOORS)
def test_every_form_means_the_same(name: str) -> None:
    door = DOORS[name]
    expected = door(list(IDS))
    for form, make in FORMS.items():
        assert door(make()) == expected, form


@pytest.mark.parametrize("name", DOORS)
def test_ranges_are_ids(name: str) -> None:
    door = DOORS[name]
    assert door(range(1, 7)) == door([1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("name", DOORS)
def test_every_wrong_form_is_the_same_error(name: str) -> None:
    door = DOORS[name]
    for form, value in WRONG.items():
        if form == "beyond 64 bits" and name in ("q_tokens", "stop_token_ids", "allowed_token_ids"):
            continue  # checked by the vocabulary, which these do not know
        with pytest.raises(InvalidInputError):
            raise AssertionError(f"{form}: {door(value)!r}")


@pytest.mark.parametrize("name", SETS)
def test_ids_without_an_order_may_be_a_set(name: str) -> None:
    door = DOORS[name]
    assert sorted(door(set(IDS))) == sorted(door(sorted(set(IDS))))
