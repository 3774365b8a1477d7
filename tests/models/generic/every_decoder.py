"""Every decoder and multimodal model of transformers as a tiny random checkpoint, and how its text runs here."""

from __future__ import annotations

import multiprocessing
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from paged.errors import CheckpointError, PagedError
from paged.models.generic.network import ModuleNetwork
from paged.models.registry import load_model
from paged.step.batch import UnifiedBatchItem, VerifyLogits
from tests.models.families import FAMILIES, PARTS, Families, logits_of, options, save_checkpoint, tokens
from tests.models.published_settings.others import published_values
from tests.tolerance import assert_within

PROMPT = tokens(20)
# Keys of tokens in whose place something else stands, or that are beside it.
_PLACEHOLDER = re.compile(r"(?:image|video|audio|vision|bo[ai]|eo[ai])\w*_token_(?:id|index)")
# Seconds for one architecture.
DEADLINE = 60
# Sizes under all names that configurations have for them; a configuration takes those that it has.
_SIZES = options(
    """vocab_size=128 hidden_size=64 intermediate_size=96 num_hidden_layers=2 num_attention_heads=4
    num_key_value_heads=2 head_dim=16 max_position_embeddings=128 initializer_range=0.1 n_embd=64 n_layer=2 n_head=4
    n_positions=128 n_inner=96 ffn_dim=96 decoder_ffn_dim=96 encoder_ffn_dim=96 decoder_layers=2 encoder_layers=2
    decoder_attention_heads=4 encoder_attention_heads=4 d_model=64 word_embed_proj_dim=64 rotary_dim=8
    embedding_size=64 num_layers=2 ffn_hidden_size=96 n_heads=4 n_layers=2 max_seq_len=128
    num_experts=4 num_local_experts=4 n_routed_experts=4 num_experts_per_tok=2 moe_intermediate_size=32 n_group=1
    topk_group=1 first_k_dense_replace=1 moe_num_experts=4 moe_k=2 moe_topk=2 num_shared_experts=1 n_shared_experts=1
    expert_ffn_hidden_size=32 zero_expert_num=0 kv_lora_rank=32 q_lora_rank=24 qk_nope_head_dim=16 qk_rope_head_dim=16
    qk_head_dim=32 v_head_dim=16 sliding_window=8 is_decoder=True bos_token_id=1 eos_token_id=2 pad_token_id=0
    vocab_size_per_layer_input=128 hidden_size_per_layer_input=16 num_kv_shared_layers=0 laurel_rank=8
    mamba_d_state=16 mamba_n_heads=8 mamba_d_head=16 mamba_n_groups=1 linear_num_key_heads=2 linear_num_value_heads=4
    linear_key_head_dim=16 linear_value_head_dim=16 shared_intermediate_size=48 shared_expert_intermediate_size=48
    moe_shared_expert_intermediate_size=48 global_head_dim=16 index_topk=5 index_head_dim=32 index_n_heads=16
    adapter_in_dim=64 adapter_input_size=64 adapter_out_dim=64 encoder_hash_byte_group_vocab=64 out_hidden_size=64
    text_hidden_size=64"""
)
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_SECTIONS = _ROPE | {"mrope_section": [2, 3, 3]}
# In the place of towers of the library timm.
_TOWER = options("model_type='siglip_vision_model' hidden_size=64 num_hidden_layers=2 num_attention_heads=4")
# Options that a configuration of a multimodal model needs beside small sizes: by its class without `Config`.
_OPTIONS: dict[str, dict[str, Any]] = {
    "Chameleon": {"vocabulary_map": {"<image>": 127, "IMGIMGA": 126}},
    "DeepseekOcr2Text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "DiffusionGemmaText": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "Dots3NoteVision": {"per_layer_config": {}},
    "Emu3": {"vocabulary_map": {"<image>": 127, "<|extra_200|>": 126, "<|visual token 000000|>": 125}},
    "Emu3VQVAE": {"base_channels": 32},
    "Ernie4_5_VLMoeText": {
        "moe_intermediate_size": [32, 16],
        "rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]},
    },
    "FastVlm": {"vision_config": _TOWER},
    "FunAsrNanoAdaptor": {"intermediate_size": 16},
    "Glm5NextText": {"index_topk": 16, "qk_rope_head_dim": 0},
    "Granite4Vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2", "spatial_target_layers": [0]},
    "HunYuanVLText": {"head_dim": 16, "rope_parameters": _ROPE | {"mrope_section": [2, 2, 2, 2]}},
    "JanusVQVAE": {"base_channels": 32},
    "KyutaiSpeechToText": {"audio_pad_token_id": 128},
    "Mimi": {"upsample_groups": 64},
    "MuseSparkAudio": {"patch_sizes": [16, 6], "hidden_sizes": [16, 16], "depths": [1, 1]},
    "Molmo2Adapter": {"vision_feature_layer": [1, 0]},
    "Nemotron3Diarization": {"head_config": {"audio_hidden_size": 64}},
    "Nemotron3_5TranscribeWordTimestamp": {"blank_token_id": 127},
    "PaddleOCRText": {"rope_parameters": _SECTIONS},
    "PerceptionLM": {"vision_config": _TOWER | {"model_args": {"embed_dim": 64}}},
    "Qwen2_5OmniText": {"rope_parameters": _SECTIONS},
    "Qwen3OmniMoeTalker": {"spatial_merge_size": 2},
    "Qwen3OmniMoeTalkerText": {"shared_expert_intermediate_size": 48},
    "Radio": {"video_temporal_patch_size": 2},
    "Step3p7Text": {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
    "VibeVoiceAcousticTokenizerEncoder": {"num_filters": 2},
}
# Sizes of configurations that are not valid with those above. Two assistants of Gemma 4 remain, which transformers 5.23
# cannot build of any sizes, and Gemma 3n's wrapper, which needs timm.
_OWN = {
    "BambaConfig": "attn_layer_indices=[1]",
    "CohereCompassTextConfig": "rope_parameters={'full_attention':{'rope_type':'default','rope_theta':1e4}} "
    "num_hidden_layers=2 layer_types=['full_attention','full_attention']",
    "DbrxConfig": "attn_config={'kv_n_heads':2,'clip_qkv':8,'rope_theta':1e4}",
    "GPTNeoConfig": "attention_types=[[['global','local'],1]]",
    "Mamba2Config": "num_heads=8",
    "ProphetNetConfig": "num_encoder_layers=2 num_decoder_layers=2",
    "ReformerConfig": "axial_pos_embds_dim=[16,48] axial_pos_shape=[8,16] attention_head_size=16 "
    "attn_layers=['local','lsh']",
    "ZambaConfig": "num_hidden_layers=3 layer_types=['mamba','hybrid','hybrid']",
    "Zamba2Config": "num_hidden_layers=2 layer_types=['mamba','hybrid']",
    "ZayaConfig": "num_experts_per_tok=1",
}


