"""vLLM's attention over latents that an indexer chooses (DeepSeek-V3.2) on this project's operations; imports vLLM.

vLLM's indexer writes the chosen positions of every query to a buffer, which is read in place. Prompts no longer than
the number of chosen keys see all of them, so their latents are expanded as in dense layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)

from paged.errors import InvalidInputError
from paged.interop.vllm import E4M3_CACHES, PLAIN_CACHES
from paged.interop.vllm_engine.latents import (
    PACKED_CACHES,
    CachedRequests,
    LatentBuilder,
    LatentImpl,
    PagedMlaBackend,
)


@dataclass(kw_only=True)
class PagedSparseMlaMetadata(SparseMLACommonMetadata):
    """vLLM's metadata of a step. parts: the requests that attend to chosen keys, by their number."""

    parts: dict[int, CachedRequests] = field(default_factory=dict)

    def requests(self, num_tokens: int) -> CachedRequests:
        """Return the requests of the first num_tokens queries: the decodes, or all if prompts choose keys, too."""
        num_reqs, max_query_len = self.num_reqs, self.max_query_len
        if num_tokens == self.num_decode_tokens:
            num_reqs, max_query_len = self.num_decodes, self.decode_max_query_len
        if num_reqs not in self.parts:
            seq_lens: Any = self.seq_lens
            self.parts[num_reqs] = CachedRequests(
                block_table=self.block_table[:num_reqs],
                seq_lens=seq_lens[:num_reqs],
                dcp_tot_seq_lens=None,
                query_start_loc=self.query_start_loc[: num_reqs + 1],
                max_query_len=max_query_len,
                max_seq_len=self.max_seq_len,
            )
        return self.parts[num_reqs]


class PagedSparseMlaBuilder(LatentBuilder, SparseMLACommonMetadataBuilder[PagedSparseMlaMetadata]):
    """Makes `PagedSparseMlaMetadata` by vLLM's rules; verify rows are decodes."""

    metadata_cls = PagedSparseMlaMetadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.topk_mask_workspace = None  # 128 MiB on Blackwell for prompts under a mask, which do not occur here

    def _build_req_id_per_token(self, common_attn_metadata: Any) -> torch.Tensor:
        """Return no ids, which saves a launch: attention here takes positions and the offsets of queries."""
        buffer: torch.Tensor = self.req_id_per_token_buffer
        return buffer[:0]

    def update_draft_decode_metadata(self, metadata: PagedSparseMlaMetadata) -> None:
        """Drop the plans after lengths changed in place, see `PagedMetadataBuilder.update_draft_decode_metadata`."""
        metadata.parts.clear()


class PagedSparseMlaImpl(LatentImpl, SparseMLACommonImpl[PagedSparseMlaMetadata]):
    """Attention of one sparse layer."""

    known_caches: ClassVar[tuple[str, ...]] = PLAIN_CACHES + E4M3_CACHES + tuple(PACKED_CACHES)

    def __init__(
        self,
        *,
        indexer: Any = None,
        topk_indices_buffer: torch.Tensor | None = None,
        index_group_builder: Any = None,
        **named: Any,
    ) -> None:
        """Take vLLM's arguments, see `LatentImpl`.

        index_group_builder is ignored: vLLM's groups share slots of chosen keys, and attention here reads positions.

        Raises:
            InvalidInputError: there is no buffer of chosen positions.
        """
        super().__init__(**named)
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)
        if self.topk_indices_buffer is None:
            raise InvalidInputError("topk_indices_buffer: None, expected the indexer's")
        self.masked_mha_available = False

    def chosen_positions(self) -> torch.Tensor | None:
        return self.topk_indices_buffer  # type: ignore[no-any-return]

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: PagedSparseMlaMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return attention of the first queries of a step to their chosen keys, and no log-sum-exps."""
        num_tokens = len(q[0]) if isinstance(q, tuple) else len(q)
        positions: Any = self.topk_indices_buffer
        requests = attn_metadata.requests(num_tokens)
        chosen = positions[:num_tokens]
        return self.attend_cached(q, kv_c_and_k_pe_cache, requests, layer, causal=True, indices=chosen), None


class PagedSparseMlaBackend(PagedMlaBackend):
    """Declares the sparse backend to vLLM."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*PagedSparseMlaImpl.known_caches]
    get_name = staticmethod(lambda: "PAGED_MLA_SPARSE")
    get_impl_cls = staticmethod(lambda: PagedSparseMlaImpl)
    get_builder_cls = staticmethod(lambda: PagedSparseMlaBuilder)
    is_sparse = classmethod(lambda cls: True)
    supports_non_causal = classmethod(lambda cls: False)
