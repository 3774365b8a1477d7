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

from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError, PagedError, UnsupportedError
from paged.folder_path import as_folder
from paged.kernels.core.device import use_triton
from paged.kernels.core.dtypes import kv_kind
from paged.kernels.core.errors import shown
from paged.models.cache_sizes import check_cache_dtypes, check_rotation, check_state_dtype, sized_cache_config
from paged.models.draft_loader import MTP, load_draft_head, multi_token_prefix
from paged.models.families.axk2 import AXK2
from paged.models.families.cohere import COHERE
from paged.models.families.config_keys import refuse_unread, unknown_keys, unread_keys
from paged.models.families.deepseek import DEEPSEEK, DEEPSEEK_PARTS
from paged.models.families.deepseek_v4 import DeepseekV4
from paged.models.families.deepseek_v41 import DeepseekV41
from paged.models.families.defaults import DEFAULTS
from paged.models.families.dense import DENSE, DENSE_PARTS
from paged.models.families.dots3 import Dots3Note
from paged.models.families.experts import EXPERT_PARTS, EXPERTS
from paged.models.families.gemma4 import Gemma4
from paged.models.families.hy_v4 import HY_V4
from paged.models.families.hybrid import HYBRIDS
from paged.models.families.kimi import KIMI, KIMI_PARTS
from paged.models.families.llama import Llama
from paged.models.families.mamba import MAMBAS
from paged.models.families.minimax import MINIMAX
from paged.models.families.mistral_large import MistralLarge4
from paged.models.families.network import Network
from paged.models.families.qwen4 import QWEN4
from paged.models.families.rwkv import RWKV
from paged.models.families.sigmoid_experts import SIGMOID_EXPERTS, SIGMOID_PARTS
from paged.models.generic.config import ModuleConfig
from paged.models.layers.config import DecoderConfig
from paged.models.layers.head_rotation import KEYS, check_layer
from paged.models.layers.rope import rope_frequencies
from paged.models.loading.files_read import FilesRead, noting_reads
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.load_options import LoadOptions, keys_and_values
from paged.models.loading.weights import Track, read_headers, untracked
from paged.models.network_loader import load_network
from paged.models.paged_lm import PagedCausalLM
from paged.models.parallel.fingerprint import (
    arithmetic_parts,
    checkpoint_parts,
    code_parts,
    model_digest,
    option_parts,
    program_parts,
)
from paged.models.parallel.ranks import ParallelConfig, Ranks
from paged.models.quantization.read import read_config
from paged.models.wrappers import WRAPPERS, UnknownArchitectureError, text_part, wrapped, wrapper_of
from paged.tools.printable import one_line

_LOG = logging.getLogger("paged")

# Name in `architectures` of config.json -> network.
ARCHITECTURES: dict[str, type[Network]] = {
    "LlamaForCausalLM": Llama,
    **COHERE,
    **DENSE,
    **EXPERTS,
    **SIGMOID_EXPERTS,
    **DEEPSEEK,
    **AXK2,
    **HY_V4,
    "Dots3NoteForCausalLM": Dots3Note,
    **HYBRIDS,
    **KIMI,
    **MAMBAS,
    **MINIMAX,
    **QWEN4,
    **RWKV,
    "DeepseekV4ForCausalLM": DeepseekV4,
    "Gemma4ForCausalLM": Gemma4,
}

# Name in `architectures` that transformers does not know -> architecture with the same code.
ALIASES = {
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "KimiK3LinearForCausalLM": "KimiLinearForCausalLM",
    "MiniMaxM3SparseForCausalLM": "MiniMaxM3VLForCausalLM",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
    "MiMoV2ForCausalLM": "MiMoV2FlashForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
}

# model_type -> family that is only the text part of multimodal models.
TEXT_PARTS = {
    family.model_type: family
    for family in (
        *(*DENSE_PARTS, *EXPERT_PARTS, *SIGMOID_PARTS, *DEEPSEEK_PARTS, *KIMI_PARTS),
        *(DeepseekV41, MistralLarge4),
    )
}

