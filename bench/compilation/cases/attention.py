"""paged_attention: every tile that the chooser returns, for its target, and the planning and merging kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paged.bench.compilation.cases.case import EVERY_CASE, NUM_SMS, TARGETS, TENSOR_CORES, CompileCase
from paged.bench.compilation.cases.launches import (
    DTYPES,
    ELEMENTS,
    SeenLaunch,
    empty,
    launch_case,
    launch_of,
    launches_of,
)
from paged.kernels.attention.chosen_kernel import _chosen_attention_kernel
from paged.kernels.attention.keys import _pack_mask_kernel
from paged.kernels.attention.merge_splits import _merge_splits_kernel
from paged.kernels.attention.paged_attention import paged_attention
from paged.kernels.attention.plan import DECODE_MAX_ROWS
from paged.kernels.attention.plan_kernel import _plan_kernel
from paged.kernels.attention.tile_kernels import _attention_kernel
from paged.kernels.attention.union_kernel import _unite_choices_kernel
from paged.kernels.core.device import LARGE_SHARED_MEMORY
from paged.kernels.core.dtypes import KV_KINDS, kv_kind

_ALIGNED = ("q_token", "q_head", "k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head", "out_token", "out_head")
# Kind of a cache -> type of its elements in Triton.
_ELEMENTS = {kind.name: ELEMENTS[dtype] for dtype, kind in KV_KINDS.items()}
_GROUP = 4  # query heads per KV head
# Name of an option of `paged_attention` -> its tensor, given the number of the sequence's tokens.
_OPTIONS: dict[str, Callable[[int], torch.Tensor]] = {
    "causal": lambda _: empty("i1", 1),
    "sinks": lambda _: empty("bf16", _GROUP),
    "alibi_slopes": lambda _: empty("fp32", _GROUP),
    "k_scale": lambda _: empty("fp32", 1),
    "v_scale": lambda _: empty("fp32", 1),
    "mask": lambda num_tokens: empty("i1", num_tokens, num_tokens),
}


def cases() -> list[CompileCase]:
    """Return cases of each target's own tiles, for every kind of head and cache and with all options."""
    call = _call(128, 128, "bf16", "", "", rows=128, box=64)
    call |= {"causal": empty("i1", 1), "mask": empty("i1", 32, 32)}
    cases = [
        launch_case("paged_attention plan", launch_of(_plan_kernel, "sm_90", paged_attention, **call)),
        launch_case("paged_attention mask", launch_of(_pack_mask_kernel, "sm_90", paged_attention, **call), aligned=()),
    ]
    call = _call(128, 128, "bf16", "", "", rows=128, box=64) | _choice(32, 128) | {"causal": empty("i1", 1)}
    cases.append(
        launch_case(
            "paged_attention union", launch_of(_unite_choices_kernel, "sm_90", paged_attention, **call), aligned=()
        )
    )
    copies = dict.fromkeys(("sm_80", "sm_90", "sm_100"), ("LDGSTS.128",))
    for head_dim in (128, 256, 512):
        call = _call(head_dim, head_dim, "bf16", "", "", rows=128, box=64) | {"sinks": empty("bf16", _GROUP)}
        launch = launch_of(_merge_splits_kernel, "sm_90", paged_attention, **call)
        outs = ("stride_out_token", "stride_out_head")
        name = f"paged_attention merge D={head_dim}"
        cases.append(launch_case(name, launch, aligned=outs, expect=copies, programs_per_sm=4))
    window: dict[str, Any] = {"window_size": (16, -1)}
    for target in TARGETS:
        boxes: tuple[int, ...] = (0,)
        if target in LARGE_SHARED_MEMORY:
            boxes = (64, 128, 0)
        for head_dim in (128, 256):
            for rows in (32, 64):
                cases.append(_attention_case(target, "decode", head_dim, rows=rows, box=min(max(boxes), 64)))
        cases.append(_attention_case(target, "decode", 512, rows=32))
        cases.append(_attention_case(target, "decode", 512, box=16, rows=16))
        cases.append(_attention_case(target, "decode", 128, rows=64))
        cases.append(_attention_case(target, "decode", 128, rows=64, has_options=True))
        head_dims: tuple[int, ...] = (128, 256)
        if target in EVERY_CASE:
            head_dims = (64, 80, 128, 256)
        for kind in ("decode", "prefill"):
            for box in boxes:
                for head_dim in head_dims:
                    cases.append(_attention_case(target, kind, head_dim, box=box))
                for cache in _ELEMENTS:
                    cases.append(_attention_case(target, kind, 128, cache=cache, box=box))
            for head_dim in (64, 128, 256):
                cases.append(_attention_case(target, kind, head_dim, dtype="fp32"))
            cases += [
                _attention_case(target, kind, 128, box=max(boxes), **window),
                _attention_case(target, kind, 128, softcap=5.0, **window, box=max(boxes)),
                _attention_case(target, kind, 128, dtype="fp32", softcap=5.0),
                _attention_case(target, kind, 128, has_options=True),
                _attention_case(target, kind, 256, has_options=True),
                _attention_case(target, kind, 512, has_options=True),
                _attention_case(target, kind, 384),
                _attention_case(target, kind, 512),
                _attention_case(target, kind, 512, cache="e4m3"),
                _attention_case(target, kind, 256, cache="int8"),
                _attention_case(target, kind, 512, cache="int8"),
                _attention_case(target, kind, 128, cache="int8", has_options=True),
                _attention_case(target, kind, 256, cache="int8", has_options=True),
                _attention_case(target, kind, 512, cache="int8", has_options=True),
                _attention_case(target, kind, 128, cache="int8", dtype="fp32"),
                _attention_case(target, kind, 512, cache="int8", shared=True),
                _attention_case(target, kind, 256, cache="int4"),
                _attention_case(target, kind, 512, cache="int4"),
                _attention_case(target, kind, 128, cache="int4", has_options=True),
                _attention_case(target, kind, 256, cache="int4", has_options=True),
                _attention_case(target, kind, 512, cache="int4", has_options=True),
                _attention_case(target, kind, 128, cache="int4", dtype="fp32"),
                _attention_case(target, kind, 256, cache="nvfp4"),
                _attention_case(target, kind, 512, cache="nvfp4"),
                _attention_case(target, kind, 128, cache="nvfp4", has_options=True),
                _attention_case(target, kind, 512, cache="nvfp4", has_options=True),
                _attention_case(target, kind, 256, cache="e4m3_rows"),
                _attention_case(target, kind, 512, cache="e4m3_rows", has_options=True),
                _attention_case(target, kind, 128, cache="int8", v_cache="int4"),
                _attention_case(target, kind, 128, v_cache="int8"),
                _attention_case(target, kind, 512, dtype="fp32"),
                _attention_case(target, kind, 192, v_head_dim=128),
                _attention_case(target, kind, 192, v_head_dim=128, has_options=True),
                _attention_case(target, kind, 128, attention_chunk_size=8192),
                _attention_case(target, kind, 512, shared=True),
            ]
    # The same tile may be chosen with boxes and without. Its cases then have one name, and the later case, which has no
    # boxes, replaces the other.
    cases += chosen_cases()
    return list({(case.name, case.targets): case for case in cases}.values())


