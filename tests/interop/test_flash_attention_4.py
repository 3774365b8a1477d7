"""FlashAttention 4's functions over the parameters of its own tests (tests/cute/test_flash_attn.py there), thinned:
head counts and sizes, lengths, windows with negative edges, sinks, soft caps, layouts of queries and keys, hints."""

import math
import random
from typing import Any

import pytest
import torch

from paged import UnsupportedError
from paged.interop.flash_attention_4 import flash_attn_func, flash_attn_varlen_func
from tests.tolerance import DTYPES, assert_close

AXES: dict[str, list[Any]] = {
    # Of queries and keys. Theirs end at 4,224, which takes the interpreter minutes.
    "lengths": [(1, 1), (1, 3), (2, 1), (3, 3), (64, 32), (64, 1), (1, 128), (113, 3), (3, 113), (64, 65), (65, 64)],
    "head_dims": [(8, 8), (32, 32), (72, 72), (96, 96), (128, 64), (128, 128), (192, 128), (256, 256), (64, 128)],
    "num_kv_heads": [6, 3, 2, 1],
    "window": ["none", "causal", "both", "keys before", "keys behind", "shifted", "empty"],
    "softcap": [0.0, 15.0],
    "layout": ["padded", "packed", "packed q", "packed k", *(f"pages of {size}" for size in (1, 4, 128))],
    **{name: [False, True] for name in ("sinks", "has_empty", "has_hints", "has_lse")},
}


def _window(kind: str, length: int, rng: random.Random) -> tuple[int | None, int | None]:
    near, far = sorted(rng.randrange(length + 1) for _ in "ab")
    windows: dict[str, tuple[int | None, int | None]] = {
        "both": (near, far),
        "keys before": (None, -near),
        "keys behind": (-near, None),
        "shifted": rng.choice([(far, -near), (-near, far)]),
        "empty": (-1, 0),  # which is no limit, as a sum below 0 is
    }
    return windows.get(kind, rng.choice([(None, None), (-1, -1)]))


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: dict[str, Any], window: tuple[int | None, int | None]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one sequence, by the definition; and the same with weights rounded to the inputs' dtype."""
    dtype = q.dtype
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    if case["softcap"]:
        scores = case["softcap"] * (scores / case["softcap"]).tanh()
    ahead = torch.arange(len(k), device=q.device) - (torch.arange(len(q), device=q.device) + len(k) - len(q))[:, None]
    left, right = window
    if left is not None and right is not None and left + right < 0:
        left = right = None
    sees = torch.ones_like(ahead, dtype=torch.bool)
    if left is not None:
        sees &= ahead >= -left
    if right is not None:
        sees &= ahead <= right
    if case["window"] == "causal":
        sees &= ahead <= 0
    scores = scores.masked_fill(~sees, -math.inf)
    if case["sinks"] is not None:
        scores = torch.cat([scores, case["sinks"].double()[:, None, None].expand(-1, len(q), 1)], 2)
    lse = scores.logsumexp(2)
    weights = (scores - lse.clamp(min=-1e300).unsqueeze(2)).exp()[:, :, : len(k)]
    out, rounded = (torch.einsum("hqk,khd->qhd", one, v) for one in (weights, weights.to(dtype).double()))
    return out, rounded, lse


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(8, 24))]
)
def test_parameters_of_its_own_tests(seed: int, backend: str, device: torch.device) -> None:
    rng = random.Random(seed)
    case = {name: rng.choice(values) for name, values in AXES.items()}
    (longest_q, longest_k), (head_dim, v_head_dim), layout = case["lengths"], case["head_dims"], case["layout"]
    dtype, heads = rng.choice(DTYPES), case["num_kv_heads"]
    window = _window(case["window"], longest_k, rng)
    is_even = layout == "padded" and rng.random() < 0.5  # flash_attn_func's
    used = [[n if is_even else rng.randint(1, n) for _ in range(3)] for n in (longest_q, longest_k)]
    if case["has_empty"] and not is_even:
        used[rng.randrange(2)][rng.randrange(3)] = 0

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    q, k, v = (
        rand(3, longest_q, 6, head_dim),
        rand(3, longest_k, heads, head_dim),
        rand(3, longest_k, heads, v_head_dim),
    )
    case["sinks"] = torch.randn(6, device=device) if case["sinks"] else None
    counts_q, counts_k = (torch.tensor(counts, dtype=torch.int32, device=device) for counts in used)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "window_size": window, "causal": case["window"] == "causal"}
    given |= {"learnable_sink": case["sinks"], "softcap": case["softcap"], "return_lse": case["has_lse"]}
    if case["has_hints"]:
        given |= {"num_splits": 3, "pack_gqa": True, "deterministic": True}
    function = flash_attn_func if is_even else flash_attn_varlen_func
    packs_q = layout in ("packed", "packed q")
    if packs_q:
        given |= {"q": _packed(q, used[0]), "cu_seqlens_q": _offsets(counts_q), "max_seqlen_q": longest_q}
    elif not is_even:
        given["seqused_q"] = counts_q
    if layout in ("packed", "packed k"):
        keys = {"k": _packed(k, used[1]), "v": _packed(v, used[1])}
        given |= keys | {"cu_seqlens_k": _offsets(counts_k), "max_seqlen_k": longest_k}
    elif not is_even:
        given["seqused_k"] = counts_k
    if layout.startswith("pages"):
        given |= _pages(k, v, int(layout.split()[-1]))
    out, lse = function(**given)
    assert (lse is None) != case["has_lse"]
    outs, rounded, lses = zip(
        *(_dense(q[i, :m], k[i, :n], v[i, :n], case, window) for i, (m, n) in enumerate(zip(*used, strict=True))),
        strict=True,
    )
    got = list(out.split(used[0])) if packs_q else [out[i, :m] for i, m in enumerate(used[0])]
    for one, *want in zip(got, outs, rounded, strict=True):
        assert_close(one, want[0], rounded=want[1] if one.numel() and dtype != torch.float32 else None)
    if lse is not None:
        got = list(lse.split(used[0], 1)) if packs_q else [lse[i, :, :m] for i, m in enumerate(used[0])]
        for one, want in zip(got, lses, strict=True):
            assert_close(one, want)