# Largest number of config.json keys that an error message lists.
_MAX_KEYS = 8


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
        RankFailedError: another process could not load its part, has ended, or made no progress for `timeout_s`.
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
        if ranks.rank:
            track = untracked
        return _load(folder, load_options, ranks, track)
    except BaseException as error:
        ranks.fail(f"it could not load the model ({type(error).__name__}: {error})")
        raise


def _load(folder: Path, load_options: LoadOptions, ranks: Ranks, track: Track) -> PagedCausalLM:
    with noting_reads() as reads:
        model = _load_model(folder, load_options, ranks, track)
    if load_options.cache_folder is not None:
        with ranks.apart():
            model.kv_manager.set_fingerprint(_fingerprint(model, reads, load_options))
    return model


def _load_model(folder: Path, load_options: LoadOptions, ranks: Ranks, track: Track) -> PagedCausalLM:
    network_class, config = chosen_config(
        folder, model_impl=load_options.model_impl, trust_remote_code=load_options.trust_remote_code
    )
    if config.unknown_keys and not ranks.rank:
        text = "%s: nothing reads %s; if the model's own code does, the answers are wrong"
        _LOG.warning(text, one_line(folder / "config.json"), one_line(", ".join(config.unknown_keys), 500))
    dtype = load_options.dtype or config.dtype
    cache_dtypes = keys_and_values(load_options.kv_cache_dtype, dtype)
    max_seq_len = load_options.max_seq_len
    if max_seq_len is None:
        max_seq_len = config.max_position_embeddings
    _check_options(load_options, config, cache_dtypes, max_seq_len, ranks)
    device = load_options.device
    cache_kinds = kv_kind(cache_dtypes[0]), kv_kind(cache_dtypes[1])
    if isinstance(config, ModuleConfig):
        # Imported late, because importing transformers takes seconds.
        from paged.models.module_loader import load_module_network

        network: Network = load_module_network(
            config, folder, dtype=dtype, device=device, cache_kinds=cache_kinds, ranks=ranks
        )
    else:
        draft_prefix = None
        if load_options.draft == MTP:
            draft_prefix = multi_token_prefix(config)
        with ranks.apart():
            network = load_network(
                network_class,
                config,
                folder,
                dtype=dtype,
                device=device,
                cache_kinds=cache_kinds,
                ranks=ranks,
                track=track,
                draft_prefix=draft_prefix,
                kv_rotation=load_options.kv_cache_rotation,
                kept_layers=load_options.kv_cache_keep_layers,
            )
            network.read_folder(folder)
    if load_options.draft is not None:
        network.draft_head = load_draft_head(load_options.draft, network, folder, dtype, device, track)
        if load_options.kv_cache_rotation is not None:
            for attention in network.draft_head.attention:
                check_layer("the draft head", attention, KEYS)
    kv_config = sized_cache_config(_with_draft_layers(network), dtype, cache_dtypes, max_seq_len, load_options, ranks)
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
        return model


def _check_options(
    load_options: LoadOptions,
    config: DecoderConfig,
    cache_dtypes: tuple[torch.dtype, torch.dtype],
    max_seq_len: int,
    ranks: Ranks,
) -> None:
    """Refuse options that do not fit the model, before its weights are read."""
    known_positions = config.max_position_embeddings
    if not 1 <= max_seq_len <= known_positions:
        raise InvalidInputError(f"max_seq_len: {max_seq_len}, expected 1 to {known_positions}, the model's own limit")
    dtype = load_options.dtype or config.dtype
    has_draft_head = load_options.draft is not None
    kept_layers = load_options.kv_cache_keep_layers
    check_cache_dtypes(config, dtype, cache_dtypes, kept_layers, has_draft_head=has_draft_head)
    check_state_dtype(config, load_options.state_dtype)
    check_rotation(config, load_options.kv_cache_rotation)
    if load_options.draft is not None and ranks.size > 1:
        raise UnsupportedError(f"draft: {load_options.draft}, expected None with several ranks")
    if load_options.draft is not None and isinstance(config, ModuleConfig):
        raise UnsupportedError(f"draft: {load_options.draft}, expected None for transformers' own module")
    if load_options.quantization is not None:
        obstacle = ""
        if config.quantization is not None:
            obstacle = "a quantised checkpoint"
        elif use_triton(load_options.device):
            obstacle = f"device {load_options.device} with Triton"
        if obstacle:
            raise UnsupportedError(
                f"quantization: {load_options.quantization} on {obstacle}, expected plain weights on a CPU"
            )


