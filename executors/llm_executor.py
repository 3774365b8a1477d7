"""Executor of language models: one forward per step for checkpoints, the model's own calls for other models."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from paged.errors import InvalidInputError, UnsupportedError
from paged.executors.cpu_threads import choose_threads
from paged.executors.foreign import ForeignModel
from paged.executors.parallel.driver import Driver
from paged.executors.parallel.follower import follow, load_adapter, update_weights, wake
from paged.executors.parallel.messages import Kind
from paged.executors.progress import tracked
from paged.executors.requests.sampling_params import SamplingParams, sampling_defaults
from paged.executors.thread_waits import warn_of_spinning
from paged.executors.types import ExecutorCapabilities, ExecutorStatus, MemoryRequirements, ModelInfo
from paged.executors.unified_executor import UnifiedExecutor
from paged.folder_path import as_folder
from paged.kernels.core.errors import as_bool, as_int
from paged.kernels.core.launch import warming_up
from paged.models.base import DecoderOnlyLLM
from paged.models.loading.checkpoint_folder import local_folder, model_name
from paged.models.loading.hf_config import HfConfig, read_eos_token_ids
from paged.models.loading.weights import untracked
from paged.models.paged_lm import PagedCausalLM
from paged.models.parallel.ranks import ParallelConfig
from paged.models.registry import load_model
from paged.models.weight_update import Source
from paged.seq_id import SeqId
from paged.step.batch import UnifiedBatchItem

_LOG = logging.getLogger("paged")
# Values of a token at the widest point of a decoder layer, in hidden sizes: the hidden state, the residual, and 4 each
# for gate, up and their product.
ACTIVATIONS_PER_HIDDEN = 14
# On a CPU, models of at least this size in bytes are packed at load. For smaller models, packing takes longer than
# generating a short text.
_PACKED_BYTES = 8 << 20


class LlmExecutor(UnifiedExecutor):
    """Runs a `DecoderOnlyLLM`; every call is one unified forward of the model.

    If a model's `unified_forward` raises UnsupportedError, it is not called again. Decode steps then share one
    `decode_batch`, and every other item runs in its own `prefill`.

    If a model keeps its own KV caches, the executor tracks their lengths. After a failed call it releases new sequences
    and truncates all others. A sequence that the model cannot truncate is released, and its handle becomes invalid.

    `metadata["lora_adapter"]` of an item sets the adapter of its sequence from this item on. In models of this package,
    the first token fixes the adapter, because K/V depend on it; the sequence's namespace is the adapter's name.

    If several processes share a model (`ParallelConfig`), call rank 0 as if it were alone, and call `serve` on the
    other ranks, where all other work raises UnsupportedError. The cache's tensors then hold only rank 0's KV heads.
    """

    def __init__(self, model: DecoderOnlyLLM, info: ModelInfo) -> None:
        self.model = model
        if isinstance(model, PagedCausalLM):
            self._lm: PagedCausalLM | ForeignModel = model
            self.kv_manager, self.embeds_limits = model.kv_manager, model.embeds_limits
            token_bytes = model.kv_manager.config.token_bytes(model.kv_manager.tensors.storage.dtype)
        else:
            self._lm = ForeignModel(model, info)
            self._model_takes_items = True
            token_bytes = self._lm.token_bytes
        memory = MemoryRequirements(
            weight_bytes=self._lm.parameter_bytes(),
            kv_bytes_per_token_per_layer=-(-token_bytes // info.num_layers),
            activation_bytes_per_token=ACTIVATIONS_PER_HIDDEN * info.hidden_size * info.dtype.itemsize,
        )
        super().__init__(info, self._lm.kv_manager, memory)
        self._run = self._lm.run
        if info.device.type == "cpu":
            _set_threads()
        self._ranks = self._lm.ranks
        if self._ranks.rank:
            self.refusal = f"rank {self._ranks.rank} of {self._ranks.size}: it can only `serve`; rank 0 drives"
        self._driver: Driver | None = None
        self._generation = HfConfig({}, "generation_config.json")
        if self._ranks.size > 1 and self._ranks.rank == 0:
            self._driver = Driver(cast(PagedCausalLM, model))

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, parallel: ParallelConfig | None = None, progress: bool = True, **options: Any
    ) -> LlmExecutor:
        """Load a Hugging Face checkpoint: a folder, or OWNER/NAME on the Hub if huggingface_hub is installed.

        On a CPU, PyTorch's number of threads is set by `choose_threads`, unless the user has chosen a number. CUDA
        graphs are captured by `warmup`. On a CPU, models of 8 MiB or more are packed at load, smaller models by
        `warmup`; see `PagedCausalLM.pack`.

        Args:
            parallel: how to distribute the model over processes; each process makes this call.
            progress: whether to show progress bars of loading and packing, on a terminal with tqdm installed.
            options: fields of `LoadOptions`: device, dtype, num_blocks, block_size, max_seq_len, num_swap_blocks,
                host_cache_bytes, cache_folder, cache_folder_bytes, enable_prefix_cache, max_pinned_fraction,
                kv_cache_dtype, kv_cache_keep_layers, kv_cache_rotation, max_loras, max_lora_rank, cuda_graphs, draft,
                quantization, num_state_slots, state_dtype, snapshot_interval, max_drafts, model_impl,
                trust_remote_code.

        Raises:
            CheckpointError: files are missing or malformed, or the Hub lacks the model.
            UnsupportedError: the architecture or an option is not supported, or huggingface_hub is not installed.
            InvalidInputError: an argument has the wrong type or is out of range.
            RankFailedError: another process has ended or could not load its part.
        """
        track = partial(tracked, shown=as_bool("progress", progress))
        folder = local_folder(as_folder("path", path))
        model = load_model(folder, parallel=parallel, track=track, **options)
        if model.device.type == "cpu" and model.parameter_bytes() >= _PACKED_BYTES:
            if model.ranks.rank:
                model.pack(untracked)
            else:
                model.pack(track)
        config = model.config
        info = ModelInfo(
            model_id=model_name(folder),
            model_type=model.model_type,
            num_parameters=model.num_parameters(),
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            num_heads=model.num_attention_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_seq_len,
            dtype=model.dtype,
            device=model.device,
            eos_token_ids=read_eos_token_ids(folder),
        )
        executor = cls(model, info)
        executor._generation = HfConfig.read(folder, "generation_config.json", may_lack=True)
        return executor

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling defaults of the checkpoint's generation_config.json, else the defaults of SamplingParams.

        Raises:
            CheckpointError: a value in the file has the wrong type or is out of range.
        """
        return SamplingParams(**sampling_defaults(self._generation))

    def serve(self) -> None:
        """Follow the work of rank 0 until it shuts down. For ranks other than 0.

        Raises:
            RankFailedError: another process has ended or did not answer within `ParallelConfig.timeout_s`.
            UnsupportedError: this is rank 0.
        """
        if self._ranks.rank == 0:
            raise UnsupportedError("serve: called on rank 0, expected another rank; rank 0 drives the others")
        try:
            follow(cast(PagedCausalLM, self.model))
        finally:
            super().shutdown()

    def _alike(self, kind: Kind, *words: str) -> AbstractContextManager[None]:
        """Return the context of a call that every rank runs by itself."""
        if self._driver is None:
            return nullcontext()
        return self._driver.alike(kind, *words)

    @property
    def weights_generation(self) -> int:
        return self.model.weights_generation if isinstance(self.model, PagedCausalLM) else 0

    @property
    def sleep_level(self) -> int:
        return self.model.memory.level if isinstance(self.model, PagedCausalLM) else 0

    @property
    def takes_device_ids(self) -> bool:
        return isinstance(self._lm, PagedCausalLM)

    def capabilities(self) -> ExecutorCapabilities:
        model = type(self.model)
        capabilities = replace(
            super().capabilities(),
            supports_truncate=model.truncate_kv is not DecoderOnlyLLM.truncate_kv,
            supports_lora=model.set_lora_adapter_for_cache is not DecoderOnlyLLM.set_lora_adapter_for_cache,
            prefers_tokens=self._ranks.size > 1,
        )
        if not isinstance(self._lm, PagedCausalLM):
            return capabilities
        network = self._lm.network
        return replace(
            capabilities,
            supports_hidden_states=True,
            has_routed_experts=any(network.config.moe),
            has_invariant_rows=network.has_invariant_rows,
            has_draft_head=self._lm.drafts is not None,
        )

    def supports_native_unified_decode(self) -> bool:
        return isinstance(self._lm, PagedCausalLM) or self._lm.is_native

    def kv_capacity(self) -> int:
        return self.model.kv_capacity()

    def truncate_kv_for_cache_id(self, cache_id: SeqId, new_len: int) -> None:
        """Roll the sequence with this id back to its first `new_len` tokens."""
        with self._call():
            self._truncate(self._live_handle(cache_id), new_len)

    def cache_metrics_snapshot(self) -> Any | None:
        return self.model.cache_metrics_snapshot()

    def lora_metrics_snapshot(self) -> Mapping[str, Any] | None:
        return self.model.lora_metrics_snapshot()

    def load_lora(self, name: str, path: str | Path) -> None:
        """Load a low-rank adapter from a folder saved by PEFT, while other adapters stay in use.

        The first adapter of a layer compiles the layer's adapter kernels and captures graphs of steps with adapters.

        Raises:
            InvalidInputError: the name is taken, max_loras are loaded, or the rank exceeds max_lora_rank.
            CheckpointError: files or tensors are missing or malformed.
            UnsupportedError: a setting of the adapter is not supported, or the model does not support adapters.
        """
        with self._call(), warming_up():
            model = self._paged()
            with self._alike(Kind.LOAD_LORA, str(name), str(path)):
                failure = load_adapter(model, name, path)
            if failure is not None:
                raise failure

    def unload_lora(self, name: str) -> None:
        """Unload an adapter and forget its cached prefixes.

        Raises:
            InvalidInputError: the adapter is not loaded, or sequences use it.
            UnsupportedError: the model does not support adapters.
        """
        lock: AbstractContextManager[object] = nullcontext()
        if self._driver is not None:
            lock = self._driver.lock
        with self._call(), lock:
            self._paged().adapters.unload(name)
            with self._alike(Kind.UNLOAD_LORA, name):
                pass

    def list_loras(self) -> tuple[str, ...]:
        """Return the names of the loaded adapters; empty if the model does not support adapters."""
        return self.model.adapters.names() if isinstance(self.model, PagedCausalLM) else ()

    def update_weights(self, source: Source, *, check_finite: bool = False) -> None:
        """Replace all weights, or none after an error, from a folder or named tensors. No sequence may be live.

        The weights are first read into host memory and checked as in loading. The prefix cache is cleared. Adapters, a
        draft head and the scales of an 8-bit cache stay. CUDA graphs stay valid unless weights are quantised; then they
        are captured again. Recorded steps of a CPU are always recorded again.

        Args:
            source: folder of a checkpoint with the same config.json; or (name in such a checkpoint, tensor on any
                device) pairs, if one process runs the whole model.
            check_finite: whether to refuse infinity and NaN.

        Raises:
            CheckpointError: a tensor is missing, unexpected, or has another shape or dtype; the configuration differs;
                or a weight is not finite.
            InvalidInputError: sequences with K/V of the old weights are live, or the source is something else.
            UnsupportedError: the model is not a `PagedCausalLM`, or tensors are given to one of several ranks.
        """
        check_finite = as_bool("check_finite", check_finite)
        with self._call(), warming_up():
            model = self._paged("no weights of this package")
            _check_idle(model, "update_weights")
            is_folder = isinstance(source, str | Path)
            if not is_folder and self._ranks.size > 1:
                raise UnsupportedError("source: tensors, expected a folder that every rank can read")
            folder = str(source) if is_folder else ""
            with self._alike(Kind.UPDATE_WEIGHTS, folder, "yes" if check_finite else ""):
                failure = update_weights(model, source, check_finite=check_finite)
            if failure is not None:
                raise failure

    def update_weights_from_group(
        self,
        tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
        *,
        group: dist.ProcessGroup | None = None,
        source_rank: int = 0,
        check_finite: bool = False,
    ) -> None:
        """Receive new weights by broadcasts, then run `update_weights`.

        All tensors are received before any is checked, so that the sender does not hang after an error.

        Args:
            tensors: name, dtype and shape of each tensor, in the order of the sender's `torch.distributed.broadcast`.
            group: process group; None for the default group. With NCCL, tensors arrive on this executor's device.
            source_rank: global rank of the sender.

        Raises:
            The errors of `update_weights`.
        """
        device = self._info.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        received = []
        for name, dtype, shape in tensors:
            tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
            dist.broadcast(tensor, source_rank, group=group)
            received.append((name, tensor.cpu()))
        self.update_weights(received, check_finite=check_finite)

    def sleep(self, level: int = 1) -> None:
        """Free the device memory of weights and KV cache until `wake`. No sequence may be live.

        The prefix cache is cleared and graphs are dropped. Adapters and swap space stay. Until `wake`, forwards raise
        ModelAsleepError.

        Args:
            level: 1 keeps the weights in host memory (on a CPU, they stay where they are). 2 drops the weights;
                `update_weights` wakes the model with new ones.

        Raises:
            InvalidInputError: sequences are live, the model is already asleep, or the level is neither 1 nor 2.
            UnsupportedError: the model is not a `PagedCausalLM`.
        """
        level = as_int("level", level, low=1, high=2)
        with self._call():
            model = self._paged("no weights of this package")
            _check_idle(model, "sleep")
            if model.memory.level:
                raise InvalidInputError(f"sleep: the model sleeps at level {model.memory.level} already")
            with self._alike(Kind.SLEEP, str(level)):
                model.memory.sleep(level)

    def wake(self) -> None:
        """Restore the memory freed by `sleep` at level 1, and capture graphs again. Do nothing if the model is awake.

        Raises:
            ModelAsleepError: the weights were dropped; call `update_weights` to wake the model.
            torch.OutOfMemoryError: too little memory is free; the model stays asleep.
        """
        with self._call(), warming_up():
            model = self._paged("no weights of this package")
            if model.memory.level == 2:
                model.memory.check_awake()
            elif model.memory.level:
                with self._alike(Kind.WAKE):
                    wake(model)

    def warmup(self, *, progress: bool = True) -> None:
        """Compile kernels and capture CUDA graphs; on a CPU, pack the weights and record steps. Sequences stay live.

        progress: whether to show progress bars on a terminal.
        """
        with self._call(), warming_up(), self._alike(Kind.WARM_UP):
            self._lm.prepare(partial(tracked, shown=as_bool("progress", progress)))
        super().warmup()

    def status(self) -> ExecutorStatus:
        status, model = super().status(), self.model
        if not isinstance(model, PagedCausalLM):
            return status
        return replace(status, graph_replays=model.num_graph_replays, unrecorded_steps=model.graphs.num_unrecorded)

    def shutdown(self) -> None:
        super().shutdown()
        self._lm.reset()
        if self._driver is not None:
            if self.kv_manager is not None and self.kv_manager.files is not None:
                # Evict blocks to host memory on every rank; each rank then writes them to its files.
                self.kv_manager.evict(self.kv_manager.config.num_blocks)
            self._driver.stop()
        if self.kv_manager is not None:
            self.kv_manager.close_tiers()

    def _paged(self, lack: str = "no adapters") -> PagedCausalLM:
        if not isinstance(self.model, PagedCausalLM):
            raise UnsupportedError(f"{type(self.model).__name__} takes {lack}")
        return self.model

    def _choose_adapters(self, items: Sequence[UnifiedBatchItem]) -> None:
        if not isinstance(self._lm, PagedCausalLM):  # chooses them with each forward
            return
        for item in items:
            if "lora_adapter" in item.metadata:
                self._lm.set_lora_adapter_for_cache(item.cache_id, item.metadata["lora_adapter"])


def _set_threads() -> None:
    """Set PyTorch's number of threads by `choose_threads`, and warn if waiting threads spin."""
    current = torch.get_num_threads()
    choice = choose_threads(current)
    if choice.num_threads != current:
        torch.set_num_threads(choice.num_threads)
        _LOG.info("%d threads in place of %d: %s", choice.num_threads, current, choice.reason)
    warn_of_spinning(choice.num_threads)


def _check_idle(model: PagedCausalLM, call: str) -> None:
    """Raise InvalidInputError if sequences hold K/V, which `call` would invalidate."""
    num_live = len(model.kv_manager.handles())
    if num_live:
        raise InvalidInputError(f"{call}: {num_live} sequences hold K/V of the weights, expected none")
