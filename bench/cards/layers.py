"""Cards of norms, rotation, gated activations and residual streams."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from paged.bench.bounds import layers as bounds
from paged.bench.cards.card import Card, Edge, Masks, Row, defined, moved, named, same, whole
from paged.bench.cards.draw import Draw
from paged.bench.compilation.cases.case import CompileCase
from paged.bench.compilation.cases.launches import DTYPES, empty, launch_case, launches_of, single_case
from paged.bench.limits import Cost
from paged.bench.problems.arguments import Arguments, Tensors
from paged.kernels.layers import definition
from paged.kernels.layers.activation import ACTIVATIONS
from paged.kernels.layers.gate_streams import gate_streams
from paged.kernels.layers.mix_snapshots import mix_snapshots
from paged.kernels.layers.mix_streams import mix_streams
from paged.kernels.layers.rms_norm import fused_add_rms_norm, rms_norm
from paged.kernels.layers.rotary_embedding import rotary_embedding
from paged.kernels.layers.silu_and_mul import silu_and_mul

# Heads and widths of Qwen3-8B (Qwen, 2025).
TOKENS = (4096, 256, 19)
HEADS, HEAD_DIM = ((32, 8), (8, 2), (8, 2)), (128, 64, 128)
_NORM = {"tokens": TOKENS, "hidden_size": (4096, 1024, 4096)}
_ODD_TOKENS = (0, 1, 5)
COMPILED_TOKENS = 64
# head_dim, query heads and KV heads of Llama-3.2-1B, Phi-2, Qwen3-8B and Gemma-2B, then of the widest heads.
COMPILED_HEADS = ((64, 32, 8), (80, 32, 32), (128, 32, 8), (256, 8, 1), (512, 16, 2))


def _norm(draw: Draw, *, tokens: int, hidden_size: int) -> Arguments:
    return {"x": draw.normal(tokens, hidden_size), "weight": draw.normal(hidden_size)}


def _odd_norm(draw: Draw) -> Iterator[Arguments]:
    x, weight = 30 * draw.normal(3, 1025), draw.normal(1025)
    yield {"x": x, "weight": weight, "eps": 1e-5}


def _added_norm(draw: Draw, *, tokens: int, hidden_size: int) -> Arguments:
    x, residual = draw.normals(2, tokens, hidden_size)
    return {"x": x, "residual": residual, "weight": draw.normal(hidden_size)}


def _added_norm_expected(arguments: Arguments) -> Tensors:
    """Round the sum to the dtype of the residual before it is normalised."""
    residual = arguments["residual"]
    total = (arguments["x"].double() + residual.double()).to(residual.dtype)
    return {"x": definition.rms_norm(total, arguments["weight"], arguments.get("eps", 1e-6)), "residual": total}


def _norm_cases() -> list[CompileCase]:
    """Return hidden sizes 64 to 8,192. Gemma-3-1B's size has float32 weights."""
    cases = []
    for hidden_size, kind in ((64, "bf16"), (1152, "fp32"), (2048, "bf16"), (8192, "bf16")):
        x, weight = empty("bf16", COMPILED_TOKENS, hidden_size), empty(kind, hidden_size)
        name = f"hidden={hidden_size} {kind} weights"
        cases.append(single_case(f"rms_norm {name}", rms_norm, x, weight))
        cases.append(single_case(f"fused_add_rms_norm {name}", fused_add_rms_norm, x, x.clone(), weight))
    return cases


def _rotation(draw: Draw, *, tokens: int, heads: tuple[int, int], dim: int) -> Arguments:
    query, key = draw.normal(tokens, heads[0], dim), draw.normal(tokens, heads[1], dim)
    positions, cos_sin_cache = draw.rotary(tokens, dim)
    return {"positions": positions, "query": query, "key": key, "cos_sin_cache": cos_sin_cache}


def _rotate_quarter(draw: Draw, *, interleaved: bool) -> Iterator[Arguments]:
    """Rotate a quarter of the head, with repeated positions."""
    angles = torch.rand(64, 12, device=draw.device) * 6
    yield {
        "positions": torch.tensor([0, 40, 7, 7], device=draw.device),
        "query": draw.normal(4, 5, 96),
        "key": draw.normal(4, 1, 96),
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], -1),
        "interleaved": interleaved,
    }


