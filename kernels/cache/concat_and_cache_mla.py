"""Write new latents and their rotated dimensions to their slots in a latent cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core.checks import FLOAT_DTYPES, check_eps, check_last_dim_contiguous, check_tensor, check_writable
from ..core.compat import tl, triton
from ..core.device import takes_numba, use_triton
from ..core.dtypes import (
    _encode,
    as_kernel_argument,
    cast_to_cache,
    decode_e4m3,
    encode_e4m3,
    has_native_e4m3,
    load_inverse_scale,
)
from ..core.errors import as_bool
from ..core.ids import Ids, check_all_ids, checks_ids
from ..core.launch import Compute, Launch, nothing, strides, wait_for_inputs
from ..core.operation import Run, operation
from ..core.rotation import check_rotary, locate_token, positions_of, rotate_heads, rotation_launch
from . import definition
from .latent_cache import NVFP4_GROUP, PACKED_GROUP, check_latent_cache, check_latent_scale, latent_kind, latent_parts
from .write import CacheWrite, slot_offset

_GROUP = tl.constexpr(PACKED_GROUP)
_NVFP4_GROUP = tl.constexpr(NVFP4_GROUP)
# Smallest magnitude that sets a group's scale. Below it 448 / magnitude would be infinite, so smaller groups lose bits.
_SMALLEST = tl.constexpr(2.0**-100)
# Arguments of the kernel that only a rotation needs.
_ROTATION = ("q_ptr", "positions_ptr", "cos_sin_cache_ptr")


@triton.jit
def _concat_and_cache_mla_kernel(
    q_ptr,  # [num_tokens, NUM_Q_HEADS, ROPE_DIM], rotated in place, or None
    latent_ptr,  # [num_tokens, LATENT]
    k_rope_ptr,  # [num_tokens, ROPE_DIM]
    latent_cache_ptr,  # [num_blocks, KV_BLOCK_SIZE, LATENT], or LATENT / 2 bytes of two codes
    rope_cache_ptr,  # [num_blocks, KV_BLOCK_SIZE, ROPE_DIM]
    scales_cache_ptr,  # [num_blocks, KV_BLOCK_SIZE, groups of LATENT], or None
    slot_mapping_ptr,  # int64 [num_tokens], negative to skip
    positions_ptr,  # int64 [num_tokens], or None without q
    cos_sin_cache_ptr,  # float32 [max_position, ROTARY_DIM], or None without q
    weight_ptr,  # [LATENT], or None without q
    scale_ptr,  # float32 [1], or None
    eps,
    stride_q_token,
    stride_q_head,
    stride_latent_token,
    stride_k_rope_token,
    stride_latent_cache_block,
    stride_latent_cache_slot,
    stride_rope_cache_block,
    stride_rope_cache_slot,
    stride_scales_cache_block,
    stride_scales_cache_slot,
    stride_cos_sin_position,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,  # always 1
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    KIND: tl.constexpr,  # see `latent_kind`
    NATIVE_FP8: tl.constexpr,
):
    """Process BLOCK_HEADS query heads of a token. A token's last program writes its row of the cache."""
    wait_for_inputs()
    if q_ptr is not None:
        token, head_block, cos_sin_ptr, offs_head = locate_token(
            positions_ptr, cos_sin_cache_ptr, stride_cos_sin_position, BLOCK_HEADS
        )
        heads = (head_block * BLOCK_HEADS + offs_head)[:, None]
        if head_block < (NUM_Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS:
            q_ptrs = q_ptr + token * stride_q_token + heads * stride_q_head
            rotate_heads(
                q_ptrs, q_ptrs, heads < NUM_Q_HEADS, None, cos_sin_ptr, None, eps, ROPE_DIM, ROTARY_DIM, INTERLEAVED,
                BLOCK_PAIRS, BLOCK_REST,
            )  # fmt: skip
            return
    else:
        token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    offs = tl.arange(0, LATENT_PADDED)
    mask = offs < LATENT
    latent = tl.load(latent_ptr + token * stride_latent_token + offs, mask=mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        root = tl.sqrt(tl.sum(latent * latent, 0) / LATENT + eps)
        latent = latent / root * tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    row_ptr = latent_cache_ptr + slot_offset(slot, stride_latent_cache_block, stride_latent_cache_slot, KV_BLOCK_SIZE)
    scale_ptrs = None if scale_ptr is None else scale_ptr + tl.zeros([1, 1], tl.int32)
    if scales_cache_ptr is not None:
        scales_row = slot_offset(slot, stride_scales_cache_block, stride_scales_cache_slot, KV_BLOCK_SIZE)
    if KIND == "nvfp4_latent":
        codes = _encode_nvfp4(latent, scales_cache_ptr + scales_row, LATENT_PADDED, NATIVE_FP8)
        tl.store(row_ptr + tl.arange(0, LATENT_PADDED // 2), codes)
    elif KIND == "packed":
        groups = latent.reshape(LATENT_PADDED // _GROUP, _GROUP)
        largest = tl.maximum(tl.max(tl.abs(groups), 1), _SMALLEST)
        not_finite = tl.sum(groups * 0.0, 1)  # NaN if a group holds infinity or NaN, which codes cannot express
        offs_g = tl.arange(0, LATENT_PADDED // _GROUP)
        tl.store(scales_cache_ptr + scales_row + offs_g, largest / 448.0 + not_finite)
        latent = (groups * (448.0 / largest)[:, None]).reshape(LATENT_PADDED)
        stored = cast_to_cache(latent, None, latent_cache_ptr.dtype.element_ty, "e4m3", NATIVE_FP8)
        tl.store(row_ptr + offs, stored, mask=mask)
    else:
        inverse = None
        if scale_ptr is not None:
            inverse = 1.0 / tl.load(scale_ptr)
        stored = cast_to_cache(latent, inverse, latent_cache_ptr.dtype.element_ty, KIND, NATIVE_FP8)
        tl.store(row_ptr + offs, stored, mask=mask)

    rope_row = slot_offset(slot, stride_rope_cache_block, stride_rope_cache_slot, KV_BLOCK_SIZE)
    rope_ptrs = rope_cache_ptr + rope_row + tl.zeros([1, 1], tl.int32)
    k_ptrs = k_rope_ptr + token * stride_k_rope_token + tl.zeros([1, 1], tl.int32)
    ROPE_FORM: tl.constexpr = "" if KIND == "packed" else KIND
    ROPE_KIND: tl.constexpr = "e4m3" if KIND == "nvfp4_latent" else ROPE_FORM
    if q_ptr is not None:
        one_head = tl.zeros([1, 1], tl.int32) == 0
        rotate_heads(
            k_ptrs, rope_ptrs, one_head, None, cos_sin_ptr, scale_ptrs, eps, ROPE_DIM, ROTARY_DIM, INTERLEAVED,
            BLOCK_PAIRS, BLOCK_REST, ROPE_KIND, NATIVE_FP8,
        )  # fmt: skip
    elif ROPE_DIM > 0:
        offs_r = tl.arange(0, BLOCK_REST)[None, :]
        rope = tl.load(k_ptrs + offs_r, mask=offs_r < ROPE_DIM, other=0.0).to(tl.float32)
        inverse = load_inverse_scale(scale_ptrs, offs_r < ROPE_DIM)
        stored = cast_to_cache(rope, inverse, rope_cache_ptr.dtype.element_ty, ROPE_KIND, NATIVE_FP8)
        tl.store(rope_ptrs + offs_r, stored, mask=offs_r < ROPE_DIM)


@triton.jit
def _encode_nvfp4(latent, scales_ptr, LATENT: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """The bytes [LATENT / 2] of a latent in float32; stores its scales, in the order of `_Nvfp4LatentForm`."""
    groups = latent.reshape(LATENT // _NVFP4_GROUP, _NVFP4_GROUP)
    largest = tl.maximum(tl.max(tl.abs(groups), 1) * (1.0 / 6.0), 0.001953125)  # 2^-9
    scale_codes = encode_e4m3(largest + tl.sum(groups * 0.0, 1), NATIVE_FP8)
    index = tl.arange(0, LATENT // _NVFP4_GROUP)
    tl.store(scales_ptr + index % 4 * (LATENT // _NVFP4_GROUP // 4) + index // 4, scale_codes)
    inverse = 1.0 / decode_e4m3(scale_codes, NATIVE_FP8).to(tl.float32)
    codes = _encode(groups * inverse[:, None], 1, 1, 7).to(tl.int32)
    codes = (codes & 7) | ((codes >> 4) & 8)  # the sign to the highest of four bits
    first, second = tl.split(codes.reshape(LATENT // 2, 2))
    return (first | second << 4).to(tl.uint8)


class LatentWrite(NamedTuple):
    """Arguments of `concat_and_cache_mla`: latents, their rotated dimensions, the cache and its slots."""

    latent: torch.Tensor
    k_rope: torch.Tensor
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    scale: torch.Tensor | None

    def check(self) -> None:
        """Raise InvalidInputError unless all arguments fit together."""
        latent, k_rope, kv_cache, slot_mapping, scale = self
        check_tensor("latent", latent, ("num_tokens", "latent"), FLOAT_DTYPES)
        num_tokens, size = latent.shape
        rope = check_latent_cache(kv_cache, size, latent.dtype) - size
        check_tensor("k_rope", k_rope, (num_tokens, rope), (latent.dtype,), latent.device)
        check_tensor("kv_cache", kv_cache, kv_cache.shape, None, latent.device)
        check_tensor("slot_mapping", slot_mapping, (num_tokens,), (torch.int64,), latent.device)
        for name, tensor in (("latent", latent), ("k_rope", k_rope)):
            check_last_dim_contiguous(name, tensor)
        check_writable("kv_cache", kv_cache)
        check_latent_scale("scale", scale, kv_cache)

    @property
    def slots(self) -> Ids:
        """Return the slots and their range, for checks. Negative slots are skipped."""
        num_blocks, block_size = self.kv_cache.shape[:2]
        return Ids("slot_mapping", self.slot_mapping, None, num_blocks * block_size - 1)

    def as_heads(self) -> CacheWrite:
        """Return the write of rotated dimensions as keys of one head, and of latents as its values."""
        latent, rope, scales = latent_parts(self.kv_cache, self.latent.shape[1])
        key, value = self.k_rope.unsqueeze(1), self.latent.unsqueeze(1)  # [num_tokens, 1, size]
        v_scale = self.scale
        if scales is not None:
            v_scale = scales.unsqueeze(2)  # [num_blocks, block_size, 1, groups]
        return CacheWrite(key, value, rope.unsqueeze(2), latent.unsqueeze(2), self.slot_mapping, self.scale, v_scale)

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Return the tensors that the kernel takes."""
        latent, rope, scales = latent_parts(self.kv_cache, self.latent.shape[1])
        return {
            "latent_ptr": self.latent,
            "k_rope_ptr": self.k_rope,
            "latent_cache_ptr": as_kernel_argument(latent),
            "rope_cache_ptr": as_kernel_argument(rope),
            "scales_cache_ptr": scales,
            "slot_mapping_ptr": self.slot_mapping.contiguous(),
            "scale_ptr": self.scale,
        }


@operation(mutates=("kv_cache",))
def concat_and_cache_mla(
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
) -> Run[None]:
    """Write row t of latent and of k_rope, side by side, to slot slot_mapping[t] of a latent cache.

    Args:
        latent: [num_tokens, latent], float32, float16 or bfloat16, last dimension contiguous. latent is a multiple of
            16 up to 1024.
        k_rope: [num_tokens, rope], the rotated dimensions, dtype of latent, last dimension contiguous; rope may be 0.
        kv_cache: as in `paged_mla_attention`: [num_blocks, block_size, latent + rope] in the dtype of latent or
            float8_e4m3fn, or uint8 rows of 656 or 352 bytes. Rows of 656 bytes get a float32 scale for each 128
            latents: the largest magnitude / 448. Rows of 352 bytes get an e4m3 scale for each 16 latents: the largest
            magnitude / 6, at least 2^-9. A scale is NaN if a value is not finite.
        slot_mapping: int64 [num_tokens], block_id * block_size + offset; negative to skip the token. Slots are
            distinct.
        scale: one float32 value for a float8_e4m3fn cache. Rows are divided by it, and multiplied by it when they are
            read.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit, or a slot lies beyond the cache. On a GPU
            slots are checked only with PAGED_CHECK=1.
        UnsupportedError: an argument requires a gradient.
    """
    write = LatentWrite(latent, k_rope, kv_cache, slot_mapping, scale)
    write.check()
    if not use_triton(latent):
        if takes_numba(latent, k_rope):
            return _bind_numba_write(write)
        return definition.write_latents
    checks = checks_ids(latent)
    launch = _launch_for(write, None, None) if len(latent) else nothing
    none = dict.fromkeys((*_ROTATION, "weight_ptr"))

    def run(
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
    ) -> None:
        write = LatentWrite(latent, k_rope, kv_cache, slot_mapping, scale)
        if checks:
            check_all_ids("concat_and_cache_mla", write.slots, by_triton=True)
        launch({**none, **write.tensors()})

    return run


@operation(mutates=("q_rope", "kv_cache"), finish=lambda arguments, _: arguments["q_rope"])
def mla_norm_rope_and_cache(
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    latent_weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    scale: torch.Tensor | None = None,
) -> Run[torch.Tensor]:
    """Apply `rms_norm` to latents and `rotary_embedding` to q_rope and k_rope, then `concat_and_cache_mla`.

    q_rope changes in place and is returned; latent and k_rope do not change. Everything is computed in float32 and
    rounded once.

    Args:
        q_rope: [num_tokens, num_heads, rope], the part of queries that rotates, dtype of latent, last dimension
            contiguous; usually a view.
        latent, k_rope, kv_cache, slot_mapping, scale: as in `concat_and_cache_mla`. latent and k_rope come straight
            from their projection.
        positions, cos_sin_cache, interleaved: as in `rotary_embedding`. A cos_sin_cache without columns rotates
            nothing; then q_rope stays as it is, and rope may be 0.
        latent_weight: [latent], weight of the norm.
        eps: added to the mean square of a latent; at least 0.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit, or a slot or position is out of range. On a
            GPU slots and positions are checked only with PAGED_CHECK=1.
        UnsupportedError: an argument requires a gradient.
    """
    write = LatentWrite(latent, k_rope, kv_cache, slot_mapping, scale)
    write.check()
    eps, interleaved = check_eps(eps), as_bool("interleaved", interleaved)
    num_tokens, size = latent.shape
    check_tensor("q_rope", q_rope, (num_tokens, "num_heads", k_rope.shape[1]), (latent.dtype,), latent.device)
    check_last_dim_contiguous("q_rope", q_rope)
    check_writable("q_rope", q_rope)
    check_rotary(positions, cos_sin_cache, q_rope)
    check_tensor("latent_weight", latent_weight, (size,), FLOAT_DTYPES, latent.device)
    if not use_triton(latent):
        if takes_numba(q_rope, latent, k_rope, weights=(latent_weight,)):
            return _bind_numba_norm_and_write(
                write, q_rope, cos_sin_cache, latent_weight, eps=eps, interleaved=interleaved
            )
        return definition.write_rotated_latents
    checks = checks_ids(latent)
    launch: Compute = nothing
    rotates = cos_sin_cache.shape[1] > 0
    if len(latent) and rotates:
        launch = _launch_for(write, q_rope, cos_sin_cache, eps, interleaved)
    elif len(latent):
        launch = _launch_for(write, None, None, eps)

    def run(
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        latent_weight: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        write = LatentWrite(latent, k_rope, kv_cache, slot_mapping, scale)
        if checks:
            ids = write.slots, positions_of(positions, cos_sin_cache)
            check_all_ids("mla_norm_rope_and_cache", *ids, by_triton=True)
        rotation: dict[str, torch.Tensor | None] = dict.fromkeys(_ROTATION)
        if rotates:
            rotation = dict(zip(_ROTATION, (q_rope, positions.contiguous(), cos_sin_cache), strict=True))
        launch({**rotation, **write.tensors(), "weight_ptr": latent_weight.contiguous()})
        return q_rope

    return run


def _bind_numba_write(write: LatentWrite) -> Run[None]:
    """Return a function that runs the numba kernel of `reshape_and_cache`; see `LatentWrite.as_heads`."""
    from ..cpu.cache import reshape_and_cache as numba_write

    launch = numba_write.launch_for(write.as_heads(), v_kind=latent_kind(write.kv_cache))
    assert launch is not None  # it has all formats of latents but float16, which is not taken

    def run(
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
    ) -> None:
        write = LatentWrite(latent, k_rope, kv_cache, slot_mapping, scale)
        heads = write.as_heads()
        tensors = {
            "key_ptr": heads.key,
            "value_ptr": heads.value,
            "k_cache_ptr": heads.k_cache,
            "v_cache_ptr": heads.v_cache,
            "k_scale_ptr": heads.k_scale,
            "v_scale_ptr": heads.v_scale,
            "k_table_scale_ptr": None,
            "v_table_scale_ptr": None,
            "slot_mapping_ptr": slot_mapping.contiguous(),
        }
        if launch(tensors):  # the kernel has found a slot out of range
            check_all_ids("concat_and_cache_mla", write.slots, by_triton=False)

    return run


def _bind_numba_norm_and_write(
    write: LatentWrite,
    q_rope: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    latent_weight: torch.Tensor,
    *,
    eps: float,
    interleaved: bool,
) -> Run[torch.Tensor]:
    """Return a function that runs the numba kernel of `qk_norm_rope_and_cache`; see `LatentWrite.as_heads`."""
    from ..cpu.cache import qk_norm_rope_and_cache as numba_write

    launch = numba_write.launch_for(
        q_rope,
        write.as_heads(),
        cos_sin_cache,
        latent_weight,
        eps=eps,
        interleaved=interleaved,
        norms_values=True,
        v_kind=latent_kind(write.kv_cache),
    )
    assert launch is not None  # it has all formats of latents but float16, which is not taken

    def run(
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        latent_weight: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        write = LatentWrite(latent, k_rope, kv_cache, slot_mapping, scale)
        heads = write.as_heads()
        tensors = {
            **dict.fromkeys(numba_write.OPTIONAL),
            "q_ptr": q_rope,
            "k_ptr": heads.key,
            "v_ptr": heads.value,
            "k_cache_ptr": heads.k_cache,
            "v_cache_ptr": heads.v_cache,
            "k_scale_ptr": heads.k_scale,
            "v_scale_ptr": heads.v_scale,
            "v_weight_ptr": latent_weight.contiguous(),
            "slot_mapping_ptr": slot_mapping.contiguous(),
            "positions_ptr": positions.contiguous(),
            "cos_sin_cache_ptr": cos_sin_cache,
        }
        if launch(tensors):  # the kernel has found an id out of range
            ids = write.slots, positions_of(positions, cos_sin_cache)
            check_all_ids("mla_norm_rope_and_cache", *ids, by_triton=False)
        return q_rope

    return run


def _launch_for(
    write: LatentWrite,
    q_rope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    eps: float = 0.0,
    interleaved: bool = False,
) -> Launch:
    (num_tokens, size), rope_dim = write.latent.shape, write.k_rope.shape[1]
    latent, rope, scales = latent_parts(write.kv_cache, size)
    if q_rope is None or cos_sin_cache is None:
        sizes = ("NUM_Q_HEADS", "ROTARY_DIM", "BLOCK_HEADS", "BLOCK_PAIRS")
        grid: tuple[int, ...] = (num_tokens,)
        rotation: dict[str, Any] = {**dict.fromkeys(sizes, 1), "stride_cos_sin_position": 0, "NUM_KV_HEADS": 1}
        rotation |= {"INTERLEAVED": False, "num_warps": 4}
        num_unrotated = rope_dim
    else:
        num_unrotated = rope_dim - cos_sin_cache.shape[1]
        grid, rotation = rotation_launch(num_tokens, q_rope.shape[1], 1, rope_dim, cos_sin_cache, interleaved)
    return Launch(
        _concat_and_cache_mla_kernel,
        grid,
        {
            "eps": eps,
            **strides("token head", q=q_rope),
            **strides("token", latent=write.latent, k_rope=write.k_rope),
            **strides("block slot", latent_cache=latent, rope_cache=rope, scales_cache=scales),
            "LATENT": size,
            "LATENT_PADDED": triton.next_power_of_2(size),
            "ROPE_DIM": rope_dim,
            "KV_BLOCK_SIZE": write.kv_cache.shape[1],
            "BLOCK_REST": triton.next_power_of_2(max(num_unrotated, 1)),
            "KIND": latent_kind(write.kv_cache),
            "NATIVE_FP8": has_native_e4m3(write.latent.device),
            **rotation,
        },
    )
