"""Processes that load a model together: all hold the same, and one that stalls is given up."""

import json
import os
import signal
import struct
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import copytree
from time import monotonic, sleep
from typing import Any

import pytest
import torch.distributed as dist

from paged import CheckpointError, InvalidInputError, LlmExecutor, ParallelConfig, RankFailedError
from paged.executors import llm_executor
from paged.models import cache_sizes
from paged.models.parallel import fingerprint
from paged.models.parallel.ranks import Ranks
from paged.step.batch import UnifiedBatch, UnifiedBatchItem
from tests.deadline import HANG_S
from tests.executors.parallel.followers import OPTIONS, Followers
from tests.models.families import FAMILIES, save_checkpoint, tokens
from tests.models.lora.folders import Adapter


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loading") / "base"
    save_checkpoint(FAMILIES["llama"], folder)
    Adapter(["q_proj", "o_proj"], seed=1).save(folder.parent / "adapter", folder)
    return folder


def _set(key: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = next(file for file in (folder / "config.json", folder / "adapter_config.json") if file.exists())
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))

    return change


def _flip(at: str, name: str = "") -> Callable[[Path], None]:
    """Change a tensor: its first byte, its last or half of all."""

    def change(folder: Path) -> None:
        (file,) = folder.glob("*.safetensors")
        data = bytearray(file.read_bytes())
        (size,) = struct.unpack("<Q", data[:8])
        entries = json.loads(data[8 : 8 + size])
        begin, end = entries[name or max(set(entries) - {"__metadata__"})]["data_offsets"]
        quarter = (end - begin) // 4
        bounds = {"first": (begin, begin + 1), "last": (end - 1, end), "middle": (begin + quarter, end - quarter)}
        for index in range(*bounds[at]):
            data[8 + size + index] ^= 1
        file.write_bytes(data)

    return change


def _longer_header(folder: Path) -> None:
    """The same tensors in a file of another size."""
    (file,) = folder.glob("*.safetensors")
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    file.write_bytes(struct.pack("<Q", size + 8) + data[8 : 8 + size] + b" " * 8 + data[8 + size :])


def _order_other(
    followers: Followers, monkeypatch: pytest.MonkeyPatch, folder: Path, other: Path, **options: Any
) -> LlmExecutor:
    """Let the others load a folder, and this process another one, or the same with other options."""
    load = LlmExecutor.from_pretrained
    monkeypatch.setattr(LlmExecutor, "from_pretrained", lambda _, **given: load(other, **given | options))
    return followers.order(folder, 2, {"timeout_s": HANG_S}, OPTIONS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}), "rope_parameters"),
        (_set("rms_norm_eps", 1e-3), "rms_norm_eps"),
        (_set("unread_by_anyone", None), "names of settings and tensors"),
        (_flip("first", "model.norm.weight"), "model.norm.weight"),
        (_flip("middle", "model.layers.1.mlp.down_proj.weight"), "model.layers.1.mlp.down_proj.weight"),
        (_flip("last", "model.embed_tokens.weight"), "model.embed_tokens.weight"),
        (_longer_header, r"[\w.]*weight"),
    ],
    ids=["rope", "norm", "key", "first", "middle", "last", "size"],
)
def test_other_checkpoints(
    change: Callable[[Path], None],
    named: str,
    followers: Followers,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(copytree(llama, tmp_path / "other"))
    with pytest.raises(InvalidInputError, match=rf"^{named}: ranks \[1\] have other values than"):
        _order_other(followers, monkeypatch, llama, tmp_path / "other")
    assert ": ranks [0] have other values than" in followers.answers(2)[0]


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"block_size": 16}, {"num_blocks": 65}, {"max_seq_len": 40}],
)
def test_other_options(
    options: dict[str, Any], followers: Followers, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInputError, match=r"^options: ranks \[1\]"):
        _order_other(followers, monkeypatch, llama, llama, **options)
    assert followers.answers(2)[0].startswith("InvalidInputError: options: ranks [0]")