def _rotated(arguments: Arguments) -> Tensors:
    options = {name: arguments[name] for name in ("positions", "cos_sin_cache")}
    interleaved = bool(arguments.get("interleaved", False))
    want = {}
    for name in ("query", "key"):
        if arguments[name] is not None:
            want[name] = definition.rotate(arguments[name], **options, interleaved=interleaved)
    return want


def rotations() -> list[tuple[int, int, int, int, bool]]:
    """Return head_dim, query heads, KV heads, rotary_dim and interleaved of compiled rotations."""
    shapes = [(*heads, heads[0], False) for heads in COMPILED_HEADS]
    return [*shapes, (80, 32, 32, 32, False), (128, 32, 8, 128, True)]


def rotation_name(head_dim: int, rotary_dim: int, interleaved: bool) -> str:
    name = f"head_dim={head_dim} rotary_dim={rotary_dim}"
    if interleaved:
        name += " interleaved"
    return name


def _rotation_cases() -> list[CompileCase]:
    """Return partial and interleaved rotations.

    Layers of Gemma 4 that read another layer's keys rotate queries alone.
    """
    cases = []
    for head_dim, num_q_heads, num_kv_heads, rotary_dim, interleaved in rotations():
        q = empty("bf16", COMPILED_TOKENS, num_q_heads, head_dim)
        k = empty("bf16", COMPILED_TOKENS, num_kv_heads, head_dim)
        positions, cos_sin = empty("i64", COMPILED_TOKENS), empty("fp32", COMPILED_TOKENS, rotary_dim)
        name = f"rotary_embedding {rotation_name(head_dim, rotary_dim, interleaved)}"
        rotate = partial(rotary_embedding, positions, q, interleaved=interleaved)
        cases.append(single_case(name, rotate, k, cos_sin))
        if head_dim >= 256:
            cases.append(single_case(f"{name} queries alone", rotate, None, cos_sin))
    return cases


def _gates(draw: Draw, *, tokens: int, size: int, activation: str = "silu") -> Arguments:
    return {"x": draw.normal(tokens, 2 * size), "activation": activation}


def _all_activations(draw: Draw) -> Iterator[Arguments]:
    """Return a size that fills no tile, with every activation."""
    x = 4 * draw.normal(3, 2 * 1025)
    for activation in ACTIVATIONS:
        yield {"x": x, "activation": activation}


def _gate_cases() -> list[CompileCase]:
    """Return narrow to wide MLPs. Gemma-3-1B has 6,912 units."""
    sizes = [(32, "silu"), (768, "silu"), (14336, "silu"), *((6912, activation) for activation in ACTIVATIONS[1:])]
    cases = []
    for size, activation in sizes:
        x = empty("bf16", COMPILED_TOKENS, 2 * size)
        cases.append(single_case(f"silu_and_mul {activation} size={size}", silu_and_mul, x, activation=activation))
    return cases


def _streams(
    draw: Draw,
    *,
    tokens: int,
    count: int,
    size: int,
    kind: str,
    before: str = "",
    iterations: int = 20,
    single_pass: bool = False,
) -> Arguments:
    """Return streams that a part's output joins, and weights of a kind: "head", "independent" or "mixing".

    before: kind of the connection before; "none" for no output, "" for the same kind. single_pass: whether the input
        has the weights of the call before.
    """
    kinds = {"none": 0, "head": 1, "independent": 2, "mixing": 3}
    num_kinds, num_before = kinds[kind], kinds[before or kind]
    sections = (count, count, count * count)
    num_weights = sum(sections[:num_kinds])
    output, joins = None, None
    if num_before > 0:
        # Shares of a doubly stochastic matrix, or gains alone.
        joins = draw.floats(tokens, sum(sections[1 : max(num_before, 2)])).abs() / count
        output = draw.normal(tokens, size)
    weights: torch.Tensor | None = None
    if single_pass:
        weights = draw.floats(tokens, count).sigmoid()
    return {
        "streams": draw.normal(tokens, count, size),
        "weights": weights,
        "output": output,
        "joins": joins,
        "fn": draw.floats(num_weights, count * size) * (count * size) ** -0.5,
        "base": draw.floats(num_weights),
        "scale": 0.5 + draw.floats(num_kinds).abs(),
        "norm_weight": draw.normal(size),
        "num_iterations": iterations if kind == "mixing" else 0,
    }


