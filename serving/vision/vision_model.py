"""Image processor and vision tower of a checkpoint, run by transformers, for prompts with images."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paged.errors import CheckpointError, InvalidInputError, PagedError, UnsupportedError
from paged.executors.text.detokenizer import Message
from paged.folder_path import as_folder
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.load_options import as_dtype
from paged.prompt_embeds import PromptEmbeds, mrope_positions
from paged.serving.text.chat_tokenizer import ChatTokenizer
from paged.tools.printable import one_line

if TYPE_CHECKING:
    from PIL.Image import Image

# Outputs of a processor that the vision tower does not take.
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")


class _Family(NamedTuple):
    """has_grid: images are grids of any size with three rotary axes. has_spans: bidirectional attention in images."""

    has_grid: bool = False
    has_spans: bool = False


# Supported families by `model_type` of config.json.
_FAMILIES = {
    "gemma3": _Family(has_spans=True),
    "llava": _Family(),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _Family(has_grid=True)),
}


class VisionModel:
    """Encodes prompts with images: token ids, and `PromptEmbeds` from the model's own vision tower. Thread-safe.

    Args:
        model: a transformers model without its text part.
        processor: the model's processor; for grids, its image processor.
    """

    def __init__(self, model: Any, processor: Any, tokenizer: ChatTokenizer) -> None:
        self._model, self._processor, self._tokenizer = model, processor, tokenizer
        self._family = _FAMILIES[model.config.model_type]
        self._row_id: int = model.config.image_token_id
        # Token that a chat template writes for an image. Gemma's differs from the token whose rows the image replaces.
        if self._family.has_grid:
            token = tokenizer.tokenizer.id_to_token(self._row_id)
        else:
            token = processor.image_token
        if not token:
            raise CheckpointError(f"tokenizer: no token {self._row_id}, expected the token of images")
        self._token = str(token)
        self._lock = Lock()

    @staticmethod
    def is_in(path: str | os.PathLike[str]) -> bool:
        """Return whether a folder has a model with a supported vision tower."""
        hf = HfConfig.read(Path(path), "config.json")
        return hf.values.get("model_type") in _FAMILIES and isinstance(hf.values.get("vision_config"), dict)

    @classmethod
    def from_folder(
        cls,
        path: str | os.PathLike[str],
        tokenizer: ChatTokenizer,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
    ) -> VisionModel:
        """Load the processor and the tower of a checkpoint, with code of transformers, never of the folder.

        Load it before the executor, whose cache takes the remaining memory.

        Args:
            dtype: torch.dtype or name; None for the checkpoint's own.
            device: None for a GPU if there is one.

        Raises:
            UnsupportedError: images of the model are not supported, or transformers or pillow is not installed.
            CheckpointError: transformers cannot load it.
        """
        folder = as_folder("path", path)
        if not cls.is_in(folder):
            model_type = HfConfig.read(folder, "config.json").values.get("model_type")
            raise UnsupportedError(f"{folder}: images for {model_type!r}, expected one of {', '.join(_FAMILIES)}")
        try:
            import PIL  # noqa: F401
            import transformers
        except ImportError as error:
            raise UnsupportedError(f"images need {error.name}: pip install 'paged[vision]'") from error
        kind_of_number = as_dtype("dtype", dtype) or "auto"
        if not device:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        with _quiet(), _named(str(folder), CheckpointError):
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            has_grid = _FAMILIES[config.model_type].has_grid
            # Qwen's full processor would only add placeholders and videos, which need torchvision.
            kind = transformers.AutoImageProcessor if has_grid else transformers.AutoProcessor
            processor = kind.from_pretrained(folder, local_files_only=True)
            text = config.get_text_config()
            text.num_hidden_layers = 0
            if getattr(text, "layer_types", None):
                text.layer_types = []
            if getattr(config, "quantization_config", None) is not None:
                del config.quantization_config  # it describes only the text part
            model = transformers.AutoModel.from_pretrained(
                folder, config=config, dtype=kind_of_number, local_files_only=True, use_safetensors=True
            )
            model.language_model = None
            model = model.to(device).eval()
        return cls(model, processor, tokenizer)

    def encode_chat(
        self, messages: Sequence[Message], images: Sequence[Image], /, *, longest: int | None = None, **options: Any
    ) -> tuple[list[int], PromptEmbeds | None]:
        """Return the token ids of a conversation and the rows of its images (None without images).

        Args:
            messages: messages with a content part {"type": "image"} for each image, in order.
            longest: maximum number of tokens, or None.
            options: options of `ChatTokenizer.encode_chat`.

        Raises:
            InvalidInputError: the processor or the chat template refuses an image or the messages, or the text contains
                the placeholder of an image.
            SequenceTooLongError: there are more than `longest` tokens; the tower has not run.
        """
        messages = [_in_parts(message) for message in messages]
        if not images:
            return self._tokenizer.encode_chat(messages, longest=longest, **options), None
        with _named("images", InvalidInputError):
            inputs, texts = self._processed(images)

        def expand(text: str) -> str:
            pieces = text.split(self._token)
            if len(pieces) != len(texts) + 1:
                count = f"{len(pieces) - 1} times {self._token!r} in the rendered messages"
                raise InvalidInputError(f"messages: {count}, expected {len(texts)}, once for each image")
            expanded = pieces[0]
            for image_text, piece in zip(texts, pieces[1:], strict=True):
                expanded += image_text + piece
            return expanded

        ids = self._tokenizer.encode_chat(messages, expand=expand, longest=longest, **options)
        return ids, self._embedded(ids, inputs)

    def _processed(self, images: Sequence[Image]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Return the tower's inputs, and the placeholder text of each image."""
        with self._lock:
            if self._family.has_grid:
                inputs = self._processor(images=list(images), return_tensors="pt")
                counts = inputs["image_grid_thw"].prod(-1) // self._merge_size**2
                return dict(inputs), [self._token * count for count in counts.tolist()]
            placeholders = [self._token * len(images)]
            inputs = self._processor(
                text=placeholders, images=list(images), return_tensors="pt", return_text_replacement_offsets=True
            )
            texts = [replaced["replacement"] for replaced in inputs["text_replacement_offsets"][0]]
            tower_inputs = {name: value for name, value in inputs.items() if name not in _OF_TEXT}
            return tower_inputs, texts

    @property
    def _merge_size(self) -> int:
        return int(self._model.config.vision_config.spatial_merge_size)

    def _embedded(self, ids: list[int], inputs: Mapping[str, torch.Tensor]) -> PromptEmbeds:
        positions = [position for position, token in enumerate(ids) if token == self._row_id]
        device = next(self._model.parameters()).device
        on_device = dict(inputs)
        for name, value in inputs.items():
            if torch.is_tensor(value):
                on_device[name] = value.to(device)
        on_device["pixel_values"] = on_device["pixel_values"].to(self._model.dtype)
        with self._lock, torch.no_grad():
            features = self._model.get_image_features(**on_device)
        rows = torch.cat(list(features.pooler_output))
        if len(rows) != len(positions):
            raise CheckpointError(f"images: {len(rows)} rows for {len(positions)} tokens {self._row_id} of the prompt")
        deepstack = None
        layers = getattr(features, "deepstack_features", None)
        if layers:
            deepstack = torch.stack([torch.cat(list(layer)) for layer in layers])
        spans = list(_runs(positions)) if self._family.has_spans else ()
        rope = None
        if self._family.has_grid:
            grids = inputs["image_grid_thw"].tolist()
            rope = mrope_positions(len(ids), positions, grids, merge_size=self._merge_size)
        return PromptEmbeds(positions, rows, deepstack, rope, spans)


def _in_parts(message: Message) -> Message:
    """Return a message with a list of parts as content, which some templates require."""
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each run of consecutive positions."""
    begin = None
    for position, following in zip(positions, [*positions[1:], -1], strict=True):
        if begin is None:
            begin = position
        if following != position + 1:
            yield begin, position + 1
            begin = None


@contextmanager
def _named(name: str, kind: type[PagedError]) -> Iterator[None]:
    """Convert errors of transformers to errors of `kind`."""
    try:
        yield
    except (PagedError, MemoryError):
        raise
    except Exception as error:
        raise kind(f"{name}: transformers fails ({type(error).__name__}: {one_line(error, 300)})") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' progress bars and its report that the text part has no layers."""
    from transformers.utils import logging

    level, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows_bars:
            logging.enable_progress_bar()
