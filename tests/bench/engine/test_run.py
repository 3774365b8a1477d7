"""The engine's benchmark: what its rows are made of, and that wrong text gets no speed."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paged import SamplingParams
from paged.bench import benchmark
from paged.bench.benchmark import Setting, line
from paged.bench.check import WrongResultError
from paged.bench.engine import conversations, decode, llama_cpp_process, long_prompt, models, quantized, throughput
from paged.bench.engine import run as bench_engine
from paged.bench.engine.beside import check_same_texts
from paged.bench.limits import Ceilings
from paged.cache.tiers import files

pytestmark = pytest.mark.usefixtures("by_pytorch")
CPU = torch.device("cpu")
TINY = models.MODELS["Llama-10M"] | {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 3}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "Llama-tiny", TINY)


def test_overhead_leaves_out_executor_and_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that sleeps does not count: all else takes a small part of its time."""
    slept_s = 0.1
    forward = bench_engine.PagedAttentionExecutor.run

    def slow(self: object, step: object) -> object:
        time.sleep(slept_s)
        return forward(self, step)  # type: ignore[arg-type]

    monkeypatch.setattr(bench_engine.PagedAttentionExecutor, "run", slow)
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=100)
    row = bench_engine.overhead("x", params, Setting(CPU, 5))
    assert 0 < row["detail"]["lowest_us"] <= row["value"] < row["detail"]["with_sampling_us"]
    assert row["detail"]["lowest_us"] < slept_s * 1e6 / 2
    assert row["goals"][0]["met"] == (row["value"] <= 300)


def test_a_clock_stands_in_for_the_device() -> None:
    """Steps are recorded, replayed and read without a device, and each has a gap, of 0 or more."""
    (case,) = (case for case in bench_engine.CASES if case.name == "host_gap.Engine.1.1ms")
    row = case.measure(Setting(CPU, 2))
    assert row["detail"]["host_us"] > 0
    assert 0 <= row["value"] <= row["detail"]["gap_p90_us"]


def test_a_kernel_loaded_late_is_said_beside_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is not built again, as it is where a row of a kernel is measured again."""
    triton = pytest.importorskip("triton")
    step, built = bench_engine.Engine.step, []
    monkeypatch.setattr(long_prompt, "random_executor", lambda *a: built.append(1) or models.random_executor(*a))

    def loading(engine: bench_engine.Engine) -> object:
        if hook := triton.knobs.runtime.jit_post_compile_hook:
            hook(fn=SimpleNamespace(name="_late_kernel"))
        return step(engine)

    monkeypatch.setattr(bench_engine.Engine, "step", loading)
    row = long_prompt.long_prompt("x", "Llama-tiny", None, Setting(CPU, 2))
    assert (row["late_kernels"], len(built)) == ("_late_kernel", 1)
    assert "loaded while timed: _late_kernel" in line(row)


def test_conversations_with_tiers_run_fewer_prompt_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose texts are those without; and a folder that waits longer than it may misses its goal."""
    monkeypatch.setattr(conversations, "_NUM_CONVERSATIONS", 40)
    monkeypatch.setattr(conversations, "_NUM_TURNS", 2)
    monkeypatch.setattr(files, "PATIENCE_S", 0.5)
    row = conversations.conversations("x", "Llama-tiny", Setting(CPU, 2))
    detail, goals = row["detail"], {goal["text"]: goal["met"] for goal in row["goals"]}
    assert 0 < detail["host_prompt_tokens_avoided"] == detail["folder_prompt_tokens_avoided"]
    assert detail["restart_prompt_tokens_avoided"] > detail["folder_prompt_tokens_avoided"]
    assert detail["restart_first_hits"] == conversations._NEW_TOKENS - 1
    assert not goals["at most 50 ms later, slow folder"]
    assert detail["dead_added_most_ms"] > 100


def test_texts_must_agree() -> None:
    texts = [[index, 1] for index in range(20)]
    check_same_texts(texts, [*texts[:18], [0], [1]], 2)
    check_same_texts(texts, [[index, 2] for index in range(20)], 1)
    with pytest.raises(WrongResultError, match="17 of 20"):
        check_same_texts(texts, [*texts[:17], [0], [1], [2]], 2)


def test_throughput_beside_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "_NUM_PROMPTS", 6)
    monkeypatch.setattr(throughput, "_NEW_TOKENS", 3)
    monkeypatch.setattr(throughput, "_ROUNDS", {"cpu": (2, 2)})
    row = throughput.throughput("tiny", 1.0, Setting(CPU, 1))
    detail = row["detail"]
    ratio = min(peer["ratio"] for peer in row["peers"].values())
    assert ratio == pytest.approx(row["value"] / detail["peer_tokens_per_second"])
    assert row["percent"] == pytest.approx(100 * row["bound_us"] / row["median_us"])
    assert row["value"] == pytest.approx(6 * 3 / row["median_us"] * 1e6)
    assert row["goals"][0]["met"] == (ratio >= 1)


