"""What vLLM compiles of `PagedBackend` as it starts; importing this imports vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from tqdm import tqdm
from vllm.distributed import is_global_first_rank
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel

from paged.interop.vllm_engine.metadata import PagedMetadata
from paged.kernels.attention.config import step_sizes
from paged.kernels.common.compilation import run_compiled, serving_begins

# A layer, a number of rows, the keys that tiles are found for, and whether each sequence says if it is causal.
LayerStep = tuple[Any, int, int, bool]


class AttentionWarmup(VllmJitKernel[LayerStep]):
    """The kernels of attention and of the cache write, as vLLM's registry of what is compiled before requests come.

    vLLM asks for the steps once the layers have their caches, and for their compilation before it captures graphs.
    """

    def __init__(self, impl_class: type) -> None:
        """impl_class: of the layers that are meant."""
        super().__init__()
        self._impl_class = impl_class

    def get_warmup_keys(self, vllm_config: Any) -> list[LayerStep]:
        """Steps of every size that tiles depend on, of each layer; none where the cache is spread over ranks, whose
        layers wait for each other."""
        context = vllm_config.compilation_config.static_forward_context
        layers = [layer for layer in context.values() if isinstance(getattr(layer, "impl", None), self._impl_class)]
        flags = (False, True) if vllm_config.attention_config.use_non_causal else (False,)
        longest = vllm_config.scheduler_config.max_num_batched_tokens
        return [
            (layer, num_tokens, vllm_config.model_config.max_model_len, by_flag)
            for layer in layers
            if layer.kv_cache.numel() and layer.impl.dcp_world_size == 1  # it runs, by itself
            for num_tokens in step_sizes((layer.num_heads // layer.num_kv_heads,), longest)
            for by_flag in flags
        ]

    def compile(self, compile_key: LayerStep) -> None:
        self.compile_many([compile_key])

    def compile_many(self, compile_keys: Iterable[LayerStep]) -> None:
        """Compile several kernels at once, and launch them; from here on a compilation is what PAGED_JIT says."""
        steps = list(compile_keys)

        def run() -> None:
            for step in steps:
                _run(*step)

        run_compiled(run, partial(tqdm, desc="paged attention", unit="kernel", disable=not is_global_first_rank()))
        serving_begins()


def _run(layer: Any, rows: int, max_seq_len: int, by_flag: bool) -> None:
    """Write and attend to nothing but padding: rows that lie in one projection's output, by themselves, or with values
    alone in one."""
    device = layer.kv_cache.device
    none = torch.zeros(2, dtype=torch.int32, device=device)  # offsets: there is no query, so that all rows are padding
    slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
    metadata = PagedMetadata(
        num_actual_tokens=rows,
        max_query_len=rows,
        query_start_loc=none,
        max_seq_len=max_seq_len,
        seq_lens=none[:1],
        block_table=none[:1, None],
        slot_mapping=slots,
        causal=none[:1] if by_flag else True,
    )
    heads = layer.num_heads, layer.num_kv_heads, layer.num_kv_heads
    sizes = layer.head_size, layer.head_size, layer.head_size_v
    widths = [number * size for number, size in zip(heads, sizes, strict=True)]
    together = torch.zeros(rows, sum(widths), dtype=layer.dtype, device=device).split(widths, dim=1)
    apart = [x.contiguous() for x in together]
    for given in (together, apart, (*apart[:2], together[2])):
        query, key, value = (x.view(rows, *shape) for x, *shape in zip(given, heads, sizes, strict=True))
        out = torch.empty(rows, layer.num_heads, layer.head_size_v, dtype=layer.dtype, device=device)
        layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
        layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, out)
