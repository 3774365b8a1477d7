"""New weights in a model that runs: afterwards it is the model that loads them, or after an error the old one."""

import gc
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from paged import Engine, EngineConfig, LlmExecutor, SamplingParams, SpeculativeDecoder, UnifiedBatch, UnifiedBatchItem
from paged.errors import CheckpointError, InvalidInputError, PagedError
from paged.step.batch import VerifyLogits
from tests.deadline import HANG_S
from tests.models.allocations import recorded
from tests.models.edits import WEIGHTS, Tensors, edit_config, edit_tensors
from tests.models.families import FAMILIES, PARTS, assert_same_logits, save_checkpoint
from tests.models.quantization.checkpoints import write
from tests.models.quantization.packers import FORMATS
from tests.models.stepping import begin, decode

OPTIONS: dict[str, Any] = {"block_size": 8, "num_blocks": 32, "progress": False}
FAST = ("gemma3", "gptq zeros, order")
# What is loaded in ways of its own: experts of every layout, latents, states, tied and fused projections.
LOADED = (
    *("deepseek_v3", "falcon_h1", "gemma3", "gemma4_moe", "gpt_oss", "granite_moe_hybrid", "hunyuan_moe", "lfm2_moe"),
    *("llama4", "llama_tied", "minicpm3", "olmo_hybrid", "phi3", "qwen3_next"),
)
# Two greedy completions, one of which is in the middle of its prompt when the weights change.
PROMPTS = [5, 9, 2, 7], list(range(3, 40))
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def _rolled(tensors: Tensors) -> None:
    """Other weights of every kind: the same rows, in another order."""
    for name, tensor in tensors.items():
        if tensor.dim() == 0 or name.endswith(("weight_shape", "g_idx")):
            continue
        is_small = tensor.dtype.itemsize == 1
        tensors[name] = (tensor.view(torch.uint8) if is_small else tensor).roll(1, 0).view(tensor.dtype)


def _changed(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    edit_tensors(to, _rolled)
    return to


def _load(folder: Path) -> LlmExecutor:
    executor = LlmExecutor.from_pretrained(folder, **OPTIONS)
    executor.warmup()
    return executor


def _logits(executor: LlmExecutor) -> torch.Tensor:
    begin(executor.model, (9, 3))
    logits = torch.cat([decode(executor.model, (0, 1), 5), decode(executor.model, (1, 0), 9)])
    executor.model.reset()
    return logits


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.thorough) for name in (*LOADED, *FORMATS)]
)
def test_the_model_becomes_the_one_that_loads_them(name: str, packable: Path, tmp_path: Path) -> None:
    """Packed for a CPU, with steps recorded where they can be; no prefix of the old weights is found."""
    old = tmp_path / "old"
    if name in FAMILIES:
        save_checkpoint(FAMILIES[name], old)
    else:
        old = write(name, packable, tmp_path).packed
    new = _changed(old, tmp_path / "new")
    running, fresh = _load(old), _load(new)
    before, expected = _logits(running), _logits(fresh)
    assert not torch.allclose(expected, before, atol=0.01)
    running.update_weights(new)
    assert_same_logits(_logits(running), expected)
    running.update_weights(load_file(old / WEIGHTS).items())
    assert_same_logits(_logits(running), before)


@pytest.mark.parametrize(
    "name",
    [
        *("ernie4_5_moe", "mixtral", "olmo_hybrid"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("mistral_large4", "nemotron_h")),
    ],
)
def test_weights_in_another_layout(name: str, tmp_path: Path) -> None:
    """Those of a model that transformers holds, by its own names, for one that was loaded by the published names."""
    theirs = save_checkpoint((PARTS | FAMILIES)[name], tmp_path / "published")
    theirs.save_pretrained(tmp_path / "own", save_original_format=False)
    tensors = load_file(tmp_path / "own" / WEIGHTS)
    assert tensors.keys() != load_file(tmp_path / "published" / WEIGHTS).keys()
    for first, second in (("published", "own"), ("own", "published")):
        running = _load(_changed(tmp_path / first, tmp_path / f"{first}_changed"))
        expected = _logits(_load(tmp_path / "published"))
        assert not torch.allclose(_logits(running), expected, atol=0.01)
        running.update_weights(tmp_path / second)
        assert_same_logits(_logits(running), expected)
    running.update_weights(tensors.items())
    assert_same_logits(_logits(running), expected)


