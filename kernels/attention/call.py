"""Calls of both attention operations: their arguments, and the shapes that their schedules depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..cache.latent_cache import LATENT_DIM, RECORD_FORMS, RecordForm, latent_kind, record_form
from ..core.device import LARGE_SHARED_MEMORY, device_of
from ..core.dtypes import kv_kind
from ..core.errors import InvalidInputError, as_int, shown
from ..core.ids import Sequences
from ..core.operation import Run
from . import tiles
from .keys import NO_LIMIT
from .plan import DECODE_MAX_ROWS, AttentionPlan, AttentionTile, PlanShape, check_plan

# Forms of records of latents, by their names.
LATENT_FORMS = {form.kind: form for form in RECORD_FORMS.values() if form.num_numbers == LATENT_DIM}


@dataclass(frozen=True, kw_only=True)
class AttentionShape(PlanShape):
    """Everything besides the lengths that a schedule of `paged_attention` depends on.

    box, more_scores: as in `tiles.decode_tile`.
    bundle_tokens: tokens that share a tile, and so a union, if each token chooses its blocks. 0 without chosen blocks.
    """

    box: int = 0
    more_scores: bool = False
    bundle_tokens: int = 0

    @property
    def decode_rows(self) -> int:
        return self.group if self.bundle_tokens else DECODE_MAX_ROWS

    def tiles(self, arch: str, rows: int) -> dict[str, AttentionTile]:
        sizes = (self.head_dim, self.v_head_dim, self.element_size, arch, self.box)
        options: dict[str, Any] = {"more_scores": self.more_scores, "kind": self.kind}
        if self.bundle_tokens:
            phases = {"decode": tiles.decode_tile(*sizes, rows=self.group, **options)}
            if self.bundle_tokens > 1:
                most_rows = self.bundle_tokens * self.group
                phases["prefill"] = tiles.decode_tile(*sizes, rows=most_rows, union=True, **options)
            return phases
        phases = {"decode": tiles.decode_tile(*sizes, rows=rows, **options)}
        if rows > DECODE_MAX_ROWS:
            phases["prefill"] = tiles.prefill_tile(*sizes, **options)
        return phases


@dataclass(frozen=True, kw_only=True)
class MlaShape(PlanShape):
    """Everything besides the lengths that a schedule of `paged_mla_attention` depends on.

    kind: see `latent_kind`. chosen: whether each query chooses its keys.
    """

    chosen: bool = False

    def tiles(self, arch: str, rows: int) -> dict[str, AttentionTile]:
        """Return the tiles by phase.

        If one query fills more than DECODE_MAX_ROWS rows, all sequences take the tile and the splits of "decode".
        Partial results are small then, compared with the latents that a split reads.
        """

        def tile(max_rows: int) -> AttentionTile:
            return tiles.mla_tile(
                self.v_head_dim, self.element_size, arch, rows=max_rows, kind=self.kind, chosen=self.chosen
            )

        if rows <= DECODE_MAX_ROWS or self.group > DECODE_MAX_ROWS:
            return {"decode": tile(rows)}
        return {"decode": tile(DECODE_MAX_ROWS), "prefill": tile(rows)}


class AttentionCall(NamedTuple):
    """Arguments of `kernels.attention.paged_attention.paged_attention`, checked, with defaults filled in.

    Attributes:
        window: positions that a query sees left and right of its own; NO_LIMIT for all. Causal is 0 on the right.
        chunk_size: `attention_chunk_size`; 0 for no limit.
        is_causal: bool [num_seqs]; True sets the right window of that sequence to 0.
        out: None for a new output.
        v_head_dim: numbers of a value.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_seqlen_q: int
    is_causal: torch.Tensor | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_table_scale: torch.Tensor | None
    v_table_scale: torch.Tensor | None
    mask: torch.Tensor | None
    chosen_blocks: torch.Tensor | None
    chosen_block_size: int
    softmax_scale: float
    window: tuple[int, int]
    chunk_size: int
    softcap: float
    deterministic: bool
    return_lse: bool
    out: torch.Tensor | None
    v_head_dim: int

    @property
    def shares_cache(self) -> bool:
        """Whether v_cache is a view of k_cache from its first element on, so that a key begins with its value."""
        k_cache, v_cache = self.k_cache, self.v_cache
        is_view = k_cache.data_ptr() == v_cache.data_ptr() and k_cache.stride() == v_cache.stride()
        return is_view and k_cache.dtype == v_cache.dtype and v_cache.shape[3] <= k_cache.shape[3]

    @property
    def out_strides(self) -> tuple[int, int]:
        """Distances between two tokens and two heads of the output."""
        return _out_strides(self.out, self.q.shape[1], self.v_head_dim)

    @property
    def shape(self) -> AttentionShape:
        """The shape that schedules depend on."""
        num_tokens, num_q_heads, head_dim = self.q.shape
        num_kv_heads, arch = self.k_cache.shape[2], device_of(self.q.device).arch
        group, kinds = num_q_heads // num_kv_heads, [kv_kind(self.k_cache.dtype), kv_kind(self.v_cache.dtype)]
        kind = tiles.kind_of_tile(*(kind.name for kind in kinds))
        more_scores = self.softcap > 0 or self.alibi_slopes is not None or self.mask is not None
        # The plan of chosen blocks counts entries, which window and chunk do not shorten.
        window, chunk_size, box, bundle_tokens = (NO_LIMIT, NO_LIMIT), 0, 0, 0
        if self.chosen_blocks is None:
            window, chunk_size = self.window, self.chunk_size
            if all(kind.numbers_per_element == 1 for kind in kinds):
                box = min(_box_keys(self.k_cache, arch), _box_keys(self.v_cache, arch))
        elif self.mask is not None:
            bundle_tokens = 1
        else:
            bundle_tokens = tiles.bundle_tokens(
                head_dim,
                self.v_head_dim,
                self.q.element_size(),
                arch,
                group=group,
                num_queries=self.max_seqlen_q,
                num_chosen=self.chosen_blocks.shape[2],
                more_scores=more_scores,
                kind=kind,
                deterministic=self.deterministic,
            )
        return AttentionShape(
            num_tokens=num_tokens,
            num_kv_heads=num_kv_heads,
            group=group,
            head_dim=head_dim,
            v_head_dim=self.v_head_dim,
            element_size=self.q.element_size(),
            window=window,
            chunk_size=chunk_size,
            box=box,
            bundle_tokens=bundle_tokens,
            more_scores=more_scores,
            kind=kind,
            deterministic=self.deterministic,
        )

    @property
    def num_products(self) -> Callable[[Mapping[str, Any]], int]:
        """A function that counts the multiplications of one query of each sequence, from `seq_lens` on the host."""
        products_of_a_key = self.q.shape[1] * (self.q.shape[2] + self.v_head_dim)
        return lambda tensors: int(tensors["seq_lens"].sum()) * products_of_a_key