def chosen_cases() -> list[CompileCase]:
    """Return cases of chosen blocks on each target, for one cache block that holds a block of keys, and for several."""
    cases = []
    for target in TARGETS:
        cases += [
            _chosen_case(target, 128, size=128, box=64),
            _chosen_case(target, 128, size=24),
            _chosen_case(target, 256, size=64, box=64),
            _chosen_case(target, 256, size=16),
            _chosen_case(target, 512, size=16),
            _chosen_case(target, 128, size=128, box=64, group=32),
            _chosen_case(target, 128, size=16, group=64),
            _chosen_case(target, 128, size=16, has_options=True),
            _chosen_case(target, 256, size=16, has_options=True),
            _chosen_case(target, 128, size=16, dtype="fp32"),
        ]
        for cache in _ELEMENTS:
            cases += [
                _chosen_case(target, 128, size=128, box=64, cache=cache),
                _chosen_case(target, 128, size=16, cache=cache, has_options=True),
            ]
        cases += _union_cases(target)
    return cases


def _union_cases(target: str) -> list[CompileCase]:
    """Return cases of tiles over the union of several tokens' chosen blocks, and of the kernel that unites them."""
    cases = []
    for head_dim, size in ((128, 128), (128, 24), (256, 64), (256, 16), (512, 16)):
        cases.append(_chosen_case(target, head_dim, size=size, box=64 if size >= 64 else 0, tokens=64))
        cases.append(_chosen_case(target, head_dim, size=size, tokens=64, group=8, has_options=True))
    for cache in _ELEMENTS:
        for head_dim in (128, 256):
            cases.append(_chosen_case(target, head_dim, size=128, box=64, cache=cache, tokens=64))
            cases.append(_chosen_case(target, head_dim, size=16, cache=cache, tokens=64, has_options=True))
    cases.append(_chosen_case(target, 128, size=128, tokens=2))
    cases.append(_chosen_case(target, 128, size=16, dtype="fp32", tokens=64, group=4))
    return cases


