"""First-order errors of pooled entries. docs/bounds.md derives them."""

from __future__ import annotations

from typing import Any

import torch

from paged.bench.bounds.cache import half_code, record_error
from paged.bench.bounds.first_order import ELEMENTARY, Defined, U, gamma, rounding
from paged.bench.bounds.layers import norm_error
from paged.bench.problems.arguments import Arguments, Tensors
from paged.kernels.cache import pooled_definition
from paged.kernels.cache.definition import with_rows
from paged.kernels.cache.latent_cache import record_form

_FINISH = ("norm_weight", "eps", "cos_sin_cache", "interleaved", "rotates_last")


def pooled_write(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    """Return the errors of sums with softmax weights or of means, through norm, rotation and the cache's form."""
    options = {name: value for name, value in arguments.items() if name not in ("entry_cache", *_FINISH)}
    bias, rows = arguments.get("position_bias"), arguments["row_cache"].double()
    values, gates = rows, rows[..., :0]
    if bias is not None:
        values, gates = rows.chunk(2, -1)
    _, pooled = pooled_definition.pooled_entries(**options, compute=torch.float64)
    options["row_cache"] = torch.cat([values.abs(), gates], -1)
    slots, magnitude = pooled_definition.pooled_entries(**options, compute=torch.float64)
    num_rows = arguments["pool_size"]
    if arguments.get("row_table") is not None:
        num_rows *= 2
    error = magnitude * pooling_error(num_rows, gates, bias)
    firsts = None
    if arguments.get("positions") is not None:
        closing = pooled_definition.closing_tokens(
            arguments["row_slots"], arguments["entry_slots"], arguments["pool_size"]
        )
        firsts = arguments["positions"][closing] - arguments["pool_size"] + 1
    entries, error = _finished(pooled, error, firsts, arguments)
    error = _stored(entries, error, arguments["entry_cache"])
    return {"entries": with_rows(torch.zeros_like(want["entries"]), slots, error)}


def pooling_error(num_rows: int, gates: torch.Tensor, bias: torch.Tensor | None) -> float:
    """Return the error of an entry, relative to the weighted sum of magnitudes.

    A gate with its bias and its distance to the largest one are rounded, and so is the exponential.
    """
    if bias is None:
        return gamma(num_rows) + ELEMENTARY
    largest = float(gates.abs().nan_to_num(0.0, posinf=0.0).amax() + bias.double().abs().amax())
    return 2 * gamma(num_rows) + 2 * (4 * U * largest + ELEMENTARY)


def _finished(
    entries: torch.Tensor, error: torch.Tensor, firsts: torch.Tensor | None, arguments: Arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return entries [m, head_dim] and their errors after norm and rotation."""
    options: dict[str, Any] = {name: arguments[name] for name in _FINISH if name in arguments}
    weight, table = options.get("norm_weight"), options.pop("cos_sin_cache", None)
    if weight is not None:
        eps = options.get("eps", 1e-6)
        root = (entries.square().mean(-1, keepdim=True) + eps).sqrt()
        entries = pooled_definition.Finish(norm_weight=weight, eps=eps)(entries, None)
        root_error = error.square().mean(-1, keepdim=True).sqrt() / root
        error = error / root * weight.double().abs() + entries.abs() * (root_error + norm_error(entries.shape[1]))
    if table is not None:
        partners = _partners(entries.shape[1], table.shape[1], arguments)
        error = error + error[:, partners] + ELEMENTARY * (entries.abs() + entries[:, partners].abs())
        entries = pooled_definition.Finish(**{**options, "norm_weight": None, "cos_sin_cache": table})(entries, firsts)
    return entries, error


def _partners(head_dim: int, rotary_dim: int, arguments: Arguments) -> torch.Tensor:
    """Return the element that each element rotates with; itself behind or before the rotated ones."""
    first = head_dim - rotary_dim if arguments.get("rotates_last") else 0
    pairs = torch.arange(rotary_dim)
    if arguments.get("interleaved"):
        pairs = pairs.unflatten(0, (-1, 2)).flip(1).flatten()
    else:
        pairs = pairs.roll(rotary_dim // 2)
    partners = torch.arange(head_dim)
    partners[first : first + rotary_dim] = first + pairs
    return partners


def _stored(entries: torch.Tensor, error: torch.Tensor, entry_cache: torch.Tensor) -> torch.Tensor:
    """Return the errors of entries with the rounding to the form of the cache."""
    if entry_cache.dtype != torch.uint8:
        return error + rounding(entries, entry_cache.dtype)
    form = record_form(entry_cache, entries.shape[1])
    if form is None:
        scale = entries.abs().amax(-1, keepdim=True) / 448
        return error + half_code(entries, scale)
    return record_error(entries, form, error)