class MlaCall(NamedTuple):
    """Arguments of `paged_mla_attention`, checked, with defaults filled in.

    window: as in `AttentionCall`. causal: whether chosen keys may only be those up to the query's position.
    out: None for a new output.
    """

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_seqlen_q: int
    sinks: torch.Tensor | None
    k_scale: torch.Tensor | None
    indices: torch.Tensor | None
    v_head_dim: int
    softmax_scale: float
    causal: bool
    window: tuple[int, int]
    deterministic: bool
    return_lse: bool
    out: torch.Tensor | None

    @property
    def out_strides(self) -> tuple[int, int]:
        """Distances between two tokens and two heads of the output."""
        return _out_strides(self.out, self.q.shape[1], self.v_head_dim)

    @property
    def shape(self) -> MlaShape:
        """The shape that schedules depend on."""
        num_tokens, num_heads, head_dim = self.q.shape
        window = self.window
        if self.indices is not None:  # the plan counts chosen keys
            window = NO_LIMIT, NO_LIMIT
        return MlaShape(
            num_tokens=num_tokens,
            num_kv_heads=1,
            group=num_heads,
            head_dim=head_dim,
            v_head_dim=self.v_head_dim,
            element_size=self.q.element_size(),
            window=window,
            kind=latent_kind(self.kv_cache),
            chosen=self.indices is not None,
            deterministic=self.deterministic,
        )


