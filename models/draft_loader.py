"""Load the draft head of a target model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.core.errors import shown
from paged.models.drafts.block_head import BLOCK_DRAFTER, BlockDraftHead
from paged.models.drafts.eagle3_head import Eagle3Head, Eagle3Norms
from paged.models.drafts.head import DraftHead
from paged.models.drafts.multi_token_head import MULTI_TOKEN_HEADS, MultiTokenHead, StreamsDraftHead
from paged.models.families.config_keys import refuse_unread
from paged.models.families.defaults import DEFAULTS
from paged.models.families.llama import Llama
from paged.models.families.network import Network, set_dtype
from paged.models.layers.attention_config import AttentionConfig
from paged.models.layers.config import DecoderConfig, MoeConfig
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.kv_scales import is_kv_scale
from paged.models.loading.weights import StoredTensors, Track, check_weights, load_weights, read_headers, untracked
from paged.models.network_loader import UNUSED, text_tensors, with_stored_layout
from paged.models.quantization.read import as_stored, without_zero_biases

# Value of the option `draft` for the head in the target's own checkpoint.
MTP = Path("mtp")
_EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


def is_eagle3(folder: Path) -> bool:
    """Return whether a folder's config.json names an EAGLE-3 head, not a model.

    Raises:
        CheckpointError: config.json is missing or malformed.
    """
    return not {*_EAGLE3}.isdisjoint(HfConfig.read(folder).items("architectures", str))


def multi_token_prefix(config: DecoderConfig) -> str:
    """Return the prefix of the names of a model's multi-token head.

    Raises:
        UnsupportedError: no prefix is known for this model type.
    """
    if config.block_drafter is not None:
        return BLOCK_DRAFTER
    names = MULTI_TOKEN_HEADS.get(config.model_type)
    if names is None:
        known = ", ".join(MULTI_TOKEN_HEADS)
        raise UnsupportedError(f"draft: no multi-token head of {config.model_type} is known, only of {known}")
    return f"{names.prefix.format(config.num_layers)}."


def load_draft_head(
    draft: Path, target: Network, folder: Path, dtype: torch.dtype, device: torch.device, track: Track = untracked
) -> DraftHead:
    """Load a draft head: with "mtp" the one in the target's own `folder`, or the EAGLE-3 head in its own folder.

    Raises:
        CheckpointError: a tensor is missing, unexpected or misshapen, or the head's sizes differ from the target's.
        UnsupportedError: this architecture has no such head, or an option of the head is not supported.
    """
    with torch.device("meta"):
        if draft == MTP and target.config.block_drafter is not None:
            head, stored = _block_drafter(target, folder)
        elif draft == MTP:
            head, stored = _multi_token_head(target, folder)
        else:
            folder = draft
            head, stored = _eagle3_head(target, folder)
        set_dtype(head, dtype)
    destinations = head.destinations()
    stored = without_zero_biases(stored, destinations)
    stored = {name: tensor for name, tensor in stored.items() if not is_kv_scale(name)}
    check_weights(stored, destinations, tied_head=False, folder=folder)
    head._apply(lambda meta: torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device))
    load_weights(stored, head.destinations(), track=track)
    if head.offsets is not None:
        tokens = torch.arange(len(head.offsets)) + head.offsets.cpu()
        if tokens.min() < 0 or tokens.max() >= head.vocab_size or len(tokens.unique()) < len(tokens):
            raise CheckpointError(f"d2t: in {folder}, expected offsets to different tokens below {head.vocab_size}")
    return head


def _block_drafter(target: Network, folder: Path) -> tuple[DraftHead, StoredTensors]:
    drafter = target.config.block_drafter
    assert drafter is not None
    stored = _head_tensors(target, folder, "main_proj")
    has_confidence_head = any(".confidence_head." in name for name in stored)
    config = _with_layers(target.config, drafter.num_layers, drafter.moe)
    config = replace(config, quantization=as_stored(config.quantization, stored))
    return BlockDraftHead(target, config, has_confidence_head=has_confidence_head), stored


def _head_tensors(target: Network, folder: Path, projection: str) -> StoredTensors:
    """Return the tensors of the head in the target's own checkpoint, by the family's names.

    projection: name of one of them, for the error.
    """
    prefix = multi_token_prefix(target.config)
    named = text_tensors(type(target), target.config, read_headers(folder))
    stored: StoredTensors = {}
    for name, tensor in named.items():
        if name.startswith(prefix) and not UNUSED.search(name):
            stored[name] = tensor
    if not stored:
        raise CheckpointError(f"{prefix}{projection}: {folder} has no multi-token head; use it without a draft")
    return stored


def _with_layers(config: DecoderConfig, count: int, moe: MoeConfig | None) -> DecoderConfig:
    """Return a configuration with layers of a head behind its own. moe: experts of each."""
    attention: AttentionConfig = config.mtp_attention or config.attention[-1]
    return replace(
        config,
        attention=(*config.attention, *[attention] * count),
        moe=(*config.moe, *[moe] * count),
        recurrent=(*config.recurrent, *[None] * count),
        ngrams=(*config.ngrams, *[None] * count),
        attends=(*config.attends, *[True] * count),
        intermediate_size=(*config.intermediate_size, *[config.intermediate_size[-1]] * count),
    )


def _multi_token_head(target: Network, folder: Path) -> tuple[DraftHead, StoredTensors]:
    config, prefix = target.config, multi_token_prefix(target.config)
    names = MULTI_TOKEN_HEADS[config.model_type]
    stored = _head_tensors(target, folder, names.projection)
    config = _with_layers(config, 1, config.moe[-1])
    layer_of_head, last_layer = f"{prefix}{names.layer}".removesuffix("."), f"model.layers.{config.num_layers - 1}"
    as_layer: StoredTensors = {}
    for name, tensor in stored.items():
        as_layer[name.replace(layer_of_head, last_layer)] = tensor
    config = with_stored_layout(config, as_layer)
    if config.streams is None:
        head: DraftHead = MultiTokenHead(target, config, names)
    else:
        head = StreamsDraftHead(target, config, names)
    _share_copies(head, stored, f"{prefix}{names.embedding}.weight", f"{prefix}{names.lm_head}.weight")
    return head, stored


def _eagle3_head(target: Network, folder: Path) -> tuple[DraftHead, StoredTensors]:
    hf = HfConfig.read(folder)
    if target.config.snapshot_period or target.config.streams is not None:
        raise UnsupportedError(
            f"{hf.source}: a head of a {target.config.model_type} with several rows of residual stream, expected one"
        )
    hf.defaults = DEFAULTS[Llama.model_type]
    names = hf.items("architectures", str)
    if not is_eagle3(folder):
        raise UnsupportedError(f"{hf.source}: architectures {shown(names)}, known heads are {', '.join(_EAGLE3)}")
    config = replace(Llama.read_config(hf), tie_word_embeddings=False, quantization=None)
    num_logits, taps = hf.integer("draft_vocab_size", config.vocab_size), _taps(hf, target.config)
    section = hf.section("eagle_config") or hf
    norms = Eagle3Norms(
        begins_residual=hf.flag("norm_before_residual"),
        taps_joined=section.flag("norm_before_fc", hf.flag("norm_before_fc")),
        taps_apart=hf.flag("fc_norm"),
        output=hf.flag("norm_output"),
    )
    refuse_unread(hf, config)
    for key, number, expected in (
        ("num_hidden_layers", config.num_layers, 1),
        ("vocab_size", config.vocab_size, target.config.vocab_size),
        ("target_hidden_size", hf.integer("target_hidden_size", config.hidden_size), target.config.hidden_size),
    ):
        if number != expected:
            raise CheckpointError(f"{hf.source}: {key} {number}, expected {expected} for this target")
    stored = {name.removeprefix("model."): tensor for name, tensor in read_headers(folder).items()}
    stored.pop("t2d", None)
    layer_name = "layers.0"
    if any(name.startswith("midlayer.") for name in stored):
        layer_name = "midlayer"
    head = Eagle3Head(target, config, taps=taps, num_logits=num_logits, norms=norms, layer_name=layer_name)
    if num_logits == config.vocab_size and "d2t" not in stored:
        head.offsets = None
    if config.hidden_size == target.config.hidden_size:
        lm_head = ""
        if head.offsets is None:
            lm_head = "lm_head.weight"
        _share_copies(head, stored, "embed_tokens.weight", lm_head)
    return head, stored


def _taps(hf: HfConfig, target: DecoderConfig) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads, as in vLLM: the layers that it names, or three by default.

    Raises:
        CheckpointError: the target lacks such a layer.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    count = target.num_layers
    section = hf.section("eagle_config") or hf
    named = section.items(key, int) or hf.items(key, int)
    taps = tuple(named) or (2, count // 2, count - 3)
    if list(taps) != sorted({*taps}) or not 0 <= taps[0] <= taps[-1] <= count:
        raise CheckpointError(
            f"{hf.source}: {key} {shown(list(taps))}, expected rising numbers of layers up to {count}"
        )
    return taps


def _share_copies(head: DraftHead, stored: StoredTensors, embedding: str, lm_head: str) -> None:
    """Let a head without an embedding or LM head of its own read the target's."""
    if embedding not in stored:
        head.embed_tokens = None
    if lm_head and lm_head not in stored:
        head.lm_head = None
