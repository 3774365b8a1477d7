"""Warm-up: forwards over padding that launch every kernel of a model's steps.

Compiling a kernel takes seconds, in which no sequence gets a token.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged.cache.manager import PagedKvCacheManager
from paged.kernels.attention.tiles import step_sizes
from paged.kernels.core.device import load_numba
from paged.kernels.core.launch import ROW_COUNTS
from paged.kernels.cpu.products import has_mkl, this_cpu
from paged.kernels.lora.batch import FEW_ROWS, MANY_ROWS, LoraBatch
from paged.kernels.sampling.sample_tokens import launch_all
from paged.models.families.network import Network
from paged.models.layers.config import MoeConfig
from paged.models.layers.modules import Linear
from paged.models.layers.sparse_moe import SparseMoe
from paged.models.loading.weights import PackedModule, Track, untracked
from paged.models.parallel.draw import CANDIDATES
from paged.models.quantization.packed_weights import CpuProducts, PackedWeights
from paged.step.metadata import NUM_STATE_ARRAYS, AttentionMetadata
from paged.step.staging import to_device

# Largest number of adapter blocks whose kernels are compiled. The number of splits halves as blocks double. Kernels for
# more blocks are the same, because they have one split.
_MOST_BLOCKS = 512
# Largest number of tokens in tuned MoE tables, and so the largest for which MoE kernels are compiled.
_MOST_TOKENS = 4096
# Modules of numba kernels that every network needs. Experts and recurrent layers need more modules, listed below.
_KERNELS = (
    "cpu.cache.qk_norm_rope_and_cache",
    "cpu.layers.rms_norm",
    "cpu.layers.gated_activation",
)
_EXPERT_KERNELS = ("cpu.moe.fused_moe", "cpu.moe.route_tokens")
_RECURRENT_KERNELS = (
    "cpu.recurrent.causal_conv1d",
    "cpu.recurrent.gated_rms_norm",
    "cpu.recurrent.scan",
)


# Bytes of the piece that is freed. Then glibc keeps freed pieces up to this size; its limit is 32 MiB, overhead
# included.
_LARGEST_FREED = (32 << 20) - (64 << 10)


def keep_freed_memory() -> None:
    """Let glibc keep freed CPU memory, by freeing one piece of nearly 32 MiB.

    Otherwise freed pages go back to the system after each step, which takes 4 % of the time of MoE prompts.
    """
    torch.empty(_LARGEST_FREED, dtype=torch.uint8)


def load_numba_kernels(network: Network, dtype: torch.dtype, track: Track = untracked) -> None:
    """Let a network on a CPU use numba kernels, if numba is installed, and compile or load them now."""
    if not load_numba():
        return
    network.uses_numba = True

    def module(name: str) -> Any:
        return import_module(f"paged.kernels.{name}")

    has_experts = any(isinstance(layer, SparseMoe) for layer in network.modules())
    kind = module("cpu.kernel").Kernel
    names, tiles = _KERNELS + _EXPERT_KERNELS * has_experts, module("cpu.layers.tile_linear")
    names += _RECURRENT_KERNELS * any(network.own_config.recurrent)
    if has_experts or has_mkl(dtype) or (dtype == torch.bfloat16 and not tiles.multiplies(dtype)):
        names += ("cpu.layers.linear",)
    has_products = any(isinstance(layer, PackedModule) for layer in network.modules())
    names += ("cpu.quantization.product",) * has_products
    kernels = []
    for name in names:
        kernels += [value for value in vars(module(name)).values() if isinstance(value, kind)]
    plain = torch.empty(0, dtype=dtype)  # keys and values that are not in a cache, such as those of expanded latents
    for k_cache, v_cache in ((plain, plain), *network.attended_caches()):
        kernels += module("cpu.attention.paged_attention").kernels_for(dtype, k_cache, v_cache)
    if has_products:
        kernels += module("cpu.quantization.block_product").KERNELS.values()
    if tiles.multiplies(dtype) and (has_experts or has_mkl(dtype) or dtype == torch.bfloat16):
        kernels.append(tiles.kernel_of(dtype))
    late = [
        kernel for kernel in dict.fromkeys(kernels) if "address" not in vars(kernel)
    ]  # a compiled kernel has its address
    for kernel in track(late, desc="numba kernels", unit="kernel"):
        _ = kernel.address


def measure_products(network: Network, dtype: torch.dtype) -> None:
    """Let packed weights measure which product is faster for how many rows, on a CPU with AMX.

    Numba kernels multiply packed codes without AMX; oneDNN and unpacked weights use it. Other CPUs have no such choice.
    """
    if not network.uses_numba or not this_cpu().has_amx:
        return
    limits: dict[Hashable, float] = {}
    with network.computing():
        for module in network.modules():
            if isinstance(module, CpuProducts):
                for product in module.products:
                    product.measure(dtype, limits)


def run_steps(network: Network, kv_manager: PagedKvCacheManager, *, longest: int) -> None:
    """Run padding steps of every size that selects tiles, choose tokens in every way, and copy a block.

    The call needs and changes no cache block, and does not synchronise. longest: tokens of the longest sequence.
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

    `run_steps` is not enough, because tiles of small layers depend on many more rows.
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
    none = np.zeros(2, np.int32)  # offsets without a query, so all rows are padding
    tables = np.zeros((num_tables, 1, 1), np.int32)
    states: list[NDArray[np.int32]] = []
    max_append = 0
    if kv_manager.config.has_slots:
        states = [none[:1]] * NUM_STATE_ARRAYS
    recurrent = kv_manager.config.recurrent
    if recurrent is not None:
        max_append = recurrent.max_append
    input_ids, *fields = to_device((ids, ids, slots, none[:1], *states, none, tables), kv_manager.device)
    metadata = AttentionMetadata.over(fields, max_seqlen_q=num_tokens, max_seqlen_k=longest, max_append=max_append)
    with torch.no_grad():
        hidden = network(input_ids, metadata.positions, replace(metadata, lora=lora))
        network.logits(hidden[:1])
