"""Draw tokens from logits: penalties, temperature, top_k, top_p, min_p and noise, without sorting the vocabulary.

`passes.py` has the kernels over all logits. `thresholds.py` has the kernels that find top_k and top_p and choose the
token. The engine's keys are hashes of seed and position (`executors/sampling/noise.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import torch

from ..core.checks import FLOAT_DTYPES, check_dtype, check_shape, check_tensor, refuse_gradients
from ..core.compat import triton
from ..core.custom_ops import in_fields
from ..core.device import device_of, use_triton
from ..core.errors import InvalidInputError
from ..core.ids import Ids, check_all_ids
from ..core.launch import launch, num_warps
from ..core.operation import Run, operation
from . import definition, passes, thresholds
from .greedy_argmax import BLOCK_TOKENS, greedy_argmax
from .penalties import Penalties
from .row_functions import NUM_BINS

# The most tokens whose masses, multiples of 2^-42, add up in an int64.
MAX_VOCAB_SIZE = 1 << 20
BLOCK_LIST, PROBES = 512, thresholds.PROBES.value
# More tokens than any vocabulary has; float64 holds it exactly.
_ALL = 1 << 62


class Filter(NamedTuple):
    """A filter of `sample_tokens`, which has one number for each row.

    Attributes:
        dtype: dtype of the numbers.
        off: the parameter of a request that does not use the filter.
        keeps_all: the number that keeps all tokens.
        num_best: number of best tokens that decide what the filter keeps; None if the number itself says so.
    """

    dtype: torch.dtype
    off: float
    keeps_all: float
    num_best: int | None

    def cuts(self, value: float, vocab_size: int) -> bool:
        """Return whether a request's parameter leaves out any token."""
        return value != self.off and (self.num_best is not None or value < vocab_size)

    def number(self, value: float) -> float:
        """Return the number for a request's parameter."""
        if value == self.off:
            return self.keeps_all
        return value if self.num_best is not None else min(value, self.keeps_all)


# The filters by the names of their arguments, in the order in which they apply.
FILTERS = {
    "top_k": Filter(torch.int64, 0, _ALL, None),
    "top_p": Filter(torch.float32, 1.0, 1.0, _ALL),
    "min_p": Filter(torch.float32, 0.0, 0.0, 1),
}


