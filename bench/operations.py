"""The public operations as float64 defines them. Verify, benchmarks, fuzzing and replays of recorded calls share this.

A definition takes an operation's arguments by name, and so checks any function that takes them, ours or another's.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

import paged
from paged.bench.check import Result, WrongResultError
from paged.bench.writes import Masks, writes_of
from paged.kernels.attention import reference as attention_reference
from paged.kernels.cache import reference as cache_reference
from paged.kernels.common.reference import f64
from paged.kernels.layers import reference as layers_reference
from paged.kernels.lora import reference as lora_reference
from paged.kernels.mla import reference as mla_reference
from paged.kernels.moe import reference as moe_reference
from paged.kernels.moe.moe_align_block_size import max_num_blocks
from paged.kernels.quantization import reference as quantization_reference
from paged.kernels.recurrent import reference as recurrent_reference
from paged.kernels.sampling import reference as sampling_reference

Arguments = dict[str, Any]
Tensors = dict[str, torch.Tensor]
"""Results by name; a call may give fewer than are expected, as without return_lse."""
HOW = "plan prefix_plan shared_prefix_len max_seqlen_q deterministic return_lse out aligned ticket".split()
"""Arguments that say how to compute, and do not change the result."""
_STATE = ("conv", "state", "ring_k", "ring_u", "ring_g")


class Judgement(NamedTuple):
    """dtype: whose error budget counts, None for that of each result. budgets: factor on it. See `bench.check`."""

    dtype: torch.dtype | None = None
    budgets: float = 1


@dataclasses.dataclass(frozen=True)
class Definition:
    """One operation.

    expected: from the arguments by name, on the CPU, before a call: the results in float64, or as whole numbers.
    results: from the arguments after a call and what it returned: returned and written tensors.
    judge: from the arguments, how far a result may differ.
    """

    name: str
    expected: Callable[[Arguments], Tensors]
    results: Callable[[Arguments, Any], Tensors]
    judge: Callable[[Arguments], Judgement] = lambda _: Judgement()

    @property
    def operation(self) -> Callable[..., Any]:
        """The public function, as `paged` has it now."""
        function: Callable[..., Any] = getattr(paged, self.name)
        return function

    def want(self, arguments: Arguments) -> Tensors:
        """Return the expected results; leaves the arguments as they are."""
        return self.expected(on_cpu(arguments))

    def call(self, arguments: Arguments, function: Callable[..., Any] | None = None) -> Tensors:
        """Call a function, by default the operation, which may write to the arguments, and return its results."""
        return self.results(arguments, (function or self.operation)(**arguments))

    def check(self, arguments: Arguments, judgement: Judgement | None = None) -> dict[str, Result]:
        """Run the reference, then the operation."""
        want = self.want(arguments)
        if judgement is None:
            judgement = self.judge(arguments)
        return self.beside(self.call(arguments), want, judgement)

    def beside(self, got: Tensors, want: Tensors, judgement: Judgement) -> dict[str, Result]:
        """Return results beside the expected ones of their names."""
        return {name: Result(tensor, want[name], *judgement, name) for name, tensor in got.items()}

    def writes(self, arguments: Arguments) -> Masks:
        """Return what a call may write; everything else is only read."""
        return writes_of(self.name, arguments)

    def by_name(self, *positional: Any, **named: Any) -> Arguments:
        """Return the arguments of a call by name."""
        return dict(self.signature.bind(*positional, **named).arguments)

    @property
    def own(self) -> Callable[..., Any]:
        """The operation itself, whatever stands in its place in `paged`."""
        function: Callable[..., Any] = getattr(importlib.import_module(paged._MODULE_OF[self.name]), self.name)
        return function

    @property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.own)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return the value with the function's results in place of tensors, in lists, tuples and dataclasses too."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for field in dataclasses.fields(value):
            if field.init:
                changed[field.name] = map_tensors(function, getattr(value, field.name))
        return dataclasses.replace(value, **changed)
    return value


def dtype_of(arguments: Arguments) -> torch.dtype:
    """Return the dtype of the first floating-point argument, which that of the result follows."""
    for value in arguments.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.dtype
    return torch.float32


def on_cpu(arguments: Arguments) -> Arguments:
    """Return the arguments with their tensors on the CPU."""
    moved: Arguments = map_tensors(torch.Tensor.cpu, arguments)
    return moved


def without_how(arguments: Arguments) -> Arguments:
    """Return the arguments that decide the results."""
    return {name: value for name, value in arguments.items() if name not in HOW}


def _returned(*names: str) -> Callable[[Arguments, Any], Tensors]:
    """Name the tensors that an operation returns, one or several."""

    def results(_: Arguments, returned: Any) -> Tensors:
        if isinstance(returned, torch.Tensor):
            returned = (returned,)
        if not isinstance(returned, tuple | list):
            raise WrongResultError(f"returned {type(returned).__name__}, expected tensors: {', '.join(names)}")
        return {name: tensor for name, tensor in zip(names, returned, strict=False) if tensor is not None}

    return results


def _reference(function: Callable[..., Any], *names: str) -> Callable[[Arguments], Tensors]:
    """Name the results of a reference that takes the operation's arguments."""
    name_results = _returned(*names)
    return lambda arguments: name_results(arguments, function(**without_how(arguments)))


