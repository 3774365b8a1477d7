"""How much a reader passes: files and types on a decode step's way, calls down to a kernel, places that name one thing.

    TRITON_INTERPRET=1 python -m tests.structure.measures

`tests/structure/test_measures.py` bounds each measure.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import paged
from paged.kernels.core.operation import Bound
from tests.structure.imports import ROOT, SOURCES

Calls = list[tuple[str, str, int]]


def step_files() -> set[str]:
    """Return the files whose functions one decode step of the engine calls, by the bundled checkpoint and PyTorch."""
    with _decoding_engine(overlap=False) as engine:
        return {file for file, _, _ in _calls_of(engine.step)}


def carriers(*, overlap: bool) -> set[str]:
    """Return the names of the types that carry a decode step from file to file: `Completion` and those made for it.

    A type counts if a function hands an object of it, made in this step, to a function of another file: as an argument,
    alone or in a list, or as the result. Types of kernels do not count, because kernels know no steps.
    """
    with _decoding_engine(overlap=overlap) as engine:
        before = gc.get_objects()  # kept, so that no new object gets the id of an old one
        return {"Completion"} | _types_handed_on(engine.step, {id(value) for value in before})


@contextmanager
def _decoding_engine(*, overlap: bool) -> Iterator[paged.Engine]:
    """Yield an engine whose sequences all decode, by the bundled checkpoint and PyTorch."""
    with _backend("torch"):
        executor = paged.LlmExecutor.from_pretrained(ROOT / "models" / "recall", num_blocks=64, progress=False)
        engine = paged.Engine(executor, paged.EngineConfig(overlap=overlap), eos_token_ids=())
        engine.add_request([5, 17, 3, 60], paged.SamplingParams(temperature=0, max_tokens=16))
        for _ in range(8):
            engine.step()
        yield engine


def _types_handed_on(run: Callable[[], object], old_ids: set[int]) -> set[str]:
    """Return the names of the types above the kernels whose new objects pass from one file to another."""
    names: set[str] = set()

    def note(frame: FrameType, event: str, result: Any) -> None:
        caller = frame.f_back
        if event not in ("call", "return") or caller is None:
            return
        file, other = _file_of(frame.f_code.co_filename), _file_of(caller.f_code.co_filename)
        if file is None or other is None or file == other:
            return
        values = [result]
        if event == "call":
            code = frame.f_code
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            values = [frame.f_locals[name] for name in arguments if name != "self" and name in frame.f_locals]
        for value in values:
            for part in value if type(value) in (list, tuple) else [value]:
                module = type(part).__module__
                is_ours = module.startswith("paged.") and not module.startswith("paged.kernels.")
                if is_ours and id(part) not in old_ids:
                    names.add(type(part).__name__)

    with _profiled(note):
        run()
    return names


def reserve_files() -> set[str]:
    """Return the files whose functions a reservation and its commit call where blocks are added and published."""
    manager = paged.PagedKvCacheManager(paged.PagedKvCacheConfig(1, 1, 8, block_size=4, num_blocks=9, device="cpu"))
    requests = [paged.KvSlotRequest(manager.allocate(seq_id).cache_id, 5) for seq_id in "ab"]
    token_ids = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]
    return {file for file, _, _ in _calls_of(lambda: manager.reserve(requests).commit(token_ids))}


def attention_way() -> tuple[set[str], int, int]:
    """Return the files of a plain `paged_attention` call, and the calls down to the kernel in it and in a bound one.

    The public function is the first of the calls, what starts the kernel the last.
    """
    k_cache, v_cache = torch.randn(2, 4, 16, 1, 16).unbind(0)
    tensors = {
        "block_table": torch.tensor([[1]], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
        "seq_lens": torch.tensor([5], dtype=torch.int32),
    }
    q = torch.randn(1, 2, 16)
    plan = paged.AttentionPlan(tensors["cu_seqlens_q"], tensors["seq_lens"], max_seqlen_q=1, max_seqlen_k=16)
    bound = Bound(paged.paged_attention)

    def call(attention: Callable[..., object], **options: Any) -> Calls:
        return _calls_of(lambda: attention(q, k_cache, v_cache, max_seqlen_q=1, **tensors, **options))

    with _backend("triton"):
        plain = call(paged.paged_attention)
        call(bound, plan=plan)
        return {file for file, _, _ in plain}, _calls_to_kernel(plain), _calls_to_kernel(call(bound, plan=plan))


def places(pattern: str) -> list[str]:
    """Return "file:line" of every line outside tests that matches."""
    found: list[str] = []
    for _, path in SOURCES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(ROOT)}:{number}")
    return found


def measure() -> dict[str, int]:
    """Return every measure by its name."""
    files, plain, bound = attention_way()
    return {
        "files of a decode step": len(step_files()),
        "files from reserve to commit": len(reserve_files()),
        "types that carry a step": len(carriers(overlap=False) | carriers(overlap=True)),
        "files of paged_attention": len(files),
        "calls of paged_attention down to its kernel": plain,
        "calls of a bound paged_attention": bound,
        "places of a KV dtype": len(places(r"\bfloat8_e5m2\b")),
        "files of a sampling filter": len({place.partition(":")[0] for place in places(r"\bmin_p\b")}),
    }


@contextmanager
def _backend(name: str) -> Iterator[None]:
    before = os.environ.get("PAGED_BACKEND")
    os.environ["PAGED_BACKEND"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["PAGED_BACKEND"]
        else:
            os.environ["PAGED_BACKEND"] = before


def _calls_of(run: Callable[[], object]) -> Calls:
    """Return file, name and depth of every function of the project that is called, in order."""
    calls: Calls = []
    depth = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth
        file = _file_of(frame.f_code.co_filename)
        if file is None or frame.f_code.co_name.startswith("<"):
            return
        if event == "call":
            depth += 1
            calls.append((file, frame.f_code.co_name, depth))
        elif event == "return":
            depth -= 1

    with _profiled(note):
        run()
    return calls


@contextmanager
def _profiled(note: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Call `note` at calls and returns of this thread.

    Garbage is not collected meanwhile: generators that earlier tests have left would be closed, which counts as calls.
    """
    gc.disable()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()


@cache
def _file_of(name: str) -> str | None:
    """Return a source file of the project by its path from the root, None for any other file."""
    path = Path(os.path.realpath(name))
    if path not in {source for _, source in SOURCES}:
        return None
    return str(path.relative_to(ROOT))


def _calls_to_kernel(calls: Calls) -> int:
    """Return the depth of the call that starts `_attention_kernel`."""
    return next(depth - 1 for _, name, depth in calls if name == "_attention_kernel")


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{value:4} {name}")
