"""Decode steps on a CPU: recordings of numba's loops, and what is said of those that cannot be recorded."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import Engine, EngineConfig, SamplingParams
from paged.errors import InvalidInputError
from paged.executors.llm_executor import LlmExecutor
from paged.kernels.cpu.products import this_cpu
from paged.kernels.cpu.recording import Recording
from paged.models import step_graphs
from paged.models.paged_lm import PagedCausalLM
from paged.models.step_graphs import capture_for
from paged.models.step_threads import StepThreads
from tests.backends import needs_numba
from tests.models.families import FAMILIES, assert_same_logits, save_checkpoint, save_family
from tests.models.stepping import begin, decode, make

CPU = torch.device("cpu")
by_numba = pytest.mark.parametrize("backend", [pytest.param("numba", marks=needs_numba)], indirect=True)


def _assert_recorded(recorded: PagedCausalLM, eager: PagedCausalLM) -> None:
    """Three decode steps of two sequences are repeated from recordings, and give what steps without recordings give."""
    assert recorded.graphs.num_unrecorded == 0
    for model in (recorded, eager):
        begin(model, (7, 3))
    for number in range(3):
        assert_same_logits(decode(recorded, (1, 0), number), decode(eager, (1, 0), number))
    assert recorded.num_graph_replays == 3


@pytest.mark.by_cpu
@by_numba
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_recorded(llama_folder: Path, dtype: torch.dtype, is_packed: bool, backend: str) -> None:
    """Decodes alone, of the sizes that there are by default; drafts run as they do without."""
    recorded, eager = (make(llama_folder, graphs, dtype=dtype) for graphs in (None, False))
    for model in (recorded, eager) if is_packed else ():
        model.pack()
        model.graphs.capture()
    assert recorded.graphs.num_unrecorded == 0
    for model in (recorded, eager):
        begin(model, (7, 3, 12, 1, 18))
    for number, names in enumerate([(4, 1, 0), (0, 1, 2, 3, 4), (3,), *((4, 2, 0),) * 5]):
        expected, before = decode(eager, names, number), recorded.num_graph_replays
        assert_same_logits(decode(recorded, names, number), expected)
        assert recorded.num_graph_replays == before + 1
    with pytest.raises(InvalidInputError, match="token id 128"):
        recorded.decode(3, 128, 3)
    for model in (recorded, eager):
        model.forward_verify(3, [1, 2, 3])
    assert recorded.num_graph_replays == before + 1
    assert_same_logits(decode(recorded, (3, 0), 9), decode(eager, (3, 0), 9))


@pytest.mark.by_cpu
@by_numba
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_products_of_packed_weights_are_recorded(name: str, form: str, tmp_path: Path, backend: str) -> None:
    if name == "qwen3_moe" and (not this_cpu().multiplies_codes or (form == "int8" and this_cpu().has_amx)):
        pytest.skip("experts have a product each")
    save_checkpoint(FAMILIES[name], tmp_path)
    recorded, eager = (make(tmp_path, graphs, quantization=form) for graphs in (None, False))
    recorded.graphs.capture()
    _assert_recorded(recorded, eager)


@pytest.mark.by_cpu
@by_numba
@pytest.mark.parametrize(
    ("formats", "rotation"),
    [
        ("int4,int4", "hadamard"),
        pytest.param("nvfp4,int8", "hadamard_keys", marks=pytest.mark.thorough),
        pytest.param("fp8_per_token_head,fp8", None, marks=pytest.mark.thorough),
    ],
)
def test_writes_of_codes_and_rotated_heads_are_recorded(
    formats: str, rotation: str | None, llama_folder: Path, backend: str
) -> None:
    options = {"dtype": torch.bfloat16, "kv_cache_dtype": tuple(formats.split(",")), "kv_cache_rotation": rotation}
    recorded, eager = (make(llama_folder, graphs, **options) for graphs in (None, False))
    _assert_recorded(recorded, eager)


@pytest.mark.by_cpu
@by_numba
@pytest.mark.thorough
@pytest.mark.parametrize(("name", "form"), [("deepseek_v3", "fp8"), ("deepseek_v32", "fp8"), ("deepseek_v3", "nvfp4")])
def test_writes_of_latents_in_bytes_are_recorded(name: str, form: str, tmp_path: Path, backend: str) -> None:
    """Rows of published sizes, in e4m3, in 656 and in 352 bytes."""
    config = FAMILIES[name]
    config.kv_lora_rank, config.qk_rope_head_dim, config.head_dim = 512, 64, 64
    config.qk_head_dim = config.qk_nope_head_dim + 64
    if name == "deepseek_v32":
        config.index_head_dim = 64
    save_checkpoint(config, tmp_path)
    options = {"dtype": torch.bfloat16, "kv_cache_dtype": form}
    recorded, eager = (make(tmp_path, graphs, **options) for graphs in (None, False))
    _assert_recorded(recorded, eager)


@pytest.mark.by_cpu
@by_numba
@pytest.mark.parametrize(
    "name",
    [
        *("cohere2", "deepseek_v3", "gemma2", "gemma4_moe", "gemma4_shared_kv", "glm4_moe", "gpt_oss"),
        *("hunyuan_v1_dense", "llama4"),
        *("mimo_v2_flash", "minimax_m3", "ministral3", "nemotron_h", "qwen3_moe", "qwen3_next"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("deepseek_v32", "deepseek_v4", "qwen4_exp")),
    ],
)
def test_operations_between_the_kernels_are_recorded(name: str, tmp_path: Path, backend: str) -> None:
    """Layer norms, softcaps, sorting, reads by index, experts; in bfloat16 experts of large steps depend on the CPU."""
    save_family(name, tmp_path)
    recorded, eager = (make(tmp_path, graphs, dtype=torch.bfloat16) for graphs in (None, False))
    for model in (recorded, eager):
        begin(model, (7, 3, 12, 1, 18))
    for number, names in enumerate([(4, 1, 0), (3,), *((4, 2, 0),) * 3]):
        assert_same_logits(decode(recorded, names, number), decode(eager, names, number))
    assert recorded.num_graph_replays == 5


@by_numba
class TestThreads:
    """Recorded steps that take twice as long on two threads, by a clock that stands in."""

    @pytest.fixture
    def counts(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
        """Numbers of threads of the steps."""
        counts: list[int] = []
        repeat_recording = Recording.repeat

        def repeat(recording: Recording) -> bool:
            counts.append(torch.get_num_threads())
            return repeat_recording(recording)

        monkeypatch.setattr(Recording, "repeat", repeat)
        monkeypatch.setattr(step_graphs, "StepThreads", lambda: StepThreads(lambda: 1e-3 * sum(counts)))
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        yield counts
        torch.set_num_threads(before)

    def test_steps_take_the_faster_number(self, llama_folder: Path, backend: str, counts: list[int]) -> None:
        recorded, eager = (make(llama_folder, graphs) for graphs in (None, False))
        for model in (recorded, eager):
            begin(model, (7, 3))
        for number in range(24):
            assert_same_logits(decode(recorded, (0, 1), number), decode(eager, (0, 1), number))
        assert counts == [2] * 8 + [1] * 16

    def test_invariant_steps_keep_their_threads(self, llama_folder: Path, backend: str, counts: list[int]) -> None:
        """As bits of products may depend on them."""
        executor = LlmExecutor.from_pretrained(llama_folder, num_blocks=32)
        executor.warmup(progress=False)
        engine = Engine(executor, EngineConfig(batch_invariant=True), eos_token_ids=())
        engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=24), progress=False)
        assert counts == [2] * 23


@pytest.mark.by_cpu
@by_numba
def test_what_is_not_recorded(
    tmp_path: Path, llama_folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """8-bit latents of 40 numbers, which no numba kernel reads, as a warning says; and all without numba."""
    save_checkpoint(FAMILIES["deepseek_v3"], tmp_path)
    options: dict[str, Any] = {"num_blocks": 8, "max_seq_len": 32}
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    executors = {"torch": LlmExecutor.from_pretrained(llama_folder, **options)}
    with caplog.at_level(logging.WARNING, "paged"):
        executors["torch"].warmup()
        assert "not recorded" not in caplog.text
        monkeypatch.setenv("PAGED_BACKEND", "numba")
        executors["numba"] = LlmExecutor.from_pretrained(tmp_path, **options, kv_cache_dtype="fp8")
        executors["numba"].warmup()
    [warning] = [record for record in caplog.records if "not recorded" in record.getMessage()]
    assert warning.name == "paged"
    assert "they run paged_mla_attention, which no numba kernel computes" in warning.getMessage()
    for name, executor in executors.items():
        begin(executor.model, (3,))
        assert decode(executor.model, (0,), 1).isfinite().all()
        assert executor.status().graph_replays == 0
        count = 8 if name == "numba" else 0  # all sizes that 8 blocks have
        assert executor.status().unrecorded_steps == executor.model.graphs.num_unrecorded == count


@by_numba
def test_what_cannot_be_recorded_is_called_again(backend: str) -> None:
    x, calls = torch.zeros(2), list[list[float]]()
    repeat, obstacle = capture_for(CPU)(lambda: lambda: calls.append(x.add_(1).tolist()))
    assert obstacle == "Tensor.tolist"
    repeat()
    assert calls == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]  # bound, recorded, and called
    added, obstacle = capture_for(CPU)(lambda: lambda: calls.append(x.add_(1)))  # type: ignore[arg-type]
    added()
    assert not obstacle
    assert (x.tolist(), len(calls)) == ([6.0, 6.0], 5)


def test_calls_stand_in_without_numba() -> None:
    calls: list[int] = []
    replay, _ = capture_for(CPU)(lambda: lambda: calls.append(len(calls)))
    replay()
    assert calls == [0, 1]
