"""A new operation is a kernel, a definition and a card: then verify, the benchmark, compilation and fuzzing know it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paged.bench.benchmark import Setting
from paged.bench.cards.card import Card, Row, defined, named
from paged.bench.check import WrongResultError
from paged.bench.compilation.cases.launches import empty, single_case
from paged.bench.kernels.run import Case, contest
from paged.bench.verification.cases import checks_of
from paged.kernels.core.compat import tl, triton
from paged.kernels.core.device import use_triton
from paged.kernels.core.launch import Launch
from paged.kernels.core.operation import Run, like_the_first, operation
from tests.fuzz.kernels.kernel_calls import odd_problem

CPU = torch.device("cpu")


@triton.jit
def _squared_relu_kernel(x_ptr, out_ptr, size, BLOCK_SIZE: tl.constexpr):
    offs = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.maximum(tl.load(x_ptr + offs, mask=offs < size, other=0.0).to(tl.float32), 0.0)
    tl.store(out_ptr + offs, x * x, mask=offs < size)


def squared_relu_definition(x: torch.Tensor, *, compute: torch.dtype = torch.float64) -> torch.Tensor:
    return x.to(compute).relu().square()


@operation(like_the_first)
def squared_relu(x: torch.Tensor) -> Run[torch.Tensor]:
    if not use_triton(x):
        return lambda x: squared_relu_definition(x, compute=torch.float32).to(x.dtype)
    launch = Launch(_squared_relu_kernel, (triton.cdiv(x.numel(), 256),), {"size": x.numel(), "BLOCK_SIZE": 256})

    def run(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel():
            launch({"x_ptr": x.contiguous(), "out_ptr": out})
        return out

    return run


CARD = Card(
    "squared_relu",
    lambda draw, tokens, size: {"x": draw.normal(tokens, size)},
    defined(squared_relu_definition, "out"),
    named("out"),
    rows=(Row({"tokens": (4096, 16, 3), "size": (12288, 64, 1025)}),),
    odd={"tokens": (0, 1, 5), "size": (1, 1025, 24)},
    compiled=lambda: [single_case("squared_relu", squared_relu, empty("bf16", 4096))],
    function=squared_relu,
)


@pytest.mark.usefixtures("backend")
def test_verify_fuzzing_and_compilation_read_it() -> None:
    (check,) = checks_of(CARD)
    assert check.name == "squared_relu"
    results = [*check.results(CPU, torch.float16)]
    for seed in range(4):
        results += CARD.check(odd_problem(CARD, seed, torch.bfloat16)).values()
    assert all(result.first_wrong() is None for result in results)
    (case,) = CARD.compiled()
    assert case.signature == {"x_ptr": "*bf16", "out_ptr": "*bf16", "size": "i32", "BLOCK_SIZE": "constexpr"}


@pytest.mark.usefixtures("by_pytorch")
def test_the_benchmark_reads_it_and_refuses_a_wrong_one() -> None:
    setting = Setting(CPU, 3, small=True)
    row = contest(Case(CARD, CARD.rows[0]), setting).row()
    assert (row["name"], row["size"]) == ("squared_relu", {"tokens": 16, "size": 64})
    wrong = replace(CARD, function=lambda x: squared_relu(x) + 1)
    with pytest.raises(WrongResultError):
        contest(Case(wrong, CARD.rows[0]), setting)