def _odd_streams(draw: Draw) -> Iterator[Arguments]:
    """Return the first site of a model, whose streams are one tensor, and other connections in turns."""
    first = _streams(draw, tokens=3, count=3, size=130, kind="mixing", before="none")
    yield first | {"streams": draw.normal(3, 130)[:, None].expand(-1, 3, -1), "eps": 1e-3}
    yield _streams(draw, tokens=17, count=4, size=257, kind="independent", before="mixing") | {"eps": 0.05}
    yield _streams(draw, tokens=5, count=4, size=128, kind="head", before="mixing") | {"norm_eps": 0.1}
    yield _streams(draw, tokens=5, count=8, size=72, kind="mixing", iterations=1) | {"magnitude": 3.0}
    yield _streams(draw, tokens=3, count=3, size=130, kind="mixing", single_pass=True) | {"eps": 0.05}
    yield _streams(draw, tokens=3, count=3, size=24, kind="independent", single_pass=True)


def _stream_cases() -> list[CompileCase]:
    """Return sites of GLM-5.3-Flash, of DeepSeek-V4.1-Flash and of HY-V4, its head, and a first site in float32."""
    cases = []
    for dtype, size, kind, before in (
        ("bf16", 4096, "mixing", "mixing"),
        ("bf16", 5120, "mixing", "mixing"),
        ("bf16", 2816, "independent", "independent"),
        ("bf16", 2816, "head", "independent"),
        ("fp32", 4096, "mixing", "none"),
    ):
        draw = Draw(torch.device("cpu"), DTYPES[dtype])
        is_single_pass = size == 5120
        arguments = _streams(
            draw, tokens=COMPILED_TOKENS, count=4, size=size, kind=kind, before=before, single_pass=is_single_pass
        )
        join, collapse = launches_of("sm_90", mix_streams, **arguments)
        name = f"mix_streams {dtype} {kind} after {before} size={size}"
        cases += [launch_case(f"{name} join", join), launch_case(f"{name} collapse", collapse)]
    return cases


def _gated_streams(
    draw: Draw, *, tokens: int, count: int, size: int, rank: int, has_output: bool = True, is_last: bool = False
) -> Arguments:
    """Return streams that a part's output joins, and low-rank weights. is_last: whether no part follows."""
    output, gains = None, None
    if has_output:
        output, gains = draw.normal(tokens, size), 2 * draw.floats(tokens, count).sigmoid()
    num_weights = rank
    if not is_last:
        num_weights += count
    # Numbers behind the first product are near 1, as behind the second.
    return {
        "streams": draw.normal(tokens, count, size),
        "output": output,
        "gains": gains,
        "norm_weight": draw.normal(count * size),
        "down": draw.normal(num_weights, count * size) * (count / size) ** 0.5,
        "up": draw.normal(count * size, rank) * rank**-0.5,
    }


def _gated_streams_cost(card: Card, arguments: Arguments) -> Cost:
    """Count both products, and every argument and result once: at decode the two weights are most of the bytes."""
    down, up = arguments["down"], arguments["up"]
    products = 2 * len(arguments["streams"]) * (down.numel() + up.numel())
    return Cost(products, moved(card, arguments).num_bytes)


def _odd_gated_streams(draw: Draw) -> Iterator[Arguments]:
    """Return a first site, whose streams are one tensor; the last mix; splits and tiles that are not full."""
    first = _gated_streams(draw, tokens=3, count=3, size=130, rank=12, has_output=False)
    yield first | {"streams": draw.normal(3, 130)[:, None].expand(-1, 3, -1), "eps": 1e-3}
    yield _gated_streams(draw, tokens=17, count=4, size=300, rank=70, is_last=True)
    yield _gated_streams(draw, tokens=65, count=2, size=40, rank=8) | {"eps": 0.1}


