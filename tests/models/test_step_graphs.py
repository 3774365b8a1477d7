"""Steps that are replayed: the logits of eager ones, padding that touches nothing, and what stays eager."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch

from paged.errors import InvalidInputError, OutOfBlocksError
from paged.models.logits_policy import by_item
from paged.models.paged_lm import PagedCausalLM
from paged.models.registry import load_model
from paged.models.step_graphs import DEFAULT_SIZES, GraphShape, capture_for, graph_shapes, graph_sizes
from paged.step.batch import FullLogits, GreedyArgmax, UnifiedBatchItem, VerifyLogits
from paged.step.batch_step import step_of
from tests.models.families import FAMILIES, assert_same_logits, save_checkpoint, tokens
from tests.models.lora.folders import Adapter
from tests.models.stepping import assert_same_results, begin, decode, go_back, make, next_items
from tests.tolerance import assert_within


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_checkpoint(FAMILIES[request.param], path)
    return path


@pytest.mark.parametrize(
    ("folder", "is_interpreted"),
    [
        *((name, False) for name in ("gemma3", "gemma4_moe", "gemma4_shared_kv", "gpt_oss", "llama", "mistral")),
        *(("qwen3_moe", is_interpreted) for is_interpreted in (False, True)),
    ],
    indirect=["folder"],
)
def test_same_logits_as_eager(folder: Path, is_interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the edges of every size, while sequences grow into new blocks, larger batches before smaller ones."""
    replayed, eager = make(folder), make(folder, cuda_graphs=False)
    for model in (replayed, eager):
        begin(model, (7, 3, 12, 1, 18))
    steps = [(4, 1, 0), (0, 1, 2, 3), (3,)]  # where replays take seconds: those that run the Triton kernels on a CPU
    if not is_interpreted:
        steps += [(2, 0), (0, 1, 2, 3, 4), *((4, 2, 0),) * 5]
    for number, names in enumerate(steps):
        expected, before = decode(eager, names, number), replayed.num_graph_replays
        with monkeypatch.context() as patch:
            if is_interpreted:
                patch.setenv("PAGED_BACKEND", "triton")
            assert_same_logits(decode(replayed, names, number), expected)
        assert replayed.num_graph_replays - before == (len(names) <= 4)
    assert eager.num_graph_replays == 0
    blocks = {block for handle in replayed.kv_manager.handles() for block in handle.blocks}
    unowned = [block for block in range(replayed.kv_manager.config.num_blocks + 1) if block not in blocks]
    for layer in set(replayed.network.config.cache_layers):
        for cache in (replayed.kv_manager.k_cache(layer), replayed.kv_manager.v_cache(layer)):
            assert cache[unowned].isnan().all(), "padding wrote to the cache"


@pytest.fixture
def model(llama_folder: Path) -> Iterator[PagedCausalLM]:
    made = make(llama_folder)
    yield made
    made.reset()
    made.kv_manager.check_integrity()
    assert made.kv_manager.stats().used_blocks == 0


@pytest.mark.parametrize("folder", ["gemma3", "gpt_oss", "llama", "qwen3_moe"], indirect=True)
def test_random_steps(folder: Path, tmp_path: Path) -> None:
    """Decodes, drafts, chunks and prompts of sequences with and without adapters, in any mix and number, of two models
    in the same state, of which one replays."""
    twins = replayed, eager = [make(folder, sizes, num_blocks=64) for sizes in ((1, 3, 8, 16), False)]
    targets, random_, lengths = ("q_proj", "o_proj"), random.Random(0), dict.fromkeys(range(8), 0)
    paths = [Adapter((target,), seed=seed).save(tmp_path / target, folder) for seed, target in enumerate(targets)]
    for model in twins:
        for target, path in zip(targets, paths, strict=True):
            model.adapters.load(target, path)
        model.warm_up_adapters()
    for number in range(24):
        longest, items = random_.choice((1, 1, 3, 12)), list[UnifiedBatchItem]()
        for name in random_.sample(range(8), random_.choice((1, 2, 3, 8))):
            policy = random_.choice((FullLogits(), FullLogits(), VerifyLogits()))
            is_final = isinstance(policy, VerifyLogits) or random_.random() < 0.75
            ids = tokens(random_.randint(1, longest), seed=random_.randrange(1000))
            items.append(UnifiedBatchItem(name, ids, None, lengths[name], is_final, logits_policy=policy))
            for model in twins if lengths[name] == 0 and name % 3 else ():
                model.set_lora_adapter_for_cache(name, targets[name % 3 - 1])
            lengths[name] += len(ids)
        before = replayed.num_graph_replays
        assert_same_results(replayed.unified_forward(items), eager.unified_forward(items))
        is_replay = sum(len(item.q_tokens) for item in items) <= 16 and any(item.is_final_chunk for item in items)
        assert replayed.num_graph_replays - before == is_replay
        for name, length in lengths.items():  # back, as after drafts that were refused
            if length > 40 or (length and number % 5 == 4):
                lengths[name] = random_.randrange(max(length - 30, 0), length)
                for model in twins:
                    model.truncate_kv(name, lengths[name])
    assert eager.num_graph_replays == 0 < replayed.num_graph_replays < 24
    for model in twins:
        model.kv_manager.check_integrity()


