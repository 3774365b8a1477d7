"""From a folder with a Hugging Face checkpoint to a model that runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError, UnsupportedError
from paged.kernels.common.scalars import shown
from paged.models.computation_keys import refuse_unread
from paged.models.families.gemma3 import Gemma3
from paged.models.families.gpt_oss import GptOss
from paged.models.families.llama import Llama, Mistral
from paged.models.families.mixtral import Mixtral
from paged.models.families.qwen2 import Qwen2
from paged.models.families.qwen3 import Qwen3
from paged.models.families.qwen3_moe import Qwen3Moe
from paged.models.layers.config import DecoderConfig
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.load_options import (
    as_device,
    as_dtype,
    as_flag,
    as_folder,
    as_graphs,
    as_optional_size,
    as_size,
)
from paged.models.network_loader import load_network
from paged.models.paged_lm import PagedCausalLM

ARCHITECTURES: dict[str, type[Llama]] = {
    "Gemma3ForCausalLM": Gemma3,
    "GptOssForCausalLM": GptOss,
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "MixtralForCausalLM": Mixtral,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
}

# On a CPU: room for this many sequences of full length, as long as that takes no more than this many bytes.
_CPU_SEQUENCES = 4
_CPU_BYTES = 1 << 30
# On a GPU: the rest of the memory is for activations.
GPU_FRACTION = 0.9


def load_model(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    num_blocks: int | None = None,
    block_size: int = 16,
    max_seq_len: int | None = None,
    num_swap_blocks: int = 0,
    enable_prefix_cache: bool = True,
    kv_cache_dtype: torch.dtype | str | None = None,
    max_loras: int = 8,
    max_lora_rank: int = 64,
    cuda_graphs: bool | Sequence[int] | None = None,
) -> PagedCausalLM:
    """The model of a checkpoint folder (config.json and safetensors), with a KV cache.

    Args:
        path: the folder.
        device: CUDA where there is one, else the CPU.
        dtype: of weights and activations: float32, float16 or bfloat16, as torch.dtype or by name; as the checkpoint
            says where None or "auto".
        num_blocks: size of the KV cache. None takes 90 % of the GPU's memory left after the weights, or on a CPU room
            for four sequences of full length, at most 1 GiB.
        block_size: tokens a block.
        max_seq_len: longest sequence; the model's own limit where None.
        num_swap_blocks: blocks of host memory that sequences can be swapped to.
        enable_prefix_cache: let prompts begin with K/V that earlier ones computed.
        kv_cache_dtype: that of the weights where None or "auto", or torch.float8_e4m3fn, half of 16 bits: then with the
            scales that the checkpoint holds for it, else with 1.
        max_loras: how many adapters can be loaded at once.
        max_lora_rank: of any of them. The first one to change a layer takes the memory for max_loras of this rank.
        cuda_graphs: batch sizes up to which steps of one token a sequence are padded and replayed from graphs, once
            `prepare` has captured them; True for 1 to 256 in 22 sizes, False for none, None for True on a GPU alone. On
            a CPU, where there are no graphs, the same path runs the layers.

    Raises:
        CheckpointError: the folder is incomplete, malformed or unsafe.
        UnsupportedError: the architecture, or an option of it, is not known here.
        InvalidInputError: an argument is of another kind, a size is not positive, max_seq_len is beyond the model's own
            limit, the device is not there, or the cache's dtype is another.
    """
    folder = as_folder("path", path)
    device, given_dtype = as_device(device), as_dtype("dtype", dtype)
    num_blocks, block_size = as_optional_size("num_blocks", num_blocks), as_size("block_size", block_size)
    # Its range is the model's own.
    max_seq_len = None if max_seq_len is None else as_size("max_seq_len", max_seq_len, minimum=-(2**31 - 1))
    block_size, num_swap_blocks = (
        as_size("block_size", block_size),
        as_size("num_swap_blocks", num_swap_blocks, minimum=0),
    )
    max_loras, max_lora_rank = as_size("max_loras", max_loras), as_size("max_lora_rank", max_lora_rank)
    enable_prefix_cache, cuda_graphs = as_flag("enable_prefix_cache", enable_prefix_cache), as_graphs(cuda_graphs)
    given_kv_dtype = as_dtype("kv_cache_dtype", kv_cache_dtype, torch.float8_e4m3fn)

    network_class, config = read_model_config(folder)
    known_positions = config.max_position_embeddings
    max_seq_len = known_positions if max_seq_len is None else max_seq_len
    if not 1 <= max_seq_len <= known_positions:
        raise InvalidInputError(f"max_seq_len: {max_seq_len}, expected 1 to {known_positions}, the model's own limit")
    dtype = given_dtype or config.dtype
    kv_cache_dtype = given_kv_dtype or dtype
    if kv_cache_dtype not in (dtype, torch.float8_e4m3fn):
        raise InvalidInputError(f"kv_cache_dtype: {kv_cache_dtype}, expected {dtype} or torch.float8_e4m3fn")

    has_fp8_cache = kv_cache_dtype == torch.float8_e4m3fn
    network = load_network(network_class, config, folder, dtype=dtype, device=device, has_fp8_cache=has_fp8_cache)
    if num_blocks is None:
        num_blocks = _num_blocks(config, kv_cache_dtype, device, block_size, max_seq_len)
    kv_config = PagedKvCacheConfig(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        enable_prefix_cache=enable_prefix_cache,
        dtype=kv_cache_dtype,
        device=device,
        max_seq_len=max_seq_len,
        sliding_window=config.windows[0] if len(set(config.windows)) == 1 else None,
    )
    return PagedCausalLM(
        network,
        PagedKvCacheManager(kv_config),
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        cuda_graphs=cuda_graphs,
    )


def read_model_config(folder: Path) -> tuple[type[Llama], DecoderConfig]:
    """The class that runs a checkpoint, and its configuration.

    Raises:
        CheckpointError: config.json is missing or malformed.
        UnsupportedError: the architecture, or an option of it, is not known here.
    """
    hf = HfConfig.read(folder)
    network_class = network_class_of(hf)
    return network_class, config_of(network_class, hf)


def config_of(network_class: type[Llama], hf: HfConfig) -> DecoderConfig:
    """What a family reads, once no other key of `hf` is seen to change what it computes; errors as there."""
    config = network_class.read_config(hf)
    refuse_unread(hf, config)
    return config


def network_class_of(hf: HfConfig) -> type[Llama]:
    """The class that runs a checkpoint.

    Raises:
        UnsupportedError: none of its architectures is known here, or model_type names another family.
    """
    names = hf.items("architectures", str)
    for name in names:
        if name in ARCHITECTURES:
            family, model_type = ARCHITECTURES[name], hf.text("model_type")
            if model_type != family.model_type and model_type in {one.model_type for one in ARCHITECTURES.values()}:
                raise UnsupportedError(f"{hf.source}: model_type {model_type!r}, but architectures {shown(names)}")
            return family
    raise UnsupportedError(f"{hf.source}: architectures {shown(names)}, known are {', '.join(ARCHITECTURES)}")


def _num_blocks(
    config: DecoderConfig, dtype: torch.dtype, device: torch.device, block_size: int, max_seq_len: int
) -> int:
    block_bytes = 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return max(1, int(free_bytes * GPU_FRACTION) // block_bytes)
    wanted = _CPU_SEQUENCES * -(-max_seq_len // block_size)
    return max(1, min(wanted, _CPU_BYTES // block_bytes))