def test_what_ranks_choose_by_themselves(followers: Followers, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions, and a block size that depends on the device."""
    monkeypatch.setattr(fingerprint.paged, "__version__", "0.0.0")
    with pytest.raises(InvalidInputError, match=r"^paged: ranks \[1\] have other values than '0.0.0'"):
        followers.order(llama, 2, {}, OPTIONS)
    followers.answers(2)
    monkeypatch.undo()
    monkeypatch.setattr(cache_sizes, "default_block_size", lambda arch: 64)
    with pytest.raises(InvalidInputError, match=r"^the cache's options: ranks \[1\]"):
        followers.order(llama, 2, {}, {"num_blocks": 64})
    followers.answers(2)


def test_a_rank_that_cannot_read_its_files(
    followers: Followers, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        _order_other(followers, monkeypatch, llama, tmp_path)
    assert followers.answers(2)[0].startswith("RankFailedError: rank 1 of 2 cannot go on: ranks [0] failed")


def _load_other(load: Callable[..., Any], other: Path, model: Any, name: str, path: Path) -> Any:
    return load(model, name, other)


def test_other_adapters(followers: Followers, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on machines of their own have other files under one path; all refuse, and the next adapter loads."""
    adapter, load = llama.parent / "adapter", llm_executor.load_adapter
    with followers.load(llama, 2, **OPTIONS) as spread:
        for number, change in enumerate((_set("lora_alpha", 3), _flip("middle"))):
            other = copytree(adapter, tmp_path / str(number))
            change(other)
            monkeypatch.setattr(llm_executor, "load_adapter", partial(_load_other, load, other))
            with pytest.raises(InvalidInputError, match=r"ranks \[1\] have other values"):
                spread.load_lora("one", adapter)
            assert spread.list_loras() == ()
        monkeypatch.setattr(llm_executor, "load_adapter", load)
        spread.load_lora("one", adapter)
        assert spread.list_loras() == ("one",)


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_ten_models_in_turn(backend: str | None, mortals: Followers, llama: Path) -> None:
    """Over torchrun's environment, or over the caller's default group, which stays."""
    with mortals.invite(
        llama, 2, {"timeout_s": HANG_S}, OPTIONS, times=10, **({"backend": backend} if backend else {})
    ):
        if backend:
            dist.init_process_group(backend)
        batch, rows = UnifiedBatch([UnifiedBatchItem("a", tokens(9))]), []
        for _ in range(10):
            executor = LlmExecutor.from_pretrained(
                llama, parallel=ParallelConfig(tensor_parallel_size=2, timeout_s=HANG_S), **OPTIONS
            )
            rows += executor.unified_decode(batch)
            executor.shutdown()
            assert dist.is_initialized() == bool(backend)
    assert mortals.answers(2) == ["served"]
    if backend:
        dist.destroy_process_group()
    assert all(row.equal(rows[0]) for row in rows)


def _at_tick(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[Ranks], object]) -> None:
    """Do something once while this process loads."""
    ticks, tick = iter(range(10**6)), Ranks.tick

    def ticking(ranks: Ranks) -> None:
        if next(ticks) == number:
            act(ranks)
        tick(ranks)

    monkeypatch.setattr(Ranks, "tick", ticking)


@pytest.mark.parametrize("number", [2, 30], ids=["comparing", "loading"])
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.thorough
def test_another_that_is_lost_while_it_loads(
    sign: signal.Signals, number: int, mortals: Followers, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has ended is noticed long before `timeout_s`, one that stands still after it."""
    timeout_s = 8.0 if sign is signal.SIGSTOP else 2 * HANG_S
    _at_tick(monkeypatch, number, lambda _: os.kill(mortals.processes[0].pid, sign))
    began = monotonic()
    with pytest.raises(RankFailedError, match="rank 0 of 2 cannot go on: another rank has ended, or did not answer"):
        mortals.order(llama, 2, {"timeout_s": timeout_s}, OPTIONS)
    assert sign is signal.SIGSTOP or monotonic() - began < timeout_s / 2


@pytest.mark.thorough
def test_this_one_that_stalls_while_it_loads(
    followers: Followers, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process lives, and answers; the others give it up, and it learns so."""

    def stall(ranks: Ranks) -> None:
        watches = [thread for thread in threading.enumerate() if thread.name == "paged-ranks-apart"]
        assert len(watches) == 1
        watches[0].join(HANG_S)

    _at_tick(monkeypatch, 30, stall)
    with pytest.raises(RankFailedError, match=r"ranks \[0\] made no progress in 6 s"):
        followers.order(llama, 2, {"timeout_s": 6.0}, OPTIONS)
    assert "cannot go on" in followers.answers(2)[0]


@pytest.mark.thorough  # as it takes longer than a timeout that no busy machine exceeds
def test_a_slow_rank_is_waited_for(followers: Followers, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice it reads 20 tensors, which take longer than the timeout, each of them a fifteenth of it."""
    timeout_s, tick, num_ticks = 5.0, Ranks.tick, 0

    def slow_tick(ranks: Ranks) -> None:
        nonlocal num_ticks
        num_ticks += 1
        sleep(timeout_s / 15)
        tick(ranks)

    monkeypatch.setattr(Ranks, "tick", slow_tick)
    followers.order(llama, 2, {"timeout_s": timeout_s}, OPTIONS).shutdown()
    assert followers.answers(2) == ["served"]
    assert num_ticks > 2 * 15


@pytest.mark.thorough  # waits for a limit of time
def test_another_that_never_comes(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for as long as the caller says, not as long as by default."""
    began = monotonic()
    with (
        Followers(0).invite(llama, 2, {}, {}),
        pytest.raises(RankFailedError, match="not all processes joined in 1 s"),
    ):
        LlmExecutor.from_pretrained(llama, parallel=ParallelConfig(tensor_parallel_size=2, timeout_s=1.0))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(InvalidInputError, match="neither a default process group nor torchrun's environment"):
        LlmExecutor.from_pretrained(llama, parallel=ParallelConfig(tensor_parallel_size=2))
    assert monotonic() - began < ParallelConfig().timeout_s