def _gated_stream_cases() -> list[CompileCase]:
    """Return sites of Qwen4-Exp: between two parts, before the first one in float32, and behind the last one."""
    cases = []
    for dtype, has_output, is_last in (("bf16", True, False), ("fp32", False, False), ("bf16", True, True)):
        draw = Draw(torch.device("cpu"), DTYPES[dtype])
        sizes = {"tokens": COMPILED_TOKENS, "count": 4, "size": 2048, "rank": 320}
        arguments = _gated_streams(draw, **sizes, has_output=has_output, is_last=is_last)
        parts = ["join", "add", "gate"]
        if is_last:
            parts.remove("gate")  # the third launch is the same at every site
        launches = launches_of("sm_90", gate_streams, **arguments)
        name = f"gate_streams {dtype}"
        if not has_output:
            name += " first"
        if is_last:
            name += " last"
        cases += [launch_case(f"{name} {part}", launch) for part, launch in zip(parts, launches, strict=False)]
    return cases


def _snapshots(draw: Draw, *, tokens: int, snapshots: int, size: int, has_output: bool = True) -> Arguments:
    """Return the stream behind its snapshots, and a row between them that is none yet."""
    output = None
    if has_output:
        output = draw.normal(tokens, size)
    return {
        "rows": draw.normal(snapshots + 2, tokens, size),
        "output": output,
        "score_norm_weight": draw.normal(size),
        "score_weight": draw.normal(size) * size**-0.5,
        "norm_weight": draw.normal(size),
        "num_snapshots": snapshots,
    }


def _odd_snapshots(draw: Draw) -> Iterator[Arguments]:
    """Return a stream alone, rows of different sizes, and scores that leave one row."""
    yield _snapshots(draw, tokens=3, snapshots=0, size=130, has_output=False) | {"eps": 0.1}
    sizes = torch.tensor([1e-3, 30.0, 1.0, 0.1], device=draw.device)
    spread = _snapshots(draw, tokens=3, snapshots=2, size=257)
    yield spread | {"rows": spread["rows"] * sizes.to(spread["rows"].dtype)[:, None, None], "norm_eps": 0.3}
    yield spread | {"score_weight": 20 * spread["score_weight"]}


def _snapshots_expected(arguments: Arguments) -> Tensors:
    mixed, stream = definition.mix_snapshots(**arguments)
    return {"x": mixed, "rows": torch.cat([arguments["rows"][:-1].double(), stream[None]])}


def _snapshots_written(arguments: Arguments) -> Masks:
    """Mark the stream, if an output is added."""
    is_written = torch.zeros(len(arguments["rows"]), dtype=torch.bool)
    is_written[-1] = arguments["output"] is not None
    return {"rows": is_written}


def _snapshot_cases() -> list[CompileCase]:
    """Return sites of Kimi K3, and one without an output in float32."""
    cases = []
    for dtype, has_output in (("bf16", True), ("fp32", False)):
        draw = Draw(torch.device("cpu"), DTYPES[dtype])
        arguments = _snapshots(draw, tokens=COMPILED_TOKENS, snapshots=8, size=7168, has_output=has_output)
        name = f"mix_snapshots {dtype} size=7168"
        cases.append(single_case(name, partial(mix_snapshots, **arguments)))
    return cases


