"""One attention call over a paged KV cache: a prompt, a decode step and a chunk of a longer prompt together.

    python examples/attention.py

Every sequence's result is compared with PyTorch's scaled_dot_product_attention over its keys, gathered by hand.
"""

import torch

import paged

NUM_BLOCKS, BLOCK_SIZE, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 64, 16, 8, 2, 64
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# The cache: [num_blocks, block_size, num_kv_heads, head_dim], filled by earlier steps.
k_cache, v_cache = torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, device=device).unbind(0)

# Three sequences: a whole prompt of 5, a decode step at length 30, and the last 3 tokens of 12.
query_lens, seq_lens = [5, 1, 3], [5, 30, 12]
block_table = torch.tensor([[7, 0], [3, 9], [5, 0]], dtype=torch.int32, device=device)
q = torch.randn(sum(query_lens), NUM_Q_HEADS, HEAD_DIM, device=device)

out = paged.paged_attention(
    q,
    k_cache,
    v_cache,
    block_table=block_table,
    cu_seqlens_q=torch.tensor([0, 5, 6, 9], dtype=torch.int32, device=device),
    seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
    max_seqlen_q=max(query_lens),
)

start = 0
for table, query_len, seq_len in zip(block_table.long(), query_lens, seq_lens, strict=True):
    keys, values = (cache[table].flatten(0, 1)[:seq_len].transpose(0, 1) for cache in (k_cache, v_cache))
    queries = q[start : start + query_len].transpose(0, 1)
    visible = torch.ones(query_len, seq_len, dtype=torch.bool, device=device).tril(seq_len - query_len)
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], visible, enable_gqa=True
    )
    torch.testing.assert_close(out[start : start + query_len], expected[0].transpose(0, 1), rtol=1e-4, atol=1e-4)
    print(f"{query_len} queries over {seq_len} keys: agree with PyTorch")
    start += query_len
