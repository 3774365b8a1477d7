"""Steps replayed from graphs whose memory is poisoned before every replay: the logits that they should have."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.errors import UnsupportedError
from paged.kernels.sampling.sample_tokens import sample_tokens
from paged.models.loading.load_options import LoadOptions
from paged.models.loading.weights import untracked
from paged.models.paged_lm import PagedCausalLM
from paged.models.parallel.ranks import Ranks
from paged.models.parallel.share import Share
from paged.models.registry import _load, load_model
from paged.step.batch import DrawToken, FullLogits, GreedyArgmax, LogitsPolicy, UnifiedBatchItem, VerifyLogits
from tests.emulated_device.emulator.device import EmulatedCuda
from tests.models.families import FAMILIES, Case, assert_same_logits, save_checkpoint, tokens
from tests.models.generic.test_modules import ALL
from tests.models.lora.folders import Adapter
from tests.tolerance import assert_within

SIZES: dict[str, Any] = {"device": "cuda", "block_size": 4, "num_blocks": 16, "max_seq_len": 32}
LENGTHS = (7, 3)
# Windows, sinks and experts with biases.
ALWAYS = ("gpt_oss",)
# The layers of other families are among theirs.
REPLAYED = (
    *("cohere", "ernie4_5_moe", "falcon_h1", "gemma3", "gemma4_moe", "gemma4_shared_kv", "glm4_moe"),
    *(
        "glm_moe_dsa",
        "deepseek_v4",
        "gpt_oss",
        "granite_moe_hybrid",
        "hunyuan_moe",
        "hy_v4",
        "laguna",
        "lfm2_moe",
        "llama4",
        "mamba2",
        "mimo_v2_flash",
        "minicpm3",
        "minimax_m2",
        "minimax_m3",
        "ministral3",
    ),
    *("nemotron_h", "olmo2", "olmo_hybrid", "phi3", "phimoe", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "rwkv7"),
    *("qwen4_exp", "starcoder2"),
)

# Classes that modules of transformers run: RMS norms and experts of ours, `Conv1D` and LayerNorms of theirs; and
# attention in the place of their own, with ALiBi and without.
MODULES = ("mixtral", "gpt2", "bloom", "gptj")


def prefill(model: PagedCausalLM, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Run the prompts, by PyTorch as that is quicker, and capture the graphs."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    model.unified_forward([UnifiedBatchItem(i, tokens(length, i)) for i, length in enumerate(lengths)])
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    model.graphs.capture()
    assert model.num_graph_replays == 0


@contextmanager
def replays_alone(model: PagedCausalLM, cuda: EmulatedCuda, count: int) -> Iterator[None]:
    """So many replays are all that is done; nothing is launched beside them, compiled, waited for, or a hazard."""
    mark = cuda.report.mark()
    yield
    assert model.num_graph_replays == cuda.report.num_replays == count
    assert (cuda.report.hazards, cuda.report.compiled_after(mark)) == ([], [])
    assert not cuda.report.synchronised_after(mark)


def one_layer(folder: Path) -> Any:
    """A Llama of one layer; transformers' model of it."""
    config = FAMILIES["llama"]
    config.num_hidden_layers = 1
    return save_checkpoint(config, folder)


