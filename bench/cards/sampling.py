"""Cards of choosing tokens: the best token, and draws from filtered distributions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from paged.bench.cards.card import Card, Edge, Row, defined, named, same
from paged.bench.cards.draw import Draw
from paged.bench.compilation.cases.case import CompileCase
from paged.bench.compilation.cases.launches import empty, launch_case, launches_of
from paged.bench.limits import Cost
from paged.bench.problems.arguments import Arguments, num_bytes
from paged.kernels.sampling import definition
from paged.kernels.sampling.greedy_argmax import greedy_argmax
from paged.kernels.sampling.penalties import Penalties
from paged.kernels.sampling.sample_tokens import sample_tokens

# Vocabulary of Qwen3.
_VOCAB_SIZE = 151_936
_SIZES = {"rows": (256, 16, 2), "vocab_size": (_VOCAB_SIZE, 32000, 9000)}
_FILTERS = {"top_k": "i64", "top_p": "fp32", "min_p": "fp32"}
# Kernels that run after the penalties, so that no case has penalties for them.
_AFTER_PENALTIES = ("bound", "choose")


def _best(draw: Draw, *, rows: int, vocab_size: int, is_masked: bool = False) -> Arguments:
    arguments = {"logits": draw.normal(rows, vocab_size)}
    if is_masked:
        arguments["token_mask"] = torch.rand(rows, vocab_size, device=draw.device) < 0.5
    return arguments


def _ties_and_masks(draw: Draw) -> Iterator[Arguments]:
    """Draw ties, masks, penalties, and a row without an allowed token."""
    device = draw.device
    logits = ((torch.randn(6, 5000, device=device) * 4).round() / 2).to(draw.dtype)
    logits[2] = -torch.inf
    for shape in ((5000,), (6, 5000)):
        yield {
            "logits": logits,
            "token_mask": torch.rand(shape, device=device) < 0.8,
            "repetition_penalty": torch.where(torch.rand(shape, device=device) < 0.5, 1.0, 1.3),
        }


def _draws(draw: Draw, *, rows: int, vocab_size: int, is_penalised: bool = False, **filters: float | None) -> Arguments:
    """Draw float32 logits, as forwards give them, and filters of the same number for each row.

    is_penalised: every third row has no penalties.
    """
    arguments: Arguments = {
        "logits": 3 * draw.floats(rows, vocab_size),
        "keys": torch.randint(0, 1 << 32, (rows, 2), device=draw.device),
        "temperature": torch.full((rows,), 0.8, device=draw.device),
    }
    for name, value in filters.items():
        if value is not None:
            arguments[name] = torch.full((rows,), value, device=draw.device)
    if is_penalised:
        states = torch.arange(rows, device=draw.device)
        states[::3] = -1
        counts = torch.randint(0, 3, (max(rows, 1), vocab_size), dtype=torch.int32, device=draw.device)
        seen = (counts > 0) | (torch.rand(counts.shape, device=draw.device) < 0.5)  # in the output or in the prompt
        arguments["penalties"] = Penalties(states, counts, seen, torch.rand(rows, 3, device=draw.device) + 0.5)
    return arguments


def _draw_cost(_: Card, arguments: Arguments) -> Cost:
    """Count logits, read once, or three times if there are filters, and a token for each row."""
    logits = arguments["logits"]
    passes = 1
    if any(arguments.get(name) is not None for name in _FILTERS):
        passes = 3
    return Cost(0, passes * num_bytes(logits) + 8 * len(logits))


def _best_cases() -> list[CompileCase]:
    """Return cases with and without masks and penalties."""
    logits = empty("bf16", 1, _VOCAB_SIZE)
    chunk, reduce = launches_of("sm_90", greedy_argmax, logits)
    options = {"token_mask": empty("i1", _VOCAB_SIZE), "repetition_penalty": empty("fp32", _VOCAB_SIZE)}
    penalised, _ = launches_of("sm_90", greedy_argmax, logits, **options)
    return [
        launch_case("greedy_argmax chunk", chunk),
        launch_case("greedy_argmax chunk masked penalised", penalised),
        launch_case("greedy_argmax reduce", reduce),
    ]


def _draw_cases() -> list[CompileCase]:
    """Return cases with and without penalties: no filter, each filter alone, all filters."""
    cases = []
    for filters in ((), ("top_k",), ("top_p",), ("min_p",), tuple(_FILTERS)):
        cases += _sample_cases(filters)
        if filters in ((), tuple(_FILTERS)):
            cases += _sample_cases(filters, penalised=True)
    return cases


def _sample_cases(filters: tuple[str, ...], *, penalised: bool = False) -> list[CompileCase]:
    """Return the kernels of `sample_tokens` with these filters; with penalties, only the kernels that take them."""
    logits, keys, temperature = empty("bf16", 1, _VOCAB_SIZE), empty("i64", 1, 2), empty("fp32", 1)
    options: dict[str, Any] = {name: empty(_FILTERS[name], 1) for name in filters}
    if penalised:
        counts, seen = empty("i32", 1, _VOCAB_SIZE), empty("i1", 1, _VOCAB_SIZE)
        options["penalties"] = Penalties(empty("i64", 1), counts, seen, empty("fp32", 1, 3))
    cases = []
    for launch in launches_of("sm_90", sample_tokens, logits, keys, temperature, **options):
        part = launch.kernel.fn.__name__.removeprefix("_").removesuffix("_kernel").replace("_", " ")
        text = " ".join(filters).replace("min_p", "log_min_p") or "plain"
        name = f"sample_tokens {text}: {part}"
        if not penalised:
            cases.append(launch_case(name, launch))
        elif part not in _AFTER_PENALTIES:
            cases.append(launch_case(f"{name} penalised", launch))
    return cases


CARDS = (
    Card(
        "greedy_argmax",
        _best,
        defined(definition.greedy_argmax, "tokens"),
        named("tokens"),
        rows=(Row({"rows": (128, 16, 2), "vocab_size": _SIZES["vocab_size"]}),),
        edges=(Edge("ties, masks, penalties", _ties_and_masks),),
        odd={"rows": (0, 1, 3), "vocab_size": (1, 1025, 40), "is_masked": (False, True)},
        compiled=_best_cases,
    ),
    Card(
        "sample_tokens",
        _draws,
        defined(definition.sample_tokens, "tokens"),
        named("tokens"),
        cost=_draw_cost,
        rows=(
            Row(_SIZES),
            Row({**_SIZES, "top_p": same(0.95)}, "top_p"),
            Row({**_SIZES, "top_k": same(50), "top_p": same(0.95)}, "top_k_top_p"),
        ),
        odd={
            "rows": (0, 1, 3),
            "vocab_size": (1, 1025, 40),
            "top_k": (None, 1, 7),
            "top_p": (None, 0.9),
            "min_p": (None, 0.05),
            "is_penalised": (False, True),
        },
        compiled=_draw_cases,
    ),
)
