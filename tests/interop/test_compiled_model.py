"""Our models through torch.compile: the whole forward is one graph, and gives the logits of the plain one."""

from itertools import product
from pathlib import Path

import pytest
import torch

from paged.cache.manager import PagedKvCacheManager
from paged.models.layers.attention import HeldCaches
from paged.models.paged_lm import PagedCausalLM
from paged.models.registry import load_model
from paged.step.batch import UnifiedBatchItem
from tests.models.families import FAMILIES, assert_same_logits, save_checkpoint, tokens


def _step(models: tuple[PagedCausalLM, PagedCausalLM], lengths: dict[str, int]) -> None:
    """So many more tokens of every sequence, in one forward of each model."""
    items = []
    for name, length in lengths.items():
        handle = models[0].kv_manager.get_handle(name)
        start = 0 if handle is None else handle.num_tokens
        items.append(UnifiedBatchItem(name, tokens(length, start + length), pos_offset=start))
    for got, want in zip(*(model.unified_forward(items) for model in models), strict=True):
        assert_same_logits(got, want)


THOROUGH = ["gemma4_moe-auto", "gemma4_shared_kv-int8", "gpt_oss-auto", "nemotron-auto"]


@pytest.mark.parametrize("case", ["llama-auto", *(pytest.param(case, marks=pytest.mark.thorough) for case in THOROUGH)])
def test_forward_is_one_graph(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, kind = case.split("-")
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    torch._dynamo.reset()
    save_checkpoint(FAMILIES[family], tmp_path)
    plain, other = (load_model(tmp_path, block_size=8, num_blocks=32, kv_cache_dtype=kind) for _ in range(2))
    network = other.network
    network.forward = torch.compile(network.forward, fullgraph=True, backend="aot_eager")
    compiled = PagedCausalLM(network, PagedKvCacheManager(plain.kv_manager.config))
    models = compiled, plain
    _step(models, {"a": 11, "b": 5, "c": 19})
    _step(models, {"a": 1, "b": 3, "c": 6, "d": 7, "e": 6})
    with torch.compiler.set_stance("fail_on_recompile"):  # steps differ in lengths that the graph does not depend on
        _step(models, {"a": 4, "b": 1, "f": 9})
        _step(models, {"a": 1, "b": 17, "c": 1, "d": 1, "f": 1, "g": 13})
    _step(models, dict.fromkeys("abc", 1))
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [None, torch.float8_e4m3fn, torch.int8])
def test_layers_hold_whole_storages(dtype: torch.dtype | None, tmp_path: Path) -> None:
    """inductor copies a cache that is a part of a larger storage before every write: 2 copies a layer and step."""
    save_checkpoint(FAMILIES["llama"], tmp_path)
    model = load_model(tmp_path, block_size=8, num_blocks=32, kv_cache_dtype=dtype)
    for index, layer in enumerate(model.network.layers):
        manager = model.kv_manager
        attention, (k_scale, v_scale) = layer.self_attn, manager.scales(index)
        pairs = [(attention.k_cache, manager.k_cache(index)), (attention.v_cache, manager.v_cache(index))]
        if dtype == torch.int8:
            pairs += [(attention.k_scale, k_scale), (attention.v_scale, v_scale)]
        for held, given in pairs:
            assert (held.data_ptr(), held.shape, held.stride()) == (given.data_ptr(), given.shape, given.stride())
            assert held.untyped_storage().nbytes() == held.nbytes
            assert given.untyped_storage().nbytes() > given.nbytes


def test_a_held_cache_is_the_memory_that_was_given() -> None:
    """Views that coincide in each subset of storage, offset, shape, strides and dtype: one tensor only if all do."""
    dtypes = (torch.float32, torch.int32, torch.float16)
    storages = [torch.zeros(2, 4, 48).to(dtype) for dtype in dtypes for _ in range(2)]  # 2 slots of 4 blocks
    offsets, shapes = (0, 8, 4 * 48, 4 * 48 + 8), ((4, 2, 1, 4), (4, 2, 1, 6), (4, 2, 2, 4))
    strides = ((48, 8, 8, 1), (48, 16, 8, 1), (48, 8, 4, 1))
    views = [
        storage.as_strided(shape, stride, offset)
        for storage, offset, shape, stride in product(storages, offsets, shapes, strides)
    ]
    caches = HeldCaches()
    held = [caches.of(view) for view in views]
    for cache, view in zip(held, views, strict=True):
        for name in ("data_ptr", "size", "stride"):
            assert getattr(cache, name)() == getattr(view, name)()
        assert cache.dtype == view.dtype
    assert len({*map(id, held)}) == len(views)
    # Views of one slot share a storage of its own; seen again, a view is the same tensor.
    slots = {(cache.untyped_storage().data_ptr(), cache.untyped_storage().nbytes()) for cache in held}
    assert slots == {(slot.data_ptr(), slot.nbytes) for storage in storages for slot in storage}
    for cache, view in zip(held, views, strict=True):
        assert caches.of(view.detach()) is cache