def test_shapes() -> None:
    """What is captured, the largest first; a step takes the graph with the shortest queries that it fits."""
    shapes = graph_shapes((1, 2, 6, 16), is_adapted=False)
    expected = [(16, 16), (8, 16), (1, 16), (6, 6), (1, 6), (2, 2), (1, 2), (1, 1)]
    assert [(shape.longest_query, shape.num_tokens) for shape in shapes] == expected
    adapted = graph_shapes((4, 6), is_adapted=True)
    assert adapted == [GraphShape(6, 6, True), GraphShape(1, 6, True)], "few sizes"


def test_adapters_leave_the_graphs_alone(model: PagedCausalLM, llama_folder: Path, tmp_path: Path) -> None:
    """Base rows keep their bits; adapters' rows run eagerly until their layers are captured too."""
    begin(model, (5, 6))
    before = decode(model, (0, 1), 3)
    model.adapters.load("poetry", Adapter(("q_proj", "down_proj"), seed=1).save(tmp_path / "poetry", llama_folder))
    go_back(model, 5, 6)
    assert torch.equal(decode(model, (0, 1), 3), before)
    assert model.num_graph_replays == 2
    model.set_lora_adapter_for_cache(2, "poetry")
    model.prefill(2, tokens(4))
    mixed = decode(model, (0, 1, 2), 8)
    assert model.num_graph_replays == 2
    go_back(model, 6, 7)
    assert_same_logits(decode(model, (0, 1), 8), mixed[:2])
    assert model.num_graph_replays == 3
    for is_captured, targets in ((True, ()), (False, ("o_proj",)), (True, ())):
        if targets:
            model.adapters.load("more", Adapter(targets, seed=2).save(tmp_path / "more", llama_folder))
        else:
            model.warm_up_adapters()
        go_back(model, 6, 7, 4)
        replays = model.num_graph_replays
        assert_same_logits(decode(model, (0, 1, 2), 8), mixed)
        assert model.num_graph_replays - replays == is_captured


@pytest.mark.parametrize("is_adapted", [False, True])
def test_tokens_that_only_the_device_knows(
    is_adapted: bool, model: PagedCausalLM, llama_folder: Path, tmp_path: Path
) -> None:
    """A replayed step, and one that is too large for a graph, of device ids beside others: the logits of host ids."""
    plain = make(llama_folder, cuda_graphs=False)
    poetry = Adapter(("q_proj",), seed=1).save(tmp_path / "poetry", llama_folder)
    for one in (model, plain):
        if is_adapted:
            one.adapters.load("poetry", poetry)
            one.set_lora_adapter_for_cache(0, "poetry")
            one.warm_up_adapters()
        begin(one, (8, 3, 7))
    for length in (1, 40):
        chunk, replays = UnifiedBatchItem("chunk", tokens(length)), model.num_graph_replays
        expected = plain.unified_forward([*next_items(plain, (0, 2, 1), 5), chunk])
        ids = torch.tensor([5, 5, 5], device=model.device)
        items = [*next_items(model, (0, 2, 1), 0), chunk]
        with torch.no_grad(), step_of(model.kv_manager, items, device_ids=ids) as step:
            assert_same_results(by_item(items, model.run(step)), expected)
        assert model.num_graph_replays - replays == (length == 1)
        for one in (model, plain):
            one.release("chunk")


