"""Steps that are replayed: the logits of eager ones, padding that touches nothing, and what stays eager."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import paged.models.step_graphs
from paged.batch import FullLogits, GreedyArgmax, UnifiedBatchItem, VerifyLogits
from paged.errors import InvalidInputError, OutOfBlocksError
from paged.models.graph_recorder import graph_recorder
from paged.models.paged_lm import PagedCausalLM
from paged.models.registry import load_model
from paged.models.step_graphs import DEFAULT_SIZES, GraphShape, graph_shapes, graph_sizes
from tests.backends import needs_numba
from tests.models.families import FAMILIES, assert_same_logits, save_checkpoint, tokens
from tests.models.lora.folders import Adapter

pytestmark = pytest.mark.usefixtures("_fast")

SIZES = (2, 4)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_checkpoint(FAMILIES[request.param], path)
    return path


def make(folder: Path, cuda_graphs: bool | Sequence[int] | None = SIZES, **sizes: Any) -> PagedCausalLM:
    """A model whose cache is full of NaN, and graphs captured."""
    model = load_model(
        folder, **{"block_size": 4, "num_blocks": 32, "max_seq_len": 64, **sizes}, cuda_graphs=cuda_graphs
    )
    for layer in set(model.network.config.cache_layers):
        model.kv_manager.k_cache(layer).fill_(torch.nan)
        model.kv_manager.v_cache(layer).fill_(torch.nan)
    model.graphs.capture()
    return model


def begin(model: PagedCausalLM, lengths: Sequence[int]) -> None:
    """Sequences 0, 1, ... of so many tokens."""
    model.unified_forward([UnifiedBatchItem(i, tokens(length, i)) for i, length in enumerate(lengths)])


def decode(model: PagedCausalLM, names: Sequence[int], token: int) -> torch.Tensor:
    """Logits of one more token of each."""
    lengths = {handle.cache_id: handle.num_tokens for handle in model.kv_manager.handles()}
    return model.decode_batch([(name, (token + name) % 128, lengths[name]) for name in names])


@pytest.mark.parametrize(
    ("folder", "is_interpreted"),
    [
        ("gemma3", False),
        ("gemma4_moe", False),
        ("gemma4_shared_kv", False),
        ("gpt_oss", False),
        ("llama", False),
        ("mistral", False),
        ("qwen3_moe", False),
        ("qwen3_moe", True),
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
            assert_same_logits(decode(replayed, names, number), expected.cpu())
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


def test_rows_of_an_earlier_step_are_gone(model: PagedCausalLM) -> None:
    """The second step has a row less: what the fourth sequence holds stays, and nothing of it is run."""
    begin(model, (5, 5, 5, 5))
    decode(model, (0, 1, 2, 3), 9)
    handle = model.kv_manager.get_handle(3)
    assert handle is not None
    before = [model.kv_manager.read_kv(handle, layer, 0, 6) for layer in range(2)]
    decode(model, (0, 1, 2), 50)
    after = [model.kv_manager.read_kv(handle, layer, 0, 6) for layer in range(2)]
    assert all(torch.equal(a, b) for pair in zip(before, after, strict=True) for a, b in zip(*pair, strict=True))
    assert model.num_graph_replays == 2


def test_logits_outlive_the_next_step(model: PagedCausalLM) -> None:
    begin(model, (5, 6))
    first = decode(model, (0, 1), 3)
    kept = first.clone()
    decode(model, (0, 1), 77)
    assert torch.equal(first, kept)


def test_what_runs_eagerly(model: PagedCausalLM) -> None:
    """More tokens than any graph has, and a step of which no logits are wanted."""
    begin(model, (5, 6))
    model.unified_forward([UnifiedBatchItem(0, [1, 2], pos_offset=5), UnifiedBatchItem("new", tokens(3))])
    model.unified_forward([UnifiedBatchItem(0, [1], pos_offset=7, is_final_chunk=False)])
    model.forward_verify(1, [1, 2, 3, 4, 5])
    assert model.num_graph_replays == 0
    model.forward_verify(1, [3])
    model.unified_forward([UnifiedBatchItem(0, [1], pos_offset=8, logits_policy=GreedyArgmax())])
    assert model.num_graph_replays == 2


class Twins:
    """A model that replays and one that does not, in the same state: every step has the same logits in both."""

    def __init__(self, folder: Path, path: Path, sizes: Sequence[int]) -> None:
        self.models = [make(folder, choice, num_blocks=64) for choice in (sizes, False)]
        self.most = sizes[-1]
        for number, targets in enumerate([("q_proj",), ("o_proj",)]):
            adapter = Adapter(targets, seed=number).save(path / str(number), folder)
            for model in self.models:
                model.adapters.load(f"adapter {number}", adapter)
        for model in self.models:
            model.prepare_adapters()
        self.lengths: dict[int, int] = {}

    def step(self, queries: dict[int, int], random_: random.Random) -> None:
        """So many tokens of each sequence; a third of them are verified, a sixth are no final chunks."""
        items = []
        for name, count in queries.items():
            policy = random_.choice((FullLogits(), FullLogits(), VerifyLogits()))
            start, is_final = self.lengths.get(name, 0), isinstance(policy, VerifyLogits) or random_.random() < 0.75
            ids = tokens(count, seed=random_.randrange(1000))
            items.append(UnifiedBatchItem(name, ids, None, start, is_final, logits_policy=policy))
            if start == 0 and name % 3:
                for model in self.models:
                    model.set_lora_adapter_for_cache(name, f"adapter {name % 3 - 1}")
            self.lengths[name] = start + count
        before = self.models[0].num_graph_replays
        replayed, eager = (model.unified_forward(items) for model in self.models)
        is_replay = sum(queries.values()) <= self.most and any(item.is_final_chunk for item in items)
        assert self.models[0].num_graph_replays - before == is_replay
        for actual, expected in zip(replayed, eager, strict=True):
            assert (actual is None) == (expected is None)
            if expected is not None:
                assert_same_logits(actual, expected.cpu())

    def roll_back(self, name: int, length: int) -> None:
        """Take tokens back, as after drafts that were refused."""
        for model in self.models:
            model.truncate_kv(name, length)
        self.lengths[name] = length


@pytest.mark.parametrize("folder", ["gemma3", "gpt_oss", "llama", "qwen3_moe"], indirect=True)
def test_random_steps(folder: Path, tmp_path: Path) -> None:
    """Decodes, drafts, chunks and prompts of sequences with and without adapters, in any mix and number."""
    twins, random_ = Twins(folder, tmp_path, (1, 3, 8, 16)), random.Random(0)
    for number in range(24):
        names = random_.sample(range(8), random_.choice((1, 2, 3, 8)))
        longest = random_.choice((1, 1, 3, 12))
        twins.step({name: random_.randint(1, longest) for name in names}, random_)
        for name, length in list(twins.lengths.items()):
            if length > 40 or number % 5 == 4:
                twins.roll_back(name, random_.randrange(max(length - 30, 0), length))
    assert twins.models[1].num_graph_replays == 0 < twins.models[0].num_graph_replays < 24
    for model in twins.models:
        model.kv_manager.check_integrity()


def test_shapes() -> None:
    """What is captured, the largest first; a step takes the graph with the shortest queries that it fits."""
    shapes = graph_shapes((1, 2, 6, 16), is_adapted=False)
    expected = [(16, 16), (8, 16), (1, 16), (6, 6), (1, 6), (2, 2), (1, 2), (1, 1)]
    assert [(shape.longest_query, shape.num_tokens) for shape in shapes] == expected
    adapted = graph_shapes((4, 6), is_adapted=True)
    assert adapted == [GraphShape(6, 6, True), GraphShape(1, 6, True)], "few sizes"
    assert len(graph_shapes(DEFAULT_SIZES, is_adapted=False)) == 36
    assert len(graph_shapes(DEFAULT_SIZES, is_adapted=True)) == 22


def test_adapters_leave_the_graphs_alone(model: PagedCausalLM, llama_folder: Path, tmp_path: Path) -> None:
    """Loaded after the capture into layers that were captured: base rows keep their bits, others run eagerly until
    they are captured too, and again when an adapter changes more layers.
    """
    begin(model, (5, 6))
    before = decode(model, (0, 1), 3)
    model.adapters.load("poetry", Adapter(("q_proj", "down_proj"), seed=1).save(tmp_path / "poetry", llama_folder))
    for name, length in ((0, 5), (1, 6)):
        model.truncate_kv(name, length)
    assert torch.equal(decode(model, (0, 1), 3), before)
    assert model.num_graph_replays == 2
    model.set_lora_adapter_for_cache(2, "poetry")
    model.prefill(2, tokens(4))
    mixed = decode(model, (0, 1, 2), 8)
    assert model.num_graph_replays == 2
    for name, length in ((0, 6), (1, 7)):
        model.truncate_kv(name, length)
    assert_same_logits(decode(model, (0, 1), 8), mixed[:2].cpu())
    assert model.num_graph_replays == 3
    for is_captured, targets in ((True, ()), (False, ("o_proj",)), (True, ())):
        if targets:
            model.adapters.load("more", Adapter(targets, seed=2).save(tmp_path / "more", llama_folder))
        else:
            model.prepare_adapters()
        for name, length in ((0, 6), (1, 7), (2, 4)):
            model.truncate_kv(name, length)
        replays = model.num_graph_replays
        assert_same_logits(decode(model, (0, 1, 2), 8), mixed.cpu())
        assert model.num_graph_replays - replays == is_captured


def next_items(model: PagedCausalLM, names: Sequence[int], token: int) -> list[UnifiedBatchItem]:
    handles = [model.kv_manager.get_handle(name) for name in names]
    return [
        UnifiedBatchItem(handle.cache_id, [token], kv_cache=handle, pos_offset=handle.num_tokens)
        for handle in handles
        if handle is not None
    ]


@pytest.mark.parametrize(
    "meanwhile", ["nothing", "a decode of others", "a capture", "the same once more", "an adapter"]
)
def test_prepared_steps(
    meanwhile: str, model: PagedCausalLM, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed or not, used or not, they give the logits of plain ones; one that is used sends only its tokens."""
    plain = make(llama_folder, cuda_graphs=False)
    for one in (model, plain):
        begin(one, (8, 3, 7))
    sizes: list[int] = []
    send = paged.models.step_graphs.to_device

    def noted(arrays: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        sizes.append(sum(array.nbytes for array in arrays))
        return send(arrays, *args, **kwargs)

    monkeypatch.setattr(paged.models.step_graphs, "to_device", noted)
    for token in (5, 6):
        prepared = model.prepare_step([item.kv_cache for item in next_items(model, (0, 2, 1), 0) if item.kv_cache])
        assert prepared is not None
        if meanwhile == "a decode of others":
            for one in (model, plain):
                decode(one, (1, 2), 33)
        elif meanwhile == "a capture":
            model.graphs.capture()
        elif meanwhile == "the same once more":
            again = model.prepare_step(prepared.step.handles)
            assert again is not None
            prepared = again
        elif meanwhile == "an adapter" and not model.adapters.names():
            model.adapters.load("poetry", Adapter(("q_proj",), seed=1).save(tmp_path / "poetry", llama_folder))
        sizes.clear()
        replays = model.num_graph_replays
        results = model.unified_forward(next_items(model, (0, 2, 1), token))
        expected = plain.unified_forward(next_items(plain, (0, 2, 1), token))
        for actual, want in zip(results, expected, strict=True):
            assert want is not None
            assert_same_logits(actual, want.cpu())
        assert model.num_graph_replays == replays + 1
        assert prepared.is_used == (meanwhile != "a decode of others")
        if meanwhile in ("nothing", "the same once more", "an adapter"):
            assert sizes == [4 * 8], "the tokens of the padded batch"


@pytest.mark.parametrize("is_captured", [False, True])
def test_prepared_steps_with_adapters(
    is_captured: bool, model: PagedCausalLM, llama_folder: Path, tmp_path: Path
) -> None:
    model.adapters.load("poetry", Adapter(("q_proj",), seed=1).save(tmp_path / "poetry", llama_folder))
    model.set_lora_adapter_for_cache(0, "poetry")
    begin(model, (5, 6))
    expected = model.unified_forward(next_items(model, (0, 1), 7))
    if is_captured:
        model.prepare_adapters()
    for name, length in ((0, 5), (1, 6)):
        model.truncate_kv(name, length)
    prepared = model.prepare_step(model.kv_manager.handles())
    for got, want in zip(model.unified_forward(next_items(model, (0, 1), 7)), expected, strict=True):
        assert want is not None
        assert_same_logits(got, want.cpu())
    assert prepared is not None
    assert prepared.is_used
    assert model.num_graph_replays == is_captured


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
    model.prepare(lambda items, desc, unit: seen.setdefault(desc, list(items)))
    wanted = graph_shapes((1, 8, 32), is_adapted=False)
    assert seen["CUDA graphs"] == wanted, "none that the cache has no sequences for"
    for name, length in ((0, 5), (1, 6)):
        model.truncate_kv(name, length)
    assert_same_logits(decode(model, (0, 1), 3), expected.cpu())
    assert model.num_graph_replays == 1

    def fail(items: Sequence[Any], desc: str, unit: str) -> Iterator[Any]:
        yield items[0]
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        model.prepare(fail)
    decode(model, (0, 1), 3)
    assert model.num_graph_replays == 1, "a capture that failed leaves no graphs"


def test_no_graphs_of_pytorch_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    assert graph_sizes([1, 2], gpu, 9) == (1, 2)
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    assert graph_sizes(None, gpu, 9) == graph_sizes([1, 2], gpu, 9) == ()
    assert graph_sizes([1, 2], torch.device("cpu"), 9) == (1, 2)


@needs_numba
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_recorded_on_a_cpu(llama_folder: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes alone, of the sizes that there are by default; drafts run as they do without."""
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    recorded, eager = (make(llama_folder, graphs, dtype=dtype) for graphs in (None, False))
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


@needs_numba
def test_what_is_not_recorded(tmp_path: Path, llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that read values on the host, and steps without loops."""
    save_checkpoint(FAMILIES["gpt_oss"], tmp_path)
    without_loops = make(llama_folder, None)
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    for model in (without_loops, make(tmp_path, None)):
        begin(model, (3,))
        assert decode(model, (0,), 1).isfinite().all()
        assert model.num_graph_replays == 0


def test_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "triton")
    cpu = torch.device("cpu")
    assert graph_sizes(True, cpu, 1000) == (1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16)) == DEFAULT_SIZES
    assert graph_sizes(None, torch.device("cuda"), 1000) == DEFAULT_SIZES
    assert graph_sizes(False, torch.device("cuda"), 1000) == graph_sizes((), cpu, 9) == ()
    assert graph_sizes(None, cpu, 10, weight_bytes=1 << 20) == (*range(1, 9), 10)
    assert graph_sizes(None, cpu, 1000, weight_bytes=1 << 30) == ()
    assert graph_sizes(True, cpu, 5) == (1, 2, 4, 5)
    assert graph_sizes([9, 3, 3], cpu, 1000) == (3, 9)
    for choice in ([0], [4, -1], ["4"]):
        with pytest.raises(InvalidInputError, match="cuda_graphs: "):
            graph_sizes(choice, cpu, 1000)  # type: ignore[arg-type]