def check_replay(folder: Path, theirs: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """A decode step of two sequences is one replay, and has the logits of transformers' model."""
    with EmulatedCuda(num_sms=2) as cuda:
        ours = load_model(folder, **SIZES, cuda_graphs=[2], **options)
        prefill(ours, monkeypatch)
        with replays_alone(ours, cuda, 1):
            logits = ours.decode_batch([(i, 5 + i, length) for i, length in enumerate(LENGTHS)])
        on_host = logits.cpu()
    case = Case(theirs, ours)
    for i, length in enumerate(LENGTHS):
        assert_same_logits(on_host[i], case.expected([*tokens(length, i), 5 + i])[-1])


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.thorough) for name in REPLAYED]
)
def test_replays(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_replay(tmp_path, save_checkpoint(FAMILIES[family], tmp_path), monkeypatch)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load transformers' modules without their check, which takes 20 seconds in Triton's interpreter."""
    monkeypatch.setattr("paged.models.module_loader.check_module", lambda *_: None)


@pytest.mark.thorough
@pytest.mark.parametrize("family", MODULES)
def test_transformers_modules_replay(
    family: str, unchecked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = save_checkpoint(FAMILIES[family] if family in FAMILIES else ALL[family], tmp_path)
    check_replay(tmp_path, theirs, monkeypatch, model_impl="transformers")


@pytest.mark.thorough
def test_a_module_that_cannot_be_captured_is_refused(
    unchecked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward reads a value on the host; without that it is captured."""

    def read_value(_module: Any, _inputs: Any, output: Any) -> None:
        output.last_hidden_state.sum().item()

    save_checkpoint(ALL["opt"], tmp_path)
    with EmulatedCuda(num_sms=2) as cuda:
        ours = load_model(tmp_path, **SIZES, cuda_graphs=[2])
        hook = ours.network.decoder.register_forward_hook(read_value)
        with pytest.raises(UnsupportedError, match=r"cuda_graphs: a step cannot be captured: CUDA error: .*; cuda_gr"):
            ours.graphs.capture()
        assert [hazard.kind for hazard in cuda.report.hazards] == ["wait in a capture"]
        assert not ours.graphs.are_captured
        hook.remove()
        ours.graphs.capture()
        assert ours.graphs.are_captured


class _StandIn(Ranks):
    """The first of two ranks, the other of which computes the same; what is sent is work of the device alone."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)

    def apart(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compare(self, values: torch.Tensor) -> list[torch.Tensor]:
        return [values, values]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x), -1)


@pytest.mark.thorough
def test_a_rank_of_two_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it adds up with others is within the graph, and nothing is waited for; tokens are chosen behind it."""
    save_checkpoint(FAMILIES["qwen3_moe"], tmp_path)
    policies: list[list[LogitsPolicy]] = [[FullLogits(), FullLogits()], [GreedyArgmax(), DrawToken(0.7, (3, 5))]]
    with EmulatedCuda(num_sms=2) as cuda:
        ours = _load(
            tmp_path, LoadOptions(**SIZES, cuda_graphs=(2,)), _StandIn(Share(0, 2, expert_parallel=True)), untracked
        )

        def steps() -> list[Any]:
            results = []
            for pair in policies:
                results += ours.unified_forward(
                    [UnifiedBatchItem(i, [5 + i], pos_offset=7, logits_policy=one) for i, one in enumerate(pair)]
                )
                for i in range(2):
                    ours.truncate_kv(i, 7)
            return results

        prefill(ours, monkeypatch, (7, 7))
        ones = torch.ones(2, device="cuda")
        sample_tokens(torch.zeros(2, 64, device="cuda"), ones.long()[:, None].repeat(1, 2), ones)  # as warmup does
        with replays_alone(ours, cuda, 2):
            found = steps()
        monkeypatch.setenv("PAGED_BACKEND", "torch")
        ours.graphs.clear()
        pairs = [(mine.cpu(), theirs.cpu()) for mine, theirs in zip(found, steps(), strict=True)]
        assert ours.num_graph_replays == 2
    for mine, theirs in pairs:
        assert_within(mine, theirs, 1e-4 * theirs.abs().max())


def test_larger_and_smaller_batches_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of two sizes over the same memory."""
    theirs = one_layer(tmp_path)
    with EmulatedCuda(num_sms=2) as cuda:
        ours = load_model(tmp_path, **SIZES, cuda_graphs=[1, 2])
        prefill(ours, monkeypatch, (4, 3))
        texts = [tokens(4, 0), tokens(3, 1)]
        rows: list[tuple[torch.Tensor, list[int]]] = []
        with replays_alone(ours, cuda, 3):
            for names in ((0, 1), (1,), (0, 1)):
                handles = [handle for handle in ours.kv_manager.handles() if handle.cache_id in names]
                items = [
                    UnifiedBatchItem(one.cache_id, [9], kv_cache=one, pos_offset=one.num_tokens) for one in handles
                ]
                for item, row in zip(items, ours.unified_forward(items), strict=True):
                    texts[item.seq_id].append(9)
                    rows.append((row, list(texts[item.seq_id])))
        results = [(row.cpu(), text) for row, text in rows]
    case = Case(theirs, ours)
    for row, text in results:
        assert_same_logits(row, case.expected(text)[-1])


# The tokens that each sequence gets in a step; a tuple's are drafts, whose logits are all wanted. Sequence 1 has an
# adapter, 2 begins with the last step.
STEPS: list[dict[int, Any]] = [{0: (3, 4)}, {0: [5], 1: [6]}, {1: (3, 4), 0: [6], 2: [7]}]


def run_steps(model: PagedCausalLM) -> list[torch.Tensor]:
    results = []
    for step in STEPS:
        lengths = {handle.cache_id: handle.num_tokens for handle in model.kv_manager.handles()}
        items = []
        for name, ids in step.items():
            policy: LogitsPolicy = VerifyLogits() if isinstance(ids, tuple) else FullLogits()
            items.append(UnifiedBatchItem(name, ids, pos_offset=lengths.get(name, 0), logits_policy=policy))
        results += [rows for rows in model.unified_forward(items) if rows is not None]
    return results


def test_every_kind_of_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification, an adapter and a sequence that begins: the logits of eager steps."""
    one_layer(tmp_path / "base")
    adapter = Adapter(("q_proj", "o_proj"), seed=1).save(tmp_path / "adapter", tmp_path / "base")
    with EmulatedCuda(num_sms=2) as cuda:
        ours = load_model(tmp_path / "base", **SIZES, cuda_graphs=[4])
        ours.adapters.load("poetry", adapter)
        ours.set_lora_adapter_for_cache(1, "poetry")
        prefill(ours, monkeypatch)
        launches = len(cuda.report.launches)
        with replays_alone(ours, cuda, len(STEPS)):
            replayed = run_steps(ours)
        assert len(cuda.report.launches) == launches
        ours.release(2)
        for i, length in enumerate(LENGTHS):
            ours.truncate_kv(i, length)
        ours.graphs.clear()
        eager = run_steps(ours)
        assert ours.num_graph_replays == len(STEPS)
        assert len(cuda.report.launches) - launches > 5 * len(STEPS)
        results = [(got.cpu(), want.cpu()) for got, want in zip(replayed, eager, strict=True)]
    for got, want in results:
        assert_same_logits(got, want)