def _chosen_case(
    target: str,
    head_dim: int,
    *,
    size: int,
    dtype: str = "bf16",
    cache: str = "",
    box: int = 0,
    group: int = 16,
    tokens: int = 1,
    has_options: bool = False,
) -> CompileCase:
    """Return the case of tokens with 16 chosen blocks of `size` positions; see `_attention_case`."""
    call = _call(head_dim, head_dim, dtype, cache, cache, rows=tokens * _GROUP, box=box) | _choice(tokens, size)
    call["q"] = empty(dtype, tokens, group, head_dim)
    if has_options:
        call |= {"window_size": (16, -1), "softcap": 5.0, "causal": empty("i1", 1)}
        if tokens == 1:
            call["mask"] = empty("i1", 1, 1)
        call |= {"sinks": empty("bf16", group), "alibi_slopes": empty("fp32", group)}
        for name in ("k_scale", "v_scale"):
            call.setdefault(name, empty("fp32", 1))
    launch, programs_per_sm = planned_launch(_chosen_attention_kernel, target, paged_attention, **call)
    arguments = launch.arguments
    expect: dict[str, tuple[str, ...]] = {}
    if dtype != "fp32":
        expect[target] = (TENSOR_CORES[target] if target.startswith("gfx") or arguments["BLOCK_M"] >= 64 else "HMMA",)
    words = [f"{arguments['BLOCK_M']} x {arguments['BLOCK_N']}", f"D={head_dim}", dtype, f"blocks of {size}"]
    if tokens > 1:
        words.append("union")
    if cache:
        words.append(f"{cache} cache")
    if has_options:
        words.append("options")
    return launch_case(
        f"paged_attention chosen {' '.join(words)} for {target}",
        launch,
        aligned=tuple(f"stride_{name}" for name in _ALIGNED),
        expect=expect,
        targets=(target,),
        programs_per_sm=programs_per_sm,
        may_spill=dtype == "fp32",
    )


def _choice(tokens: int, size: int) -> dict[str, Any]:
    """Return 16 blocks of `size` positions for each token."""
    return {"chosen_blocks": empty("i32", tokens, 1, 16), "chosen_block_size": size}


