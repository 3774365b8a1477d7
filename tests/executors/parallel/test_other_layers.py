"""Every kind of layer over several processes, each once."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged.batch import UnifiedBatchItem
from tests.executors.parallel.cases import case_id, loaded_case
from tests.executors.parallel.followers import Followers
from tests.models.families import tokens

PROMPT = tokens(40)
# What else layers are made of, each once. Where there are more processes than KV heads, some have the same ones.
OTHERS = [
    ("cohere2", 2, False),
    ("gemma4_moe", 2, True),
    ("gemma4_shared_kv", 2, False),
    ("glm4_moe", 4, True),
    ("gpt_oss", 2, True),
    ("granite_moe_shared", 2, False),
    ("llama4", 2, True),
    ("llama_biases_linear_rope", 4, False),
    ("minimax_m2", 2, True),
    ("minimax_m2", 4, False),
    ("olmo2", 2, False),
    ("olmo3", 4, False),
    ("phi3", 2, False),
    ("qwen2_moe", 2, False),
    ("qwen3_moe", 4, False),
]


@pytest.mark.parametrize("one", OTHERS, ids=case_id)
def test_other_layers(one: tuple[str, int, bool], tmp_path: Path, followers: Followers) -> None:
    with loaded_case(one, tmp_path, followers) as case:
        case.same(UnifiedBatchItem("a", PROMPT[:12]), UnifiedBatchItem("b", PROMPT[:9], is_final_chunk=False))
        case.same(UnifiedBatchItem("a", [5], pos_offset=12), UnifiedBatchItem("b", PROMPT[9:], pos_offset=9))
