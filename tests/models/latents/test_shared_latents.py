"""Layers of Mistral Large 4 that read the latents of another layer."""

from typing import Any

import pytest

from paged.errors import CheckpointError, PagedError, UnsupportedError
from paged.models.cache_sizes import cache_config
from paged.models.loading.hf_config import HfConfig
from paged.models.registry import model_config

LAYERS = {
    "num_hidden_layers": 6,
    "no_rope_layers": [1, 0, 1, 1, 0, 1],
    "kv_source_layers": [0, 1, 0, 3, 1, 3],
    "indexer_types": ["full", "shared", "full", "shared", "full", "shared"],
}


def _config(**change: Any) -> Any:
    values = {"architectures": ["MistralLarge4ForConditionalGeneration"], "text_config": LAYERS | change}
    return model_config(HfConfig(values, "config.json"))[1]


def test_only_layers_with_latents_of_their_own_take_cache() -> None:
    """Indexers have keys in layers of either kind."""
    groups = cache_config(_config()).groups
    assert [(list(group.layers), group.head_dim) for group in groups[:2]] == [([0, 3], 576), ([1], 512)]
    assert list(groups[2].layers) == [6, 8, 10]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv_source_layers": [0, 1, 0]}, CheckpointError, "expected one for each of 6"),
        ({"kv_source_layers": [0, 1, 3, 3, 1, 3]}, CheckpointError, "layer 2 reads layer 3, expected an earlier layer"),
        ({"kv_source_layers": [0, 1, 0, 3, 1, 2]}, CheckpointError, "layer 5 reads layer 2, expected an earlier layer"),
        ({"kv_source_layers": [0, 1, 1, 3, 1, 3]}, UnsupportedError, "layer 2 reads layer 1, .* rotates alike, None"),
        # transformers keeps the latents of layer 3 from there on.
        ({"kv_source_layers": [0, 1, 0, 3, 3, 0]}, UnsupportedError, "layer 4 reads layer 3"),
        ({"kv_source_layers": [0, 1, 2, 2, 1, 0]}, UnsupportedError, "layer 5 reads layer 0, .* rotates alike, 2"),
        ({"no_rope_layers": [0] * 6}, UnsupportedError, "expected a layer that rotates"),
    ],
)
def test_other_sources_are_refused(change: dict[str, Any], error: type[PagedError], message: str) -> None:
    with pytest.raises(error, match=message):
        _config(**change)
