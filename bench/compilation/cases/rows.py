"""The operations that move rows: norms, rotary embedding, cache writes, block copies, merges, gated SiLU, and the
checks of ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton

from paged.bench.compilation.case import EVERY_CASE, NATIVE_FP8, CompileCase, kernel_case
from paged.kernels.attention.merge_attn_states import _merge_attn_states_kernel
from paged.kernels.cache.copy_blocks import BLOCK_WORDS, _copy_blocks_kernel
from paged.kernels.cache.qk_norm_rope_and_cache import _qk_norm_rope_and_cache_kernel
from paged.kernels.cache.reshape_and_cache import _reshape_and_cache_kernel
from paged.kernels.common.id_check_kernels import _check_ids_kernel, _check_sequences_kernel
from paged.kernels.common.id_checks import LANES
from paged.kernels.common.launch import num_warps, tile
from paged.kernels.common.rotation import heads_per_program
from paged.kernels.layers.rms_norm import _rms_norm_kernel
from paged.kernels.layers.rotary_embedding import _rotary_embedding_kernel
from paged.kernels.layers.silu_and_mul import _silu_and_mul_kernel

# head_dim, query heads and KV heads of Llama-3.2-1B, Phi-2, Qwen3-8B and Gemma-2B, and the widest heads
MODELS = ((64, 32, 8), (80, 32, 32), (128, 32, 8), (256, 8, 1), (512, 16, 2))

# Arguments that are neither constexprs, int32 scalars nor bfloat16 tensors.
_FLOATS = ("k_scale_ptr", "v_scale_ptr", "cos_sin_cache_ptr", "lse_a_ptr", "lse_b_ptr", "lse_ptr")
KINDS = {"eps": "fp32"}
KINDS |= dict.fromkeys(_FLOATS, "*fp32")
KINDS |= dict.fromkeys(("positions_ptr", "slot_mapping_ptr", "cache_ptrs_ptr", "block_pairs_ptr"), "*i64")

_ID_KINDS = dict.fromkeys(("ticket_ptr", "block_table_ptr", "cu_seqlens_q_ptr", "seq_lens_ptr"), "*i32")
_ID_KINDS |= {"record_ptr": "*i64", "low_0": "i64"}


def cases() -> list[CompileCase]:
    """Head sizes 64 to 512, partial and interleaved rotary embedding, every alignment of a block; hidden sizes 64 to
    8,192, with and without the residual, at that of Gemma-3-1B its float32 weights."""
    cases = []
    strides = ("stride_x_row", "stride_residual_row", "stride_out_row")
    for hidden_size, weight in ((64, "bf16"), (1152, "fp32"), (2048, "bf16"), (8192, "bf16")):
        block_size = triton.next_power_of_2(hidden_size)
        sizes = {"HIDDEN_SIZE": hidden_size, "BLOCK_SIZE": block_size}
        for name, residual in (("rms_norm", {"residual_ptr": None}), ("fused_add_rms_norm", {})):
            name = f"{name} hidden={hidden_size} {weight} weights"
            kinds = KINDS | {"weight_ptr": f"*{weight}"} | residual
            options: dict[str, Any] = {"aligned": strides, "num_warps": num_warps(block_size)}
            cases.append(kernel_case(name, _rms_norm_kernel, sizes, kinds, **options))
    for head_dim, num_q_heads, num_kv_heads in MODELS:
        block_rows, block_dim = tile(4096, head_dim)
        rows = {"HEAD_DIM": head_dim, "BLOCK_ROWS": block_rows, "BLOCK_DIM": block_dim}
        elements = 2 * block_rows * block_dim
        kv = {"NUM_HEADS": num_kv_heads, "V_HEAD_DIM": head_dim, "KV_BLOCK_SIZE": 16}
        name, merged = f"head_dim={head_dim}", rows | {"NUM_HEADS": num_q_heads}
        cases += _cache_write_cases(f"reshape_and_cache {name}", _reshape_and_cache_kernel, elements, rows | kv)
        cases.append(_case(f"merge_attn_states {name}", _merge_attn_states_kernel, elements, merged))
        cases += _rotary_cases(head_dim, head_dim, False, num_q_heads, num_kv_heads)
    cases += _rotary_cases(80, 32, False, 32, 32)
    cases += _rotary_cases(128, 128, True, 32, 8)
    for alignment in (1, 2, 4, 8, 16):
        words: dict[str, Any] = {"ALIGNMENT": alignment, "BLOCK_WORDS": BLOCK_WORDS}
        cases.append(_case(f"copy_blocks alignment={alignment}", _copy_blocks_kernel, 2 * BLOCK_WORDS, words))
    # The MLP of Gemma-3-1B has 6,912 units.
    gated = [(32, "silu"), (768, "silu"), (14336, "silu"), (6912, "gelu"), (6912, "gelu_tanh"), (6912, "swiglu_oai")]
    for size, activation in gated:
        block_rows, block_columns = tile(4096, size)
        constexprs = {"SIZE": size, "ACTIVATION": activation, "BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns}
        elements = 2 * block_rows * block_columns
        cases.append(_case(f"silu_and_mul {activation} size={size}", _silu_and_mul_kernel, elements, constexprs))
    return cases + _id_checks()


def _id_checks() -> list[CompileCase]:
    """Kernels of PAGED_CHECK=1: slots alone, slots and positions, a slot map with ranks; sequences."""
    arrays = {"slots": ("*i64",), "slots and positions": ("*i64", "*i64"), "rows, slots and ranks": ("*i32",) * 3}
    cases = []
    for name, kinds in arrays.items():
        id_kinds = dict(_ID_KINDS)
        constexprs: dict[str, Any] = {}
        for index in range(3):
            if index < len(kinds):
                id_kinds[f"ids_{index}_ptr"] = kinds[index]
            else:
                constexprs[f"ids_{index}_ptr"] = None
        constexprs["LANES"] = LANES
        cases.append(kernel_case(f"check ids: {name}", _check_ids_kernel, constexprs, id_kinds))
    constexprs = {"KEYS_AT_ONCE": 128, "LANES": LANES}
    return [*cases, kernel_case("check sequences", _check_sequences_kernel, constexprs, _ID_KINDS, aligned=())]


def _rotary_cases(
    head_dim: int, rotary_dim: int, interleaved: bool, num_q_heads: int, num_kv_heads: int
) -> list[CompileCase]:
    shape = f"head_dim={head_dim} rotary_dim={rotary_dim}"
    if interleaved:
        shape += " interleaved"
    rotary: dict[str, Any] = {
        "NUM_Q_HEADS": num_q_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "ROTARY_DIM": rotary_dim,
        "INTERLEAVED": interleaved,
        "BLOCK_PAIRS": triton.next_power_of_2(rotary_dim // 2),
    }
    rotary_block, block_dim = triton.next_power_of_2(rotary_dim), triton.next_power_of_2(head_dim)
    alone_heads = heads_per_program(num_q_heads, num_kv_heads, rotary_block)
    fused_heads = heads_per_program(num_q_heads, num_kv_heads, block_dim)
    alone = rotary | {"BLOCK_HEADS": alone_heads}
    fused = rotary | {
        "HEAD_DIM": head_dim,
        "KV_BLOCK_SIZE": 16,
        "BLOCK_HEADS": fused_heads,
        "BLOCK_REST": triton.next_power_of_2(max(head_dim - rotary_dim, 1)),
        "V_HEAD_DIM": head_dim,
        "BLOCK_V": block_dim,
    }
    plain = {"q_weight_ptr": None, "k_weight_ptr": None}
    cases = []
    if head_dim == 256:  # Gemma's weights of norms are float32
        constexprs = fused | {"k_scale_ptr": None, "v_scale_ptr": None, "KIND": "", "NATIVE_FP8": False}
        kinds = KINDS | {"q_weight_ptr": "*fp32", "k_weight_ptr": "*fp32"}
        name = f"qk_norm_rope_and_cache {shape} float32 weights"
        cases.append(_case(name, _qk_norm_rope_and_cache_kernel, fused_heads * block_dim, constexprs, kinds))
    cases.append(_case(f"rotary_embedding {shape}", _rotary_embedding_kernel, alone_heads * rotary_block, alone))
    if head_dim >= 256:  # Gemma 4's layers that read another's keys
        queries = alone | {"NUM_KV_HEADS": 0, "key_ptr": None}
        name = f"rotary_embedding {shape} queries alone"
        cases.append(_case(name, _rotary_embedding_kernel, alone_heads * rotary_block, queries))
    for name, constexprs in (("qk_norm_rope_and_cache", fused), ("rope_and_cache", fused | plain)):
        elements = fused_heads * block_dim
        cases += _cache_write_cases(f"{name} {shape}", _qk_norm_rope_and_cache_kernel, elements, constexprs)
    return cases


def _cache_write_cases(name: str, kernel: Any, num_elements: int, constexprs: dict[str, Any]) -> list[CompileCase]:
    """Keys and values as they are, scaled to 8-bit floats, or int8; heads of 128 also with one of two alone."""
    unscaled = {"k_scale_ptr": None, "v_scale_ptr": None}
    plain = constexprs | {"KIND": "", "NATIVE_FP8": False}
    cases = [_case(name, kernel, num_elements, plain | unscaled)]
    one_alone = constexprs["HEAD_DIM"] == 128
    if one_alone:
        cases.append(_case(f"{name} scaled", kernel, num_elements, plain))
    of_int8 = KINDS | {"k_cache_ptr": "*i8", "v_cache_ptr": "*i8"}
    of_floats = KINDS | {"k_cache_ptr": "*u8", "v_cache_ptr": "*u8"}
    cases.append(_case(f"{name} int8", kernel, num_elements, plain | {"KIND": "int8"}, of_int8))
    for native, text in ((True, " native"), (False, "")):
        targets = tuple(target for target in EVERY_CASE if (target in NATIVE_FP8) == native)
        for kind in ("e4m3", "e5m2"):
            fp8 = constexprs | {"KIND": kind, "NATIVE_FP8": native}
            fp8_name = f"{name} {kind}{text}"
            case = _case(f"{fp8_name} scaled", kernel, num_elements, fp8, of_floats)
            cases.append(replace(case, targets=targets))
            if one_alone:
                case = _case(fp8_name, kernel, num_elements, fp8 | unscaled, of_floats)
                cases.append(replace(case, targets=targets))
    return cases


def _case(
    name: str, kernel: Any, num_elements: int, constexprs: dict[str, Any], kinds: dict[str, str] = KINDS
) -> CompileCase:
    """A case with the warps of a program of `num_elements`."""
    return kernel_case(name, kernel, constexprs, kinds, num_warps=num_warps(num_elements))