@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_decode_against_the_bandwidth(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 64th of the widths, 2 layers, 16 experts: bytes of weights and cache as counted by hand."""
    config = dict(models.MODELS[model], num_hidden_layers=2, vocab_size=512, head_dim=32, num_attention_heads=8)
    config |= {name: config[name] // 64 for name in ("hidden_size", "intermediate_size")}
    config |= {"num_experts": 16, "moe_intermediate_size": 24} if "num_experts" in config else {}
    monkeypatch.setitem(models.MODELS, model, config)
    row = decode.decode_early("decode", model, Setting(CPU, 3), batch=2, context=40, goal=1e6)
    detail, hidden, kv_heads = row["detail"], config["hidden_size"], config["num_key_value_heads"]
    projections = hidden * 32 * (8 + 2 * kv_heads) + 32 * 8 * hidden + 2 * 32 + 2 * hidden
    mlp = 3 * hidden * config["intermediate_size"]
    if "num_experts" in config:
        mlp = hidden * 16 + 3 * 16 * 24 * hidden * (1 - 0.5**2)
    weights = 2 * (projections + mlp) + hidden + 512 * hidden
    bound_gb = row["gb_per_s"] * row["median_us"] / 1e6
    # 40 prompt tokens each, and what was decoded before and during the three steps.
    cache = [2 * tokens * 2 * 2 * kv_heads * 32 for tokens in (40, 50)]
    assert 4 * (weights + cache[0]) <= bound_gb * 1e9 <= 4 * (weights + cache[1])
    assert row["value"] == pytest.approx(2 / row["median_us"] * 1e6)
    assert (detail["sequences"], row["goals"][0]["met"]) == (2, False)


@pytest.mark.parametrize("stretch", [None, 2.0])
def test_long_prompt_is_measured_until_its_first_token(stretch: float | None) -> None:
    """4,096 tokens in steps of 2,048, of which 32 rows decode; paced in many more."""
    row = long_prompt.long_prompt("x", "Llama-tiny", stretch, Setting(CPU, 3))
    assert row["detail"]["steps"] == 3 if stretch is None else 3 < row["detail"]["steps"] < 600
    assert row["value"] >= row["detail"]["median_times_steady"]


_LLAMA_CPP = """
import json, sys

assert sys.argv[2] == "Q4_0"
print(json.dumps({"version": "0", "bytes": 5_000_000, "instructions": "AVX2 FMA"}), flush=True)
for line in sys.stdin:
    print(json.dumps([0.5] * json.loads(line).get("steps", 1)), flush=True)
"""


def test_quantised_steps_take_turns_with_plain_ones_and_llama_cpp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The peer's process is stood in for by a script whose steps take half a second."""
    (tmp_path / "peer.py").write_text(_LLAMA_CPP)
    small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    monkeypatch.setitem(models.MODELS, "Llama-6-layers", models.MODELS["Llama-6-layers"] | small)
    monkeypatch.setattr(quantized.llama_cpp_process, "__file__", str(tmp_path / "peer.py"))
    monkeypatch.setattr(quantized, "PEER_PYTHON", Path(sys.executable))
    quantized._models.cache_clear()
    for module in (benchmark, quantized):
        monkeypatch.setattr(module, "ceilings", lambda *_: Ceilings(copy=1e9, read=2e9, matmul=1e12))
    cases = {case.name: case for case in bench_engine.CASES}
    case = cases["quantized.int4.1"]
    for peer, names in ((None, {"plain"}), ("llama.cpp", {"plain", "llama.cpp Q4_0"})):
        row = case.measure(Setting(CPU, 2, peers=peer))
        assert row["peers"].keys() == names
    assert row["peers"]["llama.cpp Q4_0"]["median_us"] == pytest.approx(5e5)
    assert row["detail"]["peer_weights_mb"] == 5
    assert "llama.cpp Q4_0 (AVX2 FMA)" in line(row)
    read_mb = row["detail"]["weights_mb"] + 32 * 2 * 128 * 2 / 1e6  # keys and values of 32 tokens, and the tied head
    assert row["detail"]["read_mb"] == pytest.approx(read_mb)
    assert row["detail"]["percent_of_read"] == pytest.approx(100 * read_mb / row["median_us"] / 2e9 * 1e12)
    plain = quantized._models("").ours("plain").parameter_bytes() / 1e6
    assert 0 < row["detail"]["weights_mb"] < plain
    row = cases["quantized.prompt.int4.512"].measure(Setting(CPU, 2, peers="llama.cpp"))
    assert row["peers"].keys() == {"plain", "llama.cpp Q4_0"}
    flops = 2 * 512 * (4 * 128 * 128 + 3 * 128 * 256) + 4 * 128 * (512 * 513 // 2)
    assert row["detail"]["percent_of_matmul"] == pytest.approx(100 * flops / row["median_us"] / 1e12 * 1e6)
    quantized._models.cache_clear()


def test_instructions_of_llama_cpp() -> None:
    text = b"CPU : SSE3 = 1 | AVX512 = 0 | AMX_INT8 = 1 | LLAMAFILE = 1 | REPACK = 0 | "
    lib = SimpleNamespace(llama_print_system_info=lambda: text)
    assert llama_cpp_process.instructions(lib) == "SSE3 AMX_INT8 LLAMAFILE"


def test_a_step_reads_the_experts_that_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setitem(models.MODELS, "gpt-oss", models.MODELS["gpt-oss"] | small | {"vocab_size": 128})
    for module in (benchmark, quantized):
        monkeypatch.setattr(module, "ceilings", lambda *_: Ceilings(copy=1e9, read=2e9, matmul=1e12))
    quantized._models.cache_clear()
    [case] = [case for case in bench_engine.CASES if case.name == "quantized.gpt-oss.MXFP4.8"]
    detail = case.measure(Setting(CPU, 2))["detail"]
    of_experts = 4 * 32 * 3 * 64 * 64 * 2  # by PyTorch unpacked to bfloat16
    of_cache = 8 * 32 * 4 * 2 * 64 * 2  # keys and values of 32 tokens
    read_bytes = detail["weights_mb"] * 1e6 - (1 - 4 / 32) ** 8 * of_experts + of_cache
    assert detail["read_mb"] * 1e6 == pytest.approx(read_bytes)
    quantized._models.cache_clear()
