"""CUDA graphs of steps: one launch instead of about ten per layer, for batches padded to a few shapes.

On a CPU, recordings of numba kernels replace graphs; they skip the Python between the kernels.
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
from paged.kernels.core.device import use_triton, wants_numba
from paged.kernels.core.operation import are_calls_watched
from paged.kernels.cpu.recording import Recording
from paged.kernels.cpu.step_memory import StepMemory
from paged.kernels.lora.batch import LoraBatch
from paged.models.families.network import Network
from paged.models.loading.load_options import as_graphs
from paged.models.lora.adapters import LoraAdapters
from paged.models.step_threads import StepThreads
from paged.step.metadata import NUM_STATE_ARRAYS, AttentionMetadata
from paged.step.staging import FixedCopy, Staging, to_device
from paged.step.step import Step
from paged.tools.printable import one_line

Begin = Callable[[], Callable[[], None]]
"""Sets up a step over tensors at fixed addresses, and returns a function that runs the step."""
Capture = Callable[[Begin], tuple[Callable[[], None], str]]
"""Runs a step; returns a function that repeats the step on new contents of the tensors, and a name.

The name is empty, or names an operation that could not be recorded; the function then makes and runs the step anew."""

_LOG = logging.getLogger("paged")
# Default sizes of decode steps on a GPU, in tokens. They may lie apart, because padding is cheap while the time of a
# step is the time to read the weights.
DEFAULT_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))
# Sizes of recorded decode steps on a CPU, in tokens. They lie close together, because each padding row costs time.
RECORDED_SIZES = (*range(1, 9), *range(12, 33, 4))
# Largest weights, in bytes, with which steps are recorded. A recording saves a fixed time per layer, so with larger
# weights it is not worth its memory and the forwards that record it. See models/limits.md.
_MOST_RECORDED_BYTES = 4 << 30
# Most tokens of a sequence in graphs of draft verification: the newest token and 7 drafts. Graphs for fewer tokens
# would not be faster, because attention takes the same tile. See models/limits.md.
_VERIFIED_TOKENS = 8
# Block ids that fill 64 bytes. Rows of the block table are padded to a multiple, so that every row is aligned.
_TABLE_LINE = 16


def graph_sizes(
    choice: bool | Sequence[int] | None, device: torch.device, num_blocks: int, *, step_bytes: int = 0
) -> tuple[int, ...]:
    """Return the numbers of tokens to capture, ascending; at most the number of sequences that `num_blocks` can hold.

    choice: the sizes; True for DEFAULT_SIZES, False for no graphs. None takes DEFAULT_SIZES on a GPU. On a CPU, None
    takes RECORDED_SIZES if a step of one token reads few weights; step_bytes tells how many bytes. A GPU with
    PAGED_BACKEND=torch has no graphs, because PyTorch implementations synchronise with the device.

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
        is_invariant: as in `Step`.
    """

    longest_query: int
    num_tokens: int
    is_adapted: bool = False
    is_invariant: bool = False


def graph_shapes(sizes: Sequence[int], *, is_adapted: bool) -> list[GraphShape]:
    """Return the graphs to capture, the largest first.

    Every size has a graph of decode steps. A coarser list, each size at most half of the next, also has graphs of draft
    verification (up to 8 tokens a sequence) and of queries of any length, such as short prompts beside decodes.

    sizes: ascending. is_adapted: whether steps have adapters; decode steps then have only the sizes of the coarser
    list.
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

    A graph holds the forward from token ids to the head's product. It is set up for the longest possible sequence, so
    it serves all lengths. Rows beyond the batch are padding: their K/V are not stored, and no sequence queries them.

    A graph contains the addresses of weights and caches, so capture again after one is replaced. Graphs of steps with
    adapters reserve the memory of all adapters that can be loaded; the adapter of each row is an input.
    `capture_adapted` captures them after the first adapter is loaded. If another adapter then changes more layers, the
    graphs are unused until the next `capture_adapted`.

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
        if cache.has_slots:
            self._num_states = NUM_STATE_ARRAYS
        if cache.recurrent is not None:
            self._max_append = cache.recurrent.max_append
        self._staging = Staging(self._device)
        self._table_width = -(-self.longest // (cache.block_size * _TABLE_LINE)) * _TABLE_LINE
        self._sizes, self._recorded_only = tuple(sizes), recorded_only
        self.clear()

    def clear(self) -> None:
        """Drop the graphs and free their memory."""
        self._capture_step: Capture | None = None
        self.are_captured = False
        self._replays: dict[GraphShape, Callable[[], None]] = {}
        self._features: dict[GraphShape, torch.Tensor] = {}
        self._num_adapted_layers = 0
        self._has_invariant = False
        self._inputs: dict[GraphShape, FixedCopy] = {}
        self._table = self._product = torch.empty(0)
        # Shape and number of tokens -> views of the input ids and of the product's rows.
        self._parts: dict[tuple[GraphShape, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._sent_table: NDArray[np.int32] | None = None
        self.num_unrecorded = 0
        # Recorded steps whose number of threads is chosen by their times.
        self._threads: dict[GraphShape, StepThreads] = {}

    def capture(self, track: Callable[[Sequence[GraphShape]], Iterable[GraphShape]] = iter) -> None:
        """Capture a graph for every shape, the largest first. The capture needs no cache blocks.

        After an error there are no graphs. track: iterates over the shapes, and may show progress.
        """
        with self._network.computing():
            self._capture_all(track)

    def _capture_all(self, track: Callable[[Sequence[GraphShape]], Iterable[GraphShape]]) -> None:
        self.clear()
        if not self._sizes or (self._recorded_only and not records_steps(self._device)):
            return
        max_tokens = self._sizes[-1]
        dtype = next(self._network.parameters()).dtype
        table_shape = self._num_tables, max_tokens, self._table_width
        self._table = torch.zeros(table_shape, dtype=torch.int32, device=self._device)
        self._product = torch.empty(max_tokens, self._network.num_logits, dtype=dtype, device=self._device)
        self._capture_step = capture_for(self._device)
        try:
            shapes = graph_shapes(self._sizes, is_adapted=False)
            if self._recorded_only:
                shapes = [shape for shape in shapes if shape.longest_query == 1]
            self._capture(self._capture_step, track(shapes))
            if self._recorded_only:
                self._threads = {shape: StepThreads() for shape in self._replays}
            self.capture_adapted(track)
        except BaseException:
            self.clear()
            raise

    def capture_adapted(self, track: Callable[[Sequence[GraphShape]], Iterable[GraphShape]] = iter) -> None:
        """Capture the graphs of steps with adapters, if others are captured and a layer has adapters."""
        if self._capture_step is None or self._recorded_only or self._num_adapted_layers == self._adapters.num_layers:
            return
        with self._network.computing():
            self._capture(self._capture_step, track(graph_shapes(self._sizes, is_adapted=True)))
        self._num_adapted_layers = self._adapters.num_layers

    def _capture_invariant(self) -> None:
        """Capture invariant decode steps when the first one runs, because few engines run any.

        Steps of several ranks cannot be recorded, because ranks do not come here together.
        """
        self._has_invariant = True
        if self._capture_step is None or not self._recorded_only or not self.are_captured:
            return
        shapes = [GraphShape(1, size, is_invariant=True) for size in reversed(self._sizes)]
        with self._network.computing(is_invariant=True):
            self._capture(self._capture_step, shapes)

    def shape_of(self, step: Step, *, is_adapted: bool) -> GraphShape | None:
        """Return the graph that runs a step; None if no graph fits.

        Graphs do not run steps without logits, with hidden states or other captured states, with embedded rows, or with
        watched calls. The first invariant step records the graphs of all invariant steps.
        """
        num_tokens, longest = len(step.token_ids), step.max_seqlen_q
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
        self, step: Step, shape: GraphShape, row_adapters: NDArray[np.int32] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a step on the graph of `shape`; return its logits, and all tokens' features if there is a draft head.

        Logits are the rows of `step.row_ids`, float32 [num_rows, num_logits]. row_adapters: as `LoraAdapters` returns
        them.
        """
        inputs, num_tokens = self._inputs[shape], len(step.token_ids)
        rows = [step.token_ids, *step.arrays[:-1], *self._adapter_rows(shape, row_adapters)]
        fills = 0, 0, -1, 0, *[0] * self._num_states, num_tokens, -1, -1
        inputs.send(rows, fills[: len(rows)])
        input_ids, product = self._parts_of(shape, num_tokens)
        step.copy_device_ids(input_ids)
        self._send_table(step.block_tables)
        if shape in self._threads:
            self._threads[shape].run(self._replays[shape])
        else:
            self._replays[shape]()
        features = self._features.get(shape)
        if features is not None:
            features = features[:num_tokens].clone()  # the next graph may overwrite them
        if len(step.row_ids) < num_tokens:
            product = product[to_device((step.row_ids,), self._device)[0]]
        return product.to(torch.float32, copy=True), features

    def _parts_of(self, shape: GraphShape, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of input ids and product; they are cached, because making them takes 5 us."""
        parts = self._parts.get((shape, num_tokens))
        if parts is None:
            parts = self._inputs[shape].tensors[0][:num_tokens], self._product[:num_tokens]
            self._parts[shape, num_tokens] = parts
        return parts

    def _capture(self, capture_step: Capture, shapes: Iterable[GraphShape]) -> None:
        with torch.no_grad():
            for shape in shapes:
                replay, obstacle = capture_step(self._forward(shape))
                if obstacle:
                    if not self.num_unrecorded:
                        text = "steps of %d tokens are not recorded and will be slower: they run %s"
                        _LOG.warning(text, shape.num_tokens, obstacle)
                    self.num_unrecorded += 1
                    if self._recorded_only:
                        continue
                self._replays[shape] = replay
        self.are_captured = bool(self._replays)
        self._replays = dict(sorted(self._replays.items()))  # `shape_of` takes the first shape that fits

    def _forward(self, shape: GraphShape) -> Begin:
        """Return the forward of one shape over the static inputs, which hold padding."""
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
        """Copy the table's rows of the batch, unless no block has changed: a full table can take megabytes."""
        if tables is not self._sent_table:
            (table,) = to_device((tables[:, :, : self._table_width],), self._device)
            self._table[:, : tables.shape[1], : tables.shape[2]].copy_(table)
            self._sent_table = tables

    def _adapter_rows(self, shape: GraphShape, row_adapters: NDArray[np.int32] | None) -> list[NDArray[np.int32]]:
        """Return the rows that adapters change, as `LoraBatch`, in the shapes of the graph; [] without adapters."""
        if not shape.is_adapted:
            return []
        padded = np.full(shape.num_tokens, -1, np.int32)
        if row_adapters is not None:
            padded[: len(row_adapters)] = row_adapters
        batch = LoraBatch.group(torch.from_numpy(padded), most_adapters=self._adapters.max_loras)
        return [batch.rows.numpy(), batch.slots.numpy()]


def _graph_capture(device: torch.device) -> Capture:
    """Return a function that captures CUDA graphs; all share one memory pool, because they run one after another.

    Capture the largest function first, so that the others reuse its memory. The next graph overwrites everything that a
    function returns or keeps, so write results to tensors made outside. The function raises UnsupportedError if a step
    runs but cannot be captured, such as a step of a transformers module that reads values on the host.
    """
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def capture(begin: Begin) -> tuple[Callable[[], None], str]:
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        # Compile and load kernels and allocate workspaces first, because a capture allows none of it.
        with torch.cuda.stream(stream):
            begin()()
        graph = torch.cuda.CUDAGraph()
        # In mode thread_local, other threads of the process may use the device.
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

    return capture


def capture_for(device: torch.device) -> Capture:
    """Return the function that captures steps of a device: as CUDA graphs, as recordings of numba kernels, or not."""
    if device.type == "cuda":
        return _graph_capture(device)
    if records_steps(device):
        return _recording_capture(StepMemory())
    return _call


def records_steps(device: torch.device) -> bool:
    """Return whether numba kernels compute on a device, so that steps may be recorded."""
    return device.type == "cpu" and wants_numba() and not use_triton(device)


def _recording_capture(memory: StepMemory) -> Capture:
    def capture(begin: Begin) -> tuple[Callable[[], None], str]:
        def run_anew() -> None:
            begin()()

        run = begin()
        run()  # the first run binds operations, which reads values on the host; repeated runs do not
        recording = Recording(run, memory)

        def repeat() -> None:
            if not recording.repeat():  # an operation failed: running it anew raises its error
                run_anew()

        if recording.obstacle:
            return run_anew, recording.obstacle
        return repeat, ""

    return capture


def _call(begin: Begin) -> tuple[Callable[[], None], str]:
    begin()()
    return lambda: begin()(), ""
