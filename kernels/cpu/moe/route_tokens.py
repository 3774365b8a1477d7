"""Numba kernel of expert routing."""

from __future__ import annotations

import numpy as np
import torch

from ...moe.routing import SCORINGS, Routing
from ..kernel import (
    Kernel,
    as_float,
    bfloats,
    bits,
    device_function,
    exp2,
    floats,
    int32s,
    load,
    share,
    thread_index,
    unpack,
)
from ..launch import SCRATCH, NumbaLaunch
from ..vectors import LOG2_E, softplus

_LOG2_E = np.float32(LOG2_E)
_SOFTMAX, _SIGMOID, _SQRT_SOFTPLUS = range(len(SCORINGS))


@device_function
def _score(logits, start, step, bias, has_bias, scoring, num_experts, scores, choice):
    """Compute the scores of a row's experts, and the values to choose by. Return False if one is NaN."""
    largest = np.float32(-np.inf)
    for expert in range(num_experts):
        choice[expert] = load(logits, start + expert * step)
        largest = max(largest, choice[expert])
    total = np.float32(0)
    for expert in range(num_experts):
        if scoring == _SIGMOID:
            scores[expert] = np.float32(1) / (np.float32(1) + exp2(-_LOG2_E * choice[expert]))
        elif scoring == _SQRT_SOFTPLUS:
            scores[expert] = np.sqrt(softplus(choice[expert]))
        else:
            scores[expert] = exp2((choice[expert] - largest) * _LOG2_E)
            total += scores[expert]
    is_number = True
    for expert in range(num_experts):
        if scoring == _SOFTMAX:
            scores[expert] /= total
        if has_bias:
            choice[expert] = scores[expert] + bias[expert]
        is_number &= scores[expert] == scores[expert] and choice[expert] == choice[expert]
    return is_number


@device_function
def _best(values, count):
    """Return the index of the largest value, the first of equal ones. NaN marks experts that are taken."""
    best = -1
    for i in range(count):
        if values[i] == values[i] and (best < 0 or values[i] > values[best]):
            best = i
    return best


@device_function
def _leave_best_groups(choice, groups, num_experts, num_groups, num_kept, counts_two):
    """Mark experts outside of the best groups as taken. A group counts its best expert, or the sum of its two best."""
    size = num_experts // num_groups
    for group in range(num_groups):
        best, second = np.float32(-np.inf), np.float32(-np.inf)
        for expert in range(group * size, (group + 1) * size):
            second = max(second, min(best, choice[expert]))
            best = max(best, choice[expert])
        if counts_two and size > 1:
            # Infinities of both signs would add up to NaN, which marks what is taken.
            best = best + second if second > np.float32(-np.inf) else second
        groups[group] = best
    for _ in range(num_kept):
        groups[_best(groups, num_groups)] = np.float32(np.nan)
    for expert in range(num_experts):
        if groups[expert // size] == groups[expert // size]:
            choice[expert] = np.float32(np.nan)


@device_function
def _route(logits, bias, weights, ids, scratch, flags, sizes, factor):
    has_bias, scoring, renormalizes = flags
    num_tokens, num_experts, top_k, num_shared, num_groups, num_kept, stride_token, stride_expert = sizes
    scores, choice = floats(scratch), floats(scratch + num_experts * 4)
    groups = floats(scratch + 2 * num_experts * 4)
    first, end = share(num_tokens)
    for token in range(first, end):
        to, start = token * (top_k + num_shared), token * stride_token
        if not _score(logits, start, stride_expert, bias, has_bias, scoring, num_experts, scores, choice):
            for i in range(top_k + num_shared):
                weights[to + i], ids[to + i] = np.float32(np.nan), np.int32(-1)
            continue
        if num_kept < num_groups:
            _leave_best_groups(choice, groups, num_experts, num_groups, num_kept, has_bias)
        total = np.float32(0)
        for i in range(top_k):
            best = _best(choice, num_experts)
            weights[to + i], ids[to + i] = scores[best], np.int32(best)
            total += scores[best]
            choice[best] = np.float32(np.nan)  # mark as taken
        for i in range(top_k):
            weights[to + i] = (weights[to + i] / total if renormalizes else weights[to + i]) * factor
        for i in range(num_shared):
            weights[to + top_k + i], ids[to + top_k + i] = np.float32(1), np.int32(num_experts + i)


@Kernel
def _route_tokens(arguments):
    values = unpack(arguments, 18)
    is_bf16, logits, bias, weights, ids, scratch, scoring, renormalizes, factor_bits = values[1:10]
    scratch_of_thread = scratch + thread_index() * 3 * values[11] * 4
    flags, factor = (bias != 0, scoring, renormalizes != 0), as_float(factor_bits)
    inputs = floats(bias), floats(weights), int32s(ids), scratch_of_thread, flags, values[10:], factor
    if is_bf16:
        _route(bfloats(logits), *inputs)
    else:
        _route(floats(logits), *inputs)


def launch_for(router_logits: torch.Tensor, routing: Routing) -> NumbaLaunch:
    """Return a launch with these options for logits like these [num_tokens, num_experts], see `Routing.tensors`."""
    num_tokens, num_experts = router_logits.shape
    arguments: tuple[int | str, ...] = (
        router_logits.dtype == torch.bfloat16,
        *("logits_ptr", "bias_ptr", "weights_ptr", "ids_ptr", SCRATCH),
        SCORINGS.index(routing.scoring),
        routing.renormalize,
        bits(routing.routed_scaling_factor),
        *(num_tokens, num_experts, routing.top_k, routing.num_shared_experts),
        *(routing.num_expert_groups, routing.topk_groups, *router_logits.stride()),
    )
    work = num_tokens * num_experts * (routing.top_k + 4)
    return NumbaLaunch(_route_tokens.address, work, arguments, scratch_size=3 * num_experts)