class _NoSync(TorchDispatchMode):
    """Raises where the host would wait for a value on the device, which no capture allows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{func} in a captured forward")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("folder", ["qwen3_moe", "gpt_oss", "gemma3", "gemma4_moe", "gemma4_shared_kv"], indirect=True)
def test_a_forward_asks_the_device_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The PyTorch implementations do, so that the check is seen to work."""
    forward = make(folder).graphs._forward(GraphShape(4, 4))

    def tolist(self: torch.Tensor) -> Any:
        raise AssertionError("tolist in a captured forward")

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    with _NoSync(), torch.no_grad():
        monkeypatch.setenv("PAGED_BACKEND", "torch")
        with pytest.raises(AssertionError, match="in a captured forward"):
            forward()
        monkeypatch.setenv("PAGED_BACKEND", "triton")
        forward()


def test_calls_stand_in_for_graphs_on_a_cpu() -> None:
    calls: list[int] = []
    replay = graph_recorder(torch.device("cpu"))(lambda: calls.append(len(calls)))
    replay()
    assert calls == [0, 1]


def test_how_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stream of its own, which runs once before it captures; the streams wait for one another on both sides."""
    events: list[Any] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            events.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self) -> None:
            events.append("replay")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        events.append(f"on {stream.name}")
        yield
        events.append("off")

    signature = inspect.signature(torch.cuda.graph.__init__)

    @contextmanager
    def capture(*args: Any, **kwargs: Any) -> Iterator[None]:
        given = signature.bind(None, *args, **kwargs).arguments
        assert isinstance(given["cuda_graph"], Graph)
        events.append(("capture", given["pool"], given["stream"].name, given["capture_error_mode"]))
        yield
        events.append("captured")

    side = iter([Stream("side")])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(side))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    record = graph_recorder(torch.device("cuda:0"))
    recorded = [
        *("side waits for current", "on side", "run", "off"),
        *(("capture", (0, 7), "side", "thread_local"), "run", "captured", "current waits for side"),
    ]
    for _ in range(2):
        events.clear()
        replay = record(lambda: events.append("run"))
        assert events == recorded
    replay()
    assert events == [*recorded, "replay"]


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
            before = model.num_graph_replays
            replayed = decode(model, names, number)
            assert model.num_graph_replays == before + 1
            for name in names:
                handle = model.kv_manager.get_handle(name)
                assert handle is not None
                model.truncate_kv(name, handle.num_tokens - 1)
            graphs, model.graphs._replays = model.graphs._replays, {}
            eager = decode(model, names, number)
            model.graphs._replays = graphs
            assert float((replayed - eager).abs().max() / eager.abs().max()) < tolerance

    check()
    old = [parameter.data for parameter in model.network.parameters()]
    for parameter in model.network.parameters():
        parameter.data = parameter.data * 0.9
    model.prepare()
    check()
    del old