# Writes to the cache


def _unrounded(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache in float64, so that a reference writes rows without rounding them; integers as they are."""
    if cache.is_floating_point():
        return f64(cache)
    return cache


def _saturated(want: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Return rows of an fp8 cache within its range."""
    if cache.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return want
    largest = torch.finfo(cache.dtype).max
    return want.clamp(-largest, largest)


def _dequantized(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return a cache as it is, or the rows of an int8 cache times their scales."""
    if cache.dtype != torch.int8:
        return cache
    assert scale is not None
    return cache.float() * scale.float().unsqueeze(-1)


def _written_cache(key: torch.Tensor, value: torch.Tensor, arguments: Arguments) -> Tensors:
    caches = []
    scales = []
    for name in ("k", "v"):
        cache, scale = arguments[f"{name}_cache"], arguments.get(f"{name}_scale")
        if cache.dtype == torch.int8:
            cache, scale = _dequantized(cache, scale), None
        caches.append(_unrounded(cache))
        scales.append(scale)
    k_cache, v_cache = cache_reference.reshape_and_cache(
        key, value, caches[0], caches[1], arguments["slot_mapping"], k_scale=scales[0], v_scale=scales[1]
    )
    return {
        "k_cache": _saturated(k_cache, arguments["k_cache"]),
        "v_cache": _saturated(v_cache, arguments["v_cache"]),
    }


def _cache_results(arguments: Arguments) -> Tensors:
    results = {}
    for name in ("k", "v"):
        results[f"{name}_cache"] = _dequantized(arguments[f"{name}_cache"], arguments.get(f"{name}_scale"))
    return results


def _judge_cache(arguments: Arguments) -> Judgement:
    """Rows of int8 times their scales are the rows, to half a step of their largest magnitude / 127."""
    if arguments["k_cache"].dtype == torch.int8:
        return Judgement(torch.bfloat16)
    return Judgement()


def _rotated(x: torch.Tensor, arguments: Arguments) -> torch.Tensor:
    interleaved = bool(arguments.get("interleaved", False))
    return layers_reference.rotate(x, arguments["positions"], arguments["cos_sin_cache"], interleaved)


def _rotary_expected(arguments: Arguments) -> Tensors:
    want = {"query": _rotated(arguments["query"], arguments)}
    if arguments["key"] is not None:
        want["key"] = _rotated(arguments["key"], arguments)
    return want


def _qk_norm_expected(arguments: Arguments) -> Tensors:
    normed = []
    for name in ("q", "k"):
        x, weight = arguments[name], arguments.get(f"{name}_weight")
        if weight is not None:
            x = layers_reference.rms_norm(x, weight, arguments.get("eps", 1e-6))
        normed.append(_rotated(x, arguments))
    q, k = normed
    return {"q": q, **_written_cache(k, arguments["v"], arguments)}


def _latent_parts(cache: torch.Tensor) -> Tensors:
    """Return a latent cache, or the parts of rows of 656 bytes: codes, scales and the rotated part."""
    if cache.dtype != torch.uint8:
        return {"kv_cache": cache}
    codes, scales, rope = (part.contiguous() for part in cache.split((512, 16, 128), -1))
    return {
        "codes": codes.view(torch.float8_e4m3fn),
        "scales": scales.view(torch.float32),
        "rope": rope.view(torch.bfloat16),
    }


def _latent_expected(latent: torch.Tensor, k_rope: torch.Tensor, arguments: Arguments) -> Tensors:
    """Each part of a packed row is judged as what it is: a code may be the neighbour of the nearest, as float32 rounds
    before the code is chosen."""
    cache, slots = arguments["kv_cache"], arguments["slot_mapping"]
    if cache.dtype != torch.uint8:
        scale = arguments.get("scale")
        written = cache_reference.concat_and_cache_mla(latent, k_rope, _unrounded(cache), slots, scale=scale)
        return {"kv_cache": _saturated(written, cache)}
    want = {}
    is_written = slots >= 0
    rows = cache_reference.packed_latents(latent, k_rope)
    for (name, part), new in zip(_latent_parts(cache).items(), rows, strict=True):
        flat = f64(part).flatten(0, 1)
        flat[slots[is_written].long()] = new[: len(slots)][is_written]
        want[name] = flat.view(part.shape)
    return want


def _mla_norm_expected(arguments: Arguments) -> Tensors:
    latent = layers_reference.rms_norm(arguments["latent"], arguments["latent_weight"], arguments.get("eps", 1e-6))
    k_rope = _rotated(arguments["k_rope"].unsqueeze(1), arguments)[:, 0]
    return {"q_rope": _rotated(arguments["q_rope"], arguments), **_latent_expected(latent, k_rope, arguments)}


def _named_caches(caches: list[torch.Tensor]) -> Tensors:
    return {f"caches[{index}]": cache for index, cache in enumerate(caches)}


def _copied(arguments: Arguments) -> Tensors:
    copies = [cache.clone() for cache in arguments["caches"]]
    pairs = torch.as_tensor(arguments["block_pairs"], dtype=torch.int64).view(-1, 2).tolist()
    for copy, cache in zip(copies, arguments["caches"], strict=True):
        for source, destination in pairs:
            copy[destination] = cache[source]
    return _named_caches(copies)


# Layers


def _fused_add_norm_expected(arguments: Arguments) -> Tensors:
    """The sum is rounded to the dtype of the residual before it is normalised."""
    residual = arguments["residual"]
    total = (f64(arguments["x"]) + f64(residual)).to(residual.dtype)
    return {"x": layers_reference.rms_norm(total, arguments["weight"], arguments.get("eps", 1e-6)), "residual": total}


def _judge_product(arguments: Arguments) -> Judgement:
    """What e4m3 or int8 weights multiply may be rounded either way in float32, by a step of 1 / 16 in e4m3."""
    x, weight = arguments["x"], arguments["weight"]
    if weight.quantizes_input and x.dtype == torch.float32:
        return Judgement(torch.bfloat16)
    return Judgement()


# Experts


def _alignment(topk_ids: torch.Tensor, block_size: int, num_experts: int, expert_map: Any = None) -> Tensors:
    """The reference's alignment as the operation returns it."""
    blocks, experts, num_padded = moe_reference.moe_align_block_size(topk_ids, block_size, num_experts, expert_map)
    unused = max_num_blocks(topk_ids.numel(), block_size, num_experts) - len(experts)
    entries = torch.tensor(blocks, dtype=torch.int64).flatten()
    return {
        "sorted_token_ids": functional.pad(entries, (0, unused * block_size), value=topk_ids.numel()),
        "expert_ids": functional.pad(torch.tensor(experts, dtype=torch.int64), (0, unused), value=-1),
        "num_tokens_post_padded": torch.tensor([num_padded]),
    }


def _routed_and_aligned(arguments: Arguments) -> Tensors:
    """With a map, experts may follow each other in another order: only the number of places is defined."""
    routing, logits, expert_map = arguments["routing"], arguments["router_logits"], arguments.get("expert_map")
    options = {field.name: getattr(routing, field.name) for field in dataclasses.fields(routing)}
    weights, ids = moe_reference.route_tokens(logits, **options)
    num_experts = arguments.get("num_local_experts")
    if num_experts is None:
        num_experts = logits.shape[1] + routing.num_shared_experts
    want = {"topk_weights": weights, "topk_ids": ids}
    return want | _alignment(ids, arguments["block_size"], num_experts, expert_map)


def _routed_and_aligned_results(arguments: Arguments, returned: Any) -> Tensors:
    weights, ids, aligned = returned
    results = {"topk_weights": weights, "topk_ids": ids, **aligned._asdict()}
    if arguments.get("expert_map") is not None:
        del results["sorted_token_ids"], results["expert_ids"]
    return results


def _judge_experts(arguments: Arguments) -> Judgement:
    """In 16 bits the activation is rounded too, which takes up to 0.84 of a budget among 600 tokens. What e4m3 weights
    multiply is rounded to e4m3: the hidden states, then the activation. Both may tip either way."""
    if arguments["w1"].dtype == torch.float8_e4m3fn:
        return Judgement(torch.float8_e4m3fn, 2)
    if arguments["hidden_states"].dtype == torch.float32:
        return Judgement()
    return Judgement(None, 2)


# Recurrent layers


def _recurrent_expected(name: str) -> Callable[[Arguments], Tensors]:
    def expected(arguments: Arguments) -> Tensors:
        want = getattr(recurrent_reference, name)(**arguments)
        state = arguments["state"]
        named = {"out": want.out.flatten(1)}
        for part in _STATE:
            tensor = getattr(want, part)
            if tensor is None:
                tensor = getattr(state, part)
            if tensor is not None:
                named[part] = tensor
        return named

    return expected


def _recurrent_results(arguments: Arguments, out: Any) -> Tensors:
    """Outputs are judged by a token's all heads: in one head the sum over K may cancel to little."""
    results = {"out": out.flatten(1)}
    for part in _STATE:
        tensor = getattr(arguments["state"], part)
        if tensor is not None:
            results[part] = tensor
    return results


def _judge_scan(arguments: Arguments) -> Judgement:
    """A scan rounds what its products multiply to the dtype of the rows, states included. In float16 that gives an
    error of 0.6 to 1 eps of a row's root mean square, 5 eps at most among 4,480 outputs: 1.9 budgets."""
    batch, dtype = arguments["batch"], arguments["mixed"].dtype
    if batch.max_seqlen_q <= batch.max_append or dtype == torch.float32:
        return Judgement()
    return Judgement(dtype, 4)


def _judge_latents(arguments: Arguments) -> Judgement:
    """Scaled codes of the published fp8 form are rounded to the dtype of q."""
    if arguments["kv_cache"].dtype == torch.uint8:
        return Judgement(torch.bfloat16)
    return Judgement()


def _recurrent(name: str, judge: Callable[[Arguments], Judgement] = _judge_scan) -> Definition:
    return Definition(name, _recurrent_expected(name), _recurrent_results, judge)


def _simple(name: str, reference: Any, *names: str, judge: Any = lambda _: Judgement()) -> Definition:
    """One whose reference has its name and arguments, in a module of references."""
    names = names or ("out",)
    return Definition(name, _reference(getattr(reference, name), *names), _returned(*names), judge)


DEFINITIONS = {
    definition.name: definition
    for definition in (
        _simple("paged_attention", attention_reference, "out", "lse"),
        Definition(
            "cascade_attention", _reference(attention_reference.paged_attention, "out", "lse"), _returned("out", "lse")
        ),
        _simple("merge_attn_states", attention_reference, "out", "lse"),
        _simple("paged_mla_attention", mla_reference, "out", "lse", judge=_judge_latents),
        _simple("choose_keys", mla_reference, "indices"),
        Definition(
            "reshape_and_cache",
            lambda arguments: _written_cache(arguments["key"], arguments["value"], arguments),
            lambda arguments, _: _cache_results(arguments),
            _judge_cache,
        ),
        Definition(
            "qk_norm_rope_and_cache",
            _qk_norm_expected,
            lambda arguments, q: {"q": q, **_cache_results(arguments)},
            _judge_cache,
        ),
        Definition(
            "concat_and_cache_mla",
            lambda arguments: _latent_expected(arguments["latent"], arguments["k_rope"], arguments),
            lambda arguments, _: _latent_parts(arguments["kv_cache"]),
        ),
        Definition(
            "mla_norm_rope_and_cache",
            _mla_norm_expected,
            lambda arguments, q: {"q_rope": q, **_latent_parts(arguments["kv_cache"])},
        ),
        Definition("copy_blocks", _copied, lambda arguments, _: _named_caches(arguments["caches"])),
        _simple("rms_norm", layers_reference),
        Definition("fused_add_rms_norm", _fused_add_norm_expected, _returned("x", "residual")),
        Definition("rotary_embedding", _rotary_expected, _returned("query", "key")),
        _simple("silu_and_mul", layers_reference),
        Definition("add_lora", lambda arguments: {"out": lora_reference.add_lora(**arguments)}, _returned("out")),
        _simple("quantized_linear", quantization_reference, judge=_judge_product),
        _simple("route_tokens", moe_reference, "topk_weights", "topk_ids"),
        Definition(
            "moe_align_block_size",
            lambda arguments: _alignment(**arguments),
            lambda _, aligned: dict(aligned._asdict()),
        ),
        Definition("route_and_align", _routed_and_aligned, _routed_and_aligned_results),
        _simple("fused_moe", moe_reference, judge=_judge_experts),
        _recurrent("causal_conv1d", lambda _: Judgement()),
        _recurrent("gated_delta_rule"),
        _recurrent("mamba2_scan"),
        _simple("gated_rms_norm", recurrent_reference),
        _simple("greedy_argmax", sampling_reference, "tokens"),
        _simple("sample_tokens", sampling_reference, "tokens"),
    )
}
