"""Cases of the kernels benchmark: one or more for every public kernel, at sizes of published models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from paged.bench.kernels import recurrent, work
from paged.bench.kernels.work import Draw, Work

SCALES = ("full", "small", "check")  # for a GPU, for a CPU, for the comparison with the reference


@dataclass(frozen=True)
class Case:
    """One row: `make` builds the operation's work from random tensors and one value of each size.

    sizes: name -> values for SCALES. Those of "check" suit a slow reference and choose the attention and MoE tiles of
    "full".
    """

    operation: str
    make: Callable[..., Work]
    sizes: dict[str, tuple[Any, Any, Any]]
    variant: str = ""
    capturable: bool = True

    @property
    def name(self) -> str:
        if self.variant:
            return f"{self.operation}.{self.variant}"
        return self.operation

    def size(self, scale: str) -> dict[str, Any]:
        return {name: values[SCALES.index(scale)] for name, values in self.sizes.items()}

    def work(self, scale: str, device: torch.device, dtype: torch.dtype) -> Work:
        return self.make(Draw(device, dtype), **self.size(scale))


# Heads and widths of Qwen3-8B, experts of Qwen3-30B-A3B (Qwen, 2025).
_TOKENS = (4096, 256, 19)
_HEADS, _DIM = ((32, 8), (8, 2), (8, 2)), (128, 64, 128)
_ROTARY = {"tokens": _TOKENS, "heads": _HEADS, "dim": _DIM}
_KV = {"num_kv_heads": (8, 2, 2), "dim": _DIM}
_NORM = {"tokens": _TOKENS, "hidden_size": (4096, 1024, 4096)}
_EXPERTS = {"num_experts": (128, 16, 16), "top_k": (8, 4, 4)}
_QKV = {"in_features": (4096, 1024, 4096), "part_sizes": ((4096, 1024, 1024), (1024, 256, 256), (4096, 1024, 1024))}
_MOE = {**_EXPERTS, "hidden_size": (2048, 256, 256), "intermediate_size": (768, 128, 128)}
_SAMPLING = {"rows": (256, 16, 2), "vocab_size": (151936, 32000, 9000)}

_ALIGN = {"tokens": _TOKENS, **_EXPERTS, "block_size": (128, 16, 16)}
_CASCADE = {"prefix": (32768, 1024, 64), "suffix": (512, 64, 20), "sequences": (64, 8, 3), "heads": _HEADS, "dim": _DIM}
_LORA_FEW = {"tokens": (64, 32, 19), "num_adapters": (8, 4, 3), "rank": (16,) * 3, **_QKV}
_LORA_MANY = {"tokens": (4096, 256, 80), "num_adapters": (4, 2, 3), "rank": (64,) * 3, **_QKV}

# Qwen3.5-35B-A3B and Nemotron-H.
_DELTA = {"heads": ((16, 32), (2, 4), (1, 2)), "dims": ((128, 128), (64, 64), (16, 16))}
_MAMBA = {"heads": ((8, 128), (1, 4), (1, 2)), "dims": ((128, 64), (128, 64), (16, 16))}
_DECODES = {"sequences": (64, 8, 3), "tokens": (1, 1, 2)}
_PROMPTS = {"sequences": (1, 1, 2), "tokens": (8192, 512, 70)}

_LINEAR = {"in_features": (4096, 1024, 1024), "out_features": (12288, 1024, 300)}
_INT8_ATTENTION = partial(work.paged_attention, is_int8=True)
_INT4 = partial(work.quantized_linear, form="int4", group_size=128)
_E4M3 = partial(work.quantized_linear, form="e4m3", group_size=128)

# Latents of DeepSeek-V3 (DeepSeek-AI, 2024) at 64 decodes of 8k.
_LATENT = {"sizes": ((512, 64),) * 3}
_LATENT_HEADS = (128, 16, 4)
_LATENT_LENGTHS = ([(1, 8192)] * 64, [(1, 512)] * 4, [(1, 200), (1, 33)])
_LATENT_STEP = {"lengths": _LATENT_LENGTHS, "heads": _LATENT_HEADS, **_LATENT}
_INDEXED = {"lengths": _LATENT_LENGTHS, "heads": (64, 16, 16), "dim": (128, 128, 32), "top_k": (2048, 128, 20)}
_CHOSEN = partial(work.paged_mla_attention, chosen=2048)
_PACKED = partial(work.concat_and_cache_mla, is_packed=True)

_Lengths = list[tuple[int, int]]


def _attention_case(
    variant: str, *lengths: *tuple[_Lengths, _Lengths, _Lengths], make: Callable[..., Work] = work.paged_attention
) -> Case:
    return Case("paged_attention", make, {"lengths": lengths, "heads": _HEADS, "dim": _DIM}, variant)


CASES = (
    _attention_case("prefill", [(2048, 2048)] * 4, [(256, 256)] * 2, [(70, 70), (33, 33)]),
    _attention_case("decode", [(1, 4096)] * 32, [(1, 512)] * 8, [(1, 600), (1, 33), (1, 1)]),
    _attention_case("decode int8", [(1, 4096)] * 32, [(1, 512)] * 8, [(1, 600), (1, 33), (1, 1)], make=_INT8_ATTENTION),
    _attention_case(
        "mixed", [(2048, 4096), *[(1, 4096)] * 31], [(128, 256), *[(1, 512)] * 7], [(40, 100), (1, 600), (1, 17)]
    ),
    Case("paged_mla_attention", work.paged_mla_attention, _LATENT_STEP, "decode"),
    Case("paged_mla_attention", _CHOSEN, _LATENT_STEP, "chosen"),
    Case("choose_keys", work.choose_keys, _INDEXED),
    Case("concat_and_cache_mla", work.concat_and_cache_mla, {"tokens": _TOKENS, **_LATENT}),
    Case("concat_and_cache_mla", _PACKED, {"tokens": _TOKENS, **_LATENT}, "packed"),
    Case(
        "mla_norm_rope_and_cache", work.mla_norm_rope_and_cache, {"tokens": _TOKENS, "heads": _LATENT_HEADS, **_LATENT}
    ),
    Case("cascade_attention", work.cascade_attention, _CASCADE),
    Case("reshape_and_cache", work.reshape_and_cache, {"tokens": _TOKENS, **_KV}),
    Case("reshape_and_cache", partial(work.reshape_and_cache, is_fp8=True), {"tokens": _TOKENS, **_KV}, "fp8"),
    # The addresses of all layers' caches travel to the device in the call, which a graph cannot capture.
    Case("copy_blocks", work.copy_blocks, {"num_caches": (72, 8, 3), "pairs": (256, 16, 4), **_KV}, capturable=False),
    Case("merge_attn_states", work.merge_attn_states, {"tokens": _TOKENS, "num_heads": (32, 8, 8), "dim": _DIM}),
    Case("rms_norm", work.rms_norm, _NORM),
    Case("fused_add_rms_norm", work.fused_add_rms_norm, _NORM),
    Case("rotary_embedding", work.rotary_embedding, _ROTARY),
    Case("qk_norm_rope_and_cache", work.qk_norm_rope_and_cache, _ROTARY),
    Case("qk_norm_rope_and_cache", partial(work.qk_norm_rope_and_cache, is_fp8=True), _ROTARY, "fp8"),
    Case("silu_and_mul", work.silu_and_mul, {"tokens": _TOKENS, "size": (12288, 1024, 12288)}),
    Case("greedy_argmax", work.greedy_argmax, {"rows": (128, 16, 2), "vocab_size": (151936, 32000, 9000)}),
    Case("sample_tokens", work.sample_tokens, _SAMPLING),
    Case("sample_tokens", partial(work.sample_tokens, top_p=0.95), _SAMPLING, "top_p"),
    Case("sample_tokens", partial(work.sample_tokens, top_k=50, top_p=0.95), _SAMPLING, "top_k_top_p"),
    Case("route_tokens", work.route_tokens, {"tokens": _TOKENS, **_EXPERTS}),
    Case("moe_align_block_size", work.moe_align_block_size, _ALIGN),
    Case("route_and_align", work.route_and_align, {"tokens": (256, 64, 19), **_EXPERTS, "block_size": (16, 16, 16)}),
    Case("fused_moe", work.fused_moe, {"tokens": (16, 16, 6), **_MOE}, "decode"),
    Case("fused_moe", work.fused_moe, {"tokens": (4096, 256, 600), **_MOE}, "prefill"),
    Case("quantized_linear", _INT4, {"tokens": (16, 16, 6), **_LINEAR}, "int4 decode"),
    Case("quantized_linear", _INT4, {"tokens": (4096, 256, 130), **_LINEAR}, "int4 prefill"),
    Case("quantized_linear", _E4M3, {"tokens": (16, 16, 6), **_LINEAR}, "e4m3 decode"),
    Case("quantized_linear", _E4M3, {"tokens": (4096, 256, 130), **_LINEAR}, "e4m3 prefill"),
    Case("add_lora", work.add_lora, _LORA_FEW, "decode"),
    Case("add_lora", work.add_lora, _LORA_MANY, "prefill"),
    Case("causal_conv1d", recurrent.causal_conv1d, _DECODES | _DELTA, "decode"),
    Case("causal_conv1d", recurrent.causal_conv1d, _PROMPTS | _DELTA, "prefill"),
    Case("gated_delta_rule", recurrent.gated_delta_rule, _DECODES | _DELTA, "decode"),
    Case("gated_delta_rule", recurrent.gated_delta_rule, _PROMPTS | _DELTA, "prefill"),
    Case("mamba2_scan", recurrent.mamba2_scan, _DECODES | _MAMBA, "decode"),
    Case("mamba2_scan", recurrent.mamba2_scan, _PROMPTS | _MAMBA, "prefill"),
    Case("gated_rms_norm", recurrent.gated_rms_norm, {"tokens": _TOKENS, "heads": (32, 8, 2), "dim": (128, 128, 128)}),
)
