"""Recordings of calls: what they hold, when they are made, and that they are made again as they were."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import paged
from paged import CheckpointError, Engine, InvalidInputError, LlmExecutor, SamplingParams
from paged.bench.attention.problem import Problem, call_of, make
from paged.bench.cards.cards import CARDS
from paged.bench.verification.replay import Replay
from paged.kernels.core.dtypes import KV_KINDS
from paged.kernels.core.operation import Bound, watch_calls
from paged.serving.command_line import cli
from paged.serving.command_line.cli import RECALL
from paged.tools.recorder import read_call, record_as_environment_says
from tests.fuzz.kernels.kernel_calls import CALLS
from tests.paged import wrong_store

CPU = torch.device("cpu")


def _without_caches(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if "cache" not in name}


def _tensors(value: Any) -> list[torch.Tensor]:
    parts = [vars(item) if hasattr(item, "__dataclass_fields__") else item for item in value.values()]
    return [leaf for leaf in tree_leaves(parts) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_is_read_as_it_was(name: str, tmp_path: Path) -> None:
    """Arguments of every kind, and results that the reference confirms, as recorded and made again."""
    call = CALLS[name]
    arguments = call.pack(call.arguments())
    before = [tensor.clone() for tensor in _tensors(_without_caches(arguments))]
    with paged.record(tmp_path, [name]):
        CARDS[name].call(arguments)
    (path,) = tmp_path.iterdir()
    recorded = read_call(path, CPU)
    assert (recorded.operation, recorded.arguments.keys()) == (name, arguments.keys())
    assert recorded.about["error"] is None
    assert recorded.about["versions"]["torch"] == torch.__version__
    copies = {key: recorded.arguments[key] for key in arguments}
    for tensor, copy in zip(_tensors(arguments), _tensors(copies), strict=True):
        assert (copy.shape, copy.stride(), copy.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    # Blocks of caches that are not reached are left out.
    for values, copy in zip(before, _tensors(_without_caches(copies)), strict=True):
        assert torch.equal(copy.double().nan_to_num(7), values.double().nan_to_num(7))
    for backend in ("", "torch"):
        results = list(Replay(path, CPU, backend).results())
        assert results
        assert all(result.first_wrong() is None for result in results), backend


@pytest.mark.thorough  # two processes
def test_a_wrong_element_of_an_engine_step_is_the_same_in_a_fresh_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model binds its operations and has recorded its steps; only the first calls of each operation are kept."""
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=64)
    executor.warmup()
    engine = Engine(executor)
    prompt, greedy = [5, 6, 7, 8, 9], SamplingParams(temperature=0, max_tokens=2)
    right = engine.generate([prompt], greedy, progress=False)[0].outputs[0].token_ids
    wrong_store.plant(monkeypatch.setattr)
    with paged.record(tmp_path, ["paged_attention"], max_files=1):
        engine.generate([[*prompt, 10, 11]], greedy, progress=False)
    monkeypatch.undo()
    assert engine.generate([prompt], greedy, progress=False)[0].outputs[0].token_ids == right
    (path,) = tmp_path.iterdir()
    code = "import sys; from tests.paged import wrong_store; {}; from paged.serving.command_line import cli; "
    code += "sys.exit(cli.main(sys.argv[1:]))"
    rows = {}
    for planted in ("wrong_store.plant()", "pass"):
        command = [sys.executable, "-c", code.format(planted), "verify", "--replay", str(path)]
        run = subprocess.run(
            [*command, "--device", "cpu", "--backend", "torch", "--json"], capture_output=True, text=True
        )
        assert run.returncode == 1, run.stderr
        for row in json.loads(run.stdout)["rows"]:
            rows[planted, row["case"]] = row
    as_recorded = rows["pass", "paged_attention as recorded"]
    assert as_recorded["first"].startswith("out[6, 1, 2]: ")
    again = rows["wrong_store.plant()", "paged_attention by torch"]
    assert again["first"].partition(":")[0] == as_recorded["first"].partition(":")[0]
    assert rows["pass", "paged_attention by torch"]["ok"]


@pytest.mark.parametrize("dtype", KV_KINDS, ids=str)
def test_caches_of_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """Their codes are read as they were, and the call is right when it is made again."""
    problem = Problem("", ((2, 9),), head_dim=64, cache_dtype=dtype)
    arguments = call_of(problem, CPU)
    with paged.record(tmp_path, ["paged_attention"]):
        paged.paged_attention(**arguments)
    (path,) = tmp_path.iterdir()
    copies = read_call(path, CPU).arguments
    block = arguments["block_table"][0, 0]
    for name in ("k_cache", "v_cache"):
        cache, copy = arguments[name].view(torch.uint8), copies[name].view(torch.uint8)
        assert copies[name].dtype == dtype
        assert torch.equal(copy[block], cache[block])
    assert all(result.first_wrong() is None for result in Replay(path, CPU, "").results())


