"""The KV cache under your own model: reserve, write, attend, commit, share a prefix.

    python examples/cache.py

The "model" is one attention layer with random weights. A second prompt begins like the first one: it finds
the shared blocks in the cache and computes only the rest.
"""

import torch

import paged
from paged import PagedKvCacheConfig, PagedKvCacheManager

NUM_HEADS, HEAD_DIM, VOCAB_SIZE = 4, 32, 1000
torch.manual_seed(0)
embedding = torch.randn(VOCAB_SIZE, NUM_HEADS * HEAD_DIM)
qkv_weight = torch.randn(3 * NUM_HEADS * HEAD_DIM, NUM_HEADS * HEAD_DIM) / 16

manager = PagedKvCacheManager(
    PagedKvCacheConfig(
        num_layers=1, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM, block_size=16, num_blocks=64, device="cpu"
    )
)


def forward(handles: list[paged.KvCacheHandle], new_tokens: list[list[int]]) -> torch.Tensor:
    """One step of any mix of sequences: the last token's attention output of each, [num_seqs, hidden]."""
    pairs = [(handle, len(tokens)) for handle, tokens in zip(handles, new_tokens, strict=True)]
    # Slots for all sequences or none. If the block raises, the reservation is rolled back.
    requests = [paged.KvSlotRequest(handle.cache_id, handle.num_tokens + count) for handle, count in pairs]
    with manager.reserve(requests) as reservation:
        metadata = manager.build_metadata(pairs)
        hidden = embedding[[token for tokens in new_tokens for token in tokens]]
        q, k, v = (hidden @ qkv_weight.T).view(-1, 3, NUM_HEADS, HEAD_DIM).unbind(1)
        k_cache, v_cache = manager.k_cache(0), manager.v_cache(0)
        paged.reshape_and_cache(k, v, k_cache, v_cache, metadata.slot_mapping)
        out = paged.paged_attention(
            q,
            k_cache,
            v_cache,
            block_table=metadata.block_table,
            cu_seqlens_q=metadata.cu_seqlens_q,
            seq_lens=metadata.seq_lens,
            max_seqlen_q=metadata.max_seqlen_q,
            plan=metadata.plan,
        )
        reservation.commit(new_tokens)  # the lengths advance, and full blocks are published with these token ids
    last = metadata.cu_seqlens_q[1:].long() - 1
    return out[last].flatten(1)


prompt = list(range(100, 140))
first = manager.allocate("first", token_ids=prompt)
alone = forward([first], [prompt])

second = manager.allocate("second", token_ids=[*prompt[:32], 7, 8, 9])
assert second.num_cached_tokens == 32
mixed = forward([first, second], [[5], [7, 8, 9]])  # a decode step beside a prompt whose first 32 tokens are cached
print(f"second: {second.num_cached_tokens} tokens from the cache; blocks {first.blocks} and {second.blocks}")

manager.free(second)
fresh = manager.allocate("fresh", namespace="another tenant", token_ids=[*prompt[:32], 7, 8, 9])
assert fresh.num_cached_tokens == 0
torch.testing.assert_close(forward([fresh], [[*prompt[:32], 7, 8, 9]])[0], mixed[1], rtol=1e-4, atol=1e-4)
print("the same result without the cached prefix")
manager.free(first), manager.free(fresh)
manager.check_integrity()
