"""`paged inspect`: checkpoints described without being loaded, and the picture of a cache at work."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import paged
from paged import LlmExecutor
from paged.models import cache_sizes, registry
from paged.models.registry import known_architectures
from paged.serving.command_line import cli
from paged.serving.command_line.cli import RECALL
from tests.deadline import HANG_S
from tests.models.edits import edit_config

Inspect = Callable[..., dict[str, Any]]
PARAMETERS = 178_432  # of the bundled checkpoint


def test_a_checkpoint_is_described_as_it_loads(inspect: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=4, dtype=torch.bfloat16)
    info, manager = executor.info(), executor.kv_manager
    monkeypatch.setattr(registry, "load_network", None)
    small = ("--dtype", "bfloat16", "--device-memory", "20MB")
    found = inspect(*small)
    assert found["supported"]
    assert found["missing"] == []
    assert found["parameters"] == sum(found["tensors"].values()) == info.num_parameters
    assert found["weight_bytes"] == 2 * info.num_parameters
    assert found["kv_bytes_per_token"] * 16 == manager.stats().bytes_per_block
    sizes = (found["num_layers"], found["num_attention_heads"], found["num_kv_heads"], found["head_dim"])
    assert sizes == (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim)
    assert found["max_seq_len"] == info.max_sequence_length

    # As many blocks as the loader takes on a GPU with so much memory left.
    free = 20_000_000 - found["weight_bytes"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 20_000_000))
    _, config = registry.read_model_config(RECALL)
    cache = cache_sizes.cache_config(config, block_size=16)
    num_blocks = cache_sizes.blocks_that_fit(cache, torch.bfloat16, torch.device("cuda"), 1024)
    assert found["kv_tokens"] == num_blocks * 16 > 1000
    int8_share = (info.head_dim + 4) / (2 * info.head_dim)
    for share, options in ((0.5, ("fp8", "--block-size", "8")), (int8_share, ("int8",))):
        smaller = inspect(*small, "--kv-cache-dtype", *options)
        assert smaller["kv_bytes_per_token"] == share * found["kv_bytes_per_token"]
        assert smaller["kv_tokens"] * share == pytest.approx(found["kv_tokens"], rel=0.01)
    assert inspect("--device-memory", "1KB")["kv_tokens"] == 0


def test_a_cache_folder_is_verified(
    run: Inspect, inspect: Inspect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of a prompt: the second finds the files of the first."""
    monkeypatch.setattr("paged.cache.tiers.files.PATIENCE_S", HANG_S)  # however busy the machine is
    folder = tmp_path / "cache"
    command = ("generate", "--prompt", "7 3 9 1 " * 12, "--max-new-tokens", "2", "--device", "cpu")
    tiers = ("--host-cache", "1MiB", "--cache-folder", str(folder), "--cache-folder-limit", "64MiB")
    answers, computed = [], []
    for options in ((), tiers, tiers):
        found = run(*command, *options)
        answers.append(found["answers"])
        computed.append(found["summary"]["prefill_tokens"])
    assert answers[0] == answers[1] == answers[2]
    assert computed[0] == computed[1] > computed[2]
    ((digest, counts),) = inspect("--cache-folder", str(folder))["digests"].items()
    assert counts["tokens"] == 16 * counts["blocks"] >= computed[0] - computed[2]
    damaged = next((folder / digest).iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert list(inspect("--cache-folder", str(folder), code=1)["damaged"]) == [str(damaged)]
    pipe, large, link = (damaged.with_name(f"{letter * 64}-0.kv") for letter in "abc")
    os.mkfifo(pipe)
    large.touch()
    os.truncate(large, 1 << 40)
    link.symlink_to("/dev/zero")
    (folder / digest / "other.kv").touch()
    (folder / digest / f"{damaged.name}.12.part").touch()
    expected = {str(path) for path in (damaged, pipe, large, link)}
    assert inspect("--cache-folder", str(folder), code=1)["damaged"].keys() == expected
    for options in (("--host-cache", "many"), ("--cache-folder", str(damaged)), ("--cache-folder-limit", "1GB")):
        assert "cache" in run(*command, *options, code=1)["error"]


def test_sizes_of_memory(inspect: Inspect) -> None:
    for text, expected in (("141GB", 141 * 10**9), ("1.5 GiB", 3 << 29), ("4096", 4096)):
        assert inspect("--device-memory", text)["device_bytes"] == expected
    for text in ("12XB", "GB", "1.2.3MB", "-1GB"):
        error = inspect(f"--device-memory={text}", code=1)["error"]
        assert "expected a size such as 141GB or 80GiB" in error


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures ['MambaForCausalLM'] are unknown; unlike"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ],
)
def test_what_is_not_supported_is_named(values: dict[str, Any], reason: str, inspect: Inspect, copy: Path) -> None:
    config = copy / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
    found = inspect(str(copy), "--device-memory", "1GB", code=1)
    assert not found["supported"]
    assert reason in found["reason"]
    assert len(found["reason"]) < 300
    assert (found["num_layers"], found["parameters"], found["kv_tokens"]) == (2, PARAMETERS, None)