def decoders() -> list[str]:
    """Return the classes that AutoModelForCausalLM knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = set()
    for entry in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        names.update(entry if isinstance(entry, tuple) else (entry,))
    return sorted(names)


def multimodal_models() -> list[str]:
    """Return the classes that AutoModelForImageTextToText and AutoModelForMultimodalLM know, without decoders."""
    from transformers.models.auto import modeling_auto

    names = set()
    for mapping in (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    ):
        for entry in mapping.values():
            names.update(entry if isinstance(entry, tuple) else (entry,))
    return sorted(names - set(decoders()))


def result_of(name: str) -> str:
    """Return `run` of a child process: "crash" if it ends by a signal or exceeds DEADLINE."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, name), daemon=True)
    child.start()
    sender.close()
    try:
        if not receiver.poll(DEADLINE):
            return f"crash: no result after {DEADLINE} s"
        result: str = receiver.recv()
        return result
    except EOFError:
        return "crash: the process ended"
    finally:
        child.kill()
        child.join()


def _send(sender: Any, name: str) -> None:
    torch.set_num_threads(1)
    try:
        result = run(name)
    except BaseException as error:
        result = f"crash: {type(error).__name__}: {error}"
    sender.send(result)


def run(name: str) -> str:
    """Return "native" or "generic" if the logits are transformers', else "wrong", "refused" or "unbuilt", and why."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model_class = getattr(transformers, name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            theirs = save(model_class, Path(folder))
        except Exception as error:  # from transformers' code, of any type
            return f"unbuilt: {type(error).__name__}: {error}"
        try:
            model = load_model(Path(folder), num_blocks=64, cuda_graphs=False)
        except CheckpointError as error:
            # transformers 5.23 writes some published names wrongly: "blocks" in Kimi K2.5's text model, for example.
            theirs.save_pretrained(folder, save_original_format=False)
            try:
                model = load_model(Path(folder), num_blocks=64, cuda_graphs=False)
            except PagedError:
                return f"refused: {str(error).replace(folder, '')}"
        except PagedError as error:
            return f"refused: {str(error).replace(folder, '')}"
        (logits,) = model.unified_forward([UnifiedBatchItem("a", PROMPT, logits_policy=VerifyLogits())])
    assert logits is not None
    theirs = getattr(theirs, "thinker", theirs)  # the whole model also speaks
    if isinstance(model.network, ModuleNetwork):
        theirs = theirs.get_submodule(model.network.config.text_module)  # if the whole model needs an image
    expected = logits_of(theirs, PROMPT)[:, : logits.shape[1]]
    try:
        assert_within(logits, expected, 1e-3 * expected.abs().max())
    except AssertionError as error:
        return f"wrong: {error}"
    return "generic" if isinstance(model.network, ModuleNetwork) else "native"


def save(model_class: Any, folder: Path) -> Any:
    """Return a random model that is saved in a folder: with a family's own sizes if it has one."""
    family = _family_of(FAMILIES, model_class.config_class)
    if family is not None:
        return save_checkpoint(family, folder)
    torch.manual_seed(0)
    config = tiny(model_class.config_class)
    _place_in_prompt(config)
    theirs = model_class(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.2, 0.2))
            else:
                parameter.normal_(0, 0.12)
    theirs.save_pretrained(folder)
    return theirs


