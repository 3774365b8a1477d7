"""Launches of an indexer's kernels, by spans of tokens whose scores fit into memory together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..cache.latent_cache import check_index_cache, index_cache_parts
from ..core.checks import FLOAT_DTYPES, check_last_dim_contiguous, check_sequences_fit, check_tensor
from ..core.compat import triton
from ..core.dtypes import as_kernel_argument, has_native_e4m3
from ..core.errors import InvalidInputError
from ..core.ids import Sequences, check_sequences
from ..core.launch import Launch, strides
from .plan import AttentionPlan, check_plan

# Keys that a program scores. It reads the heads of a query once for all of them, see limits.md.
KEYS_PER_PROGRAM = 1024


def check_index(
    q: torch.Tensor,
    weights: torch.Tensor | None,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: AttentionPlan | None,
    pool_size: int,
) -> None:
    """Raise InvalidInputError unless the tensors of `choose_keys` or `choose_blocks` fit.

    On a CPU it also checks the values of lengths and block ids. pool_size: positions of a key.
    """
    check_tensor("q", q, ("num_tokens", "num_heads", "head_dim"), FLOAT_DTYPES)
    num_tokens, num_heads, head_dim = q.shape
    if not (1 <= num_heads <= 128 and 16 <= head_dim <= 256):
        raise InvalidInputError(f"q: {num_heads} heads of {head_dim}, expected 1 to 128 of 16 to 256")
    check_last_dim_contiguous("q", q)
    if weights is not None:
        check_tensor("weights", weights, (num_tokens, num_heads), (torch.float32,), q.device)
        check_last_dim_contiguous("weights", weights)
    check_index_cache(key_cache, head_dim, q.dtype, q.device)
    check_sequences_fit(block_table, cu_seqlens_q, seq_lens, q.device)
    check_plan(plan, cu_seqlens_q, seq_lens, 0)
    keys, _ = index_cache_parts(key_cache, head_dim)
    num_blocks, positions_of_block = len(keys), keys.shape[1] * pool_size
    numbers = num_tokens, num_blocks, positions_of_block, num_tokens, 1 << 30, 1
    check_sequences(Sequences(block_table, cu_seqlens_q, seq_lens, *numbers))


def token_spans(num_tokens: int, numbers_per_token: int, most_numbers: int) -> list[tuple[int, int]]:
    """Return spans of tokens, first and one past the last, with at most `most_numbers` numbers, or of one token."""
    at_once = min(num_tokens, max(1, most_numbers // numbers_per_token))
    return [(first, min(first + at_once, num_tokens)) for first in range(0, num_tokens, at_once)]


def index_tile(element_size: int) -> tuple[int, int]:
    """Return keys in a block, and warps.

    With 64 keys three programs share an SM. 128 keys leave two and spill registers, see limits.md.
    """
    if element_size == 4:
        return 32, 8
    return 64, 4


class SpanLaunches:
    """One launch for each span of a step's tokens. A program takes a token and some of its keys."""

    def __init__(
        self,
        kernel: Any,
        spans: list[tuple[int, int]],
        columns: int,
        q: torch.Tensor,
        weights: torch.Tensor | None,
        key_cache: torch.Tensor,
        block_table: torch.Tensor,
        **options: Any,
    ) -> None:
        """columns: programs of a token. options: arguments of this kernel alone."""
        self._head_dim = head_dim = q.shape[2]
        key, scales = index_cache_parts(key_cache, head_dim)
        _, num_warps = index_tile(q.element_size())
        options = {
            "num_seqs": len(block_table),
            **strides("token head", q=q),
            **strides("token", weights=weights),
            **strides("block slot", key=key, scales=scales),
            **strides("seq", table=block_table),
            "NUM_HEADS": q.shape[1],
            "HEADS_PADDED": max(16, triton.next_power_of_2(q.shape[1])),
            "HEAD_DIM": head_dim,
            "DIM_PADDED": triton.next_power_of_2(head_dim),
            "KV_BLOCK_SIZE": key.shape[1],
            "NATIVE_FP8": has_native_e4m3(q.device),
            "num_warps": num_warps,
            "num_stages": 2,
            **options,
        }
        self._launches: list[tuple[int, int, Launch]] = []
        for first, end in spans:
            launch = Launch(kernel, (end - first, columns), {**options, "first_token": first})
            self._launches.append((first, end, launch))

    def results(
        self, tensors: Mapping[str, torch.Tensor | None], key_cache: torch.Tensor, shape: tuple[int, ...], empty: float
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Launch, and yield each span of tokens with its numbers, [tokens, *shape]; `empty` where no program writes.

        tensors: q, weights, block_table, cu_seqlens_q and seq_lens by name.
        """
        key, scales = index_cache_parts(key_cache, self._head_dim)
        arguments: dict[str, Any] = {f"{name}_ptr": tensor for name, tensor in tensors.items()}
        arguments |= {"key_ptr": as_kernel_argument(key), "scales_ptr": scales}
        for first, end, launch in self._launches:
            numbers = torch.full((end - first, *shape), empty, device=key_cache.device)
            launch({**arguments, "out_ptr": numbers})
            yield slice(first, end), numbers
