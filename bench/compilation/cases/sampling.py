"""The choice of tokens out of 151,936: the best one, and the passes that filter and draw."""

from __future__ import annotations

from typing import Any

from paged.bench.compilation.case import CompileCase
from paged.bench.compilation.launches import empty, launch_case, launches_of
from paged.kernels.sampling.greedy_argmax import greedy_argmax
from paged.kernels.sampling.penalties import Penalties
from paged.kernels.sampling.sample_tokens import sample_tokens

VOCAB_SIZE = 151_936
_FILTERS = {"top_k": "i64", "top_p": "fp32", "min_p": "fp32"}
# Kernels that take no penalties.
_AFTER_PENALTIES = ("bound", "choose")


def cases() -> list[CompileCase]:
    """With and without masks and penalties; no filter, each alone, all of them."""
    logits = empty("bf16", 1, VOCAB_SIZE)
    chunk, reduce = launches_of("sm_90", greedy_argmax, logits)
    options = {"token_mask": empty("i1", VOCAB_SIZE), "repetition_penalty": empty("fp32", VOCAB_SIZE)}
    penalised, _ = launches_of("sm_90", greedy_argmax, logits, **options)
    cases = [
        launch_case("greedy_argmax chunk", chunk),
        launch_case("greedy_argmax chunk masked penalised", penalised),
        launch_case("greedy_argmax reduce", reduce),
    ]
    for filters in ((), ("top_k",), ("top_p",), ("min_p",), tuple(_FILTERS)):
        cases += _sample_cases(filters)
        if filters in ((), tuple(_FILTERS)):
            cases += _sample_cases(filters, penalised=True)
    return cases


def _sample_cases(filters: tuple[str, ...], *, penalised: bool = False) -> list[CompileCase]:
    """The kernels of `sample_tokens` with these filters; with penalties those that take them."""
    logits, keys, temperature = empty("bf16", 1, VOCAB_SIZE), empty("i64", 1, 2), empty("fp32", 1)
    options: dict[str, Any] = {name: empty(_FILTERS[name], 1) for name in filters}
    if penalised:
        counts, seen = empty("i32", 1, VOCAB_SIZE), empty("i1", 1, VOCAB_SIZE)
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