def test_a_step_that_fails_changes_nothing(model: PagedCausalLM) -> None:
    begin(model, (4, 8))
    state = [(handle.blocks, handle.num_tokens) for handle in model.kv_manager.handles()]
    policy = GreedyArgmax(token_mask=torch.ones(3, dtype=torch.bool, device=model.device))
    items = [UnifiedBatchItem(0, [1], pos_offset=4), UnifiedBatchItem(1, [1], pos_offset=8, logits_policy=policy)]
    with pytest.raises(InvalidInputError, match="token_mask"):
        model.unified_forward(items)
    others = [model.kv_manager.allocate(f"{length} more", length) for length in (60, 56)]
    with pytest.raises(OutOfBlocksError):
        decode(model, (0, 1), 1)
    for other in others:
        model.kv_manager.free(other)
    assert [(handle.blocks, handle.num_tokens) for handle in model.kv_manager.handles()] == state
    assert model.num_graph_replays == 0
    decode(model, (0, 1), 1)
    assert model.num_graph_replays == 1


def test_nothing_is_captured_before_prepare(llama_folder: Path) -> None:
    model = load_model(llama_folder, block_size=4, num_blocks=32, cuda_graphs=(1, 8, 100))
    begin(model, (5, 6))
    expected = decode(model, (0, 1), 3)
    assert model.num_graph_replays == 0
    seen: dict[str, list[Any]] = {}
    model.prepare(lambda items, desc, **_: seen.setdefault(desc, list(items)))
    wanted = graph_shapes((1, 8, 32), is_adapted=False)
    desc = "CUDA graphs" if model.device.type == "cuda" else "recorded steps"
    assert seen[desc] == wanted, "none that the cache has no sequences for"
    go_back(model, 5, 6)
    assert_same_logits(decode(model, (0, 1), 3), expected)
    assert model.num_graph_replays == 1

    def fail(items: Sequence[Any], **_: object) -> Iterator[Any]:
        yield from items[:1]
        if items == wanted:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        model.prepare(fail)
    decode(model, (0, 1), 3)
    assert model.num_graph_replays == 1, "a capture that failed leaves no graphs"


def test_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """None on a GPU where PyTorch computes."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert graph_sizes(None, gpu, 9) == graph_sizes([1, 2], gpu, 9) == ()
    assert graph_sizes([1, 2], cpu, 9) == (1, 2)
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    assert graph_sizes([1, 2], gpu, 9) == (1, 2)
    assert graph_sizes(True, cpu, 1000) == (1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16)) == DEFAULT_SIZES
    assert graph_sizes(None, gpu, 1000) == DEFAULT_SIZES
    assert graph_sizes(None, cpu, 10, step_bytes=4 << 30) == (*range(1, 9), 10)
    assert graph_sizes(None, cpu, 1000, step_bytes=5 << 30) == ()
    assert graph_sizes([9, 3, 3], cpu, 1000) == (3, 9)
    for choice in ([0], [4, -1], ["4"]):
        with pytest.raises(InvalidInputError, match="cuda_graphs: "):
            graph_sizes(choice, cpu, 1000)  # type: ignore[arg-type]


def test_what_follows_a_recording_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = MagicMock()
    for name in ("Stream", "current_stream", "graph_pool_handle", "CUDAGraph", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    capture_for(torch.device("cuda:0"))(cuda.run)
    assert cuda.mock_calls[-1] == call.current_stream().wait_stream(cuda.Stream.return_value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float32), ("llama", torch.bfloat16), ("qwen3_moe", torch.float32)]
)
def test_graphs_are_captured_for_real(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Graphs of several sizes in turns, as they share their memory; and again over weights that were replaced."""
    save_checkpoint(FAMILIES[family], tmp_path)
    model = make(tmp_path, (1, 2, 4, 8), dtype=dtype)
    begin(model, (7, 3, 12, 1, 18))
    tolerance = 1e-4 if dtype == torch.float32 else 0.05

    def check() -> None:
        for number, names in enumerate([(0,), (0, 1, 2, 3, 4), (1, 2), (3,), (4, 2, 0), (0, 1, 2, 3), (1,)]):
            before, lengths = model.num_graph_replays, [handle.num_tokens for handle in model.kv_manager.handles()]
            replayed = decode(model, names, number)
            assert model.num_graph_replays == before + 1
            go_back(model, *lengths)
            graphs, model.graphs._replays = model.graphs._replays, {}
            eager = decode(model, names, number)
            model.graphs._replays = graphs
            assert_within(replayed, eager, tolerance * eager.abs().max())

    check()
    old = [parameter.data for parameter in model.network.parameters()]
    for parameter in model.network.parameters():
        parameter.data = parameter.data * 0.9
    model.prepare()
    check()
    del old
