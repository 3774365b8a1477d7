"""Load the model of a Hugging Face checkpoint folder."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from paged.cache.groups import DEFAULT_RING, CacheGroup, RecurrentSpec
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError, PagedError, UnsupportedError
from paged.folder_path import as_folder
from paged.kernels.attention.config import default_block_size
from paged.kernels.common.checks import NARROW_DTYPES
from paged.kernels.common.device import device_of, use_triton
from paged.kernels.common.scalars import shown
from paged.models.config_keys import refuse_unread, unknown_keys, unread_keys
from paged.models.draft_loader import MTP, load_draft_head, multi_token_prefix
from paged.models.families.cohere import COHERE
from paged.models.families.deepseek import DEEPSEEK, DEEPSEEK_PARTS
from paged.models.families.defaults import DEFAULTS
from paged.models.families.dense import DENSE, DENSE_PARTS
from paged.models.families.experts import EXPERT_PARTS, EXPERTS
from paged.models.families.gemma4 import Gemma4
from paged.models.families.hybrid import HYBRIDS
from paged.models.families.llama import Llama
from paged.models.families.mamba import MAMBAS
from paged.models.families.sigmoid_experts import SIGMOID_EXPERTS, SIGMOID_PARTS
from paged.models.generic.config import ModuleConfig
from paged.models.layers.config import DecoderConfig
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.load_options import LoadOptions
from paged.models.loading.weights import Track, read_headers, untracked
from paged.models.network_loader import load_network
from paged.models.paged_lm import PagedCausalLM
from paged.models.parallel.fingerprint import checkpoint_parts, model_digest, program_parts
from paged.models.parallel.ranks import ParallelConfig, Ranks
from paged.models.quantization.read import read_config
from paged.models.wrappers import WRAPPERS, UnknownArchitectureError, text_part, wrapped, wrapper_of
from paged.printable import one_line

_LOG = logging.getLogger("paged")

# Keys are names in `architectures` of config.json.
ARCHITECTURES: dict[str, type[Llama]] = {
    "LlamaForCausalLM": Llama,
    **COHERE,
    **DENSE,
    **EXPERTS,
    **SIGMOID_EXPERTS,
    **DEEPSEEK,
    **HYBRIDS,
    **MAMBAS,
    "Gemma4ForCausalLM": Gemma4,
}

# Names that transformers does not have, and the architectures with the same code.
ALIASES = {
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
    "MiMoV2ForCausalLM": "MiMoV2FlashForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
}

# Families that are only text parts of multimodal models, by model_type.
TEXT_PARTS = {family.model_type: family for family in (*DENSE_PARTS, *EXPERT_PARTS, *SIGMOID_PARTS, *DEEPSEEK_PARTS)}

# On a CPU, the cache's default size: this many sequences of full length, but at most this many bytes.
_CPU_SEQUENCES = 4
_CPU_BYTES = 1 << 30
# Limit of config.json keys in a message.
_MAX_KEYS = 8
# On a GPU, fraction of the memory for weights and cache; the rest is for activations.
GPU_FRACTION = 0.9
# Of the cache's memory, the largest part for states of recurrent layers. A state of Qwen3.5-35B-A3B takes the memory of
# 4,100 tokens of K/V, so that sequences and snapshots every 4,000 tokens fill both halves.
_STATE_FRACTION = 0.5
# Two slots for each of 256 sequences, and as many snapshots.
_MOST_SLOTS = 768
# On a CPU: two slots for each of 8 sequences, and 16 snapshots.
_CPU_SLOTS = 32


def load_model(
    path: str | os.PathLike[str],
    *,
    parallel: ParallelConfig | None = None,
    track: Track = untracked,
    **options: Any,
) -> PagedCausalLM:
    """Load the model of a checkpoint folder (config.json and safetensors), with a KV cache.

    Args:
        path: the folder.
        parallel: how to spread the model over processes; None for this process alone. Each process makes this call,
            reads only its part of the weights, and then runs the model as `LlmExecutor.serve` describes.
        track: iterates over the weights and may show progress; called on rank 0 only.
        options: fields of `LoadOptions`.

    Raises:
        CheckpointError: the folder is incomplete, malformed or unsafe.
        UnsupportedError: the architecture, or one of its options, is not supported.
        InvalidInputError: an argument has another type or is out of range, max_seq_len exceeds the model's own limit,
            the cache's dtype is neither the weights' nor an 8-bit one, or processes differ in options, versions,
            configuration or tensors.
        RankFailedError: another process could not load its part, has ended, or stood still for `timeout_s`.
    """
    folder = as_folder("path", path)
    if not isinstance(parallel, ParallelConfig | None):
        raise InvalidInputError(f"parallel: {shown(parallel)}, expected a ParallelConfig or None")
    if parallel is None:
        return _load(folder, LoadOptions(**options), Ranks(), track)
    if options.get("device") is None and torch.cuda.is_available():
        options["device"] = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    load_options = LoadOptions(**options)
    ranks = Ranks.join(parallel)
    try:
        options = {
            "expert_parallel": parallel.expert_parallel,
            **vars(load_options),
            "device": load_options.device.type,
        }
        ranks.see_that_same({"options": options, **program_parts()})
        with ranks.apart():
            parts = checkpoint_parts(read_config(folder).values, read_headers(folder), ranks.tick)
        ranks.see_that_same(parts)
        ranks.connect(load_options.device)
        return _load(folder, load_options, ranks, untracked if ranks.rank else track)
    except BaseException as error:
        ranks.fail(f"it could not load the model ({type(error).__name__}: {error})")
        raise


def _load(folder: Path, load_options: LoadOptions, ranks: Ranks, track: Track) -> PagedCausalLM:
    network_class, config = chosen_config(
        folder, model_impl=load_options.model_impl, trust_remote_code=load_options.trust_remote_code
    )
    if config.unknown_keys and not ranks.rank:
        text = "%s: nothing reads %s; if the model's own code does, the answers are wrong"
        _LOG.warning(text, one_line(folder / "config.json"), one_line(", ".join(config.unknown_keys), 500))
    known_positions = config.max_position_embeddings
    max_seq_len = known_positions if load_options.max_seq_len is None else load_options.max_seq_len
    if not 1 <= max_seq_len <= known_positions:
        raise InvalidInputError(f"max_seq_len: {max_seq_len}, expected 1 to {known_positions}, the model's own limit")
    dtype = load_options.dtype or config.dtype
    kv_cache_dtype = load_options.kv_cache_dtype or dtype
    has_latents = any(layer.latent is not None for layer in config.attention)
    allowed = dtype, *((torch.float8_e4m3fn,) if has_latents else NARROW_DTYPES)
    if kv_cache_dtype not in allowed:
        expected = " or ".join(map(str, allowed))
        if has_latents:
            expected += " for latents"
        raise InvalidInputError(f"kv_cache_dtype: {kv_cache_dtype}, expected {expected}")

    if load_options.draft is not None and ranks.size > 1:
        raise UnsupportedError(f"draft: {load_options.draft}, expected None with several ranks")

    if load_options.quantization is not None and (config.quantization is not None or use_triton(load_options.device)):
        on = (
            "a quantised checkpoint" if config.quantization is not None else f"device {load_options.device} with Triton"
        )
        raise UnsupportedError(f"quantization: {load_options.quantization} on {on}, expected plain weights on a CPU")

    has_fp8_cache = kv_cache_dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    if isinstance(config, ModuleConfig):
        network = _load_module(config, folder, dtype, load_options, ranks)
    else:
        with ranks.apart():
            network = load_network(
                network_class,
                config,
                folder,
                dtype=dtype,
                device=load_options.device,
                has_fp8_cache=has_fp8_cache,
                ranks=ranks,
                track=track,
                draft_prefix=multi_token_prefix(config) if load_options.draft == MTP else None,
            )
    if load_options.draft is not None:
        network.draft_head = load_draft_head(load_options.draft, network, folder, dtype, load_options.device, track)
    block_size = load_options.block_size or default_block_size(device_of(load_options.device).arch)
    kv_config = cache_config(
        with_draft_layer(network),
        block_size=block_size,
        enable_prefix_cache=load_options.enable_prefix_cache,
        dtype=kv_cache_dtype,
        device=load_options.device,
        max_seq_len=max_seq_len,
        host_cache_bytes=load_options.host_cache_bytes,
        cache_folder=load_options.cache_folder,
        cache_folder_bytes=load_options.cache_folder_bytes,
    )
    num_tables = len(kv_config.tables)
    state_bytes = 0
    if kv_config.recurrent is not None:
        recurrent = _with_slots(replace(kv_config.recurrent, conv_dtype=dtype), load_options, dtype)
        kv_config = replace(kv_config, recurrent=recurrent)
        state_bytes = (recurrent.num_slots + 1) * recurrent.slot_bytes(dtype)
    num_blocks = (load_options.num_blocks or 0) * num_tables
    num_blocks = num_blocks or ranks.least(
        _num_blocks(kv_config, kv_cache_dtype, load_options.device, max_seq_len, state_bytes)
    )
    kv_config = replace(kv_config, num_blocks=num_blocks, num_swap_blocks=load_options.num_swap_blocks * num_tables)
    ranks.see_that_same({"the cache's options": vars(kv_config) | {"device": None}})
    with ranks.apart():
        model = PagedCausalLM(
            network,
            PagedKvCacheManager(kv_config),
            max_loras=load_options.max_loras,
            max_lora_rank=load_options.max_lora_rank,
            cuda_graphs=load_options.cuda_graphs,
        )
        if load_options.quantization is not None:
            network.quantize(load_options.quantization, track)
        if load_options.cache_folder is not None:
            folders = [folder] if load_options.draft in (None, MTP) else [folder, load_options.draft]
            options = {name: getattr(load_options, name) for name in ("quantization", "model_impl", "draft")}
            options["dtype"] = dtype
            if ranks.size > 1:
                options |= {"rank": f"{ranks.rank} of {ranks.size}", "expert_parallel": ranks.share.expert_parallel}
            model.kv_manager.set_fingerprint(model_digest(folders, options, ranks.tick))
        return model


def with_draft_layer(network: Llama) -> DecoderConfig:
    """Return the configuration of a network's caches: its draft head has one more layer."""
    config, head = network.own_config, network.draft_head
    if head is None:
        return config
    attention, recurrent = (*config.attention, head.attention), (*config.recurrent, None)
    return replace(config, attention=attention, recurrent=recurrent, attends=(*config.attends, True))