def filter_columns(table: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments of `sample_tokens` from a table of FILTERS, float64 [num_filters, num_rows]."""
    return {name: column.to(kind.dtype) for (name, kind), column in zip(FILTERS.items(), table, strict=True)}


def lowest_by_best(filters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the lowest scaled logit, less the row's largest, that filters by the best token keep, float32 [n]."""
    return filters["min_p"].log()


@operation(
    lambda logits, **_: logits.new_empty(logits.shape[0], dtype=torch.int64),
    **in_fields("penalties", penalties=Penalties),
)
def sample_tokens(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperature: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    penalties: Penalties | None = None,
) -> Run[torch.Tensor]:
    """Draw one token a row from softmax(logits / temperature), after penalties and filters.

    Penalties come first, then temperature, top_k, top_p of the mass that top_k keeps, and min_p. Tokens that tie with
    the last one of top_k or top_p stay. The draw adds noise that is a hash of key and token (the Gumbel-max trick). A
    row's token does not depend on the other rows of the batch.

    top_p keeps a token if less than top_p of the mass precedes it. A token's mass is 2^42 exp(score), rounded down to a
    whole number, so the order of additions does not matter. top_k and top_p drop tokens with less than e^-31.875 of the
    best probability. The noise spans 25.7, so it could never draw them.

    Args:
        logits: [num_rows, vocab_size], float32, float16 or bfloat16, any strides; at most 2^20 tokens.
        keys: int64 [num_rows, 2], the halves of a 64-bit key, each below 2^32.
        temperature: float32 [num_rows]; 0 takes the best token, ties to the smaller id, without other filters.
        top_k: int64 [num_rows], at least 1; vocab_size or more keeps all.
        top_p: float32 [num_rows], above 0; 1 keeps all.
        min_p: float32 [num_rows], lowest probability as a share of the best token's; 0 keeps all.
        penalties: penalties of tokens that occurred; None for none.

    Returns:
        int64 [num_rows]. A row without a choice gives -1: no logit is above -inf, or the row has a temperature and a
        logit is NaN or inf.

    Raises:
        InvalidInputError: a shape, dtype or device does not fit, or the vocabulary is too large.
        UnsupportedError: an argument requires a gradient.
    """
    _check(logits, temperature, top_k, top_p, min_p, penalties)
    check_tensor("keys", keys, (len(logits), 2), (torch.int64,), logits.device)
    return _sample


def _sample(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperature: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    penalties: Penalties | None = None,
) -> torch.Tensor:
    if logits.numel() == 0:
        return torch.full((len(logits),), -1, dtype=torch.int64, device=logits.device)
    by_triton = use_triton(logits)
    if penalties is not None:
        rows = Ids("penalties.rows", penalties.rows, None, len(penalties.counts) - 1)
        check_all_ids("sample_tokens", rows, by_triton=by_triton)
    if by_triton:
        return _launch(logits, keys, temperature, top_k, top_p, min_p, penalties)[0]
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    return definition.sample_tokens(logits, keys, temperature, **filters, penalties=penalties, compute=torch.float32)


def launch_all(logits: torch.Tensor) -> None:
    """Launch every kernel of `sample_tokens`, `filter_logits` and `greedy_argmax` for logits like these."""
    ones = torch.ones(len(logits), device=logits.device)
    ids = ones.long()
    counts, seen = torch.zeros_like(logits, dtype=torch.int32), torch.ones_like(logits, dtype=torch.bool)
    penalties = Penalties(ids - 1, counts, seen, ones[:, None].repeat(1, 3))
    for top_k, top_p, min_p, paid in product((None, ids), (None, ones), (None, ones), (None, penalties)):
        sample_tokens(logits, ids[:, None].repeat(1, 2), ones, top_k=top_k, top_p=top_p, min_p=min_p, penalties=paid)
    for token_mask, repetition_penalty in product((None, seen), (None, torch.ones_like(logits))):
        greedy_argmax(logits, token_mask=token_mask, repetition_penalty=repetition_penalty)


def filter_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the logits of the distribution that `sample_tokens` draws from, float32 [num_rows, vocab_size].

    Filtered tokens are -inf. With temperature 0 all tokens but the best are -inf. A row without a choice is NaN.
    Arguments and errors are as in `sample_tokens`.
    """
    refuse_gradients("filter_logits", logits, temperature, top_p, min_p)
    _check(logits, temperature, top_k, top_p, min_p, None)
    logits = logits.float()
    if logits.numel() == 0:
        return logits.clone()
    is_greedy = (temperature == 0)[:, None]
    scores = definition.scaled(logits, temperature.masked_fill(is_greedy[:, 0], 1.0))
    if use_triton(logits):
        keys = torch.zeros(len(logits), 2, dtype=torch.int64, device=logits.device)
        best, lowest = _launch(logits, keys, temperature, top_k, top_p, min_p, None)
    else:
        best = greedy_argmax(logits)
        lowest = definition.lowest_kept(scores, top_k, top_p, min_p, torch.float32)
    scores.masked_fill_(scores < lowest[:, None], -torch.inf)
    sharp = torch.full_like(scores, -torch.inf).scatter_(1, best.clamp(min=0)[:, None], 0.0)
    return torch.where(is_greedy, sharp.masked_fill_((best < 0)[:, None], torch.nan), scores)


def _check(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    penalties: Penalties | None,
) -> None:
    check_shape("logits", logits, ("num_rows", "vocab_size"))
    check_dtype("logits", logits, *FLOAT_DTYPES)
    (num_rows, vocab_size), device = logits.shape, logits.device
    if vocab_size > MAX_VOCAB_SIZE:
        raise InvalidInputError(f"logits: {vocab_size} tokens a row, expected at most {MAX_VOCAB_SIZE}")
    check_tensor("temperature", temperature, (num_rows,), (torch.float32,), device)
    for (name, kind), tensor in zip(FILTERS.items(), (top_k, top_p, min_p), strict=True):
        if tensor is not None:
            check_tensor(name, tensor, (num_rows,), (kind.dtype,), device)
    if penalties is not None:
        check_tensor("penalties.rows", penalties.rows, (num_rows,), (torch.int64,), device)
        check_tensor("penalties.counts", penalties.counts, ("num_tables", vocab_size), (torch.int32,), device)
        check_tensor("penalties.seen", penalties.seen, penalties.counts.shape, (torch.bool,), device)
        check_tensor("penalties.weights", penalties.weights, (num_rows, 3), (torch.float32,), device)


def _launch(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    penalties: Penalties | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens, int64 [num_rows], and the lowest scaled logit that each row's filters keep, float32 [num_rows]."""
    # limits.md says how many bytes of logits and penalties are read.
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    (num_rows, vocab_size), device = logits.shape, logits.device
    num_chunks = triton.cdiv(vocab_size, BLOCK_TOKENS)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    has_cuts = top_k is not None or top_p is not None
    if top_k is not None:
        top_k = top_k.contiguous()
    if top_p is not None:
        top_p = top_p.contiguous()
    log_min_p = None
    if min_p is not None:
        log_min_p = min_p.log()
    tensors: dict[str, Any] = {
        "logits_ptr": logits,
        "keys_ptr": keys.contiguous(),
        "temperature_ptr": temperature.contiguous(),
        "top_k_ptr": top_k,
        "top_p_ptr": top_p,
        "log_min_p_ptr": log_min_p,
        "largest_ptr": empty(num_rows, num_chunks),
        "best_ptr": empty(num_rows, num_chunks),
        "token_ptr": empty(num_rows, num_chunks, dtype=torch.int32),
        "lowest_kept_ptr": empty(num_rows),
        "out_ptr": empty(num_rows, dtype=torch.int64),
        "vocab_size": vocab_size,
        "num_chunks": num_chunks,
        "stride_logits_row": logits.stride(0),
        "BLOCK_TOKENS": BLOCK_TOKENS,
        "BLOCK_CHUNKS": triton.next_power_of_2(num_chunks),
        "BLOCK_LIST": BLOCK_LIST,
    }
    if penalties is not None:
        tensors |= {
            "table_rows_ptr": penalties.rows.contiguous(),
            "counts_ptr": penalties.counts.contiguous(),
            "seen_ptr": penalties.seen.contiguous(),
            "penalties_ptr": penalties.weights.contiguous(),
        }
    if has_cuts:
        tensors |= {
            "histogram_ptr": torch.zeros(num_rows, NUM_BINS.value, dtype=torch.int32, device=device),
            "bounds_ptr": empty(num_rows, 4, dtype=torch.int32),
            "sums_ptr": torch.zeros(num_rows, 3, dtype=torch.int64, device=device),
            "listed_z_ptr": empty(num_rows, vocab_size),
            "listed_token_ptr": empty(num_rows, vocab_size, dtype=torch.int32),
        }

    def run(kernel: Any, grid: tuple[int, ...], block: int, **more: int) -> None:
        named_tensors = tensors | more
        arguments = {name: named_tensors.get(name) for name in kernel.arg_names}
        launch(kernel, grid, **arguments, num_warps=num_warps(block))

    run(passes._best_of_chunk_kernel, (num_rows, num_chunks), BLOCK_TOKENS * 2)
    if has_cuts:
        # Run only four programs an SM, because each adds its counts to the row's counts once.
        parts = min(triton.cdiv(4 * device_of(device).num_sms, num_rows), num_chunks)
        per_program = triton.cdiv(num_chunks, parts) * BLOCK_TOKENS
        run(passes._count_bins_kernel, (num_rows, parts), BLOCK_TOKENS, tokens_per_program=per_program)
        run(thresholds._bound_kernel, (num_rows,), NUM_BINS.value * 2)
    if has_cuts or log_min_p is not None:
        run(passes._collect_kernel, (num_rows, num_chunks), BLOCK_TOKENS * 2)
    run(thresholds._choose_kernel, (num_rows,), BLOCK_LIST * PROBES // 2)
    return tensors["out_ptr"], tensors["lowest_kept_ptr"]
