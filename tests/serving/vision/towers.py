"""Tiny random vision models of transformers, and prompts with images for them and for us."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from paged import PromptEmbeds, mrope_positions

IMAGE, BEGIN, END = 250, 252, 253
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
VISION = {"hidden_size": 32, "intermediate_size": 48}
QWEN = VISION | {"depth": 3, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4, "spatial_merge_size": 2}
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 251,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}


def _rope(section: Sequence[int], **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": section, **options}}


def _experts() -> dict[str, Any]:
    return {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}


def _qwen3(**text: Any) -> dict[str, Any]:
    vision = QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    rope = _rope([4, 2, 2], mrope_interleaved=True)
    return IDS | {"text_config": TEXT | rope | text, "vision_config": vision}


def _tower(**options: Any) -> dict[str, Any]:
    return VISION | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4} | options


TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": IDS
    | {
        "text_config": TEXT | _rope([2, 3, 3]),
        "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "patch_size": 4},
    },
    "qwen2_5_vl": IDS
    | {
        "text_config": TEXT | _rope([2, 3, 3]),
        "vision_config": QWEN | {"window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": _qwen3(),
    "qwen3_vl_moe": _qwen3(**_experts()),
    "gemma3": {
        "text_config": TEXT
        | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "vision_config": _tower(),
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": False,
        "image_token_index": IMAGE,
        "boi_token_index": BEGIN,
        "eoi_token_index": END,
    },
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": _tower(model_type="clip_vision_model"),
        "image_token_index": IMAGE,
    },
}


# Special tokens with the ids from IMAGE on: those in whose place rows come, a spare one, and the ends of an image.
SPECIAL = {
    "gemma3": ("<image_soft_token>", "<spare>", "<start_of_image>", "<end_of_image>"),
    "llava": ("<image>", "<spare>", "<begin>", "<end>"),
}
QWEN_SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = """{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{% endfor %}"""


@dataclass(frozen=True)
class Prompt:
    """Token ids, their embeddings for us, and inputs for transformers."""

    ids: list[int]
    embeds: PromptEmbeds
    theirs: dict[str, Any]


class Tower:
    """A model of transformers in a folder.

    grids: of the images, by turns; all of Gemma 3's and LLaVA's are squares.
    """

    def __init__(self, name: str, folder: Path) -> None:
        from transformers import AutoModelForImageTextToText
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        self.name, self.folder = name, folder
        torch.manual_seed(0)
        config = CONFIG_MAPPING[name](**TOWERS[name])
        self.model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
        self.model.generation_config.eos_token_id = None
        with torch.no_grad():  # random tokens then differ by more than rounding
            self.model.lm_head.weight.mul_(8)
            for parameter_name, parameter in self.model.named_parameters():
                if parameter.dim() == 1 and "norm" in parameter_name:
                    parameter.uniform_(0.5, 1.5)
                elif parameter_name.endswith("mm_input_projection_weight"):  # zeros until it is trained
                    parameter.normal_(0, 0.3)
        self.model.save_pretrained(folder)

    def save_processor(self) -> Any:
        """Save a processor with a tokenizer of bytes and a chat template beside the model; return the image processor,
        or for others than Qwen the processor."""
        import transformers
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:IMAGE]
        tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        image, spare, begin, end = SPECIAL.get(self.name, QWEN_SPECIAL)
        tokenizer.add_special_tokens([AddedToken(one, special=True) for one in (image, spare, begin, end)])
        tokens = {"image_token": image, "boi_token": begin, "eoi_token": end}
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=tokens)
        written = {"gemma3": begin, "llava": image}.get(self.name, begin + image + end)
        if "qwen" in self.name:
            fast.save_pretrained(self.folder)
            sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 1024}
            normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
            published = {"image_processor_type": "Qwen2VLImageProcessor", **sizes, **normal}
            (self.folder / "preprocessor_config.json").write_text(json.dumps(published))
            processor = transformers.AutoImageProcessor.from_pretrained(self.folder)
        else:
            size = {"height": 16, "width": 16}
            if self.name == "gemma3":
                images = transformers.Gemma3ImageProcessorPil(size=size)
                processor = transformers.Gemma3Processor(images, fast, image_seq_length=4)
            else:
                images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
                options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
                processor = transformers.LlavaProcessor(images, fast, patch_size=4, **options)
            processor.save_pretrained(self.folder)
        (self.folder / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", written))
        return processor

    @cache  # noqa: B019 - towers live as long as the tests
    def pixels(self, seed: int) -> dict[str, torch.Tensor]:
        """An image as a processor gives it."""
        generator = torch.Generator().manual_seed(seed)
        if "qwen" not in self.name:
            return {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}
        grid = [[1, 4, 6], [1, 6, 4], [1, 4, 4]][seed % 3]
        patches = torch.randn(grid[1] * grid[2], 3 * 2 * 16, generator=generator)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([grid])}

    def prompt(self, *parts: list[int] | int) -> Prompt:
        """A prompt of token ids and of images by their seeds."""
        ids: list[int] = []
        spans, rows, deepstack, grids, pixels = [], [], [], [], []
        for part in parts:
            if not isinstance(part, int):
                ids += part
                continue
            pixels.append(given := self.pixels(part))
            with torch.no_grad():
                found = self.model.get_image_features(**given)
            rows.append(torch.cat(list(found.pooler_output)))
            if "qwen3" in self.name:
                deepstack.append(torch.stack([torch.cat(list(layer)) for layer in found.deepstack_features]))
            if "image_grid_thw" in given:
                grids += given["image_grid_thw"].tolist()
            spans.append((len(ids) + 1, len(ids) + 1 + len(rows[-1])))
            ids += [BEGIN, *[IMAGE] * len(rows[-1]), END]
        positions = [position for position, token in enumerate(ids) if token == IMAGE]
        is_image = torch.tensor([[int(token == IMAGE) for token in ids]])
        theirs = {"input_ids": torch.tensor([ids])}
        for name in pixels[0]:
            theirs[name] = torch.cat([one[name] for one in pixels])
        if self.name == "gemma3":
            theirs["token_type_ids"] = is_image
        elif "qwen" in self.name:
            theirs["mm_token_type_ids"] = is_image
        embeds = PromptEmbeds(
            positions,
            torch.cat(rows),
            torch.cat(deepstack, 1) if deepstack else None,
            mrope_positions(len(ids), positions, grids) if grids else None,
            spans if self.name == "gemma3" else (),
        )
        return Prompt(ids, embeds, theirs)

    def logits(self, prompt: Prompt) -> torch.Tensor:
        """Those of transformers, [n, vocabulary]."""
        with torch.no_grad():
            logits: torch.Tensor = self.model(**prompt.theirs).logits[0]
        return logits

    def greedy(self, prompt: Prompt, count: int) -> list[int]:
        """The tokens that transformers generates."""
        options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            tokens: list[int] = self.model.generate(**prompt.theirs, **options)[0].tolist()
        return tokens[len(prompt.ids) :]
