"""Cards of writes to the KV cache, of its rows and of latents, and of copies of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from paged.bench.bounds import cache as bounds
from paged.bench.bounds import first_order
from paged.bench.cards.card import Card, Edge, Masks, Row, defined, same
from paged.bench.cards.draw import BLOCK_SIZE, Draw
from paged.bench.cards.layers import COMPILED_HEADS, COMPILED_TOKENS, HEAD_DIM, HEADS, TOKENS, rotation_name, rotations
from paged.bench.compilation.cases import mla as compiled_latents
from paged.bench.compilation.cases.case import EVERY_CASE, NATIVE_FP8, CompileCase
from paged.bench.compilation.cases.launches import ELEMENTS, empty, single_case
from paged.bench.limits import Cost
from paged.bench.problems.arguments import Arguments, Tensors, marked, num_bytes
from paged.kernels.cache import definition
from paged.kernels.cache.copy_blocks import BlockCopy
from paged.kernels.cache.latent_cache import NVFP4_LATENT_BYTES, PACKED_BYTES, stored_rows
from paged.kernels.cache.qk_norm_rope_and_cache import qk_norm_rope_and_cache
from paged.kernels.cache.reshape_and_cache import reshape_and_cache
from paged.kernels.core.dtypes import KV_KINDS, kv_kind

_KV = {"num_kv_heads": (8, 2, 2), "dim": HEAD_DIM}
_ROTARY = {"tokens": TOKENS, "heads": HEADS, "dim": HEAD_DIM}
# Latents of DeepSeek-V3 (DeepSeek-AI, 2024).
_LATENT = {"tokens": TOKENS, "sizes": same((512, 64))}
_ODD_TOKENS = (0, 1, 5)
_ODD_HEADS = ((1, 1), (6, 3), (4, 2))


def _write(draw: Draw, tokens: int, num_kv_heads: int, dim: int, is_fp8: bool) -> Arguments:
    """Draw caches, a slot for each token, and scales of caches in e4m3."""
    num_blocks, slots = draw.slots(tokens)
    k_cache, v_cache = draw.normals(2, num_blocks, BLOCK_SIZE, num_kv_heads, dim)
    arguments = {"k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots}
    if is_fp8:
        for name in ("k", "v"):
            arguments[f"{name}_cache"] = arguments[f"{name}_cache"].to(torch.float8_e4m3fn)
            arguments[f"{name}_scale"] = torch.rand(num_kv_heads, device=draw.device) + 0.5
    return arguments


def _rows(draw: Draw, *, tokens: int, num_kv_heads: int, dim: int, is_fp8: bool = False) -> Arguments:
    key, value = draw.normals(2, tokens, num_kv_heads, dim)
    return {"key": key, "value": value, **_write(draw, tokens, num_kv_heads, dim, is_fp8)}


def _rotated_rows(
    draw: Draw, *, tokens: int, heads: tuple[int, int], dim: int, is_fp8: bool = False, has_hadamard: bool = False
) -> Arguments:
    """Draw writes of normed and rotated keys. has_hadamard: whether a Hadamard transform follows."""
    q, (k, v) = draw.normal(tokens, heads[0], dim), draw.normals(2, tokens, heads[1], dim)
    positions, cos_sin_cache = draw.rotary(tokens, dim)
    q_weight, k_weight = draw.normals(2, dim)
    rotation = {"positions": positions, "cos_sin_cache": cos_sin_cache}
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    if has_hadamard:
        weights["hadamard_signs"] = _signs(draw, dim)
    return {"q": q, "k": k, "v": v, **_write(draw, tokens, heads[1], dim, is_fp8), **rotation, **weights}


def _signs(draw: Draw, dim: int) -> torch.Tensor:
    return torch.randint(0, 2, (dim,), device=draw.device) * 2.0 - 1


def _skipped_slots(draw: Draw) -> Iterator[Arguments]:
    """Draw negative slots, in interleaved caches with blocks of 24 and odd heads."""
    key, value = draw.normals(2, 5, 3, 80)
    k_cache, v_cache = draw.normal(4, 2, 24, 3, 80).unbind(1)
    slots = torch.tensor([95, -1, 0, 25, -7], device=draw.device)
    yield {"key": key, "value": value, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots}


def _scaled_rows(dtypes: tuple[torch.dtype, torch.dtype], draw: Draw) -> Iterator[Arguments]:
    """Draw rows of very different sizes for caches with scales; if 32 numbers share one, the last group is incomplete.

    dtypes: of keys and values.
    """
    key, value = draw.normals(2, 5, 3, 80)
    arguments = {"key": key / 100, "value": value * 1000}
    arguments["slot_mapping"] = torch.tensor([95, 2, 0, 25, 7], device=draw.device)
    for name, rows, dtype in (("k", arguments["key"], dtypes[0]), ("v", arguments["value"], dtypes[1])):
        kind = kv_kind(dtype)
        cache = torch.zeros(4, 24, 3, kind.num_elements(80), dtype=torch.uint8, device=draw.device).view(dtype)
        scales = torch.zeros(kind.scales_shape(cache), dtype=kind.scale_dtype, device=draw.device)
        arguments |= {f"{name}_cache": cache, f"{name}_scale": scales}
        if kind.has_table_scale:
            arguments[f"{name}_table_scale"] = rows.float().abs().amax() / 2688
    yield arguments


def _transformed_rows(draw: Draw) -> Iterator[Arguments]:
    """Draw keys after a Hadamard transform, for caches with scales; a part of each head is rotated."""
    for dtype in (torch.int8, torch.bits4x2, torch.float4_e2m1fn_x2):
        for arguments in _scaled_rows((dtype, dtype), draw):
            k, v = arguments.pop("key"), arguments.pop("value")
            positions, cos_sin_cache = draw.rotary(5, 24)
            rotation = {"positions": positions, "cos_sin_cache": cos_sin_cache, "interleaved": True}
            heads = {"q": draw.normal(5, 6, 80), "k": k, "v": v, "hadamard_signs": _signs(draw, 80)}
            yield {**heads, **arguments, **rotation}


def _latents(draw: Draw, *, tokens: int, sizes: tuple[int, int], record_bytes: int = 0) -> Arguments:
    """Draw writes of latents. record_bytes: size of rows that are records, 0 for rows of numbers."""
    latent, k_rope = draw.normal(tokens, sizes[0]), draw.normal(tokens, sizes[1])
    num_blocks, slots = draw.slots(tokens)
    cache = draw.normal(num_blocks, BLOCK_SIZE, sum(sizes))
    if record_bytes:
        cache = torch.zeros(num_blocks, BLOCK_SIZE, record_bytes, dtype=torch.uint8, device=draw.device)
    return {"latent": latent, "k_rope": k_rope, "kv_cache": cache, "slot_mapping": slots}


def _rotated_latents(
    draw: Draw, *, tokens: int, heads: int, sizes: tuple[int, int], rotates: bool = True, record_bytes: int = 0
) -> Arguments:
    """Draw writes of latents with a norm before them. rotates: whether the parts beside latents rotate."""
    size, rope = sizes
    positions, cos_sin_cache = draw.rotary(tokens, rope if rotates else 0)
    return {
        "q_rope": draw.normal(tokens, heads, rope),
        **_latents(draw, tokens=tokens, sizes=sizes, record_bytes=record_bytes),
        "positions": positions,
        "cos_sin_cache": cos_sin_cache,
        "latent_weight": draw.normal(size),
        "interleaved": True,
    }


def _blocks(draw: Draw, *, num_caches: int, pairs: int, num_kv_heads: int, dim: int) -> Arguments:
    # Blocks are contiguous, and all caches have the same strides.
    caches = list(draw.floats(num_caches, 2 * pairs, BLOCK_SIZE, num_kv_heads, dim).to(draw.dtype).unbind())
    return {"caches": caches, "block_pairs": draw.permutation(2 * pairs).view(pairs, 2)}


def _write_cost(_: Card, arguments: Arguments) -> Cost:
    """Count tensors that are read, q twice, and keys and values again in the dtype of the caches."""
    written = 0
    for rows, cache in (("key", "k_cache"), ("value", "v_cache"), ("k", "k_cache"), ("v", "v_cache")):
        if rows in arguments:
            written += arguments[rows].numel() * arguments[cache].element_size()
    read = [tensor for name, tensor in arguments.items() if isinstance(tensor, torch.Tensor) and "cache" not in name]
    again = [arguments.get("q"), arguments.get("cos_sin_cache")]
    return Cost(0, num_bytes(*read, *again) + written)


def _latent_cost(_: Card, arguments: Arguments) -> Cost:
    """Count tensors that are read, q twice, and a row of the cache for each token."""
    cache = arguments["kv_cache"]
    read = [tensor for tensor in arguments.values() if isinstance(tensor, torch.Tensor) and tensor is not cache]
    written = len(arguments["latent"]) * cache[0, 0].nbytes
    return Cost(0, num_bytes(*read, arguments.get("q_rope")) + written)


def _copy_cost(_: Card, arguments: Arguments) -> Cost:
    """Count a block of each cache twice for each pair."""
    block_pairs = arguments["block_pairs"]
    moved = 0
    for cache in arguments["caches"]:
        moved += 2 * len(block_pairs) * cache[0].nbytes
    return Cost(0, moved + num_bytes(block_pairs))


def _slots_of(*caches: str, also: tuple[str, ...] = ()) -> Callable[[Arguments], Masks]:
    """Return masks of the slots of `slot_mapping`, in caches and in the scales of their rows. also: written whole."""

    def writes(arguments: Arguments) -> Masks:
        masks: Masks = dict.fromkeys(also)
        for name in caches:
            cache = arguments[name]
            mask = marked(cache.shape[0] * cache.shape[1], arguments["slot_mapping"]).view(cache.shape[:2])
            masks[name] = mask
            if kv_kind(cache.dtype).has_scales:
                masks[name.replace("cache", "scale")] = mask
        return masks

    return writes


def _destinations(arguments: Arguments) -> Masks:
    pairs = torch.as_tensor(arguments["block_pairs"], dtype=torch.int64).view(-1, 2)
    masks: Masks = {}
    for index, cache in enumerate(arguments["caches"]):
        masks[f"caches[{index}]"] = marked(len(cache), pairs[:, 1].to(cache.device))
    return masks


def _row_cases() -> list[CompileCase]:
    cases = []
    for head_dim, _, num_kv_heads in COMPILED_HEADS:
        key = empty("bf16", COMPILED_TOKENS, num_kv_heads, head_dim)
        name = f"reshape_and_cache head_dim={head_dim}"
        cases += _write_cases(name, key, partial(reshape_and_cache, key, key))
    return cases


def _rotated_row_cases() -> list[CompileCase]:
    cases = []
    for head_dim, num_q_heads, num_kv_heads, rotary_dim, interleaved in rotations():
        q = empty("bf16", COMPILED_TOKENS, num_q_heads, head_dim)
        k = empty("bf16", COMPILED_TOKENS, num_kv_heads, head_dim)
        rotation = empty("i64", COMPILED_TOKENS), empty("fp32", COMPILED_TOKENS, rotary_dim)
        write = partial(_rotate_and_write, q, k, rotation, interleaved)
        shape = rotation_name(head_dim, rotary_dim, interleaved)
        if head_dim == 256:  # Gemma has float32 weights in norms
            weights = {"q_weight": empty("fp32", head_dim), "k_weight": empty("fp32", head_dim)}
            name = f"qk_norm_rope_and_cache {shape} float32 weights"
            cases.append(_write_cases(name, k, partial(write, **weights))[0])
        weights = {"q_weight": empty("bf16", head_dim), "k_weight": empty("bf16", head_dim)}
        cases += _write_cases(f"qk_norm_rope_and_cache {shape}", k, partial(write, **weights))
        cases += _write_cases(f"rope_and_cache {shape}", k, write)
        transform = partial(write, **weights, hadamard_signs=empty("fp32", head_dim))
        for dtype in (torch.int8, torch.bits4x2):
            cases.append(_scaled_case(f"qk_norm_rope_and_cache hadamard {shape}", k, transform, dtype))
        if shape == "head_dim=128 rotary_dim=128":
            cache = empty("bf16", 4, 16, num_kv_heads, head_dim)
            name = f"qk_norm_rope_and_cache hadamard {shape}"
            cases.append(single_case(name, transform, cache, cache, empty("i64", COMPILED_TOKENS)))
    return cases


def _rotate_and_write(
    q: torch.Tensor,
    k: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    interleaved: bool,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    **options: Any,
) -> object:
    return qk_norm_rope_and_cache(q, k, k, k_cache, v_cache, slots, *rotation, interleaved=interleaved, **options)


def _write_cases(name: str, key: torch.Tensor, write: Callable[..., object]) -> list[CompileCase]:
    """Return cases of writing plain K and V, 8-bit floats, and kinds with scales; for heads of 128, also unscaled."""
    _, num_heads, head_dim = key.shape
    scale = {"k_scale": empty("fp32", num_heads), "v_scale": empty("fp32", num_heads)}

    def case(text: str, kind: str, scales: dict[str, torch.Tensor], targets: tuple[str, ...]) -> CompileCase:
        cache = empty(kind, 4, 16, num_heads, head_dim)
        return single_case(
            f"{name}{text}", write, cache, cache, empty("i64", COMPILED_TOKENS), targets=targets, **scales
        )

    one_alone = head_dim == 128
    cases = [case("", "bf16", {}, EVERY_CASE)]
    if one_alone:
        cases.append(case(" scaled", "bf16", scale, EVERY_CASE))
    for dtype, kind in KV_KINDS.items():
        # Every rotation is compiled for a transform with int4, so two numbers a byte without one are compiled once.
        if kind.has_scales and (kind.numbers_per_element == 1 or name.startswith("reshape") or one_alone):
            cases.append(_scaled_case(name, key, write, dtype))
    for native, text in ((True, " native"), (False, "")):
        targets = tuple(target for target in EVERY_CASE if (target in NATIVE_FP8) == native)
        for form, code in (("e4m3", "fp8e4nv"), ("e5m2", "fp8e5")):
            cases.append(case(f" {form}{text} scaled", code, scale, targets))
            if one_alone:
                cases.append(case(f" {form}{text}", code, {}, targets))
    return cases


def _scaled_case(name: str, key: torch.Tensor, write: Callable[..., object], dtype: torch.dtype) -> CompileCase:
    """Return the case of writing K and V of a dtype with scales in the cache."""
    _, num_heads, head_dim = key.shape
    kind = kv_kind(dtype)
    cache = empty(ELEMENTS[dtype], 4, 16, num_heads, kind.num_elements(head_dim))
    scale = empty(ELEMENTS[kind.scale_dtype], *kind.scales_shape(cache))
    scales, slots = {"k_scale": scale, "v_scale": scale}, empty("i64", COMPILED_TOKENS)
    if kind.has_table_scale:
        scales |= {"k_table_scale": empty("fp32", 1), "v_table_scale": empty("fp32", 1)}
    return single_case(f"{name} {kind.spellings[0]}", write, cache, cache, slots, targets=EVERY_CASE, **scales)


def _copy_cases() -> list[CompileCase]:
    """Return every alignment of a block."""
    cases = []
    for alignment in (1, 2, 4, 8, 16):
        caches = [empty("u8", 4, alignment)]
        pairs = torch.tensor([[0, 1]])
        cases.append(single_case(f"copy_blocks alignment={alignment}", BlockCopy(caches, caches), pairs))
    return cases


def _cache_results(arguments: Arguments) -> Tensors:
    """Return both caches; int8 codes times their scales."""
    results = {}
    for name in ("k_cache", "v_cache"):
        rows, scale = arguments[name], arguments.get(f"{name[0]}_scale")
        kind = kv_kind(rows.dtype)
        results[name] = kind.decode(rows, scale, torch.float32) if kind.has_scales else rows
    return results


def _written_latents(arguments: Arguments) -> Tensors:
    """Return a latent cache, or the numbers of one whose rows are records."""
    cache = arguments["kv_cache"]
    if cache.dtype == torch.uint8:
        cache = stored_rows(cache, torch.float64)
    return {"kv_cache": cache}


def _named_caches(caches: list[torch.Tensor]) -> Tensors:
    return {f"caches[{index}]": cache for index, cache in enumerate(caches)}


def _copied(arguments: Arguments) -> Tensors:
    copies = [cache.clone() for cache in arguments["caches"]]
    pairs = torch.as_tensor(arguments["block_pairs"], dtype=torch.int64).view(-1, 2).tolist()
    for copy, cache in zip(copies, arguments["caches"], strict=True):
        for source, destination in pairs:
            copy[destination] = cache[source]
    return _named_caches(copies)


def _scaled_edges() -> list[Edge]:
    """Return an edge for each kind with scales, and one for keys and values of two kinds."""
    edges = []
    for dtype, kind in KV_KINDS.items():
        if kind.has_scales:
            edges.append(Edge(kind.spellings[0], partial(_scaled_rows, (dtype, dtype))))
    edges.append(Edge("int8 keys, int4 values", partial(_scaled_rows, (torch.int8, torch.bits4x2))))
    return edges


CARDS = (
    Card(
        "reshape_and_cache",
        _rows,
        defined(definition.reshape_and_cache, "k_cache", "v_cache"),
        lambda arguments, _: _cache_results(arguments),
        errors=bounds.cache_write,
        writes=_slots_of("k_cache", "v_cache"),
        cost=_write_cost,
        rows=(Row({"tokens": TOKENS, **_KV}), Row({"tokens": TOKENS, **_KV, "is_fp8": same(True)}, "fp8")),
        edges=(Edge("skipped slots", _skipped_slots), *_scaled_edges()),
        odd={"tokens": _ODD_TOKENS, "num_kv_heads": (1, 3, 2), "dim": (80, 16), "is_fp8": (True, False)},
        compiled=_row_cases,
    ),
    Card(
        "qk_norm_rope_and_cache",
        _rotated_rows,
        defined(definition.qk_norm_rope_and_cache, "q", "k_cache", "v_cache"),
        lambda arguments, q: {"q": q, **_cache_results(arguments)},
        errors=bounds.qk_norm_write,
        writes=_slots_of("k_cache", "v_cache", also=("q",)),
        cost=_write_cost,
        rows=(
            Row(_ROTARY),
            Row({**_ROTARY, "is_fp8": same(True)}, "fp8"),
            Row({**_ROTARY, "has_hadamard": same(True)}, "hadamard"),
        ),
        edges=(Edge("hadamard with scales", _transformed_rows),),
        odd={
            "tokens": _ODD_TOKENS,
            "heads": _ODD_HEADS,
            "dim": (80, 16),
            "is_fp8": (True, False),
            "has_hadamard": (True, False),
        },
        compiled=_rotated_row_cases,
    ),
    Card(
        "concat_and_cache_mla",
        _latents,
        defined(definition.concat_and_cache_mla, "kv_cache"),
        lambda arguments, _: _written_latents(arguments),
        errors=bounds.latent_write,
        writes=_slots_of("kv_cache"),
        cost=_latent_cost,
        rows=(
            Row(_LATENT),
            Row({**_LATENT, "record_bytes": same(PACKED_BYTES)}, "packed"),
            Row({**_LATENT, "record_bytes": same(NVFP4_LATENT_BYTES)}, "nvfp4"),
        ),
        odd={"tokens": _ODD_TOKENS, "sizes": ((512, 16), (32, 16))},
        compiled=partial(compiled_latents.write_cases, fused=False),
    ),
    Card(
        "mla_norm_rope_and_cache",
        _rotated_latents,
        defined(definition.mla_norm_rope_and_cache, "q_rope", "kv_cache"),
        lambda arguments, q: {"q_rope": q, **_written_latents(arguments)},
        errors=bounds.latent_write,
        writes=_slots_of("kv_cache", also=("q_rope",)),
        cost=_latent_cost,
        rows=(
            Row({"heads": (128, 16, 4), **_LATENT}),
            Row({"heads": (32, 16, 4), **_LATENT, "rotates": same(False)}, "unrotated"),
            Row({"heads": (128, 16, 4), **_LATENT, "record_bytes": same(NVFP4_LATENT_BYTES)}, "nvfp4"),
        ),
        odd={
            "tokens": _ODD_TOKENS,
            "heads": (1, 5),
            "rotates": (False, True),
            "sizes": ((1024, 16), (32, 0), (32, 16)),
        },
        compiled=partial(compiled_latents.write_cases, fused=True),
    ),
    Card(
        "copy_blocks",
        _blocks,
        _copied,
        lambda arguments, _: _named_caches(arguments["caches"]),
        errors=first_order.equal,
        writes=_destinations,
        cost=_copy_cost,
        # The call sends the addresses of all layers' caches to the device, which a graph cannot capture.
        rows=(Row({"num_caches": (72, 8, 3), "pairs": (256, 16, 4), **_KV}, capturable=False),),
        odd={"num_caches": (1, 3), "pairs": (0, 1, 4), "num_kv_heads": (1, 3), "dim": (1, 16)},
        compiled=_copy_cases,
    ),
)
