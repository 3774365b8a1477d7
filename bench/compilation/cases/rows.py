"""The operations that move rows: norms, rotary embedding, cache writes, block copies, merges, gated SiLU, and the
checks of ids."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from paged.bench.compilation.case import EVERY_CASE, NATIVE_FP8, CompileCase
from paged.bench.compilation.launches import empty, launch_case, launches_of
from paged.kernels.attention.merge_attn_states import merge_attn_states
from paged.kernels.cache.copy_blocks import BlockCopy
from paged.kernels.cache.qk_norm_rope_and_cache import qk_norm_rope_and_cache
from paged.kernels.cache.reshape_and_cache import reshape_and_cache
from paged.kernels.common.id_checks import Ids, Sequences, check_ids_on_device, check_sequences_on_device
from paged.kernels.layers.rms_norm import fused_add_rms_norm, rms_norm
from paged.kernels.layers.rotary_embedding import rotary_embedding
from paged.kernels.layers.silu_and_mul import silu_and_mul

# head_dim, query heads and KV heads of Llama-3.2-1B, Phi-2, Qwen3-8B and Gemma-2B, and the widest heads
MODELS = ((64, 32, 8), (80, 32, 32), (128, 32, 8), (256, 8, 1), (512, 16, 2))

_TOKENS = 64


def cases() -> list[CompileCase]:
    """Head sizes 64 to 512, partial and interleaved rotary embedding, every alignment of a block; hidden sizes 64 to
    8,192, with and without the residual, at that of Gemma-3-1B its float32 weights."""
    cases = []
    for hidden_size, kind in ((64, "bf16"), (1152, "fp32"), (2048, "bf16"), (8192, "bf16")):
        x, weight = empty("bf16", _TOKENS, hidden_size), empty(kind, hidden_size)
        name = f"hidden={hidden_size} {kind} weights"
        cases.append(_case(f"rms_norm {name}", rms_norm, x, weight))
        cases.append(_case(f"fused_add_rms_norm {name}", fused_add_rms_norm, x, x.clone(), weight))
    for head_dim, num_q_heads, num_kv_heads in MODELS:
        name = f"head_dim={head_dim}"
        key = empty("bf16", _TOKENS, num_kv_heads, head_dim)
        cases += _cache_write_cases(f"reshape_and_cache {name}", key, partial(reshape_and_cache, key, key))
        out, lse = empty("bf16", _TOKENS, num_q_heads, head_dim), empty("fp32", num_q_heads, _TOKENS)
        cases.append(_case(f"merge_attn_states {name}", merge_attn_states, out, lse, out, lse))
        cases += _rotary_cases(head_dim, head_dim, False, num_q_heads, num_kv_heads)
    cases += _rotary_cases(80, 32, False, 32, 32)
    cases += _rotary_cases(128, 128, True, 32, 8)
    for alignment in (1, 2, 4, 8, 16):
        caches = [empty("u8", 4, alignment)]
        pairs = torch.tensor([[0, 1]])
        cases.append(_case(f"copy_blocks alignment={alignment}", BlockCopy(caches, caches), pairs))
    # The MLP of Gemma-3-1B has 6,912 units.
    gated = [(32, "silu"), (768, "silu"), (14336, "silu"), (6912, "gelu"), (6912, "gelu_tanh"), (6912, "swiglu_oai")]
    for size, activation in gated:
        gate_up = empty("bf16", _TOKENS, 2 * size)
        name = f"silu_and_mul {activation} size={size}"
        cases.append(_case(name, silu_and_mul, gate_up, activation=activation))
    return cases + _id_checks()


def _id_checks() -> list[CompileCase]:
    """Kernels of PAGED_CHECK=1: slots alone, slots and positions, a slot map with ranks; sequences."""
    arrays = {"slots": ("i64",), "slots and positions": ("i64", "i64"), "rows, slots and ranks": ("i32",) * 3}
    cases = []
    for name, kinds in arrays.items():
        ids = [Ids("", empty(kinds[0], _TOKENS), None, 1), *(Ids("", empty(kind, _TOKENS), 0, 1) for kind in kinds[1:])]
        cases.append(_case(f"check ids: {name}", check_ids_on_device, "", *ids))
    tables = empty("i32", 1, 4), empty("i32", 2), empty("i32", 1)
    sequences = Sequences(*tables, 1, 4, 16, 1, 0, keys_at_once=128)
    (launch,) = launches_of("sm_90", check_sequences_on_device, sequences)
    return [*cases, launch_case("check sequences", launch, aligned=())]


def _rotary_cases(
    head_dim: int, rotary_dim: int, interleaved: bool, num_q_heads: int, num_kv_heads: int
) -> list[CompileCase]:
    shape = f"head_dim={head_dim} rotary_dim={rotary_dim}"
    if interleaved:
        shape += " interleaved"
    q, k = empty("bf16", _TOKENS, num_q_heads, head_dim), empty("bf16", _TOKENS, num_kv_heads, head_dim)
    positions, cos_sin = empty("i64", _TOKENS), empty("fp32", _TOKENS, rotary_dim)
    rotate = partial(rotary_embedding, positions, q, interleaved=interleaved)

    def write(k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, **options: Any) -> object:
        options["interleaved"] = interleaved
        return qk_norm_rope_and_cache(q, k, k, k_cache, v_cache, slots, positions, cos_sin, **options)

    def weights(kind: str) -> dict[str, torch.Tensor]:
        return {"q_weight": empty(kind, head_dim), "k_weight": empty(kind, head_dim)}

    cases = []
    if head_dim == 256:  # Gemma's weights of norms are float32
        name = f"qk_norm_rope_and_cache {shape} float32 weights"
        cases.append(_cache_write_cases(name, k, partial(write, **weights("fp32")))[0])
    cases.append(_case(f"rotary_embedding {shape}", rotate, k, cos_sin))
    if head_dim >= 256:  # Gemma 4's layers that read another's keys
        cases.append(_case(f"rotary_embedding {shape} queries alone", rotate, None, cos_sin))
    cases += _cache_write_cases(f"qk_norm_rope_and_cache {shape}", k, partial(write, **weights("bf16")))
    return cases + _cache_write_cases(f"rope_and_cache {shape}", k, write)


def _cache_write_cases(name: str, key: torch.Tensor, write: Callable[..., object]) -> list[CompileCase]:
    """Keys and values as they are, scaled to 8-bit floats, or int8; heads of 128 also with one of two alone."""
    _, num_heads, head_dim = key.shape
    scale = {"k_scale": empty("fp32", num_heads), "v_scale": empty("fp32", num_heads)}

    def case(text: str, kind: str, scales: dict[str, torch.Tensor], targets: tuple[str, ...]) -> CompileCase:
        cache = empty(kind, 4, 16, num_heads, head_dim)
        return _case(f"{name}{text}", write, cache, cache, empty("i64", _TOKENS), targets=targets, **scales)

    one_alone = head_dim == 128
    cases = [case("", "bf16", {}, EVERY_CASE)]
    if one_alone:
        cases.append(case(" scaled", "bf16", scale, EVERY_CASE))
    row_scales = {"k_scale": empty("fp32", 4, 16, num_heads), "v_scale": empty("fp32", 4, 16, num_heads)}
    cases.append(case(" int8", "i8", row_scales, EVERY_CASE))
    for native, text in ((True, " native"), (False, "")):
        targets = tuple(target for target in EVERY_CASE if (target in NATIVE_FP8) == native)
        for kind, code in (("e4m3", "fp8e4nv"), ("e5m2", "fp8e5")):
            cases.append(case(f" {kind}{text} scaled", code, scale, targets))
            if one_alone:
                cases.append(case(f" {kind}{text}", code, {}, targets))
    return cases


def _case(
    name: str, operation: Callable[..., object], *args: Any, targets: tuple[str, ...] = EVERY_CASE, **kwargs: Any
) -> CompileCase:
    """The case of the one launch that a call makes on the first of its targets, and alike on the others."""
    (launch,) = launches_of(targets[0], operation, *args, **kwargs)
    return launch_case(name, launch, targets=targets)
