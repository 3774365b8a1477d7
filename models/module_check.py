"""Check that transformers' module over a paged cache gives the logits of its own forward without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paged.cache.manager import PagedKvCacheManager
from paged.errors import PagedError, UnsupportedError
from paged.models.cache_sizes import cache_config
from paged.models.generic.config import ModuleConfig
from paged.models.generic.network import ModuleNetwork
from paged.models.generic.split import tp_styles_of
from paged.models.paged_lm import PagedCausalLM
from paged.models.parallel.ranks import Ranks
from paged.step.batch import UnifiedBatchItem, VerifyLogits
from paged.tools.printable import one_line

# Lengths of two prompts in one batch, and unequal chunks of both. The last chunk is one token, like a decode step.
_LENGTHS = (23, 14)
_CHUNKS = ((9, 7), (8, 6), (5, 0), (1, 1))
_BLOCK_SIZE, _NUM_BLOCKS = 16, 16
# Largest accepted difference of logits: well above rounding in float32, and well below the effect of one missing key.
# See models/limits.md.
_TOLERANCE = 2e-4
# Largest module, in bytes, that is copied completely. A larger one is copied with its first layers alone, at least one
# of every kind.
_COPIED_BYTES = 256 << 20


def check_module(config: ModuleConfig, module: Any, device: torch.device, ranks: Ranks) -> None:
    """Run two prompts on a float32 copy, and compare. All ranks call it; rank 0 compares.

    Raises:
        UnsupportedError: logits differ; the message says whether already whole prompts differ, or only chunks.
    """
    config, copy = _float32_copy(config, module)
    copy.to(device)
    prompts = [_prompt(length, seed, config.vocab_size).to(device) for seed, length in enumerate(_LENGTHS)]
    name = config.architecture
    try:
        with torch.no_grad():
            copy.set_attn_implementation("eager")
            expected = [copy(input_ids=prompt[None], use_cache=False).logits[0].float() for prompt in prompts]
            network = ModuleNetwork(config, ranks.share, copy, device)
            network.join(ranks)
            model = _paged_model(network)
            model.network.pack()  # the runs below then fail if other code reads a packed weight
            unchunked = _run(model, prompts, [_LENGTHS])
            chunked = _run(model, prompts, _CHUNKS)
    except PagedError:
        raise
    except Exception as error:  # transformers' code raises any type
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        raise UnsupportedError(f"transformers' {name} fails with a paged cache: {reason}") from error
    if ranks.rank:
        return
    for kind, results in {"whole prompts": unchunked, "prompts in chunks": chunked}.items():
        for logits, all_logits in zip(results, expected, strict=True):
            expected_logits = all_logits[:, : logits.shape[1]]
            largest = expected_logits.abs().max().item()
            difference = (logits - expected_logits).abs().max().item()
            if not difference <= _TOLERANCE * largest:
                raise UnsupportedError(
                    f"{kind} have other logits than without a cache, by {difference:.2g} where the largest is "
                    f"{largest:.2g}: transformers' {name} depends on more than K and V of attention"
                )


def _paged_model(network: ModuleNetwork) -> PagedCausalLM:
    cache = cache_config(
        network.own_config,
        block_size=_BLOCK_SIZE,
        num_blocks=_NUM_BLOCKS,
        dtype=torch.float32,
        device=network.embed_tokens.device,
        max_seq_len=None,
    )
    cache = replace(cache, num_blocks=_NUM_BLOCKS * len(cache.tables))
    return PagedCausalLM(network, PagedKvCacheManager(cache), cuda_graphs=False)


def _run(
    model: PagedCausalLM, prompts: Sequence[torch.Tensor], chunks: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    """Return the logits of every token of the prompts. chunks: numbers of tokens for each step, by prompt."""
    starts = [0] * len(prompts)
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for counts in chunks:
        items, indices = [], []
        for index, count in enumerate(counts):
            if count:
                start = starts[index]
                token_ids = prompts[index][start : start + count].tolist()
                items.append(UnifiedBatchItem(index, token_ids, pos_offset=start, logits_policy=VerifyLogits()))
                indices.append(index)
        for index, logits in zip(indices, model.unified_forward(items), strict=True):
            assert logits is not None
            rows[index].append(logits)
            starts[index] += counts[index]
    model.reset()
    return [torch.cat(prompt_rows) for prompt_rows in rows]


def _float32_copy(config: ModuleConfig, module: Any) -> tuple[ModuleConfig, Any]:
    """Return a copy of the module in float32, with fewer layers if it is large, and its configuration."""
    layers = module.get_submodule(config.layers)
    count = len(layers)
    if sum(parameter.nbytes for parameter in module.parameters()) > _COPIED_BYTES:
        count = _num_layers_of_all_kinds(config, layers)
    names = [f"{config.layers}.{index}." for index in range(count)]
    kept = [index for index, place in enumerate(config.places) if place.startswith(tuple(names))]
    try:
        module.set_submodule(config.layers, nn.ModuleList(layers[:count]))
        copy = deepcopy(module).float()
    finally:
        module.set_submodule(config.layers, layers)
    per_layer: dict[str, Any] = {}
    for name in ("attention", "places", "intermediate_size", "moe", "recurrent", "attends"):
        values = getattr(config, name)
        per_layer[name] = tuple(values[index] for index in kept)
    return replace(config, tp_styles=tp_styles_of(copy), **per_layer), copy


def _num_layers_of_all_kinds(config: ModuleConfig, layers: nn.ModuleList) -> int:
    """Return the number of first layers that include every kind of layer, at least two."""
    kinds = []
    for index, layer in enumerate(layers):
        attention = []
        for place, kind in zip(config.places, config.attention, strict=True):
            if place.startswith(f"{config.layers}.{index}."):
                attention.append(kind)
        modules = [(name, type(part)) for name, part in layer.named_modules()]
        shapes = [(name, parameter.shape) for name, parameter in layer.named_parameters()]
        kinds.append((attention, modules, shapes))
    last_new = max(kinds.index(kind) for kind in kinds)
    return min(max(last_new + 1, 2), len(layers))


def _prompt(length: int, seed: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator)
