"""How much a reader passes: files and types on a decode step's way, calls down to a kernel, places that name one thing.

    python -m tests.structure.measures

`tests/structure/test_measures.py` bounds each measure.
"""

from __future__ import annotations

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
from paged.kernels.common.operation import Bound
from tests.structure.imports import ROOT, SOURCES

# Types that carry a step from the scheduler to its tokens.
CARRIERS = (
    "AttentionCall",
    "AttentionMetadata",
    "BatchColumns",
    "Completion",
    "ForwardStep",
    "GraphShape",
    "HostMetadata",
    "Rows",
    "StepBatch",
    "StepOutput",
    "UnifiedBatch",
)
Calls = list[tuple[str, str, int]]


def step_files() -> set[str]:
    """Return the files whose functions one decode step of the engine calls, by the bundled checkpoint and PyTorch."""
    with _backend("torch"):
        executor = paged.LlmExecutor.from_pretrained(ROOT / "models" / "recall", num_blocks=64, progress=False)
        engine = paged.Engine(executor, eos_token_ids=())
        engine.add_request([5, 17, 3, 60], paged.SamplingParams(temperature=0, max_tokens=16))
        for _ in range(8):
            engine.step()
        return {file for file, _, _ in _calls_of(engine.step)}


def num_carriers() -> int:
    """Return how many of CARRIERS the sources define."""
    text = "\n".join(path.read_text() for _, path in SOURCES)
    return len([name for name in CARRIERS if re.search(rf"^class {name}\b", text, re.MULTILINE)])


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
        "types that carry a step": num_carriers(),
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

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


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