def _place_in_prompt(config: Any) -> None:
    """Let the tokens in whose place pictures or sound stand be some of the prompt."""
    free_ids = iter(dict.fromkeys(PROMPT))
    for key, value in sorted(config.to_dict().items()):
        if _PLACEHOLDER.fullmatch(key) and (value is None or type(value) is int):
            setattr(config, key, next(free_ids))


def _family_of(families: Families, config_class: Any) -> Any:
    """Return the first configuration of this class; None if there is none."""
    for name, words in families.data.items():
        if f"{words.split()[0]}Config" == config_class.__name__:
            return families[name]
    return None


def tiny(config_class: Any) -> Any:
    """Return a configuration with small sizes and published settings, also in the configurations inside of it."""
    default = config_class()
    values: dict[str, Any] = {}
    # Layer types follow from the number of layers where none are set.
    for key, size in [*_SIZES.items(), ("layer_types", None)]:
        if _takes(default, key):
            values[key] = size
    if _default(default, "num_key_value_heads") == (_default(default, "num_attention_heads") or 0):
        values["num_key_value_heads"] = 4
    rope = _default(default, "rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        # Of 16 elements of a head; in GLM's half of them rotate.
        values["rope_parameters"] = rope | {"mrope_section": [2, 3, 3]}
    parts: dict[str, Any] = {}
    for key, part_class in getattr(config_class, "sub_configs", {}).items():
        part = _default(default, key)
        if part is not None and part_class is not None:
            family = _family_of(Families(FAMILIES.data | PARTS.data), type(part))
            parts[key] = (family or tiny(type(part))).to_dict()
    values |= parts
    name = config_class.__name__.removesuffix("Config")
    values |= _OPTIONS.get(name, {}) | published_values(name)
    return config_class(**{**values, **options(_OWN.get(config_class.__name__, ""))})


def _default(config: Any, key: str) -> Any:
    """Return a value of a configuration; None if it has none, or other ones by layer."""
    try:
        return getattr(config, key, None)
    except RuntimeError:
        return None


def _takes(default: Any, key: str) -> bool:
    """Return whether a configuration has a size of this name, which can be set."""
    try:
        size = getattr(default, key, None)
        setattr(default, key, size)
    except Exception:  # from transformers' code, of many types
        return False
    return size is not None