def cache_config(config: DecoderConfig, **fields: Any) -> PagedKvCacheConfig:
    """Return the cache configuration of a model; layers are grouped by K/V shape and window, recurrent ones apart.

    Keys of a layer's indexer are those of one more layer, num_layers behind it.

    fields: other fields of PagedKvCacheConfig; keys of indexers depend on its dtype.
    """
    kinds: dict[tuple[int, int, int, int | None, bool], list[int]] = {}
    for index, layer in enumerate(config.attention):
        if layer.shares_kv_with is None and config.attends[index]:
            kinds.setdefault(layer.cache_kind, []).append(index)
    sizes = (config.num_kv_heads, config.head_dim, config.head_dim, config.windows[0], False)
    if list(kinds) == [sizes] and len(kinds[sizes]) == config.num_layers:
        fields["sliding_window"] = config.windows[0]
    else:
        fields["groups"] = [CacheGroup(tuple(layers), *kind) for kind, layers in kinds.items()]
    num_layers = config.num_layers
    key_layers: list[int] = []
    for index, layer in enumerate(config.attention):
        if layer.latent is not None and layer.latent.index is not None:
            key_layers.append(num_layers + index)
            key_size = layer.latent.index.key_size(fields.get("dtype") or torch.get_default_dtype())
    if key_layers:
        fields["groups"].append(CacheGroup(tuple(key_layers), 1, key_size, key_size, latent=True))
        num_layers *= 2
    recurrent = {index: states for index, states in enumerate(config.recurrent) if states is not None}
    if recurrent:
        (state,) = set(recurrent.values())
        shape = state.channels, state.conv_width, state.num_heads, state.head_dim, state.num_key_heads, state.key_dim
        fields["recurrent"] = RecurrentSpec(tuple(recurrent), *shape)
    return PagedKvCacheConfig(num_layers, config.num_kv_heads, config.head_dim, **fields)