CARDS = (
    Card(
        "mix_snapshots",
        _snapshots,
        _snapshots_expected,
        lambda arguments, x: {"x": x, "rows": arguments["rows"]},
        errors=bounds.mixed_snapshots,
        writes=_snapshots_written,
        rows=(Row({"tokens": (256, 16, 5), "snapshots": (8, 8, 3), "size": (7168, 1024, 512)}),),
        edges=(Edge("odd rows", _odd_snapshots),),
        odd={"tokens": _ODD_TOKENS, "snapshots": (0, 1, 3), "size": (1, 130, 24), "has_output": (False, True)},
        compiled=_snapshot_cases,
    ),
    Card(
        "gate_streams",
        _gated_streams,
        defined(definition.gate_streams, "x", "joined", "next_gains"),
        named("x", "joined", "next_gains"),
        errors=bounds.gated_streams,
        cost=_gated_streams_cost,
        rows=(
            Row({"tokens": (64, 16, 5), "count": same(4), "size": (2048, 512, 512), "rank": (320, 80, 80)}),
            Row(
                {"tokens": (1024, 80, 65), "count": same(4), "size": (2048, 256, 64), "rank": (320, 40, 24)},
                variant="prefill",
            ),
        ),
        edges=(Edge("odd sites", _odd_gated_streams),),
        odd={
            "tokens": _ODD_TOKENS,
            "count": (1, 8, 3),
            "size": (1, 300, 24),
            "rank": (1, 70, 8),
            "has_output": (False, True),
            "is_last": (True, False),
        },
        compiled=_gated_stream_cases,
    ),
    Card(
        "mix_streams",
        _streams,
        defined(definition.mix_streams, "x", "joined", "next_joins"),
        named("x", "joined", "next_joins"),
        errors=bounds.mixed_streams,
        rows=(
            Row({"tokens": (256, 16, 5), "count": same(4), "size": (4096, 512, 384), "kind": same("mixing")}),
            Row(
                {"tokens": (256, 16, 5), "count": same(4), "size": (2816, 352, 352), "kind": same("independent")},
                variant="independent",
            ),
            Row(
                {
                    "tokens": (256, 16, 5),
                    "count": same(4),
                    "size": (5120, 640, 640),
                    "kind": same("mixing"),
                    "single_pass": same(True),
                },
                variant="single pass",
            ),
        ),
        edges=(Edge("odd connections", _odd_streams),),
        odd={
            "tokens": _ODD_TOKENS,
            "count": (1, 8, 3),
            "size": (1, 130, 24),
            "kind": ("head", "independent", "mixing"),
            "before": ("none", "independent", "mixing"),
        },
        compiled=_stream_cases,
    ),
    Card(
        "rms_norm",
        _norm,
        defined(definition.rms_norm, "out"),
        named("out"),
        errors=bounds.rms_norm,
        rows=(Row(_NORM),),
        edges=(Edge("odd size", _odd_norm),),
        odd={"tokens": _ODD_TOKENS, "hidden_size": (1, 130, 1025, 24)},
        compiled=_norm_cases,
    ),
    Card(
        "fused_add_rms_norm",
        _added_norm,
        _added_norm_expected,
        named("x", "residual"),
        errors=bounds.fused_add_norm,
        writes=whole("x", "residual"),
        rows=(Row(_NORM),),
        odd={"tokens": _ODD_TOKENS, "hidden_size": (1, 130, 1025, 24)},
    ),
    Card(
        "rotary_embedding",
        _rotation,
        _rotated,
        named("query", "key"),
        errors=bounds.rotary,
        writes=whole("query", "key"),
        rows=(Row({"tokens": TOKENS, "heads": HEADS, "dim": HEAD_DIM}),),
        edges=(
            Edge("a quarter of the head", partial(_rotate_quarter, interleaved=False)),
            Edge("interleaved", partial(_rotate_quarter, interleaved=True)),
        ),
        odd={"tokens": _ODD_TOKENS, "heads": ((1, 1), (6, 3), (4, 2)), "dim": (80, 16)},
        compiled=_rotation_cases,
    ),
    Card(
        "silu_and_mul",
        _gates,
        defined(definition.silu_and_mul, "out"),
        named("out"),
        errors=bounds.silu_and_mul,
        rows=(Row({"tokens": TOKENS, "size": (12288, 1024, 12288)}),),
        edges=(Edge("odd size, activations", _all_activations),),
        odd={"tokens": _ODD_TOKENS, "size": (1, 1025, 24), "activation": ACTIVATIONS[::-1]},
        compiled=_gate_cases,
    ),
)
