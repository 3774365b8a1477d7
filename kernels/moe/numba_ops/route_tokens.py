"""Numba kernel of expert routing."""

from __future__ import annotations

import numpy as np
import torch

from ...common.numba_ops.kernel import (
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
from ...common.numba_ops.launch import SCRATCH, LoopLaunch
from ...common.numba_ops.vectors import LOG2_E
from ..routing import Routing

_LOG2_E = np.float32(LOG2_E)


@device_function
def _score(logits, start, step, bias, has_bias, is_sigmoid, num_experts, scores, choice):
    """Compute the scores of a row's experts, and the values to choose by; return False if one is NaN."""
    largest = np.float32(-np.inf)
    for expert in range(num_experts):
        choice[expert] = load(logits, start + expert * step)
        largest = max(largest, choice[expert])
    total = np.float32(0)
    for expert in range(num_experts):
        if is_sigmoid:
            scores[expert] = np.float32(1) / (np.float32(1) + exp2(-_LOG2_E * choice[expert]))
        else:
            scores[expert] = exp2((choice[expert] - largest) * _LOG2_E)
            total += scores[expert]
    is_number = True
    for expert in range(num_experts):
        if not is_sigmoid:
            scores[expert] /= total
        if has_bias:
            choice[expert] = scores[expert] + bias[expert]
        is_number &= scores[expert] == scores[expert] and choice[expert] == choice[expert]
    return is_number


@device_function
def _route(logits, bias, weights, ids, scores, choice, flags, sizes, factor):
    has_bias, is_sigmoid, renormalizes = flags
    num_tokens, num_experts, top_k, num_shared, stride_token, stride_expert = sizes
    first, end = share(num_tokens)
    for token in range(first, end):
        to, start = token * (top_k + num_shared), token * stride_token
        if not _score(logits, start, stride_expert, bias, has_bias, is_sigmoid, num_experts, scores, choice):
            for i in range(top_k + num_shared):
                weights[to + i], ids[to + i] = np.float32(np.nan), np.int32(-1)
            continue
        total = np.float32(0)
        for i in range(top_k):
            best = -1
            for expert in range(num_experts):
                if choice[expert] == choice[expert] and (best < 0 or choice[expert] > choice[best]):
                    best = expert
            weights[to + i], ids[to + i] = scores[best], np.int32(best)
            total += scores[best]
            choice[best] = np.float32(np.nan)  # mark as taken
        for i in range(top_k):
            weights[to + i] = (weights[to + i] / total if renormalizes else weights[to + i]) * factor
        for i in range(num_shared):
            weights[to + top_k + i], ids[to + top_k + i] = np.float32(1), np.int32(num_experts + i)


@Kernel
def _route_tokens(arguments):
    values = unpack(arguments, 16)
    is_bf16, logits, bias, weights, ids, scratch, is_sigmoid, renormalizes, factor_bits = values[1:10]
    scratch_of_thread = scratch + thread_index() * 2 * values[11] * 4
    flags, factor = (bias != 0, is_sigmoid != 0, renormalizes != 0), as_float(factor_bits)
    scores, choice = floats(scratch_of_thread), floats(scratch_of_thread + values[11] * 4)
    if is_bf16:
        _route(bfloats(logits), floats(bias), floats(weights), int32s(ids), scores, choice, flags, values[10:], factor)
    else:
        _route(floats(logits), floats(bias), floats(weights), int32s(ids), scores, choice, flags, values[10:], factor)


def takes(routing: Routing) -> bool:
    """Return whether the kernel takes these options: it does not choose groups of experts."""
    return routing.topk_groups == routing.num_expert_groups


def prepare(router_logits: torch.Tensor, routing: Routing) -> LoopLaunch:
    """Return a launch with these options for logits like these [num_tokens, num_experts], see `Routing.tensors`."""
    num_tokens, num_experts = router_logits.shape
    arguments: tuple[int | str, ...] = (
        router_logits.dtype == torch.bfloat16,
        *("logits_ptr", "bias_ptr", "weights_ptr", "ids_ptr", SCRATCH),
        routing.scoring == "sigmoid",
        routing.renormalize,
        bits(routing.routed_scaling_factor),
        *(num_tokens, num_experts, routing.top_k, routing.num_shared_experts, *router_logits.stride()),
    )
    work = num_tokens * num_experts * (routing.top_k + 4)
    return LoopLaunch(_route_tokens.address, work, arguments, scratch_size=2 * num_experts)