def _packed(x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return torch.cat([one[:count] for one, count in zip(x, counts, strict=True)])


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def _pages(k: torch.Tensor, v: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    """The same keys and values in shuffled pages, among others."""
    rest, columns = -k.shape[1] % size, -(-k.shape[1] // size)
    table = torch.randperm(3 * columns + 2, device=k.device)[: 3 * columns].view(3, columns)
    pages = {"page_table": table.to(torch.int32)}
    for name, x in (("k", k), ("v", v)):
        pages[name] = x.new_full((3 * columns + 2, size, *x.shape[2:]), math.nan)
        pages[name][table] = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rest)).unflatten(1, (columns, size))
    return pages


@pytest.mark.parametrize("window", [(None, -(10**12)), (-(10**12), None), (-(10**12), 10**13)])
def test_edges_beyond_all_keys(window: tuple[int | None, int | None], device: torch.device) -> None:
    q, k, v = torch.randn(3, 1, 5, 2, 16, device=device).unbind()
    out, lse = flash_attn_func(q, k, v, window_size=window, return_lse=True)
    assert lse is not None
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("beside", [{"alibi_slopes": torch.ones(2)}, {"attention_chunk": 4}])
def test_negative_edges_beside_positions_are_refused(beside: dict[str, Any], device: torch.device) -> None:
    q, k, v = torch.randn(3, 1, 5, 2, 16, device=device).unbind()
    beside = {key: one.to(device) if isinstance(one, torch.Tensor) else one for key, one in beside.items()}
    flash_attn_func(q, k, v, window_size=(2, -3), **beside)  # no limit
    with pytest.raises(UnsupportedError, match=r"^window_size: \(2, -1\), none below 0 beside"):
        flash_attn_func(q, k, v, window_size=(2, -1), **beside)
