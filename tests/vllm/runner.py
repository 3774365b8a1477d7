"""vLLM's way through a step, by its own functions: layers, cache groups, allocation, metadata, forward context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from vllm.config import AttentionConfig, CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.registry import AttentionBackendEnum

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.worker.gpu import attn_utils

HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = (4, 2), 32, 16, 64


@dataclass(frozen=True)
class Batch:
    """(query length, key length) a sequence, its blocks int32 [num_seqs, max_blocks_per_seq], and rows of padding."""

    lengths: tuple[tuple[int, int], ...]
    block_table: torch.Tensor
    padding_rows: int = 0

    @classmethod
    def on(cls, device: torch.device, *lengths: tuple[int, int]) -> Batch:
        """In shuffled blocks of the first group's half of the pool, but for block 0, which is vLLM's null block."""
        sizes = [-(-seq_len // BLOCK_SIZE) for _, seq_len in lengths]
        shuffled = torch.randperm(NUM_BLOCKS // 2 - 1, dtype=torch.int32) + 1
        ids = shuffled.split([*sizes, len(shuffled) - sum(sizes)])
        return cls(lengths, pad_sequence(ids[:-1], batch_first=True).to(device))

    @property
    def num_tokens(self) -> int:
        return sum(q_len for q_len, _ in self.lengths)

    def of_group(self, group: int) -> Batch:
        """The batch in the blocks of a cache group: groups overlay each other in memory, so no two own the same."""
        return replace(self, block_table=self.block_table + group * (NUM_BLOCKS // 2))

    def slots(self) -> torch.Tensor:
        """int64 [num_tokens + padding_rows]: where the queries' own keys go, -1 for padding."""
        slots = []
        for blocks, (q_len, seq_len) in zip(self.block_table.cpu().long(), self.lengths, strict=True):
            position = torch.arange(seq_len - q_len, seq_len)
            slots.append(blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        return torch.cat([*slots, torch.full((self.padding_rows,), -1)]).to(self.block_table.device)

    def arguments(self) -> dict[str, torch.Tensor]:
        """The batch as `paged_attention` and its reference take it."""
        device = self.block_table.device
        q_lens = torch.tensor([0, *(q_len for q_len, _ in self.lengths)], device=device)
        return {
            "block_table": self.block_table,
            "cu_seqlens_q": q_lens.cumsum(0, dtype=torch.int32),
            "seq_lens": torch.tensor([seq_len for _, seq_len in self.lengths], dtype=torch.int32, device=device),
        }


class Runner:
    """A model of attention layers alone, set up and stepped as vLLM's model runner does it.

    What stands in for vLLM's own: the model's configuration, which would want a checkpoint, has the attributes that
    these functions read.
    """

    backend = "CUSTOM"

    def __init__(
        self, device: torch.device, *, dtype: torch.dtype = torch.float32, layout: str = "LBNHC",
        kv_cache_dtype: str = "auto", head_dim: int = HEAD_DIM, layers: tuple[dict[str, Any], ...] = ({}, {}),
    ) -> None:  # fmt: skip
        """layers: what each `Attention` gets besides heads, head size and scale, as `head_size_v`."""
        cache = CacheConfig(block_size=BLOCK_SIZE, cache_dtype=kv_cache_dtype)
        cache.kv_cache_layout = layout
        self.device = device
        attention = AttentionConfig(backend=AttentionBackendEnum[self.backend])
        device_config = DeviceConfig(device=device.type)
        self.config = VllmConfig(device_config=device_config, cache_config=cache, attention_config=attention)
        self.config.model_config = SimpleNamespace(
            dtype=dtype, max_model_len=NUM_BLOCKS * BLOCK_SIZE, is_mm_prefix_lm=False, rswa_window=None,
            hf_config=SimpleNamespace(model_type="llama"), **self.of_model(),
        )  # fmt: skip
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with set_current_vllm_config(self.config), torch.device(device):
                self.layers = [
                    self.layer(head_dim, cache_config=cache, prefix=f"layers.{i}.attn", **options)
                    for i, options in enumerate(layers)
                ]
        finally:
            torch.set_default_dtype(default)
        context = self.config.compilation_config.static_forward_context
        with set_current_vllm_config(self.config):
            specs = attn_utils.get_kv_cache_spec(self.config)
            groups = get_kv_cache_groups(self.config, specs)
            pool = NUM_BLOCKS * sum(spec.page_size_bytes for spec in specs.values())
            self.cache = get_kv_cache_config_from_groups(self.config, groups, pool)
            self.attn_groups, self.cudagraph_support, block_sizes = attn_utils.init_attn_backend(
                self.cache, self.config, device
            )
            attn_utils.init_kv_cache(context, self.cache, device, block_sizes, self.config)
        for layer in self.layers:  # slots that were never written must not count
            layer.kv_cache.view(torch.uint8).fill_(0xFF)

    def of_model(self) -> dict[str, Any]:
        """More attributes of the model's configuration."""
        return {}

    def layer(self, head_dim: int, **options: Any) -> Any:
        return Attention(HEADS[0], head_dim, head_dim**-0.5, HEADS[1], **options)

    def tensors(self, num_rows: int) -> list[tuple[torch.Tensor, ...]]:
        """Each layer's query, key and value as a fused projection leaves them: side by side in one tensor."""
        dtype, tensors = self.config.model_config.dtype, []
        for layer in self.layers:
            sizes = [HEADS[0] * layer.head_size, HEADS[1] * layer.head_size, HEADS[1] * layer.head_size_v]
            tensors.append(torch.randn(num_rows, sum(sizes), device=self.device).to(dtype).split(sizes, 1))
        return tensors

    def group_of(self, index: int) -> int:
        """The cache group of a layer."""
        names = [group.layer_names for group in self.cache.kv_cache_groups]
        return next(group for group, each in enumerate(names) if f"layers.{index}.attn" in each)

    def metadata(self, batch: Batch, *, for_capture: bool = False, **options: Any) -> dict[str, Any]:
        """What a layer's name stands for in the forward context: the metadata of its group.

        The tables come with a row of no sequence, as vLLM keeps them for the largest batch.
        """
        given = batch.arguments()
        lengths = torch.tensor([seq_len for _, seq_len in batch.lengths])
        return attn_utils.build_attn_metadata(
            self.attn_groups,
            num_reqs=len(batch.lengths),
            num_tokens=batch.num_tokens,
            query_start_loc_gpu=given["cu_seqlens_q"],
            query_start_loc_cpu=given["cu_seqlens_q"].cpu(),
            max_query_len=max(q_len for q_len, _ in batch.lengths),
            seq_lens=given["seq_lens"],
            max_seq_len=int(lengths.max()),
            block_tables=[pad(batch.of_group(i).block_table, (0, 0, 0, 1)) for i in range(len(self.attn_groups))],
            slot_mappings=self._slots(batch),
            kv_cache_config=self.cache,
            seq_lens_cpu_upper_bound=lengths,
            for_cudagraph_capture=for_capture,
            **options,
        )

    def forward(
        self, batch: Batch, metadata: dict[str, Any] | None, tensors: list[tuple[torch.Tensor, ...]]
    ) -> list[torch.Tensor]:
        """Each layer's output [num_tokens + padding_rows, num_q_heads, v_head_dim] of its query, key and value."""
        by_layer = None if metadata is None else attn_utils.build_slot_mappings_by_layer(self._slots(batch), self.cache)
        with torch.no_grad(), set_forward_context(metadata, self.config, slot_mapping=by_layer):
            outs = [layer(*given) for layer, given in zip(self.layers, tensors, strict=True)]
        return [out.unflatten(1, (HEADS[0], -1)) for out in outs]

    def _slots(self, batch: Batch) -> torch.Tensor:
        return torch.stack([batch.of_group(group).slots() for group in range(len(self.attn_groups))])
