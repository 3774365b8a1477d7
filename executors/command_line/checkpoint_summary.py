"""What a checkpoint is and what it would take, from config.json and the headers of its weights alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from paged.errors import CheckpointError, PagedError
from paged.executors.command_line.checkpoint_folder import missing_files
from paged.models.families.llama import Llama
from paged.models.layers.config import DecoderConfig
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.weights import StoredTensors, num_weights, read_header
from paged.models.network_loader import meta_network
from paged.models.parallel.share import Share, ring_bytes, step_bytes
from paged.models.quantization.read import as_stored, read_config
from paged.models.registry import GPU_FRACTION, cache_config, model_config

# Parameters, their bytes, those of K and V of a token, and tokens that fit beside the weights.
Needs = tuple[int, int, int, int | None]


@dataclass(frozen=True)
class RankSummary:
    """One of several ranks that share a model. reason: why they cannot. sent_bytes: what it sends for a token whose
    logits are wanted; the others as in CheckpointSummary, of this rank.
    """

    tensor_parallel_size: int
    reason: str | None
    weight_bytes: int | None
    kv_bytes_per_token: int | None
    kv_tokens: int | None
    sent_bytes: int | None


@dataclass(frozen=True)
class CheckpointSummary:
    """None where nothing says so. reason: why it is not supported, by the option's name. missing: files.

    parameters: once loaded; of one that is not supported, elements stored. tensors: those by dtype. stored_bytes: of
    the files that hold them. weight_bytes: once loaded, packed weights as they are packed and others in `dtype`.
    kv_bytes_per_token: K and V of all layers that have some. kv_tokens: how many fit into `device_bytes` beside the
    weights, in whole blocks, over all sequences. sliding_layers: those that see a window only. ranks: one of each way
    to share it.
    """

    folder: str
    architectures: list[str]
    model_type: str
    supported: bool
    reason: str | None
    missing: list[str]
    parameters: int | None
    tensors: dict[str, int]
    dtype: str | None
    kv_cache_dtype: str | None
    num_layers: int | None
    sliding_layers: int | None
    num_attention_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    num_experts: int | None
    vocab_size: int | None
    max_seq_len: int | None
    stored_bytes: int
    weight_bytes: int | None
    kv_bytes_per_token: int | None
    block_size: int
    device_bytes: int | None
    kv_tokens: int | None
    ranks: list[RankSummary]


def summarize(
    folder: Path,
    *,
    device_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    kv_cache_dtype: torch.dtype | None = None,
    block_size: int = 16,
    spreads: Sequence[Share] = (),
) -> CheckpointSummary:
    """Read a folder in Hugging Face layout; a model that is not supported is described as far as that goes.

    spreads: a rank of each way to share it.

    Raises:
        CheckpointError: config.json is missing or malformed, or a file of weights is.
    """
    hf = read_config(folder)
    known = _config(hf)
    reason = known if isinstance(known, str) else None
    network_class, config = (None, None) if isinstance(known, str) else known
    stored: StoredTensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= read_header(file)
    tensors: Counter[str] = Counter()
    for tensor in stored.values():
        tensors[tensor.dtype] += math.prod(tensor.shape)
    parameters = sum(tensors.values()) or None
    cache_dtype = weight_bytes = kv_bytes = kv_tokens = None
    ranks: list[RankSummary] = []
    if network_class is not None and config is not None:
        dtype = config.dtype if dtype is None else dtype
        cache_dtype = kv_cache_dtype or dtype
        config = replace(config, quantization=as_stored(config.quantization, stored))
        needs = partial(_needs, network_class, config, dtype, cache_dtype, block_size, device_bytes)
        parameters, weight_bytes, kv_bytes, kv_tokens = needs(Share())
        ranks = [_rank(network_class, config, dtype, share, needs) for share in spreads]
    moe = next((one for one in config.moe if one is not None), None) if config is not None else None
    return CheckpointSummary(
        folder=str(folder),
        architectures=hf.items("architectures", str),
        model_type=hf.text("model_type", "unknown"),
        supported=config is not None,
        reason=reason,
        missing=missing_files(folder),
        parameters=parameters,
        tensors=dict(tensors),
        dtype=_name(dtype),
        kv_cache_dtype=_name(cache_dtype),
        num_layers=config.num_layers if config else _integer(hf, "num_hidden_layers"),
        sliding_layers=sum(window is not None for window in config.windows) if config else None,
        num_attention_heads=config.num_attention_heads if config else _integer(hf, "num_attention_heads"),
        num_kv_heads=config.num_kv_heads if config else _integer(hf, "num_key_value_heads"),
        head_dim=config.head_dim if config else _integer(hf, "head_dim"),
        num_experts=None if moe is None else moe.num_experts,
        vocab_size=config.vocab_size if config else _integer(hf, "vocab_size"),
        max_seq_len=config.max_position_embeddings if config else _integer(hf, "max_position_embeddings"),
        stored_bytes=sum(file.stat().st_size for file in {tensor.file for tensor in stored.values()}),
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes,
        block_size=block_size,
        device_bytes=device_bytes,
        kv_tokens=kv_tokens,
        ranks=ranks,
    )


def _config(hf: HfConfig) -> tuple[type[Llama], DecoderConfig] | str:
    """The class and configuration, or why the model cannot run."""
    try:
        network_class, config = model_config(hf)
        if config.quantization is not None:
            meta_network(network_class, config, config.dtype)  # its layers may be of sizes that cannot be packed so
        return network_class, config
    except PagedError as error:
        return str(error).removeprefix(f"{hf.source}: ")


def _rank(
    network_class: type[Llama], config: DecoderConfig, dtype: torch.dtype, share: Share, needs: Callable[[Share], Needs]
) -> RankSummary:
    try:
        _, weight_bytes, kv_bytes, kv_tokens = needs(share)
    except PagedError as error:
        return RankSummary(share.size, str(error), None, None, None, None)
    num_sums, counts = network_class.num_sums(config), {"last_sums": 0, "num_tokens": 1, "num_rows": 1}
    sent = step_bytes(config, num_sums=num_sums, size=share.size, itemsize=dtype.itemsize, **counts)
    return RankSummary(share.size, None, weight_bytes, kv_bytes, kv_tokens, round(ring_bytes(sent, share.size)))


def _needs(
    network_class: type[Llama],
    config: DecoderConfig,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
    device_bytes: int | None,
    share: Share,
) -> Needs:
    cache = cache_config(share.config(config), block_size=block_size)
    parameters, weight_bytes = _loaded(network_class, config, dtype, share)
    kv_tokens = None
    if device_bytes is not None:
        num_blocks = int((device_bytes - weight_bytes) * GPU_FRACTION) // cache.block_bytes(cache_dtype)
        kv_tokens = replace(cache, num_blocks=num_blocks).capacity_tokens if num_blocks > 0 else 0
    return parameters, weight_bytes, cache.token_bytes(cache_dtype), kv_tokens


def _loaded(network_class: type[Llama], config: DecoderConfig, dtype: torch.dtype, share: Share) -> tuple[int, int]:
    """Parameters and their bytes once loaded: of plain weights those of one layer of every kind, times how many."""
    if config.quantization is not None:
        return _size(network_class, config, dtype, share)
    none = replace(config, attention=(), moe=(), intermediate_size=())
    rest = num_parameters, num_bytes = _size(network_class, none, dtype, share)
    layers = Counter(zip(config.attention, config.moe, config.intermediate_size, strict=True))
    for (attention, moe, size), count in layers.items():
        layer = replace(config, attention=(attention,), moe=(moe,), intermediate_size=(size,))
        one = _size(network_class, layer, dtype, share)
        num_parameters += count * (one[0] - rest[0])
        num_bytes += count * (one[1] - rest[1])
    return num_parameters, num_bytes


def _size(network_class: type[Llama], config: DecoderConfig, dtype: torch.dtype, share: Share) -> tuple[int, int]:
    network = meta_network(network_class, config, dtype, share)
    return num_weights(network), sum(parameter.nbytes for parameter in network.parameters())


def _integer(hf: HfConfig, key: str) -> int | None:
    try:
        return hf.optional_integer(key)
    except CheckpointError:
        return None


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
