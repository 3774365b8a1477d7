"""`paged inspect`: checkpoints described without being loaded, and the picture of a cache at work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import huggingface_hub
import pytest
import torch

from paged import LlmExecutor
from paged.executors.command_line import cli
from paged.executors.command_line.cli import RECALL
from paged.models import registry
from paged.models.layers.config import DecoderConfig

Inspect = Callable[..., dict[str, Any]]


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    def run(*arguments: str, code: int = 0) -> dict[str, Any]:
        assert cli.main(["inspect", *arguments, "--json"]) == code
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def edit(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_checkpoint_is_described_as_it_loads(inspect: Inspect, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = LlmExecutor.from_pretrained(RECALL, num_blocks=4, dtype=torch.bfloat16)
    info, manager = executor.info(), executor.kv_manager
    assert manager is not None
    monkeypatch.setattr(registry, "load_network", None)
    found = inspect("--dtype", "bfloat16", "--device-memory", "20MB")
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
    config: DecoderConfig = registry.Qwen3Moe.read_config(registry.HfConfig.read(RECALL))
    cache = registry.cache_config(config, block_size=16)
    num_blocks = registry._num_blocks(cache, torch.bfloat16, torch.device("cuda"), 1024)
    assert found["kv_tokens"] == num_blocks * 16 > 1000
    halved = inspect("--dtype", "bfloat16", "--device-memory", "20MB", "--kv-cache-dtype", "fp8", "--block-size", "8")
    assert halved["kv_bytes_per_token"] * 2 == found["kv_bytes_per_token"]
    assert halved["kv_tokens"] == pytest.approx(2 * found["kv_tokens"], rel=0.01)
    int8 = inspect("--dtype", "bfloat16", "--device-memory", "20MB", "--kv-cache-dtype", "int8")
    share = (info.head_dim + 4) / (2 * info.head_dim)
    assert int8["kv_bytes_per_token"] == share * found["kv_bytes_per_token"]
    assert int8["kv_tokens"] * share == pytest.approx(found["kv_tokens"], rel=0.01)
    assert inspect("--device-memory", "1KB")["kv_tokens"] == 0


def test_sizes_of_memory(inspect: Inspect, capsys: pytest.CaptureFixture[str]) -> None:
    for text, expected in (("141GB", 141 * 10**9), ("1.5 GiB", 3 << 29), ("4096", 4096)):
        assert inspect("--device-memory", text)["device_bytes"] == expected
    for text in ("12XB", "GB", "1.2.3MB", "-1GB"):
        assert cli.main(["inspect", f"--device-memory={text}"]) == 1
        assert "expected a size such as 141GB or 80GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures ['MambaForCausalLM'], known are "),
        ({"hidden_act": "relu6"}, "activation 'relu6'"),
        (
            {"quantization_config": {"quant_method": "aqlm"}},
            "quantization_config: quant_method = 'aqlm' is not supported",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
    ],
)
def test_what_is_not_supported_is_named(
    values: dict[str, Any], reason: str, inspect: Inspect, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(copy, **values)
    found = inspect(str(copy), "--device-memory", "1GB", code=1)
    assert not found["supported"]
    assert reason in found["reason"]
    assert found["num_layers"] == 2
    assert found["parameters"] == 178_432
    assert found["kv_tokens"] is None
    assert cli.main(["inspect", str(copy)]) == 1
    assert f"no: {found['reason']}" in capsys.readouterr().out


def test_without_weights(inspect: Inspect, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters come from the configuration; what is missing is listed."""
    for name in ("model.safetensors", "tokenizer.json"):
        (copy / name).unlink()
    found = inspect(str(copy))
    assert found["missing"] == ["tokenizer.json", "*.safetensors"]
    assert found["parameters"] == 178_432
    assert found["tensors"] == {}
    assert cli.main(["inspect", str(copy)]) == 0
    assert "missing files     tokenizer.json, *.safetensors" in capsys.readouterr().out
    (copy / "config.json").unlink()
    assert cli.main(["inspect", str(copy)]) == 1
    assert "config.json, tokenizer.json, *.safetensors missing" in capsys.readouterr().err


