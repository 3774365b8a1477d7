"""Problems for every rule of paged attention that is known to go wrong; see `problem`."""

from __future__ import annotations

import torch

from paged.bench.attention.problem import Problem

FP8 = torch.float8_e4m3fn
MIXED = ((1, 1), (1, 15), (1, 16), (1, 17), (5, 18), (40, 40), (0, 9), (33, 70), (3, 3))

PROBLEMS = (
    Problem("mixed batch", MIXED),
    Problem("block size 8", MIXED, block_size=8),
    Problem("block size 24, three heads a group", ((1, 23), (1, 24), (9, 49)), heads=(3, 1), block_size=24),
    Problem("block size 64, head_dim 64", ((1, 130), (70, 70)), head_dim=64, block_size=64),
    Problem("one head a group", ((1, 40), (70, 90)), heads=(2, 2)),
    Problem("five heads a group", ((1, 40), (17, 20)), heads=(5, 1)),
    Problem("seven heads a group", ((2, 40), (17, 20)), heads=(14, 2)),
    Problem("head_dim 80", ((1, 33), (20, 20)), head_dim=80),
    Problem("head_dim 96", ((1, 33), (20, 20)), heads=(2, 1), head_dim=96),
    Problem("head_dim 256", ((1, 33), (5, 37)), heads=(2, 1), head_dim=256),
    Problem("head_dim 8", MIXED[:5], head_dim=8),
    Problem("split decodes", ((1, 1328), (1, 523), (4, 300)), heads=(2, 1)),
    Problem("a split chunk beside short ones", ((17, 2300), (1, 37)), heads=(4, 1)),
    Problem("left window", ((1, 60), (50, 50), (7, 90)), window_size=(16, -1)),
    Problem("left window of itself alone", ((1, 60), (20, 20)), window_size=(0, -1)),
    Problem("wide window", ((1, 200), (70, 200)), window_size=(64, -1)),
    Problem("two-sided window", ((1, 60), (50, 70)), causal=False, window_size=(9, 12)),
    Problem("split window", ((1, 1500), (2, 900)), heads=(2, 1), window_size=(1100, -1)),
    Problem("not causal", MIXED, causal=False),
    Problem("softcap", ((1, 60), (50, 50)), softcap=5.0),
    Problem("own scale", ((1, 60), (50, 50)), softmax_scale=0.7),
    Problem("sinks", ((1, 60), (40, 50), (3, 2), (2, 0)), sinks=True, padding_rows=2),
    Problem("sinks of split sequences", ((1, 1328), (2, 523)), heads=(2, 1), sinks=True, window_size=(900, -1)),
    Problem("ALiBi", ((1, 60), (40, 50)), alibi=True),
    Problem("ALiBi of both sides", ((3, 60), (40, 50)), alibi=True, causal=False, softcap=4.0),
    Problem("causal or not by sequence", ((3, 30), (40, 50), (20, 20), (1, 9)), causal=(True, False, True, False)),
    Problem("tree", ((5, 37), (1, 20), (9, 9), (0, 4)), tree=True, padding_rows=2),
    Problem("tree in a tile of 32", ((5, 37), (8, 20)), tree=True, dtype=torch.float16),
    Problem("verify rows in a tile of 64", ((12, 137), (16, 20), (1, 90)), dtype=torch.float16, sinks=True),
    Problem("large tree", ((70, 130), (20, 40)), heads=(2, 2), tree=True, causal=False, window_size=(50, -1)),
    Problem("scales", ((1, 60), (40, 50)), scales="tensor"),
    Problem("scales of each head", ((1, 60), (40, 50)), scales="head"),
    Problem("fp8 cache", ((1, 60), (40, 50), (5, 18)), cache_dtype=FP8, scales="head"),
    Problem("fp8 cache of a float16 model", ((1, 60), (40, 50)), cache_dtype=FP8, dtype=torch.float16, scales="tensor"),
    # Blocks of 64 keys and more are fetched as boxes, in 16-bit types and fp8.
    Problem("boxes of 64", ((1, 600), (40, 50), (5, 18)), block_size=64, dtype=torch.float16),
    Problem("boxes of 128", ((1, 300), (70, 200), (3, 129)), block_size=128, dtype=torch.float16, head_dim=64),
    Problem("boxes in blocks of 192", ((1, 300), (70, 200)), block_size=192, dtype=torch.float16, layout="head_major"),
    Problem("boxes of padded heads", ((2, 300), (70, 200)), head_dim=80, block_size=128, dtype=torch.float16),
    Problem("boxes of fp8", ((1, 600), (70, 90)), cache_dtype=FP8, block_size=128, dtype=torch.float16, scales="head"),
    Problem("boxes and a window", ((1, 300), (70, 200)), block_size=128, dtype=torch.float16, window_size=(90, -1)),
    Problem("boxes and a tree", ((5, 300), (70, 200)), block_size=128, dtype=torch.float16, tree=True, heads=(8, 2)),
    Problem("boxes, interleaved K and V", MIXED, block_size=64, dtype=torch.float16, layout="interleaved"),
    Problem("deterministic", ((1, 2500), (1, 700), (40, 90)), heads=(2, 1), deterministic=True),
    Problem("queries longer than the keys", ((5, 3), (40, 10), (2, 0), (1, 0))),
    Problem("no sequence", (), padding_rows=3),
    Problem("nothing at all", ()),
    Problem("empty queries alone", ((0, 5), (0, 0)), padding_rows=2),
    Problem("padded rows", ((1, 20), (3, 3), (30, 30)), padding_rows=7),
    Problem("interleaved K and V", MIXED, layout="interleaved"),
    Problem("head-major blocks", MIXED, layout="head_major"),
    Problem("coverage", ((1, 2011), (1, 37), (25, 64)), heads=(1, 1), head_dim=64, coverage=True),
)
