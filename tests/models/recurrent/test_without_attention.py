"""Models whose layers all keep a state: blocks hold no K/V, and no size depends on them."""

from pathlib import Path

import pytest
import torch

from paged import InvalidInputError, PagedKvCacheConfig, RecurrentSpec
from paged.models import cache_sizes
from paged.models.registry import load_model, read_model_config
from paged.serving.command_line import cli
from tests.models.families import FAMILIES, save_checkpoint, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mamba2")
    save_checkpoint(FAMILIES["mamba2"], path)
    return path


def test_blocks_take_no_memory(folder: Path) -> None:
    model = load_model(folder, host_cache_bytes=1 << 20, num_swap_blocks=4)
    manager, states = model.kv_manager, model.kv_manager.config.recurrent
    assert states is not None
    stats = manager.stats()
    assert stats.bytes_per_block == 0
    assert stats.num_blocks == states.num_slots * manager.config.blocks_for(model.config.max_seq_len)
    # The whole tier is for states, beside the swapped ones.
    host = manager.tensors.memories[1]
    assert host.num_blocks == states.num_swap_slots + (1 << 20) // stats.bytes_per_state
    model.prefill("a", tokens(40))
    handle = manager.get_handle("a")
    assert handle is not None
    assert len(handle.blocks) == -(-40 // manager.config.block_size)
    with pytest.raises(InvalidInputError, match="layer: 0 has no K/V of its own"):
        manager.k_cache(0)


def test_a_gpu_is_for_states(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks beyond one sequence are bounded, because the host keeps count of them."""
    cache = cache_sizes.cache_config(read_model_config(folder)[1], block_size=16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 40, 1 << 40))
    counts = {}
    for longest in (1 << 10, 1 << 18, 1 << 28):
        counts[longest] = cache_sizes.blocks_that_fit(cache, torch.bfloat16, torch.device("cuda"), longest)
    assert counts == {1 << 10: 64 * 64, 1 << 18: 1 << 20, 1 << 28: 1 << 24}


def test_inspection(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(folder), "--device-memory", "1GB"]) == 0
    out = capsys.readouterr().out
    assert "KV cache          none: a sequence has a state, however long it is\n" in out
    assert "KV per token" not in out


def test_a_cache_holds_something() -> None:
    """Without layers that have K/V there are layers with a state."""
    with pytest.raises(InvalidInputError, match=r"groups: layers .*, expected one or more distinct layers"):
        PagedKvCacheConfig(2, 1, 8, groups=())
    config = PagedKvCacheConfig(2, 1, 8, groups=(), recurrent=RecurrentSpec((0, 1), 8, 4))
    assert (config.has_kv, config.block_bytes(torch.int8), config.token_bytes(torch.float32)) == (False, 0, 0)