def _with_draft_layers(network: Network) -> DecoderConfig:
    """Return a configuration for the network's cache, with the layers of a draft head behind its own."""
    config, head = network.own_config, network.draft_head
    if head is None:
        return config
    count = len(head.layers)
    return replace(
        config,
        attention=(*config.attention, *head.attention),
        recurrent=(*config.recurrent, *[None] * count),
        attends=(*config.attends, *[True] * count),
    )


def _fingerprint(model: PagedCausalLM, reads: FilesRead, load_options: LoadOptions) -> bytes:
    """Return the digest that names this rank's files of K/V; it covers everything that K/V depend on.

    Raises:
        CheckpointError: a file has changed since it was loaded.
    """
    network, ranks = model.network, model.ranks
    parts: dict[str, object] = {
        **option_parts(load_options),
        **arithmetic_parts(model.device),
        **code_parts(network),
        "network": type(network).__qualname__,
        "dtype": model.dtype,
        "rank": f"{ranks.rank} of {ranks.size}",
        "expert_parallel": ranks.share.expert_parallel,
    }
    # LongRoPE's frequencies depend on the longest sequence.
    for rope, dim in network.rotations():
        if rope is not None:
            parts[f"rotation {rope} {dim}"] = rope_frequencies(rope, dim, model.num_positions).tolist()
    return model_digest(reads, parts, ranks.tick)


def read_model_config(folder: Path) -> tuple[type[Network], DecoderConfig]:
    """Return `model_config` of a checkpoint folder.

    Raises:
        CheckpointError, UnsupportedError: as `model_config`; or config.json is missing.
    """
    return model_config(read_config(folder))


def chosen_config(
    folder: Path, *, model_impl: str = "auto", trust_remote_code: bool = False
) -> tuple[type[Network], DecoderConfig]:
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


def _module_config(hf: HfConfig, folder: Path, trust_remote_code: bool) -> tuple[type[Network], DecoderConfig] | None:
    """Return the class and configuration of transformers' module; None if transformers lacks the architecture."""
    # Imported late, because importing transformers takes seconds and families do without it.
    from paged.models.generic.network import ModuleNetwork
    from paged.models.generic.probe import read_module_config

    config = read_module_config(hf, folder, trust_remote_code=trust_remote_code)
    if config is None:
        return None
    return ModuleNetwork, config


def model_config(hf: HfConfig) -> tuple[type[Network], DecoderConfig]:
    """Return a checkpoint's network class and configuration; a multimodal checkpoint gives its text part's.

    Raises:
        CheckpointError: a value is malformed.
        UnsupportedError: the architecture is not supported, a key of `hf` needs something unsupported, or model_type
            names another family.
    """
    outer = hf
    names = hf.items("architectures", str)
    wrapper = None
    if not any(ALIASES.get(name, name) in ARCHITECTURES for name in names):
        wrapper = wrapper_of(hf, names)
    if wrapper is None:
        family = _of_architecture(hf, names)
    else:
        families = {family.model_type: family for family in ARCHITECTURES.values()} | TEXT_PARTS
        family, hf = text_part(hf, wrapper, families, ARCHITECTURES)
    hf.defaults = DEFAULTS.get(family.model_type, DEFAULTS[Llama.model_type])  # users' families have none
    family = family.variant(hf)
    config = family.read_config(hf)
    refuse_unread(hf, config)
    if wrapper is not None:
        config = wrapped(config, wrapper, outer, hf)
    return family, replace(config, unknown_keys=tuple(unknown_keys(hf)))


def known_architectures() -> tuple[str, ...]:
    """Return the names in `architectures` that `model_config` takes."""
    return *ARCHITECTURES, *ALIASES, *WRAPPERS


def _of_architecture(hf: HfConfig, names: list[str]) -> type[Network]:
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
