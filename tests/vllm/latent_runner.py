"""A model of layers over latents, stepped as `runner.Runner` steps plain attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.v1.worker.gpu import attn_utils

from tests.vllm.runner import Batch, Runner

NUM_HEADS, NOPE, V_DIM = 3, 24, 40
NUM_DRAFTS, TOP_K = 4, 24


class LatentRunner(Runner):
    """vLLM's layers over latents of `rank` numbers and 64 rotated dimensions.

    up: float64 [rank, NUM_HEADS, NOPE + V_DIM], a layer's expansion of latents to keys and values.
    chosen: int32 [rows, TOP_K], what vLLM's indexer would write.
    """

    backend = "PAGED_MLA"
    rope = 64

    def __init__(self, device: torch.device, *, rank: int = 256, **options: Any) -> None:
        self.rank = rank
        self.chosen = torch.full((128, TOP_K), -1, dtype=torch.int32, device=device)
        super().__init__(device, **options)
        for layer in self.layers:
            weight = layer.kv_b_proj.weight
            weight.data.copy_(torch.randn(weight.shape) * self.rank**-0.5)
            layer.process_weights_after_loading(self.config.model_config.dtype)
            layer._k_scale.fill_(0.5)
            layer._k_scale_float = 0.5

    def of_model(self) -> dict[str, Any]:
        size = self.rank + self.rope
        sizes = {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": self.rope, "v_head_dim": V_DIM}
        sizes |= {"q_lora_rank": None, "kv_lora_rank": self.rank, "index_topk": TOP_K}
        # Verify rows are decodes up to the number of drafts and one.
        self.config.speculative_config = SimpleNamespace(
            num_speculative_tokens=NUM_DRAFTS, parallel_drafting=False, enable_adaptive_verification=False, method=None
        )
        return {
            "hf_text_config": SimpleNamespace(**sizes),
            "get_head_size": lambda: size,
            "get_num_attention_heads": lambda parallel_config: NUM_HEADS,
            "model_arch_config": SimpleNamespace(total_num_attention_heads=NUM_HEADS),
        }

    def layer(self, head_dim: int, **options: Any) -> MLAAttention:
        up = ReplicatedLinear(self.rank, NUM_HEADS * (NOPE + V_DIM), bias=False)
        sizes = {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": self.rope, "v_head_dim": V_DIM}
        sizes |= {"q_lora_rank": None, "kv_lora_rank": self.rank}
        if "SPARSE" in self.backend:
            options |= {"use_sparse": True, "topk_indices_buffer": self.chosen}
        return MLAAttention(NUM_HEADS, (NOPE + self.rope) ** -0.5, **sizes, kv_b_proj=up, **options)

    def up(self, index: int) -> torch.Tensor:
        weight = self.layers[index].kv_b_proj.weight.detach().cpu().double()
        return weight.T.unflatten(1, (NUM_HEADS, NOPE + V_DIM))

    def tensors(self, num_rows: int) -> list[tuple[torch.Tensor, ...]]:
        """Each layer's queries, latents and rotated dimensions; the last two side by side in one tensor."""
        dtype, tensors = self.config.model_config.dtype, []
        for _ in self.layers:
            q = torch.randn(num_rows, NUM_HEADS, NOPE + self.rope, device=self.device).to(dtype)
            rows = torch.randn(num_rows, self.rank + self.rope, device=self.device).to(dtype)
            latent, rope = rows.split((self.rank, self.rope), 1)
            tensors.append((q, latent, rope.unsqueeze(1)))
        return tensors

    def forward(
        self, batch: Batch, metadata: dict[str, Any] | None, tensors: list[tuple[torch.Tensor, ...]]
    ) -> list[torch.Tensor]:
        """Each layer's output [num_tokens + padding_rows, NUM_HEADS, V_DIM]."""
        by_layer = attn_utils.build_slot_mappings_by_layer(self._slots(batch), self.cache)
        outs = []
        with torch.no_grad(), set_forward_context(metadata, self.config, slot_mapping=by_layer):
            for layer, rows in zip(self.layers, tensors, strict=True):
                out = layer(*rows, output_shape=torch.Size((len(rows[0]), NUM_HEADS * V_DIM)))
                outs.append(out.unflatten(1, (NUM_HEADS, V_DIM)))
        return outs