def test_which_calls_are_recorded(tmp_path: Path) -> None:
    x, weight = torch.randn(2, 16), torch.ones(16)
    with paged.record(tmp_path / "every", ["rms_norm"], every=3, max_files=2):
        for _ in range(10):
            paged.rms_norm(x, weight)
            paged.silu_and_mul(x)
    names = sorted(path.name for path in (tmp_path / "every").iterdir())
    assert names == [f"rms_norm-{os.getpid()}-{number:06}.safetensors" for number in (0, 3)]
    with paged.record(tmp_path / "failed", failed=True):
        paged.rms_norm(x, weight)
        paged.rms_norm(x / 0, weight)
        with pytest.raises(InvalidInputError):
            paged.rms_norm(x, weight[:3])
    numbers = sorted(path.stem.rpartition("-")[2] for path in (tmp_path / "failed").iterdir())
    assert numbers == ["000001", "000002"]
    (path,) = (tmp_path / "failed").glob("*000002*")
    assert "weight" in read_call(path, CPU).about["error"]
    paged.rms_norm(x, weight)
    assert len(list((tmp_path / "failed").iterdir())) == 2, "it has ended"
    assert Bound.__call__ is Bound.run


def test_blocks_that_are_not_reached_are_left_out(tmp_path: Path) -> None:
    """Of a cache whose last block lies 2^30 elements behind the one before; its strides and the views stay."""
    storage = torch.empty(2**31 + 8 * 32, dtype=torch.float16)
    cache = storage.as_strided((3, 8, 1, 32), (2**30, 32, 32, 1))
    cache.copy_(torch.randn(3, 8, 1, 32))
    lengths = {"block_table": [[2, 99]], "cu_seqlens_q": [0, 2], "seq_lens": [8]}
    call: dict[str, Any] = {name: torch.tensor(each, dtype=torch.int32) for name, each in lengths.items()}
    with paged.record(tmp_path):
        paged.paged_attention(torch.randn(2, 2, 32).half(), cache, cache[..., :16], max_seqlen_q=2, **call)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < 10_000
    arguments = read_call(path, CPU).arguments
    assert arguments["k_cache"].stride() == arguments["v_cache"].stride() == cache.stride()
    assert arguments["k_cache"].data_ptr() == arguments["v_cache"].data_ptr()
    assert all(result.first_wrong() is None for result in Replay(path, CPU, "torch").results())


@pytest.mark.thorough
def test_a_call_is_timed_beside_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that take it: PyTorch's attention a whole prompt, and a candidate. A wrong one gets no time."""
    problem = Problem("", ((20, 20), (20, 20)), heads=(4, 2), head_dim=16, block_size=8)
    with paged.record(tmp_path):
        paged.paged_attention(**vars(make(problem, CPU)), max_seqlen_q=20, softmax_scale=0.25)
    (path,) = tmp_path.iterdir()
    replay = ["bench", "--replay", str(path), "--repeats", "2", "--candidate"]
    assert cli.main([*replay, "tests.bench.wrong_attention:int32_offsets"]) == 0
    printed = capsys.readouterr().out
    for text in ("recorded 20", " us (", "sdpa ", "wrong_attention:int32_offsets "):
        assert text in printed
    assert cli.main([*replay, "tests.bench.wrong_attention:wrong_scale"]) == 1
    assert "elements are wrong" in capsys.readouterr().err


@pytest.mark.thorough
def test_experts_are_timed_beside_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of transformers; a call with an option has none, and says so."""
    pytest.importorskip("transformers")
    x, w1, w2 = torch.randn(3, 16), torch.randn(4, 24, 16), torch.randn(4, 16, 12)
    topk_weights, topk_ids = torch.rand(3, 2), torch.tensor([[0, 2], [1, 0], [3, 1]], dtype=torch.int32)
    with paged.record(tmp_path, ["fused_moe"]):
        for activation in ("silu", "gelu"):
            paged.fused_moe(x, w1, w2, topk_weights, topk_ids, activation=activation)
    timed = {}
    for number in ("000000", "000001"):
        (path,) = tmp_path.glob(f"*-{number}.*")
        assert cli.main(["bench", "--replay", str(path), "--repeats", "2"]) == 0
        timed[number] = capsys.readouterr().out
    assert "transformers_eager " in timed["000000"]
    assert "without vllm: " in timed["000000"]
    assert "without peers: " in timed["000001"]


def test_the_environment_begins_a_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"PAGED_RECORD": str(tmp_path), "PAGED_RECORD_OPS": "rms_norm,silu_and_mul", "PAGED_RECORD_EVERY": "2"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    try:
        record_as_environment_says()
        for _ in range(2):
            paged.rms_norm(torch.randn(2, 16), torch.ones(16))
    finally:
        watch_calls(None)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setenv("PAGED_RECORD_EVERY", "x")
    with pytest.raises(InvalidInputError, match="PAGED_RECORD_EVERY='x': expected a whole number"):
        record_as_environment_says()
    code = "import paged.tools.recorder, paged.kernels.core.operation as o; print(o.are_calls_watched())"
    monkeypatch.delenv("PAGED_RECORD_EVERY")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


def test_what_cannot_be_recorded_or_read_is_refused(tmp_path: Path) -> None:
    for options, error in (
        ({"operations": ["attention"]}, "operations: 'attention' is no operation"),
        ({"every": 0}, "every: 0, expected at least 1"),
        ({"max_files": 0}, "max_files: 0, expected at least 1"),
    ):
        with pytest.raises(InvalidInputError, match=error), paged.record(tmp_path, **options):
            pass
    with pytest.raises(CheckpointError, match="no recorded call"):
        read_call(RECALL / "model.safetensors", CPU)
