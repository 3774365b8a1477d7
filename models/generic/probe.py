"""Read a decoder's sizes from transformers' own module: build it without memory, and see the calls of a forward."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.core.checks import MAX_HEAD_DIM
from paged.models.generic.config import ModuleConfig
from paged.models.generic.interface import (
    EXPERTS,
    PROBE,
    AttentionCall,
    Calls,
    register,
    unexpected_options,
)
from paged.models.generic.layers import WATCHED
from paged.models.generic.own_attention import LENGTHS, attention_of_text, replace_attention
from paged.models.generic.split import tp_styles_of
from paged.models.layers.attention_config import AttentionConfig
from paged.models.layers.config import NormConfig
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.load_options import DTYPES
from paged.tools.printable import one_line

# Keys of config.json for the longest sequence. transformers maps further keys to the first one.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")
# Rotations that are refused: they depend on the longest sequence of a step, so the other sequences of the step would
# change a sequence's result.
_CHANGING_ROPES = ("dynamic", "longrope")
# Most tokens of the probe's forward: so many that sparse attention and compressed keys have an effect. The forward runs
# on meta tensors, so tokens cost nothing.
_NUM_TOKENS = 1 << 16
# Tokens of the probe's forward if the longest sequence is unknown. The number is small because some recurrent layers,
# which are refused later, loop over the tokens.
_FEW_TOKENS = 64
_LAYER = re.compile(r"^(.*?)\.(\d+)\.")


def read_module_config(hf: HfConfig, folder: Path, *, trust_remote_code: bool = False) -> ModuleConfig | None:
    """Return the configuration of a checkpoint that transformers' own module can run; None if it has no such class.

    Raises:
        UnsupportedError: the module does not compute attention as a paged cache needs it; the message begins with the
            cause.
        CheckpointError: a value is malformed.
    """
    model_class, config = _model_class(hf, folder, trust_remote_code)
    if model_class is None:
        return None
    name = model_class.__name__
    try:
        return _Probe(hf, model_class, config).config()
    except UnsupportedError as error:
        raise UnsupportedError(f"{hf.source}: transformers' {name} cannot run with a paged cache: {error}") from error
    except Exception as error:  # transformers' code raises any type
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        if isinstance(error, KeyError) and error.args == (PROBE,):
            reason = "no layer calls attention through transformers' interface"
        if "meta tensor" in reason:  # PyTorch's message for reading a value without memory
            reason = f"its forward reads tensors on the host ({reason})"
        raise UnsupportedError(f"{hf.source}: transformers' {name} cannot be built or run: {reason}") from error


def _model_class(hf: HfConfig, folder: Path, trust_remote_code: bool) -> tuple[Any, Any]:
    """Return the class that `architectures` names, and its configuration; None if transformers does not have it."""
    auto_map = hf.section("auto_map")
    if trust_remote_code and auto_map is not None:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
        class_path = auto_map.text("AutoModelForCausalLM")
        return get_class_from_dynamic_module(class_path, folder, local_files_only=True), config
    # transformers has MptForCausalLM; the model was published as MPTForCausalLM.
    decoder = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf.text("model_type", ""), "")
    for name in hf.items("architectures", str):
        if name.casefold() == str(decoder).casefold():
            name = decoder
        candidate = getattr(transformers, name, None)
        if not isinstance(candidate, type) or not issubclass(candidate, transformers.PreTrainedModel):
            continue
        model_class: Any = candidate
        config_class: Any = model_class.config_class
        if config_class is not None and config_class.model_type == hf.values.get("model_type"):
            try:
                return model_class, config_class.from_pretrained(folder, local_files_only=True)
            except Exception as error:  # transformers raises many types
                raise CheckpointError(f"{hf.source}: {one_line(str(error), 300)}") from error
    return None, None


def build(model_class: Any, config: Any, attention: str, text_module: str = "") -> nn.Module:
    """Return a module without memory that runs the attention function of this name.

    text_module: name of a submodule to return alone.
    """
    if hasattr(model_class, "_from_config"):
        with torch.device("meta"):
            module: nn.Module = model_class._from_config(
                config,
                attn_implementation=attention_of_text(config, attention),
                experts_implementation=EXPERTS,
                dtype=torch.float32,
            )
            return module.eval().get_submodule(text_module)
    raise UnsupportedError("not a model of transformers")


class _Probe:
    """One forward of a module without memory."""

    def __init__(self, hf: HfConfig, model_class: Any, config: Any, text_module: str = "") -> None:
        register()
        self.hf, self.model_class, self.hf_config, self.text_module = hf, model_class, config, text_module
        self.text: Any = config.get_text_config(decoder=True)
        self.text.use_cache = config.use_cache = False
        if hf.values.get("quantization_config") is not None:
            raise UnsupportedError("quantization_config: packed weights need a family")
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedError("is_encoder_decoder: an encoder reads the prompt")
        self.module: Any = build(model_class, config, PROBE, text_module)
        replace_attention(self.module)
        self.names = {id(module): name for name, module in self.module.named_modules()}
        self.hidden: torch.Tensor | None = None
        self.decoder = ""
        self.linears: list[str] = []
        self.called: set[str] = set()
        self.max_positions = self._max_positions()
        self.num_tokens = min(_NUM_TOKENS, self.max_positions or _FEW_TOKENS)

    def config(self) -> ModuleConfig:
        """Return the configuration of the forward: the whole model's, or its text module's if it needs an image."""
        try:
            logits, calls = self._run()
        except (TypeError, ValueError):  # the image is missing
            text_module = self._text_module()
            if not text_module:
                raise
            return _Probe(self.hf, self.model_class, self.hf_config, text_module).config()
        if not calls:
            raise UnsupportedError("no layer calls attention through transformers' interface")
        if not self.max_positions:
            raise UnsupportedError("max_position_embeddings is missing: the longest sequence is unknown")
        if self.hidden is None:
            raise UnsupportedError("no module below the model returns hidden states")
        places = [self.names[id(call.module)] for call in calls]
        layers = self._layers(places)
        attention = tuple(self._attention(call) for call in calls)
        self._check_ropes()
        num_layers = len(attention)
        dtype = self.hf.value("dtype") or self.hf.value("torch_dtype") or "float32"
        return ModuleConfig(
            model_type=self.hf_config.model_type,
            hidden_size=self.hidden.shape[-1],
            intermediate_size=(0,) * num_layers,
            vocab_size=min(logits.shape[-1], self.module.get_input_embeddings().num_embeddings),
            max_position_embeddings=self.max_positions,
            attention=attention,
            norms=NormConfig(eps=0.0),
            moe=(None,) * num_layers,
            recurrent=(None,) * num_layers,
            attends=(True,) * num_layers,
            activation="silu",
            tie_word_embeddings=bool(getattr(self.text, "tie_word_embeddings", False)),
            dtype=DTYPES.get(str(dtype).removeprefix("torch."), torch.float32),
            quantization=None,
            architecture=self.model_class.__name__,
            model_class=self.model_class,
            config=self.hf_config,
            text_module=self.text_module,
            places=tuple(places),
            decoder=self.decoder,
            layers=layers,
            linears=tuple(self.linears),
            unused=tuple(self._unused(layers)),
            tp_styles=tp_styles_of(self.module),
        )

    def _run(self) -> tuple[torch.Tensor, list[AttentionCall]]:
        calls = Calls()
        calls.attach(self.module)
        linears: dict[str, Any] = {}
        for name, part in self.module.named_modules():
            if type(part) in WATCHED:
                part.__class__ = WATCHED[type(part)]
                linears[name] = part
        ids = torch.zeros(1, self.num_tokens, dtype=torch.int64, device="meta")
        with self._watched(calls), _NothingFound(), torch.no_grad():
            # Without a mask of tokens, transformers would read positions, which have no values here.
            mask = torch.ones_like(ids)
            result = self.module(input_ids=ids, attention_mask=mask, position_ids=ids, use_cache=False)
        calls.detach(self.module)
        self.linears = [name for name, part in linears.items() if part.is_called and not part.is_read]
        logits = getattr(result, "logits", None)
        if logits is None:
            raise UnsupportedError("the model gives no logits")
        return logits, calls.calls

    @contextmanager
    def _watched(self, calls: Calls) -> Iterator[None]:
        """Find the module that makes hidden states: the first submodule whose call contains calls of attention."""
        counts: dict[str, int] = {}
        hooks = []

        def before(module: nn.Module, *_: Any) -> None:
            counts[self.names[id(module)]] = len(calls.calls)
            self.called.add(self.names[id(module)])

        def after(module: nn.Module, _: Any, __: Any, output: Any) -> None:
            name = self.names[id(module)]
            hidden = getattr(output, "last_hidden_state", None)
            if hidden is not None and name and not counts[name] and calls.calls:
                self.decoder, self.hidden = name, hidden

        for module in self.module.modules():
            hooks.append(module.register_forward_pre_hook(before))
            hooks.append(module.register_forward_hook(after, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _text_module(self) -> str:
        """Return the name of a submodule with the text model's configuration and a head; "" if there is none."""
        for name, part in self.module.named_modules():
            is_model = isinstance(part, transformers.PreTrainedModel)
            if name and is_model and part.config is self.text and part.get_output_embeddings() is not None:
                return str(name)
        return ""

    def _unused(self, layers: str) -> list[str]:
        """Return the names of the largest modules with weights outside of `layers` that were not called.

        Only models whose parts have their own configurations have unused modules. `check_module` runs without them, so
        code that reads their attributes fails there.
        """
        unused: list[str] = []
        if not self.hf_config.sub_configs:
            return unused
        passed = [f"{layers}."]
        for name, part in self.module.named_modules():
            inside = name.startswith(tuple(passed))
            has_called = any(other == name or other.startswith(f"{name}.") for other in self.called)
            has_weights = next(part.parameters(), None) is not None
            if name and has_weights and not inside and not has_called:
                unused.append(name)
                passed.append(f"{name}.")
        return unused

    def _layers(self, places: list[str]) -> str:
        """Return the name of the list of layers. Each layer must call attention, and no module may call it twice."""
        repeated = sorted({place for place in places if places.count(place) > 1})
        if repeated:
            raise UnsupportedError(f"{repeated[0]} calls attention {places.count(repeated[0])} times for a token")
        match = _LAYER.match(places[0])
        if match is None:
            raise UnsupportedError(f"{places[0]} calls attention outside of a list of layers")
        name = match[1]
        layers = self.module.get_submodule(name)
        for index in range(len(layers)):
            if not any(place.startswith(f"{name}.{index}.") for place in places):
                kind = type(layers[index]).__name__
                raise UnsupportedError(f"{name}.{index} ({kind}) calls no attention, and may keep another state")
        for place in places:
            if not place.startswith(f"{name}."):
                raise UnsupportedError(f"{place} calls attention outside of {name}")
        return name

    def _max_positions(self) -> int:
        """Return the longest sequence; 0 if it is unknown."""
        for name in _LENGTHS:
            value = getattr(self.text, name, None)
            if isinstance(value, int) and value > 0:
                return value
        return LENGTHS.get(self.text.model_type, 0)

    def _check_ropes(self) -> None:
        for name, module in self.module.named_modules():
            types = getattr(module, "rope_type", None)
            if not isinstance(types, dict):
                types = {"": types}
            for rope_type in types.values():
                if rope_type in _CHANGING_ROPES:
                    raise UnsupportedError(f"{name}: rotation {rope_type!r} depends on the other sequences of a step")

    def _attention(self, call: AttentionCall) -> AttentionConfig:
        """Return the attention of one module.

        Raises:
            UnsupportedError: the call needs something that a paged cache does not offer.
        """
        name, options = self.names[id(call.module)], call.options
        (_, num_heads, num_queries, head_dim), (_, num_kv_heads, num_keys, k_dim) = call.query, call.key
        has_other_lengths = num_queries != self.num_tokens or num_keys != self.num_tokens
        if has_other_lengths or k_dim != head_dim or call.value[1:3] != call.key[1:3]:
            shapes = ", ".join(str(list(shape)) for shape in (call.query, call.key, call.value))
            raise UnsupportedError(f"{name}: queries, keys and values {shapes} for {self.num_tokens} tokens")
        if max(head_dim, call.value[3]) > MAX_HEAD_DIM:
            raise UnsupportedError(f"{name}: head size {head_dim}, at most {MAX_HEAD_DIM}")
        if num_heads % num_kv_heads:
            raise UnsupportedError(f"{name}: {num_heads} heads over {num_kv_heads} KV heads")
        if extra := unexpected_options(call):
            raise UnsupportedError(f"{name}: {', '.join(extra)} in its call of attention")
        is_causal = options.get("is_causal", getattr(call.module, "is_causal", True))
        if call.mask is None and not is_causal:
            raise UnsupportedError(f"{name}: its attention is not causal")
        scaling = options.get("scaling")
        if scaling is None:
            scaling = head_dim**-0.5
        return AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=call.value[3],
            rope=None,
            window=self._window(name, call),
            softmax_scale=float(scaling),
            softcap=float(options.get("softcap") or 0.0),
            qkv_bias=False,
            o_bias=False,
            sinks="s_aux" in options,
        )

    def _window(self, name: str, call: AttentionCall) -> int | None:
        """Return the window that a call's mask shows at many positions; None for no window.

        Raises:
            UnsupportedError: the mask is the model's own, or neither causal nor a causal window.
        """
        window = call.options.get("sliding_window")
        if call.mask is None:
            return window
        mask_function = getattr(call.mask, "mask_function", None)
        if mask_function is None:
            raise UnsupportedError(f"{name}: a mask of its own")
        windows = [window, getattr(self.text, "sliding_window", None), None]
        windows += [value for value in vars(self.text).values() if type(value) is int and value > 0]
        for window in dict.fromkeys(windows):
            positions = _positions(window, self.max_positions)
            queries, keys = positions[:, None], positions[None, :]
            visible = keys <= queries
            if window is not None:
                visible &= queries - keys < window
            zero = torch.zeros((), dtype=torch.int64)
            shown_by_mask: torch.Tensor = mask_function(zero, zero, queries, keys)
            if torch.equal(visible, shown_by_mask.expand_as(visible)):
                if window is not None and window >= self.max_positions:
                    return None
                return window
        raise UnsupportedError(f"{name}: a mask that is neither causal nor a causal window")


class _NothingFound(TorchDispatchMode):
    """Let `nonzero` of a tensor without memory find nothing, so that loops over experts with tokens call no expert."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.aten.nonzero.default:
            return torch.empty(0, args[0].dim(), dtype=torch.int64, device=args[0].device)
        return operation(*args, **(kwargs or {}))


def _positions(window: int | None, max_positions: int) -> torch.Tensor:
    """Return positions at which every mask of transformers shows its limits: powers of two and the window's edges."""
    size = window or 0
    centres = [0, 8, size, 3 * size, max_positions - 1]
    for power in range(24):
        centres.append(1 << power)
    near = (torch.tensor(centres)[:, None] + torch.arange(-2, 3)).unique()
    in_range: torch.Tensor = near[(near >= 0) & (near < max_positions)]
    return in_range