def returned_results(arguments: Mapping[str, Any], results: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Return what an operation returns: out and lse, or out alone without `return_lse`."""
    if arguments.get("return_lse"):
        return results
    return results[0]


def checked_window(window_size: tuple[int, int]) -> tuple[int, int]:
    """Return a window as in `AttentionCall`; raise InvalidInputError unless it is two numbers from -1."""
    try:
        window_left, window_right = window_size
    except Exception:  # the argument may be any object
        raise InvalidInputError(f"window_size: {shown(window_size)}, expected (left, right)") from None
    return _window_side("window_size[0]", window_left), _window_side("window_size[1]", window_right)


def _window_side(name: str, size: int) -> int:
    size = as_int(name, size, -1)
    if size == -1:
        return NO_LIMIT
    return min(size, NO_LIMIT)


class CompressedCall(NamedTuple):
    """Arguments of `paged_compressed_attention`, checked, with defaults filled in; out: None for a new output."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    entry_cache: torch.Tensor | None
    block_table: torch.Tensor
    entry_table: torch.Tensor | None
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_seqlen_q: int
    indices: torch.Tensor | None
    sinks: torch.Tensor | None
    cos_sin_cache: torch.Tensor | None
    softmax_scale: float
    sliding_window: int
    pool_size: int
    deterministic: bool
    return_lse: bool
    out: torch.Tensor | None

    @property
    def out_strides(self) -> tuple[int, int]:
        """Distances between two tokens and two heads of the output."""
        return _out_strides(self.out, self.q.shape[1], self.q.shape[2])

    @property
    def record_form(self) -> RecordForm | None:
        """The form of rows and entries; None if they are no records."""
        return record_form(self.kv_cache, self.q.shape[2])

    @property
    def shape(self) -> MlaShape:
        """The shape that schedules depend on. Each token is a sequence of its own, as with chosen keys."""
        num_tokens, num_heads, head_dim = self.q.shape
        kind = ""
        if self.record_form is not None:
            kind = self.record_form.kind
        return MlaShape(
            num_tokens=num_tokens,
            num_kv_heads=1,
            group=num_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            element_size=self.q.element_size(),
            window=(NO_LIMIT, NO_LIMIT),
            kind=kind,
            chosen=True,
            deterministic=self.deterministic,
        )

    def entry_ids(self) -> Sequences | None:
        """Return the ids that decide which blocks of entries are read, those of closed pools; None without entries."""
        if self.entry_cache is None or self.entry_table is None:
            return None
        num_blocks, block_size = self.entry_cache.shape[:2]
        return Sequences(
            self.entry_table,
            self.cu_seqlens_q,
            self.seq_lens // self.pool_size * self.pool_size,
            num_tokens=len(self.q),
            num_blocks=num_blocks,
            block_size=block_size * self.pool_size,
            max_seqlen_q=min(int(self.max_seqlen_q), len(self.q)),
            window_left=NO_LIMIT,
            keys_at_once=1,
            table_name="entry_table",
        )


def tensor_names(call: AttentionCall | MlaCall | CompressedCall) -> list[str]:
    """Return the names of a call's tensors, also of those that are None: the next step may have them."""
    return [name for name, value in call._asdict().items() if value is None or isinstance(value, torch.Tensor)]


def bind_steps(
    call: AttentionCall | MlaCall | CompressedCall, bind: Callable[[Any, AttentionPlan | None], Run[Any]]
) -> Run[Any]:
    """Return `bind_step` of `operation`, which binds a checked call for the tensors of a step.

    Only the names of the call's tensors stay: a bound call must not keep activations alive.
    """
    kind, names = type(call), tensor_names(call)
    options = {name: value for name, value in call._asdict().items() if name not in names}

    def bind_step(*positional: torch.Tensor, plan: AttentionPlan | None = None, **arguments: Any) -> Any:
        arguments |= zip(kind._fields, positional, strict=False)
        causal = arguments.get("causal")
        if isinstance(causal, torch.Tensor) and causal.dim():
            arguments["is_causal"] = causal
        max_seqlen_q = arguments["max_seqlen_q"]
        check_plan(plan, arguments["cu_seqlens_q"], arguments["seq_lens"], max_seqlen_q)
        tensors = {name: arguments.get(name) for name in names}
        longest = min(int(max_seqlen_q), len(arguments["q"]))
        return bind(kind(**options | tensors | {"max_seqlen_q": longest}), plan)

    return bind_step


def _box_keys(cache: torch.Tensor, arch: str) -> int:
    """Return how many keys of a head the copy engine can fetch from one block of `cache`: a power of two, or 0.

    It needs addresses and strides in multiples of 16 bytes (CUDA driver API, cuTensorMapEncodeTiled).
    """
    if arch not in LARGE_SHARED_MEMORY or cache.data_ptr() % 16:
        return 0
    size = cache.element_size()
    for stride in cache.stride()[:3]:
        if stride <= 0 or stride * size % 16:
            return 0
    block_size = cache.shape[1]
    return block_size & -block_size  # the largest power of two that divides it


def _out_strides(out: torch.Tensor | None, num_heads: int, size: int) -> tuple[int, int]:
    if out is None:
        return num_heads * size, size
    token, head, _ = out.stride()
    return token, head