def _attention_case(
    target: str,
    kind: str,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    dtype: str = "bf16",
    cache: str = "",
    v_cache: str = "",
    box: int = 0,
    rows: int = 16,
    shared: bool = False,
    has_options: bool = False,
    **options: Any,
) -> CompileCase:
    """Return the case of a sequence's tile.

    v_cache: kind of the values, "" for that of the keys. has_options: set all of _OPTIONS. options: more of
    `paged_attention`.
    """
    v_head_dim = v_head_dim or head_dim
    if kind == "prefill":
        rows = 2 * DECODE_MAX_ROWS
    call = _call(head_dim, v_head_dim, dtype, cache, v_cache or cache, rows=rows, box=box) | options
    if shared:
        call["v_cache"] = call["k_cache"]
    if has_options:
        call["window_size"] = (16, -1)
        for name, option in _OPTIONS.items():
            call.setdefault(name, option(rows // _GROUP))
    launch, programs_per_sm = planned_launch(_attention_kernel, target, paged_attention, **call)
    launch.arguments["CLEAR_PADDING"] = True  # only a step's first launch sets it; compile the longer code
    block_m, block_n = launch.arguments["BLOCK_M"], launch.arguments["BLOCK_N"]
    uses_boxes = launch.arguments["USE_TMA"]
    copy = "load_dwordx4"
    matrix = TENSOR_CORES[target]
    if target.startswith("sm"):
        copy = "UTMALDG" if uses_boxes else "LDGSTS.128"
        if cache in ("int4", "nvfp4") and block_n * head_dim // 2 < 16 * 32 * launch.options["num_warps"]:
            copy = "LDGSTS"  # a tile of keys has less than 16 bytes for each thread
        if block_m < 64:
            matrix = "HMMA"
    expect: dict[str, tuple[str, ...]] = {}
    if dtype != "fp32":
        expect[target] = (matrix, copy)
        if shared and cache:  # Triton does not prefetch a load with two decodings
            expect[target] = (matrix,)
    words = [f"{block_m} x {block_n}", f"D={head_dim}", dtype]
    if v_head_dim != head_dim:
        words[1] = f"D={head_dim},{v_head_dim}"
    if v_cache:
        words.append(f"{cache or dtype} keys {v_cache} values")
    elif cache:
        words.append(f"{cache} cache")
    flags = {
        "boxes": uses_boxes,
        "window": "window_size" in call,
        "chunk": "attention_chunk_size" in call,
        "shared K and V": shared,
        "softcap": "softcap" in call,
        "options": has_options,
    }
    words += [word for word, is_set in flags.items() if is_set]
    return launch_case(
        f"paged_attention {kind} {' '.join(words)} for {target}",
        launch,
        aligned=tuple(f"stride_{name}" for name in _ALIGNED),
        expect=expect,
        targets=(target,),
        programs_per_sm=programs_per_sm,
        may_spill=dtype == "fp32",
    )


def planned_launch(
    kernel: Any, target: str, operation: Callable[..., object], *args: Any, **kwargs: Any
) -> tuple[SeenLaunch, int]:
    """Return the launch of a kernel for the longest sequences, and the programs that its plan counts on an SM."""
    launches = launches_of(target, operation, *args, **kwargs)
    plan = [launch for launch in launches if launch.kernel is _plan_kernel][-1]
    launch = [launch for launch in launches if launch.kernel is kernel][-1]
    return launch, plan.arguments["num_programs"] // NUM_SMS[target]


def _call(
    head_dim: int, v_head_dim: int, dtype: str, cache: str, v_cache: str, *, rows: int, box: int
) -> dict[str, Any]:
    """Return the arguments for one sequence of this many rows, in blocks of `box` keys that the copy engine can fetch.

    box: 0 for blocks of 16 keys off the 16-byte grid.
    """
    num_tokens, block_size = rows // _GROUP, box or 16
    call: dict[str, Any] = {
        "q": empty(dtype, num_tokens, _GROUP, head_dim),
        "block_table": empty("i32", 1, 4096),
        "cu_seqlens_q": empty("i32", 2),
        "seq_lens": empty("i32", 1),
        "max_seqlen_q": num_tokens,
        "return_lse": True,
    }
    for name, size, kind_name in (("k_cache", head_dim, cache), ("v_cache", v_head_dim, v_cache)):
        element = _ELEMENTS.get(kind_name, dtype)
        kind = kv_kind(DTYPES[element])
        num_elements = kind.num_elements(size)
        row_size = num_elements
        if box == 0:
            row_size = num_elements + 1
        call[name] = empty(element, 4, block_size, 1, row_size)[..., :num_elements]
        if kind.has_scales:
            call[f"{name[0]}_scale"] = empty(ELEMENTS[kind.scale_dtype], *kind.scales_shape(call[name]))
        if kind.has_table_scale:
            call[f"{name[0]}_table_scale"] = empty("fp32", 1)
    return call