def test_architectures_are_listed(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    """And those of a module of one's own, which the command imports from the current folder."""
    assert cli.main(["inspect", "--architectures"]) == 0
    assert capsys.readouterr().out.split() == sorted(known_architectures())
    edit_config(copy, architectures=["MyQwen3MoeForCausalLM"])
    assert cli.main(["inspect", str(copy)]) == 1
    assert "are unknown; " in (out := capsys.readouterr().out)
    assert "closest: Qwen3MoeForCausalLM" in out
    code = "ARCHITECTURES['MyQwen3MoeForCausalLM'] = ARCHITECTURES['Qwen3MoeForCausalLM']"
    (copy / "my_models.py").write_text(f"from paged.models.registry import ARCHITECTURES\n{code}")
    command = [sys.executable, "-m", "paged", "generate", ".", "--prompt", "wren: kite; wren:"]
    environment = {**os.environ, "PYTHONPATH": str(Path(paged.__file__).parents[1])}
    run = partial(subprocess.run, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    answer = run([*command, "--import", "my_models"])
    assert (answer.returncode, "kite" in answer.stdout) == (0, True)
    assert "No module named 'no_models'" in run([*command, "--import", "no_models"]).stderr


def test_without_weights(inspect: Inspect, copy: Path) -> None:
    """Parameters come from the configuration; what is missing is listed."""
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "model.safetensors: missing, unreadable or truncated" in inspect(str(copy), code=1)["error"]
    for file in (weights, copy / "tokenizer.json"):
        file.unlink()
    found = inspect(str(copy))
    assert found["missing"] == ["tokenizer.json", "*.safetensors"]
    assert (found["parameters"], found["tensors"]) == (PARAMETERS, {})
    (copy / "config.json").unlink()
    assert "config.json, tokenizer.json, *.safetensors missing" in inspect(str(copy), code=1)["error"]


def test_picture_of_a_cache(inspect: Inspect, tmp_path: Path) -> None:
    """A block of every kind, and every kind of sequence."""
    file = tmp_path / "cache.svg"
    found = inspect("--cache", "--svg", str(file))
    assert {cell["kind"] for cell in found["cells"]} == {"free", "cached", "own", "shared", "copy"}
    names = [sequence["request_id"] for sequence in found["sequences"]]
    assert names == ["question 1", "question 2", "its fork", "an idle fork", "swapped out"]
    assert [sequence["num_cached_tokens"] for sequence in found["sequences"]][:2] == [48, 48]
    assert found["sequences"][-1]["num_swapped"] == 2
    assert "its fork" in "".join(ElementTree.parse(file).getroot().itertext())


def test_what_each_of_several_ranks_holds(inspect: Inspect) -> None:
    found = inspect("--tensor-parallel", "2", "--expert-parallel", "--dtype", "bfloat16", "--device-memory", "20MB")
    two, four, eight = found["ranks"][:3]
    assert two["weight_bytes"] < 0.52 * found["weight_bytes"]
    assert 2 * two["kv_bytes_per_token"] == found["kv_bytes_per_token"]
    assert four["kv_bytes_per_token"] == two["kv_bytes_per_token"]  # of one KV head
    assert two["kv_tokens"] > 2 * found["kv_tokens"]
    _, config = registry.read_model_config(RECALL)
    logits = -(-config.vocab_size // 2)
    assert two["sent_bytes"] == (1 + 2 * config.num_layers) * config.hidden_size * 2 + logits * 2
    assert "num_attention_heads 4" in eight["reason"]
    assert inspect("--tensor-parallel", "8", code=1)["supported"]
    assert "tensor_parallel" in inspect("--tensor-parallel", "0", code=1)["error"]