def test_weights_of_the_hub_are_not_downloaded(inspect: Inspect, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(copy)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert inspect("owner/model")["parameters"] == 178_432
    assert "*.json" in asked[0]
    assert "*.safetensors" not in asked[0]


def test_truncated_weights(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert cli.main(["inspect", str(copy)]) == 1
    assert "model.safetensors: missing, unreadable or truncated" in capsys.readouterr().err


def test_picture_of_a_cache(inspect: Inspect, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A block of every kind, and every kind of sequence."""
    file = tmp_path / "cache.svg"
    found = inspect("--cache", "--svg", str(file))
    assert {cell["kind"] for cell in found["cells"]} == {"free", "cached", "own", "shared", "copy"}
    names = [sequence["request_id"] for sequence in found["sequences"]]
    assert names == ["question 1", "question 2", "its fork", "an idle fork", "swapped out"]
    assert [sequence["num_cached_tokens"] for sequence in found["sequences"]][:2] == [48, 48]
    assert found["sequences"][-1]["num_swapped"] == 2
    assert "1 copied on write" in found["summary"]
    assert "its fork" in "".join(ElementTree.parse(file).getroot().itertext())
    assert cli.main(["inspect", "--cache", "--block-size", "8", "--columns", "8"]) == 0
    assert len(capsys.readouterr().out.splitlines()[0].split()) == 9
    for arguments, message in (
        (("--svg", "x.svg"), "only with --cache"),
        (("--cache", "--svg", str(tmp_path / "no" / "x.svg")), "No such file"),
        (("--cache", "--columns", "0"), "expected at least 1"),
    ):
        assert cli.main(["inspect", *arguments]) == 1
        assert message in capsys.readouterr().err


_LOCAL = "sliding_attention"
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 262_144,
    "head_dim": 256,
    "global_head_dim": 512,
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_GEMMA4_SMALL = {
    "sliding_window": 512,
    "max_position_embeddings": 131_072,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
_GEMMA4_LARGE = {
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "max_position_embeddings": 262_144,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}


def _gemma4(layers: int, every: int, hidden: int, intermediate: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "layer_types": ["full_attention" if layer % every == every - 1 else _LOCAL for layer in range(layers)],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


_26B_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}


@pytest.mark.parametrize(
    ("sizes", "options", "billions", "kv_elements", "held_elements"),
    [
        # 15 of 35 layers have K and V, in 3 tables of 6 slots of 512.
        (
            _gemma4(35, 5, 1536, 6144, 8, 1),
            _GEMMA4_SMALL | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True},
            4.63,
            2 * (3 * 512 + 12 * 256),
            3 * 6 * 512,
        ),
        # 24 of 42, in 4 tables of 8 slots of 1,024.
        (
            _gemma4(42, 6, 2560, 10_240, 8, 2),
            _GEMMA4_SMALL | {"num_kv_shared_layers": 18},
            7.46,
            2 * 2 * (4 * 512 + 20 * 256),
            4 * 8 * 1024,
        ),
        # A table of 5 layers that see everything, 9 of 3 others at most.
        (
            _gemma4(30, 6, 2816, 2112, 16, 8),
            _GEMMA4_LARGE | _26B_EXPERTS | {"num_global_key_value_heads": 2},
            25.2,
            2 * (5 * 2 * 512 + 25 * 8 * 256),
            10 * 6 * 2048,
        ),
        # A table of 10 layers that see everything, 10 of 5 others.
        (
            _gemma4(60, 6, 5376, 21_504, 32, 16),
            _GEMMA4_LARGE | {"num_global_key_value_heads": 4},
            30.7,
            2 * (10 * 4 * 512 + 50 * 16 * 256),
            11 * 10 * 4096,
        ),
    ],
    ids=["E2B", "E4B", "26B-A4B", "31B"],
)
def test_gemma_4_as_published(
    sizes: dict[str, Any],
    options: dict[str, Any],
    billions: float,
    kv_elements: int,
    held_elements: int,
    tmp_path: Path,
    inspect: Inspect,
) -> None:
    """The published numbers of parameters are those of text with towers of 0.45 billion in the two small ones."""
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": _GEMMA4 | sizes | options}))
    found = inspect(str(tmp_path))
    assert found["supported"], found["reason"]
    assert found["parameters"] / 1e9 == pytest.approx(billions, rel=2e-3)
    assert found["kv_bytes_per_token"] == 2 * held_elements
    assert kv_elements <= held_elements <= 1.15 * kv_elements
    assert found["num_experts"] == options.get("num_experts")


def test_what_each_of_several_ranks_holds(inspect: Inspect, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect("--tensor-parallel", "2", "--expert-parallel", "--dtype", "bfloat16", "--device-memory", "20MB")
    two, four, eight = found["ranks"][:3]
    assert two["weight_bytes"] < 0.52 * found["weight_bytes"]
    assert 2 * two["kv_bytes_per_token"] == found["kv_bytes_per_token"]
    assert four["kv_bytes_per_token"] == two["kv_bytes_per_token"]  # of one KV head
    assert two["kv_tokens"] > 2 * found["kv_tokens"]
    config: DecoderConfig = registry.Qwen3Moe.read_config(registry.HfConfig.read(RECALL))
    logits = -(-config.vocab_size // 2)
    assert two["sent_bytes"] == (1 + 2 * config.num_layers) * config.hidden_size * 2 + logits * 2
    assert "num_attention_heads 4" in eight["reason"]
    assert inspect("--tensor-parallel", "8", code=1)["supported"]
    assert cli.main(["inspect", "--tensor-parallel", "4", "--bandwidth", "1GB"]) == 0
    row = capsys.readouterr().out.splitlines()[-5]
    assert row.split()[0] == "4"
    assert row.split()[-1] == f"{10**9 // inspect('--tensor-parallel', '4')['ranks'][1]['sent_bytes']:,}"
    for wrong in (("--tensor-parallel", "0"), ("--tensor-parallel", "2", "--bandwidth", "fast")):
        assert cli.main(["inspect", *wrong]) == 1
        assert wrong[-2].removeprefix("--").replace("-", "_")[:9] in capsys.readouterr().err