def _load_module(
    config: ModuleConfig,
    folder: Path,
    dtype: torch.dtype,
    load_options: LoadOptions,
    ranks: Ranks,
) -> Llama:
    """Load transformers' own module; refuse options that need a family."""
    from paged.models.module_loader import load_module_network

    if load_options.draft is not None:
        raise UnsupportedError(f"{folder}: draft is not supported for transformers' own module")
    return load_module_network(
        config, folder, dtype=dtype, device=load_options.device, cache_config=cache_config, ranks=ranks
    )


def read_model_config(folder: Path) -> tuple[type[Llama], DecoderConfig]:
    """Return `model_config` of a checkpoint folder.

    Raises:
        CheckpointError, UnsupportedError: as `model_config`; or config.json is missing.
    """
    return model_config(read_config(folder))


def chosen_config(
    folder: Path, *, model_impl: str = "auto", trust_remote_code: bool = False
) -> tuple[type[Llama], DecoderConfig]:
    """Return `read_model_config` of a folder, or the class and configuration of transformers' own module.

    model_impl, trust_remote_code: as in `LoadOptions`.

    Raises:
        CheckpointError, UnsupportedError: as `model_config`; or transformers has no such architecture; or its module
            cannot run with a paged cache.
    """
    if model_impl == "transformers":
        if find_spec("transformers") is None:
            raise UnsupportedError("model_impl: 'transformers' needs pip install paged[transformers]")
        hf = read_config(folder)
        choice = _module_config(hf, folder, trust_remote_code)
        if choice is None:
            names = shown(hf.items("architectures", str))
            raise UnsupportedError(f"{hf.source}: architectures {names} are unknown to transformers, too")
        return choice
    try:
        return read_model_config(folder)
    except UnknownArchitectureError as unknown:
        if model_impl == "native" or find_spec("transformers") is None:
            raise
        hf = read_config(folder)
        try:
            choice = _module_config(hf, folder, trust_remote_code)
        except UnsupportedError as error:
            names = shown(hf.items("architectures", str))
            reason = str(error).removeprefix(f"{hf.source}: ")
            raise UnsupportedError(f"{hf.source}: architectures {names} are unknown; {reason}") from unknown
        if choice is None:
            raise
        return choice


