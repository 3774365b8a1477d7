"""A decoder over a paged KV cache: every method runs one forward over a mix of chunks and decode steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError
from paged.kernels.core.device import NUMBA_DTYPES, use_triton
from paged.kernels.core.launch import compile_all
from paged.kernels.cpu.products import limit_products
from paged.models.base import DecoderOnlyLLM, LlmRuntimeConfig
from paged.models.device_memory import DeviceMemory
from paged.models.drafts.block_head import BlockDraftHead
from paged.models.drafts.block_steps import BlockDraftSteps
from paged.models.drafts.steps import DraftSteps
from paged.models.families.network import Network
from paged.models.layers.sparse_moe import SparseMoe, capture_experts
from paged.models.loading.huge_pages import move_to_huge_pages
from paged.models.loading.weights import Track, num_weights, untracked
from paged.models.logits_policy import Draws, Rows, answers_of, by_item, draws_of
from paged.models.lora.adapters import LoraAdapters
from paged.models.parallel.draw import candidates_of, draw_tokens
from paged.models.quantization.packed_weights import CpuProducts
from paged.models.step_graphs import GraphShape, StepGraphs, graph_sizes
from paged.models.warmup import keep_freed_memory, load_numba_kernels, measure_products, run_adapted_steps, run_steps
from paged.prompt_embeds import EmbedsLimits
from paged.seq_id import SeqId
from paged.step.batch import UnifiedBatchItem, VerifyLogits
from paged.step.batch_step import step_of, validate_items
from paged.step.embeds import check_embeds
from paged.step.staging import to_device
from paged.step.step import Step

# Makes the other ranks run a step too. Arguments: the step, the adapters of its rows, and its draws.
Lead = Callable[[Step, NDArray[np.int32] | None, Draws | None], AbstractContextManager[None]]


class PagedCausalLM(DecoderOnlyLLM):
    """A network and the KV caches of its sequences, in one manager, by id.

    If a forward fails, every sequence is rolled back; a sequence that began with it is removed. Logits are float32, on
    the network's device.

    Attributes:
        memory: weights, cache and graphs on the device; `DeviceMemory.sleep` frees them.
        lead: wraps each step so that other ranks run it too; None on one rank.
        drafts: steps of the network's draft head; None without a draft head.
        num_graph_replays: number of forwards that ran as one of `graphs`.
        num_positions: number of positions that the layers have rotations for.

    Raises, in every method that runs tokens:
        ModelAsleepError: the model sleeps.
        InvalidInputError: no tokens, ids outside of the vocabulary, a position that is not the sequence's length, or a
            sequence that occurs twice in a batch.
        OutOfBlocksError, SequenceTooLongError: the cache is full, or a sequence grows too long; nothing was run.
    """

    def __init__(
        self,
        network: Network,
        kv_manager: PagedKvCacheManager,
        *,
        max_loras: int = 8,
        max_lora_rank: int = 64,
        cuda_graphs: bool | Sequence[int] | None = None,
    ) -> None:
        self.network = network
        self.kv_manager = kv_manager
        self.adapters = LoraAdapters(network, kv_manager, max_loras=max_loras, max_rank=max_lora_rank)
        self.model_type = network.config.model_type
        self.num_attention_heads = network.config.num_attention_heads
        self.ranks = network.ranks
        self.lead: Lead | None = None
        parameter = next(network.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        known_positions = network.config.max_position_embeddings
        max_seq_len = min(kv_manager.config.max_seq_len or known_positions, known_positions)
        self._config = LlmRuntimeConfig(
            hidden_size=network.config.hidden_size,
            num_layers=network.config.num_layers,
            num_kv_heads=network.config.num_kv_heads,
            head_dim=network.config.head_dim,
            vocab_size=network.config.vocab_size,
            max_seq_len=max_seq_len,
        )
        # Rotary tables cover only positions that the cache can hold: for a model's longest sequence they may take GBs.
        self.num_positions = min(max_seq_len, kv_manager.config.longest_sequence or max_seq_len)
        cache = kv_manager.config
        num_blocks = cache.num_blocks // len(cache.tables)
        sizes = graph_sizes(cuda_graphs, self.device, num_blocks, step_bytes=self.step_bytes(1))
        self.graphs = StepGraphs(
            network,
            cache,
            self.adapters,
            max_seq_len=max_seq_len,
            sizes=sizes,
            recorded_only=cuda_graphs is None and self.device.type == "cpu",
        )
        self.memory = DeviceMemory(network, kv_manager, self.graphs, self.num_positions)
        head = network.draft_head
        self.drafts: DraftSteps | BlockDraftSteps | None = None
        if isinstance(head, BlockDraftHead):
            self.drafts = BlockDraftSteps(head, kv_manager, network.computing, self.num_positions)
        elif head is not None:
            self.drafts = DraftSteps(head, kv_manager, network.computing)
        self.num_graph_replays = 0
        self.weights_generation = 0  # grows with every update of the weights
        self.embeds_limits = self._embeds_limits()

    @property
    def config(self) -> LlmRuntimeConfig:
        return self._config

    def num_parameters(self) -> int:
        """Return the number of weights and biases; a tied head counts once."""
        return self.network.num_weights or num_weights(self.network)

    def parameter_bytes(self) -> int:
        """Return the device memory of this rank's weights, with the scales of packed weights."""
        num_bytes = 0
        for parameter in self.network.parameters():
            if parameter.device.type == self.device.type:  # those of `HostWeights` are not on a GPU
                num_bytes += parameter.nbytes
        for module in self.network.modules():
            if isinstance(module, CpuProducts):
                num_bytes += module.nbytes
        return num_bytes

    def step_bytes(self, num_tokens: int) -> int:
        """Return the bytes of weights that a step of `num_tokens` reads.

        An embedding counts if it is also the head, and an expert if evenly spread tokens reach it.
        """
        num_bytes = self.parameter_bytes()
        if self.network.lm_head is not None:
            num_bytes -= self.network.embed_tokens.nbytes
        for module in self.network.modules():
            if isinstance(module, SparseMoe):
                num_bytes -= int(module.idle_share(num_tokens) * module.expert_bytes)
        return num_bytes

    def prefill(self, cache_id: SeqId, tokens: Sequence[int]) -> torch.Tensor:
        return self._logits([self._next_item(cache_id, tokens)])[0]

    def decode(self, cache_id: SeqId, token: int, pos: int) -> torch.Tensor:
        return self.decode_batch_with_full_logits([(cache_id, token, pos)])[0]

    def decode_batch_with_full_logits(self, items: Sequence[tuple[SeqId, int, int]]) -> torch.Tensor:
        if len(items) == 0:
            return torch.empty(0, self._config.vocab_size, device=self.device)
        decodes = [UnifiedBatchItem(cache_id, [token], pos_offset=pos) for cache_id, token, pos in items]
        return self._logits(decodes)

    def forward_verify(self, cache_id: SeqId, tokens: Sequence[int], *, start_pos: int | None = None) -> torch.Tensor:
        item = self._next_item(cache_id, tokens, start_pos)
        return self._logits([replace(item, logits_policy=VerifyLogits())])

    def unified_forward(self, items: Sequence[UnifiedBatchItem]) -> list[torch.Tensor | None]:
        if len(items) == 0:
            return []
        with self._begun(items) as step:
            return by_item(items, self.run(step))

    @contextmanager
    def _begun(self, items: Sequence[UnifiedBatchItem]) -> Iterator[Step]:
        """Check items; yield their step, which is committed at the end, and rolled back after an error."""
        self.memory.check_awake()
        self._check(items)
        with torch.no_grad(), step_of(self.kv_manager, items) as step:
            yield step

    def run(self, step: Step) -> Rows:
        """Run a step; return the answers of its wanted rows. The caller has switched gradients off, and commits."""
        if self.memory.level:
            self.memory.check_awake()
        row_adapters = None
        if self.adapters.loaded:
            row_adapters = self.adapters.row_adapters(step.handles, step.counts)
        shape = None
        if self.graphs.are_captured:
            shape = self.graphs.shape_of(step, is_adapted=row_adapters is not None)
        if self.ranks.size > 1:
            rows = self._run_on_ranks(step, shape, row_adapters)
        else:
            rows = self.run_step(step, shape, row_adapters)
            if step.policies is not None:
                rows = answers_of(rows, step.policies)
        self.num_graph_replays += shape is not None
        if row_adapters is not None:
            self.adapters.count(step.handles, step.counts)
        return rows

    def _run_on_ranks(self, step: Step, shape: GraphShape | None, row_adapters: NDArray[np.int32] | None) -> Rows:
        """Run a step on all ranks; return the answers of its wanted rows on rank 0."""
        draws = None
        if not step.returns_hidden:
            draws = self._draws_on_ranks(step)
        with nullcontext() if self.lead is None else self.lead(step, row_adapters, draws):
            rows = self.run_step(step, shape, row_adapters)
            if draws is not None:
                return self.draw(rows, draws)
            if not step.returns_hidden:
                rows = self.gather_logits(rows)
        if step.policies is None:
            return rows
        return answers_of(rows, step.policies)

    def _logits(self, items: Sequence[UnifiedBatchItem]) -> torch.Tensor:
        """Return the logits of the wanted rows of items, [num_rows, vocab_size]."""
        with self._begun(items) as step:
            logits = self.run(step)
            assert isinstance(logits, torch.Tensor)
            return logits

    def prepare(self, track: Track = untracked) -> None:
        """Warm up: compile and launch every kernel that a step can need, and capture `graphs`; on a CPU, `pack` first.

        track: iterates over the work of packing, compiling and capturing, and may show progress.
        """
        self.memory.check_awake()
        self.graphs.clear()
        self.pack(track)
        measure_products(self.network, self.dtype)
        self._launch_all(run_steps, track)
        if self.adapters.num_layers:
            self.warm_up_adapters(track)
        self.graphs.capture(self._track_graphs(track))

    def pack(self, track: Track = untracked) -> None:
        """On a CPU, reorder the weights in place for faster products, and load numba kernels if numba is installed.

        The first call on a machine takes seconds. torch.compile cannot trace a packed network.
        """
        limit_products()
        keep_freed_memory()
        if self.device.type == "cpu" and self.dtype in NUMBA_DTYPES and not use_triton(self.device):
            load_numba_kernels(self.network, self.dtype, track)
        if self.device.type == "cpu":
            with self.network.computing():
                self.network.pack(track)
            move_to_huge_pages(self.network.weight_tensors())

    def warm_up_adapters(self, track: Track = untracked) -> None:
        """Warm up steps with adapters after an adapter is loaded; also capture their graphs if there are graphs."""
        self._launch_all(run_adapted_steps, track)
        self.graphs.capture_adapted(self._track_graphs(track))

    def _track_graphs(self, track: Track) -> Track:
        if self.device.type == "cuda":
            return partial(track, desc="CUDA graphs", unit="graph")
        return partial(track, desc="recorded steps", unit="step")

    def _launch_all(self, run: Callable[..., None], track: Track) -> None:
        if self.device.type == "cuda":  # a CPU has nothing more to compile

            def ticking(kernels: Sequence[Any]) -> Iterator[Any]:
                for kernel in track(kernels, desc="kernels", unit="kernel"):
                    yield kernel
                    self.ranks.tick()

            steps = partial(run, self.network, self.kv_manager, longest=self.graphs.longest)
            with self.ranks.apart():  # ranks may compile at different times
                compile_all(steps, ticking)
            steps()

    def kv_capacity(self) -> int:
        return self.kv_manager.config.capacity_tokens

    def cache_metrics_snapshot(self) -> dict[str, Any]:
        return self.kv_manager.metrics_snapshot()

    def lora_metrics_snapshot(self) -> dict[str, Any]:
        return self.adapters.metrics_snapshot()

    def set_lora_adapter_for_cache(self, cache_id: SeqId, adapter: str | None) -> None:
        """Choose a sequence's adapter before its first token, because its K/V depend on the adapter; None for none.

        Raises:
            InvalidInputError: the adapter is not loaded, or the sequence's namespace belongs to another adapter.
        """
        self.adapters.choose(cache_id, adapter)

    def truncate_kv(self, cache_id: SeqId, new_len: int) -> None:
        handle = self.kv_manager.get_handle(cache_id)
        if handle is None:
            raise InvalidInputError(f"cache_id: {cache_id!r} is not a sequence")
        self.kv_manager.truncate(handle, new_len)

    def release(self, cache_id: SeqId) -> None:
        handle = self.kv_manager.get_handle(cache_id)
        if handle is not None:
            self.kv_manager.free(handle)

    def reset(self) -> None:
        for handle in self.kv_manager.handles():
            self.kv_manager.free(handle)

    def _check(self, items: Sequence[UnifiedBatchItem]) -> None:
        """Raise unless the items can run."""
        handles = [item.kv_cache or self.kv_manager.get_handle(item.seq_id) for item in items]
        validate_items(items, handles, vocab_size=self._config.vocab_size, max_seq_len=self._config.max_seq_len)
        check_embeds(items, self.embeds_limits)

    def _draws_on_ranks(self, step: Step) -> Draws | None:
        """Return the draws of a step if every wanted row asks only for a token and the ranks can draw it, else None."""
        draws = draws_of(step.policies or ())
        if not step.policies or draws is None or self._num_candidates(draws) is None:
            return None
        return draws

    def run_step(self, step: Step, shape: GraphShape | None, row_adapters: NDArray[np.int32] | None) -> torch.Tensor:
        """Run one forward; return this rank's columns of the wanted rows, float32 [num_rows, num_logits].

        With `step.returns_hidden`, return the wanted rows of hidden states, which every rank has in full.

        Args:
            shape: shape of the graph that runs the step.
            row_adapters: from `LoraAdapters.row_adapters`.
        """
        with self.network.computing(is_invariant=step.is_invariant):
            if self.kv_manager.canaries is not None and self.ranks.rank == 0:
                self.kv_manager.canaries.before_forward(step)
            if shape is not None:
                rows, features = self.graphs.run(step, shape, row_adapters)
            else:
                rows, features = self._run_layers(step, row_adapters)
            if self.drafts is not None and features is not None:
                self.drafts.follow(step, features)
            return rows

    def _run_layers(
        self, step: Step, row_adapters: NDArray[np.int32] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one forward without a graph; return the rows as `run_step`, and all tokens' features for a draft head."""
        metadata, outputs = step.metadata, step.outputs
        wants_all = len(step.row_ids) == len(step.token_ids)
        if row_adapters is not None:
            metadata = replace(metadata, lora=self.adapters.batch(row_adapters))
            if outputs is not None:
                output_adapters = row_adapters[step.row_ids]
                lora = None
                if (output_adapters >= 0).any():
                    lora = self.adapters.batch(output_adapters)
                outputs = replace(outputs, lora=lora)
        if step.embeds is not None:  # run all rows, because a mask has a row per token
            embeds = step.embeds.on(self.device, self.dtype, step.max_seqlen_q)
            metadata = replace(metadata, embeds=embeds)
            outputs = None
        if step.captured is None:
            hidden, features = self.network.run(step.input_ids, metadata, outputs)  # [num_rows, hidden_size]
        else:
            outputs = None
            with capture_experts(self.network, step.captured):
                hidden, features = self.network.run(step.input_ids, metadata)
            step.captured.hidden_states = hidden
        if outputs is None and not wants_all:
            hidden = hidden[step.sample_rows]
        if step.returns_hidden:
            return hidden.float(), features
        return self.network.logits(hidden), features

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return on rank 0 the logits of all ranks, float32 [num_rows, vocab_size]; on other ranks their own.

        All ranks call it.
        """
        if len(logits) == 0:
            return logits
        missing = self._rows_of_ranks - logits.shape[1]
        if missing:
            logits = functional.pad(logits, (0, missing))
        # Send logits in the head's dtype, because float32 could double the bytes without more accuracy.
        return self.ranks.gather(logits.to(self.dtype)).float()[:, : self._config.vocab_size]

    def draw(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Return tokens drawn from the logits of all ranks, int64 [num_rows], valid on rank 0; all ranks call it."""
        num_candidates = self._num_candidates(draws)
        assert num_candidates is not None
        rules = to_device(draws, self.device)
        with self.network.computing():
            return draw_tokens(self.ranks, logits, self.network.rows.start, *rules, num_candidates=num_candidates)

    def _embeds_limits(self) -> EmbedsLimits | None:
        """Return the limits of rows that replace embeddings; None if layers also read token ids."""
        config = self.network.config
        if type(self.network).layer_inputs is not Network.layer_inputs:
            return None
        windows: list[int] = []
        has_axes = True
        for layer in config.attention:
            for size in (layer.window, layer.chunk_size):
                if size is not None:
                    windows.append(size)
            has_axes = has_axes and layer.rope is not None and len(layer.rope.mrope_section) == 3
        return EmbedsLimits(
            config.hidden_size, config.num_layers, self.num_positions, has_axes, min(windows, default=None)
        )

    @property
    def _rows_of_ranks(self) -> int:
        """Rows of the vocabulary on each rank; the last rank may have fewer."""
        return -(-self._config.vocab_size // self.ranks.size)

    def _num_candidates(self, draws: Draws) -> int | None:
        return candidates_of(draws.num_candidates, self.ranks.size, self._rows_of_ranks * self.dtype.itemsize)

    def _next_item(self, seq_id: SeqId, tokens: Sequence[int], start_pos: int | None = None) -> UnifiedBatchItem:
        item = UnifiedBatchItem(seq_id, tokens)
        if start_pos is None:
            start_pos = self._length(item)
        return replace(item, pos_offset=start_pos)

    def _length(self, item: UnifiedBatchItem) -> int:
        handle = item.kv_cache or self.kv_manager.get_handle(item.seq_id)
        return 0 if handle is None else handle.num_tokens
