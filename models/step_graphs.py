"""CUDA graphs of steps: one launch instead of about ten per layer, for batches padded to a few shapes.

On a CPU, recordings of numba kernels take their place: steps without the Python between the kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged.cache.kv_cache import PagedKvCacheConfig
from paged.errors import PagedError, UnsupportedError
from paged.forward_step import ForwardStep
from paged.kernels.common.device import use_triton, wants_loops
from paged.kernels.common.numba_ops.recording import Recording
from paged.kernels.common.numba_ops.step_memory import StepMemory
from paged.kernels.common.numba_ops.thread_times import one_thread, seconds_saved_alone
from paged.kernels.common.operation import are_calls_watched
from paged.kernels.lora.batch import LoraBatch
from paged.metadata import NUM_STATE_ARRAYS, AttentionMetadata
from paged.models.families.network import Network
from paged.models.loading.load_options import as_graphs
from paged.models.lora.adapters import LoraAdapters
from paged.staging import FixedCopy, Staging, to_device
from paged.tools.printable import one_line

Begin = Callable[[], Callable[[], None]]
"""Plans a step over tensors at fixed addresses, and returns a function that runs it."""
Record = Callable[[Begin], tuple[Callable[[], None], str]]
"""Runs a step; returns a function that repeats its work on the tensors' new contents. If that function plans and runs
the step again, also returns the name of the operation that could not be recorded."""

_LOG = logging.getLogger("paged")
# Padding is cheap while reading the weights limits a step: at most 7 rows below 64, then 15.
DEFAULT_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))
# Sizes of decode steps on a CPU, where each row costs time. A recording saves 0.2 ms a layer: a Llama of 0.5B, 988 MB
# in bfloat16, took 17.9 ms in place of 22.3 (an EPYC), one of 1.5B 39 in place of 51. That is little for larger models,
# and recording takes 28 forwards. Of experts, only those count that a step reads: 4 layers of 128 experts in int4, 47
# of 339 MB, take 0.72 ms in place of 1.68.
RECORDED_SIZES = (*range(1, 9), *range(12, 33, 4))
_MOST_RECORDED_BYTES = 4 << 30
# Keys of each sequence in the longer of two measurements of a step on one thread and on all.
_MEASURED_KEYS = 1024
# The newest token and 7 drafts. Attention has tiles for 16, 32 and 64 rows of a sequence, tokens times heads of a
# group. With 4 or 8 heads, 5 tokens take the same tile as 8.
_VERIFIED_TOKENS = 8
# Rows of the block table are padded to 64 bytes, so that every row is aligned.
_TABLE_LINE = 16


def graph_sizes(
    choice: bool | Sequence[int] | None, device: torch.device, num_blocks: int, *, step_bytes: int = 0
) -> tuple[int, ...]:
    """Return the numbers of tokens to capture, ascending; at most the number of sequences that `num_blocks` can hold.

    choice: the sizes; True for DEFAULT_SIZES, False for none; None for DEFAULT_SIZES on a GPU, and on a CPU for
    RECORDED_SIZES if a step of one token reads few weights. step_bytes: what it reads. A GPU with PAGED_BACKEND=torch
    gets none, because PyTorch implementations synchronise with the device.

    Raises:
        InvalidInputError: a size is not a positive integer.
    """
    sizes = as_graphs("cuda_graphs", choice)
    on_gpu = device.type == "cuda"
    is_too_large = sizes is None and not on_gpu and step_bytes > _MOST_RECORDED_BYTES
    if sizes is False or is_too_large or (on_gpu and not use_triton(device)):
        sizes = ()
    elif sizes is None and not on_gpu:
        sizes = RECORDED_SIZES
    elif sizes is None or sizes is True:
        sizes = DEFAULT_SIZES
    return tuple(sorted({min(size, num_blocks) for size in sizes}))


@dataclass(frozen=True, order=True)
class GraphShape:
    """Upper bounds of the steps that one graph runs; a smaller shape is faster.

    Attributes:
        longest_query: largest number of tokens of one sequence.
        num_tokens: largest number of tokens, and of sequences.
        is_adapted: whether steps have adapters.
        is_invariant: as in `ForwardStep`.
    """

    longest_query: int
    num_tokens: int
    is_adapted: bool = False
    is_invariant: bool = False


def graph_shapes(sizes: Sequence[int], *, is_adapted: bool) -> list[GraphShape]:
    """Return the graphs to capture, the largest first.

    Every size has a graph of decode steps. Sizes at least twice as large as the next one also have graphs of draft
    verification (up to 8 tokens a sequence) and of queries of any length, such as short prompts beside decodes.

    sizes: ascending. is_adapted: graphs of steps with adapters; these have the fewer sizes for decode steps, too.
    """
    coarse: list[int] = []
    for size in reversed(sizes):
        if not coarse or 2 * size <= coarse[-1]:
            coarse.append(size)
    if is_adapted:
        sizes = coarse
    shapes = {GraphShape(1, size, is_adapted) for size in sizes}
    for size in coarse:
        shapes.add(GraphShape(min(size, _VERIFIED_TOKENS), size, is_adapted))
        shapes.add(GraphShape(size, size, is_adapted))
    return sorted(shapes, key=lambda shape: (shape.num_tokens, shape.longest_query), reverse=True)


class StepGraphs:
    """Replays steps of few tokens from graphs over static inputs.

    A graph holds the forward from token ids to the head's product. It is planned for the longest possible sequence, so
    it serves all lengths. Rows beyond the batch are padding: their K/V are not stored, and no sequence queries them.

    A graph contains the addresses of weights and caches: capture again after one is replaced. Graphs of steps with
    adapters reserve the memory of all adapters that can be loaded; the adapter of each row is an input.
    `capture_adapted` makes them after the first adapter is loaded. If another adapter then changes more layers, they
    are unused until it is called again.

    are_captured: whether there are graphs.
    num_unrecorded: number of shapes that the last `capture` could not record on a CPU.
    """

    def __init__(
        self,
        network: Network,
        cache: PagedKvCacheConfig,
        adapters: LoraAdapters,
        *,
        max_seq_len: int,
        sizes: Sequence[int],
        recorded_only: bool = False,
    ) -> None:
        """Store the options; `capture` captures and allocates.

        sizes: numbers of tokens, ascending. recorded_only: keep only graphs of decode steps, and only if a `Recording`
        can repeat them.
        """
        self._network = network
        self._adapters = adapters
        self._device = next(network.parameters()).device
        self.longest = min(max_seq_len, cache.longest_sequence or max_seq_len)
        self._num_tables = len(cache.tables)
        self._num_states = self._max_append = 0
        if cache.recurrent is not None:
            self._num_states, self._max_append = NUM_STATE_ARRAYS, cache.recurrent.max_append
        self._staging = Staging(self._device)
        self._table_width = -(-self.longest // (cache.block_size * _TABLE_LINE)) * _TABLE_LINE
        self._sizes, self._recorded_only = tuple(sizes), recorded_only
        self.clear()

    def clear(self) -> None:
        """Drop the graphs and free their memory."""
        self._record: Record | None = None
        self.are_captured = False
        self._replays: dict[GraphShape, Callable[[], None]] = {}
        self._features: dict[GraphShape, torch.Tensor] = {}
        self._num_adapted_layers = 0
        self._has_invariant = False
        self._inputs: dict[GraphShape, FixedCopy] = {}
        self._table = self._product = torch.empty(0)
        # For each shape and number of tokens: these tokens' input ids, and their rows of the product.
        self._parts: dict[tuple[GraphShape, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._sent_table: NDArray[np.int32] | None = None
        self.num_unrecorded = 0
        # Recorded steps that one thread runs sooner than all, up to so many keys.
        self._most_keys_of_one: dict[GraphShape, int] = {}

    def capture(self, track: Callable[[Sequence[GraphShape]], Iterable[GraphShape]] = iter) -> None:
        """Capture a graph for every shape, the largest first; after an error there are none. Needs no cache blocks.

        track: iterates over the shapes, and may show progress.
        """
        with self._network.computing():
            self._capture_all(track)

    def _capture_all(self, track: Callable[[Sequence[GraphShape]], Iterable[GraphShape]]) -> None:
        self.clear()
        if not self._sizes or (self._recorded_only and not records_loops(self._device)):
            return
        max_tokens = self._sizes[-1]
        dtype = next(self._network.parameters()).dtype
        table_shape = self._num_tables, max_tokens, self._table_width
        self._table = torch.zeros(table_shape, dtype=torch.int32, device=self._device)
        self._product = torch.empty(max_tokens, self._network.num_logits, dtype=dtype, device=self._device)
        self._record = graph_recorder(self._device)
        try:
            shapes = graph_shapes(self._sizes, is_adapted=False)
            if self._recorded_only:
                shapes = [shape for shape in shapes if shape.longest_query == 1]
            self._capture(self._record, track(shapes))
            if self._recorded_only and not self._num_states:
                self._choose_threads()
            self.capture_adapted(track)
        except BaseException:
            self.clear()
            raise

    def capture_adapted(self, track: Callable[[Sequence[GraphShape]], Iterable[GraphShape]] = iter) -> None:
        """Capture the graphs of steps with adapters, if others are captured and a layer has adapters."""
        if self._record is None or self._recorded_only or self._num_adapted_layers == self._adapters.num_layers:
            return
        with self._network.computing():
            self._capture(self._record, track(graph_shapes(self._sizes, is_adapted=True)))
        self._num_adapted_layers = self._adapters.num_layers

    def _capture_invariant(self) -> None:
        """Record invariant decode steps, at the first of them: few engines have any.

        Steps of several ranks cannot be recorded, and ranks do not come here together.
        """
        self._has_invariant = True
        if self._record is None or not self._recorded_only or not self.are_captured:
            return
        shapes = [GraphShape(1, size, is_invariant=True) for size in reversed(self._sizes)]
        with self._network.computing(is_invariant=True):
            self._capture(self._record, shapes)

    def _choose_threads(self) -> None:
        """Find the recorded steps that are too small for several threads, the smallest steps first.

        Invariant steps are not among them: the bits of libraries' products may depend on the number of threads.
        """
        if torch.get_num_threads() == 1:
            return
        with torch.no_grad():
            for shape in self._replays:
                most_keys = self._most_keys(shape)
                if most_keys == 0:
                    break
                self._most_keys_of_one[shape] = most_keys
        if self._most_keys_of_one:
            largest = max(shape.num_tokens for shape in self._most_keys_of_one)
            _LOG.info("decode steps of up to %d sequences run on one thread, unless they are long", largest)

    def _most_keys(self, shape: GraphShape) -> int:
        """Return up to how many keys of all its sequences one thread runs a recorded step sooner than all threads.

        The step is timed with one key a sequence and with many. Between and beyond, times grow with the keys.
        """
        *_, seq_lens, cu_seqlens_q = self._inputs[shape].tensors
        torch.arange(shape.num_tokens + 1, out=cu_seqlens_q)
        num_keys = min(self.longest, _MEASURED_KEYS)
        seq_lens.fill_(1)
        saved_of_few = seconds_saved_alone(self._replays[shape])
        seq_lens.fill_(num_keys)
        saved_of_many = None
        if saved_of_few is not None and saved_of_few > 0:
            saved_of_many = seconds_saved_alone(self._replays[shape])
        for tensor in (seq_lens, cu_seqlens_q):
            tensor.zero_()  # padding
        if saved_of_few is None or saved_of_many is None:
            return 0
        if saved_of_many >= saved_of_few:
            return shape.num_tokens * self.longest
        return int(shape.num_tokens * num_keys * saved_of_few / (saved_of_few - saved_of_many))

    def shape_of(self, step: ForwardStep, *, is_adapted: bool) -> GraphShape | None:
        """Return the graph that runs a step; None if none fits, if no logits or more than logits are wanted, if it
        has embedded rows, or if calls are watched. The first invariant step records the graphs of all."""
        num_tokens, longest = len(step.token_ids), step.host.max_seqlen_q
        is_stale = is_adapted and self._num_adapted_layers != self._adapters.num_layers
        has_logits = len(step.row_ids) and not step.returns_hidden
        if step.captured is not None or are_calls_watched():
            return None
        if step.embeds is not None or is_stale or num_tokens > self._sizes[-1] or not has_logits:
            return None
        if step.is_invariant and not self._has_invariant:
            self._capture_invariant()
        kind = is_adapted, step.is_invariant
        for shape in self._replays:
            is_fitting = num_tokens <= shape.num_tokens and longest <= shape.longest_query
            if is_fitting and (shape.is_adapted, shape.is_invariant) == kind:
                return shape
        return None

    def run(
        self, step: ForwardStep, shape: GraphShape, adapters: NDArray[np.int32] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a step on the graph of `shape`; return the rows of `step.row_ids`, float32 [num_rows, num_logits], and
        the features of all tokens for a draft head, if there is one.

        adapters: from `LoraAdapters.row_slots`.
        """
        inputs, num_tokens = self._inputs[shape], len(step.token_ids)
        rows = [step.token_ids, *step.host.arrays[:-1], *self._adapter_rows(shape, adapters)]
        fills = 0, 0, -1, 0, *[0] * self._num_states, num_tokens, -1, -1
        inputs.send(rows, fills[: len(rows)])
        input_ids, product = self._parts_of(shape, num_tokens)
        step.copy_device_ids(input_ids)
        self._send_table(step.host.block_tables)
        if shape in self._most_keys_of_one and step.host.seq_lens.sum() <= self._most_keys_of_one[shape]:
            with one_thread():
                self._replays[shape]()
        else:
            self._replays[shape]()
        features = self._features.get(shape)
        if features is not None:
            features = features[:num_tokens].clone()  # the next graph may overwrite them
        if len(step.row_ids) < num_tokens:
            product = product[to_device((step.row_ids,), self._device)[0]]
        return product.to(torch.float32, copy=True), features

    def _parts_of(self, shape: GraphShape, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of input ids and product; two new ones in every step would take 5 us."""
        parts = self._parts.get((shape, num_tokens))
        if parts is None:
            parts = self._inputs[shape].tensors[0][:num_tokens], self._product[:num_tokens]
            self._parts[shape, num_tokens] = parts
        return parts

    def _capture(self, record: Record, shapes: Iterable[GraphShape]) -> None:
        with torch.no_grad():
            for shape in shapes:
                replay, obstacle = record(self._forward(shape))
                if obstacle:
                    if not self.num_unrecorded:
                        text = "steps of %d tokens are not recorded and will be slower: they run %s"
                        _LOG.warning(text, shape.num_tokens, obstacle)
                    self.num_unrecorded += 1
                    if self._recorded_only:
                        continue
                self._replays[shape] = replay
        self.are_captured = bool(self._replays)
        self._replays = dict(sorted(self._replays.items()))  # `shape_of` takes the first that fits, the smallest

    def _forward(self, shape: GraphShape) -> Begin:
        """Return the planned forward of one shape over the static inputs, which hold padding."""
        size, num_tables = shape.num_tokens, self._num_tables
        # Token ids, positions, slots, lengths, slots of states and query offsets. Padding has no query, no key and no
        # slot for K/V.
        padding: list[NDArray[Any]] = [np.zeros(size, np.int64), np.zeros(size, np.int64)]
        padding += [np.full((num_tables, size), -1), *[np.zeros(size, np.int32)] * (1 + self._num_states)]
        padding += [np.zeros(size + 1, np.int32), *self._adapter_rows(shape, None)]
        inputs = self._inputs[shape] = FixedCopy(self._staging, padding)
        inputs.send(padding, [0] * len(padding))
        input_ids, *fields = inputs.tensors
        count = 4 + self._num_states
        tensors = (*fields[:count], self._table[:, : shape.num_tokens])
        lora = fields[count:]
        product = self._product[: shape.num_tokens]

        def begin() -> Callable[[], None]:
            metadata = AttentionMetadata.over(
                tensors,
                max_seqlen_q=shape.longest_query,
                max_seqlen_k=self.longest,
                max_append=self._max_append,
            )
            if lora:
                metadata = replace(metadata, lora=LoraBatch(*lora))

            def run() -> None:
                hidden, features = self._network.run(input_ids, metadata)
                self._network.head(hidden, out=product)
                if features is not None:
                    self._features[shape] = features

            return run

        return begin

    def _send_table(self, tables: NDArray[np.int32]) -> None:
        """Copy the rows of the batch, unless no block has changed: all 256 rows for 40,000 tokens are 2.6 MB."""
        if tables is not self._sent_table:
            (table,) = to_device((tables[:, :, : self._table_width],), self._device)
            self._table[:, : tables.shape[1], : tables.shape[2]].copy_(table)
            self._sent_table = tables

    def _adapter_rows(self, shape: GraphShape, adapters: NDArray[np.int32] | None) -> list[NDArray[np.int32]]:
        """Return the rows that adapters change, as `LoraBatch`, in the shapes of the graph; [] if it has none."""
        if not shape.is_adapted:
            return []
        slots = np.full(shape.num_tokens, -1, np.int32)
        if adapters is not None:
            slots[: len(adapters)] = adapters
        batch = LoraBatch.group(torch.from_numpy(slots), most_adapters=self._adapters.max_loras)
        return [batch.rows.numpy(), batch.slots.numpy()]


def _cuda_recorder(device: torch.device) -> Record:
    """Return a function that captures CUDA graphs; all share one memory pool, because they run one after another.

    Record the largest function first, so that the others reuse its memory. The next graph overwrites everything that a
    function returns or keeps: write results to tensors made outside. Raises UnsupportedError if a step runs, but cannot
    be captured, such as one of transformers' modules that reads values on the host.
    """
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def record(begin: Begin) -> tuple[Callable[[], None], str]:
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        # Compile and load kernels and allocate workspaces before the capture, which allows none of it.
        with torch.cuda.stream(stream):
            begin()()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may use the device.
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                begin()()
        except (PagedError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            cause = error.__context__ or error  # the end of a failed capture raises, too
            reason = one_line(str(cause), 300)
            raise UnsupportedError(
                f"cuda_graphs: a step cannot be captured: {reason}; cuda_graphs=False runs it"
            ) from error
        current.wait_stream(stream)
        return graph.replay, ""

    return record


def graph_recorder(device: torch.device) -> Record:
    """Return the recorder for a device; on a CPU it records only steps of numba kernels, and runs others directly."""
    if device.type == "cuda":
        return _cuda_recorder(device)
    if records_loops(device):
        return _loop_recorder(StepMemory())
    return _call


def records_loops(device: torch.device) -> bool:
    """Return whether numba kernels compute on a device, so that steps may be recorded."""
    return device.type == "cpu" and wants_loops() and not use_triton(device)


def _loop_recorder(memory: StepMemory) -> Record:
    def record(begin: Begin) -> tuple[Callable[[], None], str]:
        def run_anew() -> None:
            begin()()

        run = begin()
        run()  # binds the operations; binding reads values, repeating does not
        recording = Recording(run, memory)

        def repeat() -> None:
            if not recording.repeat():  # an error: the run below raises it
                run_anew()

        if recording.obstacle:
            return run_anew, recording.obstacle
        return repeat, ""

    return record


def _call(begin: Begin) -> tuple[Callable[[], None], str]:
    begin()()
    return lambda: begin()(), ""