def _module_config(hf: HfConfig, folder: Path, trust_remote_code: bool) -> tuple[type[Llama], DecoderConfig] | None:
    """Return the class and configuration of transformers' module; None if transformers lacks the architecture."""
    # Importing transformers takes seconds, and families do without.
    from paged.models.generic.network import ModuleNetwork
    from paged.models.generic.probe import read_module_config

    config = read_module_config(hf, folder, trust_remote_code=trust_remote_code)
    if config is None:
        return None
    return ModuleNetwork, config


def model_config(hf: HfConfig) -> tuple[type[Llama], DecoderConfig]:
    """Return a checkpoint's network class and configuration; for a multimodal checkpoint, those of its text part.

    Raises:
        CheckpointError: a value is malformed.
        UnsupportedError: the architecture is not supported, a key of `hf` needs something unsupported, or model_type
            names another family.
    """
    names = hf.items("architectures", str)
    wrapper = None
    if not any(ALIASES.get(name, name) in ARCHITECTURES for name in names):
        wrapper = wrapper_of(hf, names)
    if wrapper is None:
        family = _of_architecture(hf, names)
    else:
        families = {family.model_type: family for family in ARCHITECTURES.values()} | TEXT_PARTS
        family, hf = text_part(hf, wrapper, families, ARCHITECTURES)
    hf.defaults = DEFAULTS.get(family.model_type, DEFAULTS[Llama.model_type])  # callers may register families
    family = family.variant(hf)
    config = family.read_config(hf)
    refuse_unread(hf, config)
    if wrapper is not None:
        config = wrapped(config, wrapper, hf.source)
    return family, replace(config, unknown_keys=tuple(unknown_keys(hf)))


