"""Warm-up: forwards over padding that launch every kernel of a model's steps.

Compiling a kernel takes seconds, in which no sequence gets a token.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged.cache.manager import PagedKvCacheManager
from paged.kernels.attention.config import step_sizes
from paged.kernels.common.device import load_numba
from paged.kernels.common.launch import ROW_COUNTS
from paged.kernels.common.torch_ops.linear import has_mkl
from paged.kernels.lora.batch import FEW_ROWS, MANY_ROWS, LoraBatch
from paged.kernels.sampling.sample_tokens import launch_all
from paged.metadata import NUM_STATE_ARRAYS, AttentionMetadata
from paged.models.families.network import Network
from paged.models.layers.config import MoeConfig
from paged.models.layers.decoder import Linear
from paged.models.layers.sparse_moe import SparseMoe
from paged.models.loading.weights import PackedModule, Track, untracked
from paged.models.parallel.draw import CANDIDATES
from paged.models.quantization.packed_weights import PackedWeights
from paged.staging import to_device

# Adapter rows take twice as many blocks, so half as many splits are enough; from 512 blocks on, one is.
_MOST_BLOCKS = 512
# Tuned MoE tables end here.
_MOST_TOKENS = 4096
# Modules of numba kernels, for every network, for those with experts and for those with recurrent layers.
_LOOPS = (
    "attention.numba_ops.few_queries",
    "cache.numba_ops.qk_norm_rope_and_cache",
    "common.numba_ops.rms_norm",
    "common.numba_ops.gated_activation",
)
_EXPERT_LOOPS = ("moe.numba_ops.fused_moe", "moe.numba_ops.route_tokens")
_RECURRENT_LOOPS = (
    "recurrent.numba_ops.causal_conv1d",
    "recurrent.numba_ops.gated_rms_norm",
    "recurrent.numba_ops.scan",
)


# glibc's threshold follows freed pieces up to 32 MiB, its own overhead included.
_LARGEST_FREED = (32 << 20) - (64 << 10)


def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed CPU memory, by freeing one piece of nearly 32 MiB.

    Otherwise freed pages go back to the system after each step, which takes 4 % of the time of MoE prompts.
    """
    torch.empty(_LARGEST_FREED, dtype=torch.uint8)


def load_loops(network: Network, dtype: torch.dtype, track: Track = untracked) -> None:
    """Let a network on a CPU use numba kernels, if numba is installed, and compile or load them now."""
    if not load_numba():
        return
    network.uses_numba = True

    def module(name: str) -> Any:
        return import_module(f"paged.kernels.{name}")

    has_experts = any(isinstance(layer, SparseMoe) for layer in network.modules())
    kind = module("common.numba_ops.kernel").Kernel
    names, tiles = _LOOPS + _EXPERT_LOOPS * has_experts, module("common.numba_ops.tile_linear")
    names += _RECURRENT_LOOPS * any(network.own_config.recurrent)
    if has_experts or has_mkl(dtype) or (dtype == torch.bfloat16 and not tiles.multiplies(dtype)):
        names += ("common.numba_ops.linear",)
    has_products = any(isinstance(layer, PackedModule) for layer in network.modules())
    names += ("common.packed.numba_ops.product",) * has_products
    kernels = []
    for name in names:
        kernels += [value for value in vars(module(name)).values() if isinstance(value, kind)]
    kernels.append(module("attention.numba_ops.paged_attention").kernel_of_many(dtype))
    if has_products:
        kernels += module("common.packed.numba_ops.block_product").KERNELS.values()
    if tiles.multiplies(dtype) and (has_experts or has_mkl(dtype) or dtype == torch.bfloat16):
        kernels.append(tiles.kernel_of(dtype))
    late = [kernel for kernel in kernels if "address" not in vars(kernel)]  # a compiled kernel has its address
    for kernel in track(late, desc="numba kernels", unit="kernel"):
        _ = kernel.address


def run_steps(network: Network, kv_manager: PagedKvCacheManager, *, longest: int) -> None:
    """Run padding steps of every size that selects tiles, choose tokens in every way, and copy a block.

    longest: tokens of the longest sequence. Needs and changes no cache block, and does not synchronise.
    """
    for num_tokens in _step_sizes(network, longest):
        _run(network, kv_manager, num_tokens, longest=longest)
    run_packed(network, longest)
    widths = {network.config.vocab_size, network.num_logits}
    if network.ranks.size > 1:
        widths.add(CANDIDATES)
    for width in widths:
        launch_all(torch.zeros(1, width, device=kv_manager.device))
    kv_manager.warm_up()


def run_packed(network: Network, longest: int) -> None:
    """Multiply packed weights of every kind with every tile for up to `longest` rows.

    `run_steps` is not enough: in small layers, tiles depend on many more rows.
    """
    dtype = next(network.parameters()).dtype
    kinds = {}
    for linear in network.modules():
        if isinstance(linear, Linear) and isinstance(packed := linear.packed, PackedWeights):
            kinds[packed.layout, packed.in_features, packed.sizes, len(packed.runs), linear.bias is None] = (
                linear,
                packed,
            )
    for linear, packed in kinds.values():
        for count in packed.row_counts(longest, dtype):
            linear(torch.zeros(count, packed.in_features, dtype=dtype, device=packed.values.device))


def run_adapted_steps(network: Network, kv_manager: PagedKvCacheManager, *, longest: int) -> None:
    """Run padding steps of every additional size that adapters need."""
    for num_blocks, size in product(ROW_COUNTS, (FEW_ROWS, MANY_ROWS)):
        if num_blocks <= _MOST_BLOCKS:
            rows = torch.full((num_blocks, size), -1, dtype=torch.int32, device=kv_manager.device)
            batch = LoraBatch(rows, rows[:, 0].contiguous())
            _run(network, kv_manager, 1, longest=longest, lora=batch)


def _step_sizes(network: Network, longest: int) -> list[int]:
    group_sizes = [layer.num_heads // layer.num_kv_heads for layer in network.own_config.attention]
    sizes = set(step_sizes(group_sizes, longest))
    dtype = next(network.parameters()).dtype
    moes: dict[MoeConfig, SparseMoe] = {}
    for module in network.modules():
        if isinstance(module, SparseMoe):
            moes[module.config] = module
    for moe in moes.values():
        sizes.update(moe.token_counts(min(longest, _MOST_TOKENS), dtype))
    return sorted(sizes)


def _run(
    network: Network,
    kv_manager: PagedKvCacheManager,
    num_tokens: int,
    *,
    longest: int,
    lora: LoraBatch | None = None,
) -> None:
    """Run a forward of padding, as one sequence, with tiles for `longest` keys."""
    num_tables = len(kv_manager.config.tables)
    ids, slots = np.zeros(num_tokens, np.int64), np.full((num_tables, num_tokens), -1, np.int64)
    none = np.zeros(2, np.int32)  # offsets without a query: all rows are padding
    tables = np.zeros((num_tables, 1, 1), np.int32)
    states: list[NDArray[np.int32]] = []
    max_append = 0
    recurrent = kv_manager.config.recurrent
    if recurrent is not None:
        states = [none[:1]] * NUM_STATE_ARRAYS
        max_append = recurrent.max_append
    input_ids, *fields = to_device((ids, ids, slots, none[:1], *states, none, tables), kv_manager.device)
    metadata = AttentionMetadata.over(fields, max_seqlen_q=num_tokens, max_seqlen_k=longest, max_append=max_append)
    with torch.no_grad():
        hidden = network(input_ids, metadata.positions, replace(metadata, lora=lora))
        network.logits(hidden[:1])
