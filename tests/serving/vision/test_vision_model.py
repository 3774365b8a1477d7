"""Images through transformers' processors and towers: the answers are those of transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from paged import ChatTokenizer, Engine, InvalidInputError, LlmExecutor, SamplingParams, SequenceTooLongError
from paged.errors import UnsupportedError
from paged.serving.vision.vision_model import VisionModel
from tests.executors.engine_cases import run_to_end
from tests.serving.vision.test_prompt_embeds import SIZES
from tests.serving.vision.towers import IMAGE, Tower

IMAGES = [
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8))
    for seed, size in enumerate([(24, 32), (40, 24)])
]
MESSAGES = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "a\n"}, {"type": "image"}, {"type": "text", "text": " and "}],
    },
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "differ?"}]},
]
MakeTower = Callable[[str], Tower]


def vision_of(tower: Tower) -> VisionModel:
    return VisionModel.from_folder(tower.folder, ChatTokenizer.from_folder(tower.folder))


def theirs(tower: Tower, processor: Any) -> dict[str, torch.Tensor]:
    """What transformers makes of the messages."""
    text = ChatTokenizer.from_folder(tower.folder).render(MESSAGES)
    if "qwen" not in tower.name:
        return dict(processor(text=text, images=IMAGES, return_tensors="pt"))
    inputs = dict(processor(images=IMAGES, return_tensors="pt"))
    for count in (inputs["image_grid_thw"].prod(-1) // 4).tolist():
        text = text.replace("<|image_pad|>", "<|placeholder|>" * count, 1)
    ids = ChatTokenizer.from_folder(tower.folder).encode(text.replace("placeholder", "image_pad"), parse_special=True)
    ids = torch.tensor([ids])
    return inputs | {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).long()}


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen2_5_vl", "qwen3_vl", "llava")),
    ],
)
def test_answers_are_those_of_transformers(tower: MakeTower, name: str) -> None:
    made = tower(name)
    given = theirs(made, made.save_processor())
    ids, embeds = vision_of(made).encode_chat(MESSAGES, IMAGES)
    assert ids == given["input_ids"][0].tolist()
    engine = Engine(LlmExecutor.from_pretrained(made.folder, **SIZES), eos_token_ids=())
    output = engine.add_request(ids, SamplingParams(temperature=0, max_tokens=8), prompt_embeds=embeds)
    run_to_end(engine)
    with torch.no_grad():
        expected = made.model.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, len(ids) :]
    assert output.outputs[0].token_ids == expected.tolist()


def test_what_an_image_cannot_be_is_refused_by_name(tower: MakeTower, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tower("qwen3_vl")
    made.save_processor()
    vision = vision_of(made)
    text = [{"role": "user", "content": "<|image_pad|> and <|vision_start|>"}]
    with pytest.raises(InvalidInputError, match="3 times"):
        vision.encode_chat([*MESSAGES, *text], IMAGES)
    with pytest.raises(InvalidInputError, match="2 times"):
        vision.encode_chat(MESSAGES, IMAGES[:1])
    with pytest.raises(InvalidInputError, match="aspect ratio"):
        vision.encode_chat(MESSAGES, [IMAGES[0], Image.new("RGB", (2000, 4))])
    plain = [{"role": "user", "content": "<|vision_start|>"}]
    ids, _ = vision.encode_chat([*plain, *MESSAGES], IMAGES)
    assert ids.count(IMAGE + 2) == 2  # those of the template alone
    monkeypatch.setattr(VisionModel, "_embedded", None)  # the tower does not run
    with pytest.raises(SequenceTooLongError, match="at most 20"):
        vision.encode_chat(MESSAGES, IMAGES, longest=20)


def test_models_without_images_are_refused(tower: MakeTower, llama_folder: Path) -> None:
    tokenizer = ChatTokenizer.from_folder(tower("qwen3_vl").folder)
    assert VisionModel.is_in(tower("qwen3_vl").folder)
    assert not VisionModel.is_in(llama_folder)
    with pytest.raises(UnsupportedError, match="images for 'llama'"):
        VisionModel.from_folder(llama_folder, tokenizer)