@pytest.mark.parametrize("options", [{}, {"quantization": "int4"}], ids=str)
def test_weights_in_the_order_of_a_cpu(
    options: dict[str, str], packable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkpoint that is packed, or rounded while loading."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    folders = write("awq", packable, tmp_path)
    old = folders.plain if options else folders.packed
    new = _changed(old, tmp_path / "new")
    running, fresh = (LlmExecutor.from_pretrained(folder, **OPTIONS, **options) for folder in (old, new))
    for executor in (running, fresh):
        executor.model.network.pack()
    expected = _logits(fresh)
    assert not torch.allclose(expected, _logits(running), atol=0.01)
    running.update_weights(new)
    assert_same_logits(_logits(running), expected)


def _with(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "a name": (_with(lambda t: t.update({"other": t.pop("model.norm.weight")})), "other: unexpected tensor"),
    "one is missing": (_with(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")), "up_proj.weight: missing"),
    "a shape": (_with(lambda t: t.update({"model.norm.weight": torch.ones(65)})), "model.norm.weight: shape"),
    "a dtype": (_with(lambda t: t.update({"model.norm.weight": torch.ones(64).int()})), "model.norm.weight: dtype"),
    "not a number": (_with(lambda t: t["model.norm.weight"].fill_(torch.nan)), "norm.weight holds infinity or NaN"),
    "a setting": (lambda folder: edit_config(folder, rms_norm_eps=0.5), "differ from the model's"),
    "the end of a file": (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9]), "bytes"),
}


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_ones_leave_the_old(name: str, as_tensors: bool, llama_folder: Path, folder: Path) -> None:
    change, message = WRONG[name]
    _changed(llama_folder, folder / "new")
    change(folder / "new")
    executor = _load(llama_folder)
    before = _logits(executor)
    source: Any = folder / "new"
    if as_tensors:
        if name in ("a setting", "the end of a file"):
            pytest.skip("of a folder alone")
        source = list(load_file(source / WEIGHTS).items())
    with pytest.raises(CheckpointError, match=message):
        executor.update_weights(source, check_finite=True)
    assert torch.equal(_logits(executor), before)


@pytest.mark.parametrize(
    "source", [[("a", 1)], [("a",)], 3, [("a", torch.ones(1))] * 2, [("a", torch.ones(1).cfloat())]]
)
def test_other_sources_are_refused(source: Any, llama_folder: Path) -> None:
    executor = LlmExecutor.from_pretrained(llama_folder, **OPTIONS)
    before = _logits(executor)
    with pytest.raises(InvalidInputError, match="source"):
        executor.update_weights(source)
    assert torch.equal(_logits(executor), before)


def test_live_sequences_are_refused_and_kept(llama_folder: Path) -> None:
    executor = LlmExecutor.from_pretrained(llama_folder, **OPTIONS)
    begin(executor.model, (9,))
    with pytest.raises(InvalidInputError, match="1 sequences hold K/V of the weights"):
        executor.update_weights(llama_folder)
    assert decode(executor.model, (0,), 5).isfinite().all()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("overlap", [False, True])
def test_requests_go_on_by_the_new_weights(preemption: Any, overlap: bool, llama_folder: Path, tmp_path: Path) -> None:
    """What follows is what the new model says after the tokens that were there; K/V of the old weights are nowhere."""
    new = _changed(llama_folder, tmp_path / "new")
    executor = LlmExecutor.from_pretrained(llama_folder, **OPTIONS, num_swap_blocks=8)
    config = EngineConfig(token_budget=8, overlap=overlap, preemption=preemption)
    engine = Engine(executor, config)
    outputs = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    with pytest.raises(PagedError):
        engine.update_weights(tmp_path)
    engine.update_weights(new)
    begun = [[*one.outputs[0].token_ids] for one in outputs]
    while engine.num_unfinished:
        engine.step()
    engine.update_weights(new)  # which holds nothing
    fresh = Engine(LlmExecutor.from_pretrained(new, **OPTIONS, num_swap_blocks=8), config)
    assert begun[0]
    assert not begun[1]
    for output, prompt, tokens in zip(outputs, PROMPTS, begun, strict=True):
        rest = SamplingParams(temperature=0, max_tokens=12 - len(tokens))
        (expected,) = fresh.generate([prompt + tokens], rest)
        assert [*output.outputs[0].token_ids] == [*tokens, *expected.outputs[0].token_ids]


def _of_all(executor: LlmExecutor, token_ids: Sequence[int], *, has_hidden: bool = False) -> torch.Tensor:
    """Logits or hidden states of all tokens, in one forward."""
    item = UnifiedBatchItem("all", token_ids, logits_policy=VerifyLogits())
    (rows,) = executor.unified_decode(UnifiedBatch([item], returns_hidden=has_hidden))
    executor.release_cache("all")
    return rows


def _is_close(rows: torch.Tensor, reference: torch.Tensor) -> bool:
    """Models of other weights differ by tenths."""
    return bool((rows - reference).abs().max() < 1e-3)


def _prompt_logprobs(executor: LlmExecutor, prompt: Sequence[int]) -> torch.Tensor:
    following = torch.tensor(prompt[1:])[:, None]
    return _of_all(executor, prompt)[:-1].log_softmax(-1).gather(1, following)[:, 0]


@pytest.mark.parametrize("is_engines", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_no_result_mixes_weights(is_engines: bool, llama_folder: Path, tmp_path: Path) -> None:
    """Prompts' log probabilities and hidden states, at every moment after an update at any step, by the engine or by
    another caller while all requests wait."""
    new = _changed(llama_folder, tmp_path / "new")
    models = [LlmExecutor.from_pretrained(folder, **OPTIONS) for folder in (llama_folder, new)]
    executor = LlmExecutor.from_pretrained(llama_folder, **OPTIONS)
    params = replace(GREEDY, max_tokens=4, prompt_logprobs=0, return_hidden_states=True, ignore_eos=True, n=2)
    mixed_steps = 0
    for num_steps in range(9):
        executor.update_weights(llama_folder)
        engine = Engine(executor, EngineConfig(token_budget=8))
        outputs = [engine.add_request(prompt, params) for prompt in PROMPTS]
        for _ in range(num_steps):
            engine.step()
        had_tokens = [bool(one.outputs[0].token_ids) for one in outputs]
        mixed_steps += any(len(one.prompt_table or ()) > 1 for one in outputs)
        if is_engines:
            engine.update_weights(new)
        else:
            engine._scheduler.preempt_all()
            executor.update_weights(new)
        while engine.num_unfinished:
            engine.step()
            for output in outputs:
                for one in output.outputs:
                    if (states := one.hidden_states) is not None:
                        ran = [*output.prompt, *one.token_ids][:-1]
                        assert any(_is_close(states, _of_all(model, ran, has_hidden=True)) for model in models)
        for output, had in zip(outputs, had_tokens, strict=True):
            assert output.error is None
            values = torch.tensor([next(iter(row.values())) for row in output.prompt_logprobs[1:]])
            assert [_is_close(values, _prompt_logprobs(model, output.prompt)) for model in models] == [had, not had]
            states = output.outputs[0].hidden_states
            ran = [*output.prompt, *output.outputs[0].token_ids][:-1]
            assert _is_close(states, _of_all(models[1], ran, has_hidden=True)) or had
    assert mixed_steps > 3


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_of_the_same_weights(pooling: Any, llama_folder: Path, tmp_path: Path) -> None:
    """After an update between any two of their forwards, also in the middle of a prompt; nothing is left behind."""
    new = _changed(llama_folder, tmp_path / "new")
    executor = LlmExecutor.from_pretrained(llama_folder, **OPTIONS)
    expected = Engine(LlmExecutor.from_pretrained(new, **OPTIONS)).embed(PROMPTS, pooling=pooling)
    engine = Engine(executor, EngineConfig(token_budget=8))
    for num_forwards in range(6):
        executor.update_weights(llama_folder)
        steps = engine.embedding_steps(PROMPTS, pooling=pooling)
        for _ in range(num_forwards):
            assert next(steps) is None
        with pytest.raises(PagedError):
            engine.update_weights(tmp_path)
        engine.update_weights(new)
        *_, rows = steps
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)
        assert executor.kv_manager.stats().num_sequences == 0


def test_no_prefix_survives_an_update_that_fails_halfway(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = LlmExecutor.from_pretrained(llama_folder, **OPTIONS)
    begin(executor.model, (16,))
    executor.model.reset()
    assert executor.kv_manager.stats().cached_blocks

    def fail() -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(executor.model.network, "derive_from_weights", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        executor.update_weights(_changed(llama_folder, tmp_path / "new"))
    assert executor.kv_manager.stats().published_blocks == 0
    assert executor.weights_generation == 1


def test_a_draft_model_in_the_same_cache_holds_nothing_up(llama_folder: Path, tmp_path: Path) -> None:
    new = _changed(llama_folder, tmp_path / "new")
    executor = LlmExecutor.from_pretrained(llama_folder, **OPTIONS)
    engine = SpeculativeDecoder(executor, executor, num_draft_tokens=2)
    output = engine.add_request(PROMPTS[0], GREEDY)
    for _ in range(3):
        engine.step()
    engine.update_weights(new)
    while engine.num_unfinished:
        engine.step()
    assert output.error is None


def _take_part(rank: int, folders: list[Path]) -> None:
    """Rank 0 sends weights twice, the first time with NaN; rank 1 runs the model."""
    dist.init_process_group("gloo", init_method=f"file://{folders[0] / 'store'}", rank=rank, world_size=2)
    old, new = folders
    if rank == 0:
        tensors = load_file(new / WEIGHTS)
        for wrong in (True, False):
            for name, one in tensors.items():
                dist.broadcast(one.clone().fill_(torch.nan) if wrong and "norm" in name else one, 0)
        dist.barrier()  # a process that ends earlier may abort in gloo's threads
        dist.destroy_process_group()
        return
    executor, specs = _load(old), [(name, one.dtype, one.shape) for name, one in load_file(new / WEIGHTS).items()]
    before = _logits(executor)
    with pytest.raises(CheckpointError, match="holds infinity or NaN"):
        executor.update_weights_from_group(specs, check_finite=True)
    assert torch.equal(_logits(executor), before)
    executor.update_weights_from_group(iter(specs))
    assert_same_logits(_logits(executor), _logits(_load(new)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.thorough
def test_from_another_process(llama_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(llama_folder, tmp_path / "old")
    _changed(llama_folder, tmp_path / "new")
    code = f"from pathlib import Path; from {__name__} import _take_part as run; run(%d, [Path(%r), Path(%r)])"
    names = str(tmp_path / "old"), str(tmp_path / "new")
    sender = subprocess.Popen([sys.executable, "-c", code % (0, *names)])
    receiver = subprocess.run([sys.executable, "-c", code % (1, *names)], check=False)
    assert (receiver.returncode, sender.wait(HANG_S)) == (0, 0)


@pytest.mark.thorough
def test_many_updates_take_no_memory(llama_folder: Path, tmp_path: Path) -> None:
    """The first updates may leave something behind, later ones neither a tensor nor a byte of one."""
    new = _changed(llama_folder, tmp_path / "new")
    num_tensors: list[int] = []
    with recorded() as allocations:
        executor = _load(llama_folder)
        for _ in range(4):
            for _ in range(10):
                executor.update_weights(new)
                executor.update_weights(llama_folder)
            gc.collect()
            allocations.mark()
            num_tensors.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert len(set(allocations.at_marks)) == 1
    assert len(set(num_tensors)) == 1