def known_architectures() -> tuple[str, ...]:
    """Return the names in `architectures` that `model_config` takes."""
    return *ARCHITECTURES, *ALIASES, *WRAPPERS


def _of_architecture(hf: HfConfig, names: list[str]) -> type[Llama]:
    known_types = {family.model_type for family in ARCHITECTURES.values()}
    full_names = [ALIASES.get(name, name) for name in names]
    known_names = [name for name in full_names if name in ARCHITECTURES]
    if not known_names:
        closest: dict[str, None] = {}
        for name in names:
            closest |= dict.fromkeys(get_close_matches(name, known_architectures()))
        hint = f"closest: {', '.join(closest) or 'none'}; to add one see docs/adding-a-model.md; "
        hint += "list: `paged inspect --architectures`"
        origin = ""
        if hf.section("auto_map") is not None:
            origin = "; their code is in the checkpoint, and trust_remote_code=True tries it"
        raise UnknownArchitectureError(
            f"{hf.source}: architectures {shown(names)} are unknown{origin}{_lacking(hf)}; {hint}"
        )
    family = ARCHITECTURES[known_names[0]]
    model_type = hf.text("model_type")
    if model_type != family.model_type and model_type in known_types:
        raise UnsupportedError(f"{hf.source}: model_type {model_type!r}, but architectures {shown(names)}")
    return family


def _lacking(hf: HfConfig) -> str:
    """Return, for a message, the keys of a config.json or its text_config that a Llama does not have."""
    hf = (hf.section("text_config") or hf).overridden({})
    hf.defaults = DEFAULTS[Llama.model_type]
    try:
        keys = unread_keys(hf, Llama.read_config(hf))
    except PagedError as error:
        return f"; read as a Llama: {str(error).removeprefix(f'{hf.source}: ')}"
    kinds = {"unlike a Llama": keys, "unknown here": unknown_keys(hf)}
    text = ""
    for kind, keys in kinds.items():
        if keys:
            values = [f"{shown(key)[1:-1]} = {shown(hf.values[key])}" for key in keys[:_MAX_KEYS]]
            text += f"; {kind}: {', '.join(values)}"
    return text or "; its keys are a Llama's: only the architecture's code differs"


def _with_slots(recurrent: RecurrentSpec, load_options: LoadOptions, dtype: torch.dtype) -> RecurrentSpec:
    """Return the states' sizes with the number of slots, from the options or from the device's memory."""
    append = load_options.max_drafts + 1
    recurrent = replace(recurrent, max_append=append, ring=max(DEFAULT_RING, append))
    slot_bytes, num_slots = recurrent.slot_bytes(dtype), load_options.num_state_slots
    if num_slots is None and load_options.device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(load_options.device)
        num_slots = min(int(free_bytes * GPU_FRACTION * _STATE_FRACTION) // slot_bytes, _MOST_SLOTS)
    elif num_slots is None:
        num_slots = min(_CPU_SLOTS, _CPU_BYTES // slot_bytes)
    num_slots = max(num_slots, 2)
    num_swap_slots = min(num_slots, load_options.num_swap_blocks)
    interval = load_options.snapshot_interval
    return replace(recurrent, num_slots=num_slots, num_swap_slots=num_swap_slots, snapshot_interval=interval)


def _num_blocks(
    cache: PagedKvCacheConfig, dtype: torch.dtype, device: torch.device, max_seq_len: int, state_bytes: int = 0
) -> int:
    """state_bytes: memory that the states of recurrent layers will take."""
    block_bytes = cache.block_bytes(dtype)
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return max(1, (int(free_bytes * GPU_FRACTION) - state_bytes) // block_bytes)
    num_blocks = _CPU_SEQUENCES * cache.blocks_for(max_seq_len)
    return max(1, min(num_blocks, _CPU_BYTES // block_bytes))
