"""Latent attention of any sizes, equal or not: caches and heads are told apart by more than their sizes."""

import random
from pathlib import Path

import pytest

from paged.models.registry import load_model
from tests.models.families import FAMILIES, Case, assert_same_logits, forward, save_checkpoint, tokens

KEYS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank")
SIZES = (16, 32, 48)
INDEXED = ("deepseek_v32", "glm_moe_dsa")
OTHERS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


def _drawn(seed: int) -> dict[str, int]:
    """Random sizes; the first seeds make all of them equal."""
    rng = random.Random(seed)
    if seed < len(SIZES):
        return dict.fromkeys((*KEYS, "index_head_dim"), SIZES[seed])
    sizes = {key: rng.choice(SIZES) for key in KEYS}
    rotated = sizes["qk_rope_head_dim"]
    return sizes | {"index_head_dim": rng.choice([size for size in (*SIZES, 64) if size >= rotated])}


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *((name, seed) for name in INDEXED for seed in (0, 1, 5)),
        *((name, 0) for name in OTHERS),
        *(pytest.param(name, seed, marks=pytest.mark.thorough) for name in INDEXED for seed in range(6, 40)),
        *(pytest.param(name, seed, marks=pytest.mark.thorough) for name in OTHERS for seed in range(1, 12)),
    ],
)
def test_random_sizes_give_transformers_logits(name: str, seed: int, tmp_path: Path) -> None:
    """Chunks, a batch and decodes of two sequences."""
    sizes = _drawn(seed)
    config = FAMILIES[name]
    vars(config).update({key: size for key, size in sizes.items() if hasattr(config, key)})
    config.head_dim = sizes["qk_rope_head_dim"]
    config.qk_head_dim = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
    case = Case(save_checkpoint(config, tmp_path), load_model(tmp_path, block_size=8, num_blocks=48))
    first, second = tokens(27, seed), tokens(22, seed + 1)
    spans = [
        {"a": (0, 13)},
        {"a": (13, 25), "b": (0, 20)},
        {"b": (20, 21), "a": (25, 26)},
        {"a": (26, 27), "b": (21, 22)},
    ]
    texts = {"a": first, "b": second}
    for batch in spans:
        chunks = {sequence: texts[sequence][slice(*span)] for sequence, span in batch.items()}
        for (sequence, (_, end)), logits in zip(batch.items(), forward(case.ours, chunks), strict=True):
            assert_same_logits(logits, case.expected(texts[sequence][:end])[-1])
